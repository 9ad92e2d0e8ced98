"""vLLM's scheduler over the real connector, as an engine of the simulated node.

Real are vLLM's scheduler and its account of blocks, the connector's two sides and the client
beneath them; the model computes nothing (`BytesStand`). Modelled are time, threads, sockets and
movers, as for the simulation's other clients (tests/simulation/whole/client.py).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvd.core.keys import SessionId
from kvd_client import WorkerReport
from kvd_client.draft import StepDraft
from kvd_client.worker.jobs import JobLedger
from tests.simulation.whole import hazards
from tests.simulation.whole.bytes import ROTTEN, ZEROS, Content, RankBytes
from tests.simulation.whole.client import (
    COUNTED_S,
    DRAINED_S,
    LONGEST_STEP_S,
    MOVED,
    MOVED_FROM_A_STOPPED,
    STEP_S,
    ClientEngine,
    WatchedConnection,
)
from tests.simulation.whole.client_device import LateDevice
from tests.simulation.whole.client_threads import ProcessGone, Threads
from tests.simulation.whole.drawn import hash_of
from tests.simulation.whole.ranks import Engine, Wish
from tests.vllm.bytes_stand import BytesStand
from tests.vllm.drawn_stand import Draw
from tests.vllm.engine import prompt
from tests.vllm.modelled_bytes import WORD_BITS, WORDS, Words
from tests.vllm.node_daemon import PATIENT, with_kvd
from tests.vllm.scheduler_stand import StandOptions

STAND = StandOptions(
    num_blocks=44, max_requests=8, step_tokens=128, longest=640, model_seconds=0.002
)
ROW_BYTES = WORDS * WORD_BITS // 8
OPTIONS = {"weights_id": "drawn", "offload_prompt_only": False, "register_wait_s": 0.0}
ARRIVALS, RESETS = 0.2, 0.01  # of the steps
FORGOTTEN = 0.05  # of the steps: the device's cache alone is reset
INTERRUPTED, INTERRUPTED_S = 0.1, 0.05  # of the steps, and for how long at most
BROKEN = 0.1  # of these
PRESSED_TOKENS = 70  # of a prompt of those that take room from others
COMPUTED_S = 60.0  # a step's end has come by then
STUCK_S = 60.0  # a request that may go on has gone on by then
MOST_PRESSED = 4  # prompts at a time
PRIORITIES = 3


class Rows:
    """A number for each content that a row of an engine's memory ever had."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {bytes(ROW_BYTES): ZEROS}
        self._rows: dict[int, bytes] = {
            ZEROS: bytes(ROW_BYTES),
            ROTTEN: b"\xff" * ROW_BYTES,
        }

    def number(self, row: bytes) -> int:
        found = self._numbers.setdefault(row, len(self._numbers))
        self._rows[found] = row
        return found

    def row(self, number: int) -> bytes:
        return self._rows[number]


class RowBytes(RankBytes):
    """A rank's memory that is a stand's: rows of words, which all groups share."""

    def __init__(self, groups: int, rows: Rows) -> None:
        super().__init__(groups, 0)
        self._rows = rows
        self.blocks: Words  # once there is a stand

    def read(self, group: int, block: int) -> Content:
        return self._rows.number(self.blocks[block].tobytes())

    def write(self, group: int, block: int, content: Content) -> None:
        self.blocks[block] = np.frombuffer(self._rows.row(content), dtype=np.uint64)


