"""Right bytes on a GPU, under load and kills: `python3 -m benchmarks.gpu.stress [--seconds 40]`.

Two engines at one daemon store and load at once, layout after layout, in jobs of any size, and
now and then a mover of theirs is killed with -9 while it copies. Each block's words tell its key
and their place. After every round all of both engines' memory is compared with what must be there:
what a job that is done has loaded, what was there before, and nothing of a job that failed is
trusted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from benchmarks import report
from benchmarks.gpu import places
from benchmarks.gpu.cuda import Cuda
from benchmarks.gpu.engine_side import GpuKv
from benchmarks.gpu.peers import DeviceMemory
from benchmarks.rig import BenchEngine, daemon
from kvd_client import StepPlan
from kvd_client.draft import StepDraft
from tests.client.content import HASH_BYTES
from tests.client.kv_memory import KvMemory
from tests.daemon_process import DaemonProcess

KIB = 1 << 10
MIB = 1 << 20
WORD = 8
GOLDEN = 0x9E3779B97F4A7C15
LOOK_SECONDS = 100e-6
ROUND_SECONDS = 30.0
KILL_EACH = 5  # rounds
UNKNOWN = -1  # what a failed load may have left in a block
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Layout:
    """Fragments of a block: how many, and in what order they lie in memory."""

    name: str
    fragments: int
    is_shuffled: bool  # then no two steps are the same, and none goes as a strided copy


LAYOUTS = (
    Layout("64 even fragments", 64, is_shuffled=False),
    Layout("64 scattered fragments", 64, is_shuffled=True),
    Layout("one fragment", 1, is_shuffled=False),
    Layout("512 even fragments", 512, is_shuffled=False),
)


@dataclass(frozen=True)
class Sizes:
    """Of one engine's memory, and the pool's of both."""

    blocks: int
    block_bytes: int
    pool_blocks: int
    extent_bytes: int
    most_moved: int  # blocks of a round in each direction


FULL = Sizes(96, 2 * MIB, 512, 32 * MIB, 32)
TINY = Sizes(24, 64 * KIB, 80, MIB, 8)


class Memory:
    """An engine's KV on the GPU, and an image of it in pinned memory."""

    def __init__(self, cuda: Cuda, sizes: Sizes, layout: Layout, chance: random.Random) -> None:
        self._cuda, self._sizes = cuda, sizes
        self.size = sizes.block_bytes // layout.fragments
        total = sizes.blocks * sizes.block_bytes
        self.device = DeviceMemory(cuda, total, with_torch=False)
        self._host = cuda.pinned(total)
        image = (ctypes.c_uint64 * (total // WORD)).from_address(self._host)
        # [fragment's place, block, word]
        words = np.ctypeslib.as_array(image)
        self.image: U64 = words.reshape(layout.fragments, sizes.blocks, self.size // WORD)
        self.order = list(range(layout.fragments))
        if layout.is_shuffled:
            chance.shuffle(self.order)

    def offered(self) -> GpuKv:
        """What a rank registers; it is freed here, once the rank has closed."""
        return GpuKv(self.device, self._sizes.block_bytes, len(self.order), self.order)

    def pull(self) -> None:
        """Have the image show what is on the device."""
        self._cuda.call("cuMemcpyDtoH_v2", self._host, self.device.address, self.device.bytes)

    def push(self) -> None:
        """Have the device show what is in the image."""
        self._cuda.write(self.device.address, self._host, self.device.bytes)

    def pattern(self, key: int) -> U64:
        """What a block of that key consists of, [fragment's place, word]; UNKNOWN: wiped."""
        count = self._sizes.block_bytes // WORD
        first = np.uint64((key + 2) * GOLDEN & (1 << 64) - 1)
        words = (first + np.arange(count, dtype=np.uint64)).reshape(len(self.order), -1)
        placed = np.empty_like(words)
        placed[self.order] = words
        return placed

    def free(self) -> None:
        del self.image
        self._cuda.call("cuMemFreeHost", self._host)
        self.device.free()


class StressEngine(BenchEngine):
    """One rank, and what each of its engine blocks must hold."""

    def __init__(self, socket: str, name: str, memory: Memory, sizes: Sizes, layout: Layout):
        self._memory = memory
        self.holds = [UNKNOWN] * sizes.blocks  # the number of the key
        self.known: list[int] = []
        model = f"stress-{layout.name}"
        super().__init__(
            socket, name, sizes.blocks, sizes.block_bytes, layout.fragments, model=model
        )

    def make_memory(self) -> KvMemory:
        return cast("KvMemory", self._memory.offered())

    def begin(
        self, stores: dict[int, int], loads: dict[int, int], chance: random.Random
    ) -> tuple[StepPlan, dict[int, list[int]]]:
        """Submit jobs that store and load these blocks, by engine block: key. Blocks by job."""
        step, blocks_of = StepDraft(), dict[int, list[int]]()
        plan: dict[str, tuple[int, ...]] = {}
        for kind, moves, jobs in (("stores", stores, step.stores), ("loads", loads, step.loads)):
            left, ids = list(moves), list[int]()
            while left:
                self.job_blocks = chance.choice([1, 2, 5, 16, 64])
                mine, left = left[: self.job_blocks], left[self.job_blocks :]
                (job,) = self.draft(jobs, [hash_of(moves[block]) for block in mine], mine)
                blocks_of[job] = mine
                ids.append(job)
            plan[kind] = tuple(ids)
        made = StepPlan(**plan)
        assert self.connection.send_step(step)
        (rank,) = self.ranks
        rank.worker.start_step(made)
        rank.worker.finish_step(made)
        return made, blocks_of

    def ends_of(self, plan: StepPlan) -> dict[int, bool]:
        """Whether each of the plan's jobs was done, once all have ended."""
        (rank,), ended = self.ranks, dict[int, bool]()
        end = time.monotonic() + ROUND_SECONDS
        wanted = {*plan.stores, *plan.loads}
        while ended.keys() != wanted:
            ended |= {told.job_id: told.done for told in rank.worker.get_finished().ended}
            ended |= self._refused(wanted - ended.keys())
            if time.monotonic() > end:
                raise TimeoutError(f"jobs that have not ended: {sorted(wanted - ended.keys())}")
            time.sleep(LOOK_SECONDS)
        return ended

    def _refused(self, wanted: AbstractSet[int]) -> dict[int, bool]:
        """What the daemon has refused before a rank could hear of it, as a scheduler tells it."""
        told = dict(self.connection.take_ended())
        refused = [job for job in wanted if told.get(job) is False]
        if refused:
            self.ranks[0].worker.start_step(StepPlan(forget=tuple(refused)))
        return dict.fromkeys(refused, False)


def hash_of(key: int) -> bytes:
    return hashlib.sha256(key.to_bytes(8)).digest()[:HASH_BYTES]


class Stress:
    """Both engines' rounds over one layout."""

    def __init__(self, cuda: Cuda, sizes: Sizes, layout: Layout, seed: int) -> None:
        self.sizes, self.layout, self.chance = sizes, layout, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._memories = [Memory(cuda, sizes, layout, self.chance) for _ in range(2)]
        self._next_key = seed << 20

    @contextlib.contextmanager
    def _engines(self, running: DaemonProcess) -> Iterator[list[StressEngine]]:
        with contextlib.ExitStack() as held:
            made = []
            for number, memory in enumerate(self._memories):
                held.callback(memory.free)
                name = f"stress {self.layout.name} {number}"
                engine = StressEngine(running.socket, name, memory, self.sizes, self.layout)
                held.callback(engine.close)
                made.append(engine)
            yield made

    def run(self, running: DaemonProcess, seconds: float) -> None:
        """Rounds for that long."""
        with self._engines(running) as engines:
            for engine, memory in zip(engines, self._memories, strict=True):
                self._wipe(engine, memory, range(self.sizes.blocks))
            end = time.monotonic() + seconds
            while time.monotonic() < end and not self.wrong:
                self._round(engines, running)

    def _round(self, engines: Sequence[StressEngine], running: DaemonProcess) -> None:
        self.counts["rounds"] += 1
        begun = []
        for engine, memory in zip(engines, self._memories, strict=True):
            stores, loads = self._choose(engines)
            self._write(engine, memory, stores)
            begun.append((stores, loads, *engine.begin(stores, loads, self.chance)))
        killer = None
        if self.counts["rounds"] % KILL_EACH == 0:
            killer = threading.Thread(target=self._kill_a_mover, args=(running,))
            killer.start()
        for engine, told in zip(engines, begun, strict=True):
            stores, loads, plan, blocks_of = told
            self._settle(engine, stores, loads, engine.ends_of(plan), blocks_of)
        if killer is not None:
            killer.join()
            for engine in engines:
                engine.wait_usable()
        for engine, memory in zip(engines, self._memories, strict=True):
            memory.pull()
            self._compare(engine, memory)

    def _choose(self, engines: Sequence[StressEngine]) -> tuple[dict[int, int], dict[int, int]]:
        """Engine blocks with new keys to store, and others with known keys to load."""
        blocks = list(range(self.sizes.blocks))
        self.chance.shuffle(blocks)
        if self.chance.random() < 0.5:  # neighbours, too
            blocks.sort(key=lambda block: block // 4 * 7919 % self.sizes.blocks)
        many = self.chance.randint(1, self.sizes.most_moved)
        stores = {}
        for block in blocks[:many]:
            self._next_key += 1
            stores[block] = self._next_key
        known = [key for each in engines for key in each.known[-2 * self.sizes.most_moved :]]
        fresh = self.chance.sample(known, min(len(known), self.chance.randint(0, many)))
        targets = blocks[many : many + len(fresh)]
        return stores, dict(zip(targets, fresh, strict=False))

    def _write(self, engine: StressEngine, memory: Memory, stores: dict[int, int]) -> None:
        for block, key in stores.items():
            memory.image[:, block] = memory.pattern(key)
            engine.holds[block] = key
        memory.push()

    def _wipe(self, engine: StressEngine, memory: Memory, blocks: Sequence[int]) -> None:
        pattern = memory.pattern(UNKNOWN)
        for block in blocks:
            memory.image[:, block] = pattern
            engine.holds[block] = UNKNOWN
        memory.push()

    def _settle(
        self,
        engine: StressEngine,
        stores: dict[int, int],
        loads: dict[int, int],
        ended: dict[int, bool],
        blocks_of: dict[int, list[int]],
    ) -> None:
        """Take note of what each job's end means."""
        for job, done in ended.items():
            mine = blocks_of[job]
            kind = "stored" if mine[0] in stores else "loaded"
            self.counts[f"{kind} blocks" if done else f"{kind} blocks of failed jobs"] += len(mine)
            for block in mine:
                if block in stores and done:
                    engine.known.append(stores[block])
                elif block in loads:
                    engine.holds[block] = loads[block] if done else UNKNOWN

    def _compare(self, engine: StressEngine, memory: Memory) -> None:
        unknown = []
        for block, key in enumerate(engine.holds):
            if key == UNKNOWN:
                unknown.append(block)
            elif not np.array_equal(memory.image[:, block], memory.pattern(key)):
                self.wrong.append(f"{self.layout.name}: block {block}, key {key}")
            else:
                self.counts["blocks found right"] += 1
        self._wipe(engine, memory, unknown)

    def _kill_a_mover(self, running: DaemonProcess) -> None:
        time.sleep(self.chance.random() * 0.01)
        movers = running.movers()
        if movers:
            os.kill(self.chance.choice(sorted(movers)), signal.SIGKILL)
            self.counts["movers killed"] += 1


def measure(cuda: Cuda, sizes: Sizes, seconds: float, seed: int) -> list[dict[str, Any]]:
    """A row for each layout."""
    rows = []
    pool = sizes.pool_blocks * sizes.block_bytes
    with daemon(pool, sizes.extent_bytes) as running:
        for number, layout in enumerate(LAYOUTS):
            stress = Stress(cuda, sizes, layout, seed + number)
            stress.run(running, seconds / len(LAYOUTS))
            rows.append({"layout": layout.name, **stress.counts, "wrong": stress.wrong})
            told = ", ".join(f"{count} {what}" for what, count in sorted(stress.counts.items()))
            print(f"  {layout.name}: {len(stress.wrong)} wrong; {told}", flush=True)
    return rows


def main() -> int:
    """Run it, write the JSON; 1 if a byte was wrong, or nothing was loaded."""
    parser = argparse.ArgumentParser(description="Right bytes on a GPU, under load and kills.")
    parser.add_argument("--seconds", type=float, default=40.0, help="over all layouts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="sizes that only try it")
    parser.add_argument("--output", type=Path, help="JSON file (default: by the device's name)")
    options = parser.parse_args()
    if (reason := places.no_device()) is not None:
        print(f"no GPU to try: {reason}", file=sys.stderr)
        return 1
    cuda = Cuda()
    cuda.open_device()
    rows = measure(cuda, TINY if options.tiny else FULL, options.seconds, options.seed)
    document = {
        "benchmark": "gpu.stress",
        "device": {"name": cuda.name(), "uuid": cuda.uuid(), "cuda": cuda.version()},
        "machine": report.machine(),
        "seed": options.seed,
        "results": rows,
    }
    print(f"written to {places.write(document, cuda.name(), 'gpu-stress', options.output)}")
    wrong = [what for row in rows for what in row["wrong"]]
    print(f"{len(wrong)} blocks wrong" + "".join(f"\n  {what}" for what in wrong))
    return 1 if wrong or not all(row.get("loaded blocks") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
