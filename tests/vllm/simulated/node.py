"""Worlds of the simulation with an engine of vLLM's in each (tests/simulation/whole)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvd_client import Group
from kvd_client.integrations.vllm import connector, spec
from kvd_client.integrations.vllm.rank import worker as rank_worker
from kvd_client.integrations.vllm.scheduling import scheduler
from kvd_client.integrations.vllm.scheduling.manager import KvdManager
from tests.simulation.whole import client
from tests.simulation.whole.hazards import replaced
from tests.simulation.whole.world import World
from tests.vllm import bytes_stand, scheduler_stand
from tests.vllm.simulated.engine import Rows, VllmConnection, VllmEngine

FULL, WINDOW, STATE = (16,), (16, 40), (32, 0, True)  # tokens of a block, window, recurrent
# The groups, and how many engine blocks make one of kvd's.
SHAPES = (
    ((FULL,), 1),
    ((FULL, WINDOW), 2),
    ((FULL,), 2),
    ((FULL, (32, 70)), 1),
    ((FULL, WINDOW), 1),
    (((32,), STATE, STATE), 1),
)
ACTS = 0.5  # of a world's steps are vLLM's
ROOMY_EXTENTS = 40
# Of a prompt that is to be stored and loaded in the end. Many are computed in two steps.
FEW_TOKENS, MANY_TOKENS = 70, 150


def model_in(folder: Path) -> str:
    """A model in a new folder. Each run's has one name, as its namespace is called by it."""
    named = folder / "simulated"
    named.mkdir()
    return scheduler_stand.write_model(named)


class VllmWorld(World):
    """A world as any other of its seed, and an engine of vLLM's among its engines."""

    def __init__(self, seed: int, steps: int, model_folder: str) -> None:
        super().__init__(seed, steps)
        self._folder = model_folder

    def run(self) -> World:
        with _in_force(self):
            return super().run()

    def _draw(self) -> None:
        super()._draw()
        number = self.seed // len(SHAPES)
        shapes, width = SHAPES[self.seed % len(SHAPES)]
        is_roomy = number % 3 != 1  # so that more is left there to be loaded
        if is_roomy:
            self.settings = replace(self.settings, extents=ROOMY_EXTENTS)
        if number % 4 == 2:
            self.settings = replace(self.settings, threshold=2)
        groups = tuple(Group(tokens_per_block=32, shard_bytes=(client.BYTES,)) for _ in shapes)
        self.clients += 1
        self.served = VllmEngine(
            "/vllm",  # where it would find its daemon, too
            client.model_of("vllm", "red", 101, groups),
            self.loop,
            self.random,
            self.meanings,
            self.note,
            groups=groups,
            threads=self.threads,
            links=self.links,
            behind_s=client.BEHIND_S[self.seed // 8 % len(client.BEHIND_S)],
            shapes=shapes,
            model_folder=self._folder,
            is_lazy=width == 1 and STATE not in shapes and number % 2 == 1,
            width=width,
            wanted_tokens=MANY_TOKENS if is_roomy else FEW_TOKENS,
            rows=Rows(),
        )
        self.engines.append(self.served)

    def _do_one(self) -> None:
        served = self.served
        if served.daemon is self.daemon and self.random.random() < ACTS:
            self.note(f"{served.name} acts")
            served.act()
        else:
            super()._do_one()


def _in_force(world: VllmWorld) -> AbstractContextManager[None]:
    """Within, what vLLM's side of the client asks of time is the simulation's."""
    loop = world.loop
    virtual = vars(world.threads.as_time())
    time: Any = SimpleNamespace(
        **virtual,
        monotonic_ns=lambda: int(loop.now * 1e9) + 1,
        perf_counter=virtual["monotonic"],
        thread_time=virtual["monotonic"],
    )
    return replaced(
        [
            (connector, "SchedulerConnection", VllmConnection),
            (spec, "KvdManager", partial(KvdManager, clock=virtual["monotonic"])),
            (scheduler, "time", time),
            (rank_worker, "compute_end", lambda _device: world.served.stand.computed()),
            (scheduler_stand, "time", time),
            (bytes_stand, "time", time),
        ]
    )