class SimStand(BytesStand):
    """A stand of a process that has had others before it."""

    start_number = ""
    have_joined = False
    device: LateDevice | None = None  # none: what is launched is done

    def add(self, request: Request) -> None:
        # Of no account where the scheduler's policy is another.
        request.priority = hash_of(request.request_id) % PRIORITIES
        super().add(request)

    def launch(self, what: Callable[[], None]) -> None:
        if self.device is None:
            super().launch(what)
        else:
            self.device.launch(what)

    def _work(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        output = super()._work(scheduled)
        self._computed_by.append(None if self.device is None else self.device.begin())
        return output

    def _finish_oldest(self) -> None:
        """Sampled tokens are there once the step is computed."""
        has_come = self._computed_by.popleft()
        if has_come is not None:
            self.threads.wait_until(has_come, COMPUTED_S)
        super()._finish_oldest()

    def computed(self) -> Callable[[], None] | None:
        """In the place of kvd_client's compute_end."""
        return None if self.device is None else self.device.computed()

    def be_late(self, threads: Threads, behind_s: float, drawn: Random) -> None:
        """Have a device from now on that may need so long for a step, at most."""
        self.threads = threads
        self._computed_by: deque[Callable[[], bool] | None] = deque()
        self.device = LateDevice(RankBytes(0, 0), threads, behind_s, drawn) if behind_s else None

    def make_layout(self) -> Any:
        self.config.instance_id = self.start_number
        return super().make_layout()

    def _join_ranks(self, model: str) -> None:
        if not SimStand.have_joined:
            super()._join_ranks(model)
            SimStand.have_joined = True


class VllmConnection(WatchedConnection):
    """Knows which of its jobs are stores. Before a step is sent others may run: `interrupt`."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.stores: set[int] = set()
        self.interrupt: Callable[[], None] = lambda: None

    def send_step(self, step: StepDraft) -> bool:
        self.interrupt()
        self.stores.update(job.job_id for job in step.stores)
        return super().send_step(step)


class Progress:
    """Since when each request has gone no further, as far as the engine looked."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, float, float]] = {}

    def note(self, requests: dict[str, Request], now: float) -> None:
        """AssertionError for one that goes on no more."""
        seen, self._seen = self._seen, {}
        for name, request in requests.items():
            where = (request.status, request.num_computed_tokens, request.num_output_tokens)
            before, last, waited = seen.get(name, (None, now, 0.0))
            waits = before == where and request.status != RequestStatus.WAITING_FOR_STREAMING_REQ
            waited = waited + min(now - last, COUNTED_S) if waits else 0.0
            self._seen[name] = where, now, waited
            assert waited < STUCK_S, f"{name} goes on no more: {where}"


@dataclass(eq=False)
class VllmEngine(ClientEngine):
    """One engine of vLLM's with one rank. A process has one at a time, as its connectors have it.

    `model_folder` is where its model lies; `shapes` are its cache groups.
    """

    shapes: tuple[tuple[Any, ...], ...] = field(kw_only=True)
    model_folder: str = field(kw_only=True)
    is_lazy: bool = field(kw_only=True)
    width: int = field(kw_only=True)  # engine blocks in one of kvd's
    wanted_tokens: int = field(kw_only=True)  # of a prompt that is stored and loaded in the end
    rows: Rows = field(kw_only=True)
    stores_done: int = 0  # of all its lives, as `loads_done`

    # -- its life -----------------------------------------------------------------------------

    def start(self) -> None:
        self._begin_process()
        kv_transfer_state._KV_CONNECTOR_AGENT = None  # of the processes before
        options = OPTIONS | {
            "blocks_per_chunk": self.width,
            "store_mode": "lazy" if self.is_lazy else "eager",
        }
        transfer = with_kvd(self.name, **options)["kv_transfer_config"]
        del transfer["kv_role"]
        for patience in PATIENT:  # the product's own will do
            del transfer["kv_connector_extra_config"][patience]
        SimStand.start_number = str(self.starts)
        transfer["engine_id"] = self.name
        with hazards.elsewhere(), self._alive():
            self.stand = SimStand(self.model_folder, transfer, self.shapes, self._options())
        self.stand.be_late(self.threads, self.behind_s, self.random)
        self.rank = self.stand.worker.connector_worker
        manager = self.stand.connector.connector_scheduler.manager
        self.connection: VllmConnection = manager.connection
        self.connection.interrupt = self._be_interrupted
        self._take(self.memory[0])
        self.stand.watch(self.connection)
        self._watch_reports()
        self.draw = Draw(self.stand, hash_of(self.name) + self.starts, resets=RESETS)
        self.progress = Progress()

    def _options(self) -> StandOptions:
        """By priority a step may preempt a request that it has given blocks to: these have names
        then, and were never computed, which a lazy engine must not take for what they say."""
        return replace(STAND, policy="priority", longest_chunk=48) if self.is_lazy else STAND

    def new_memory(self) -> RankBytes:
        return RowBytes(len(self.shapes), self.rows)

    def _take(self, memory: Any) -> None:
        memory.blocks = self.stand.blocks
        self.connection.memory = memory

    def _watch_reports(self) -> None:
        worker, connection = self.rank._worker, self.connection
        get_finished = worker.get_finished

        def watched() -> WorkerReport:
            report: WorkerReport = get_finished()
            ended = {job.job_id for job in report.ended}
            for waits in connection.memory.loading:
                for block in [block for block, job in waits.items() if job in ended]:
                    del waits[block]
            done = [job for job in report.ended if job.done]
            self.stores_done += sum(job.job_id in connection.stores for job in done)
            self.loads_done += sum(job.job_id not in connection.stores for job in done)
            return report

        worker.get_finished = watched

    def die(self) -> None:
        """Its step may still stand on the stack: what it does there reaches nobody any more."""
        self.threads.end(self.name)
        if self.stand.device is not None:
            self.stand.device.end()
        worker = self.rank._worker
        worker._registrar, worker._jobs = None, JobLedger()
        Engine.die(self)
        self.daemon = None

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        """Within, time passes for these processes as long as they live."""
        starts, before = self.starts, self.threads.has_passed

        def has_passed() -> None:
            if self.starts != starts:
                raise ProcessGone

        self.threads.has_passed = has_passed
        try:
            yield
        except ProcessGone:
            if self.starts == starts:
                raise
        finally:
            self.threads.has_passed = before

    @property
    def session(self) -> SessionId | None:
        held = self.connection._session
        return None if held is None else SessionId(held.session_id)

    @property
    def has_session(self) -> bool:
        return self.connection.session is not None

    # -- what it does -------------------------------------------------------------------------

    def act(self) -> None:
        self._begin_turn()
        arrivals = 0.0 if self.is_plain else ARRIVALS
        with self._alive():
            moved = MOVED_FROM_A_STOPPED if self.loop.is_stalled else MOVED
            if not self.is_plain and self.random.random() < moved:
                self.move_memory()
            if not self.is_plain and self.random.random() < FORGOTTEN:
                self._forget_device()
            began = self.loop.now
            self.draw.turn(arrivals)
            took = self.loop.now - began
            assert took < LONGEST_STEP_S, f"a step takes {took:.1f} s (I6)"
            self.progress.note(self.stand.scheduler.requests, self.loop.now)

    def _be_interrupted(self) -> None:
        """Other threads run, and what these hear comes amid a step: its session's end, at times."""
        if not self.is_plain and self.random.random() < INTERRUPTED:
            if self.random.random() < BROKEN:
                self.lose_stream()
            self.threads.wait_until(lambda: False, self.random.random() * INTERRUPTED_S)

    def _forget_device(self) -> None:
        """So what its requests have so far, they load."""
        self.stand.finish_steps()
        with contextlib.suppress(RuntimeError):  # some load
            self.stand.scheduler.reset_prefix_cache(reset_running_requests=True)

    def move_memory(self) -> None:
        """As where vLLM sleeps: nothing runs, and nothing of its cache is of use any more."""
        if not self.draw.reset((True, True)):
            return
        self.take_memory_back()
        self.movers.clear()
        self.had.clear()
        self.memory[0] = self.new_memory()
        self._take(self.memory[0])
        self.stand._spoil(range(STAND.num_blocks))
        self.rank.restore_kv_caches()

    def take_memory_back(self) -> None:
        self.rank.unregister_kv_caches()
        self._withdraw_memory()

    def session_epoch(self, epoch: str) -> None:
        self._begin_turn()
        with self._alive():
            self.draw.reset((True, True))

    def add(self, name: str, tokens: list[int]) -> None:
        self.stand.add(self.stand.request(name, tokens, 1))

    def press(self) -> None:
        if len(self.stand.scheduler.requests) < MOST_PRESSED:
            self.pressed += 1
            name = f"{self.name} presses {self.starts} {self.pressed}"
            self.add(name, prompt(name, PRESSED_TOKENS))
        self.act()

    def wish(self) -> Wish:
        return VllmWish(self)

    def leave(self) -> None:
        deadline = self.loop.now + DRAINED_S
        while self.stand.is_busy:
            assert self.loop.now < deadline, "the engine does not come to rest"
            self.end_all()
            self.act()
            self.loop.run_for(STEP_S * 10)
        left = self.stand.left()
        assert not left, f"the connector keeps {left}"
        assert not self.rank._worker._jobs._open, "a rank's job never ended"
        assert not self.connection._lookups._answers, "an answer of a lookup is kept for nobody"
        with self._alive():
            self._audit()
        self.take_memory_back()

    def _audit(self) -> None:
        """Load all that this process has stored and the daemon still has. Each must be right."""
        session = self.connection.session
        if session is not None and session.ranks_ready:
            self.stand.audit(self.connection)

    def end_all(self) -> None:
        scheduler = self.stand.scheduler
        scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)


class VllmWish(Wish):
    """A prompt of its own is computed, stored, and all loaded once the device has forgotten it.

    A lazy engine stores what its device gives away; and of several groups each may have lost its
    rows before the next has them. Such engines want some of their blocks stored, and no more.
    """

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._name = ""
        self._asked = 0
        self._stored = engine.stores_done
        engine.end_all()

    @property
    def is_served(self) -> bool:
        engine = self._engine
        if engine.is_lazy or len(engine.shapes) > 1:
            return engine.stores_done > self._stored
        in_one: int = engine.width * engine.shapes[0][0]
        whole = engine.wanted_tokens // in_one * in_one
        cached: int = engine.stand.taken.cached_tokens.get(self._name, 0)
        return cached >= whole

    def ask(self) -> None:
        engine = self._engine
        stand = engine.stand
        if not (self.is_served or stand.is_busy):
            self._asked += 1
            self._name = f"{engine.name} wants {engine.starts} {self._asked}"
            tokens = prompt(self._name, engine.wanted_tokens)
            if not engine.is_lazy:
                stand.forget_device()
                same = prompt(f"{engine.name} {engine.starts}", engine.wanted_tokens)
                tokens = [*same, self._asked]
            engine.add(self._name, tokens)
        engine.act()

    def told(self) -> str:
        engine = self._engine
        problem = engine.connection.problem or "connected"
        return f"{problem}, asked {self._asked} times, movers {len(engine.movers)}"
