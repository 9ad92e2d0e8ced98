"""A daemon in memory that copies: late, in any order, and only what its promises allow.

A store's copy reads the engine's blocks at any moment between the end of the step that names
it and a flush of it. What it reads must be what the key says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from kvd_client import Group, JobReport, StepPlan, WorkerReport
from kvd_client.draft import JobDraft, StepDraft
from kvd_proto.groups import GroupKind
from kvd_proto.layout import NULL_ENGINE_BLOCK
from tests.client.engine_rig import namespace
from tests.client.fake_daemon import HIT, MISS, PENDING, FakeDaemon

Content = dict[int, object]  # by token within the block; a recurrent state under 0
Expected = Callable[[int, bytes], Content]  # what a key of a group means


class LabelDevice:
    """An engine's memory that keeps labels themselves."""

    def __init__(self, groups: int) -> None:
        self.blocks: list[dict[int, Content]] = [{} for _ in range(groups)]

    def write(self, group: int, block: int, offset: int, label: object) -> None:
        self.blocks[group].setdefault(block, {})[offset] = label

    def holds(self, group: int, block: int, offset: int, label: object) -> bool:
        return self.blocks[group].get(block, {}).get(offset) == label


class CopyingDaemon(FakeDaemon):
    """Keeps the bytes too, reads and writes them in the engine's `device`."""

    def __init__(self, groups: tuple[Group, ...], seed: int) -> None:
        super().__init__(namespace(*groups))
        self._source = random.Random(seed)
        self.expected: Expected = lambda _group, _hash: {}
        self.device = LabelDevice(len(groups))
        self.now = 0.0
        self._kept: dict[bytes, list[Content]] = {}
        self._stores: dict[int, JobDraft] = {}
        self._loads: dict[int, JobDraft] = {}
        self._ended: list[JobReport] = []
        self.blocks_stored = self.blocks_loaded = 0

    @property
    def connection(self) -> CopyingDaemon:
        return self

    def clock(self) -> float:
        return self.now

    def send_step(self, step: StepDraft) -> bool:
        super().send_step(step)
        for job in step.stores:
            self._stores[job.job_id] = job
            for run in job.runs:
                absent = [h for h in run.block_hashes if self.statuses.get(h) != HIT]
                self.holds(absent, PENDING)
        for job in step.loads:
            self._loads[job.job_id] = job
        return True

    def start_step(self, plan: StepPlan) -> None:
        """The worker's part before the model runs: what is flushed ends now."""
        for job_id in plan.flush:
            if job_id in self._stores:
                self._store(job_id)

    def finish_step(self, _plan: StepPlan) -> WorkerReport:
        """After the model: some of what is under way ends, and all else has its chances."""
        for job_id in [*self._stores]:
            if self._source.random() < 0.3:
                self._store(job_id)
        for job_id in [*self._loads]:
            if self._source.random() < 0.4:
                self._load(job_id)
        self.now += 0.01
        self._evict(0.004)
        is_full = self._source.random() < 0.2
        self.rooms = dict.fromkeys(range(len(self.namespace.groups)), 0) if is_full else {}
        ended, self._ended = self._ended, []
        return WorkerReport(0, tuple(ended))

    def _evict(self, share: float) -> None:
        for block_hash in [*self._kept]:
            if self._source.random() < share:
                del self._kept[block_hash]
                self.statuses[block_hash] = MISS

    # -- copies -----------------------------------------------------------------------------

    def _places(self, job: JobDraft) -> Iterable[tuple[int, bytes, list[int]]]:
        for group, _, hashes, engine_blocks in job.runs:
            width = self.namespace.groups[group].blocks_per_block
            for place, block_hash in enumerate(hashes):
                yield group, block_hash, list(engine_blocks[place * width : (place + 1) * width])

    def _store(self, job_id: int) -> None:
        job = self._stores.pop(job_id)
        for group, block_hash, blocks in self._places(job):
            parts = [dict(self.device.blocks[group].get(block, {})) for block in blocks]
            self._check(group, block_hash, parts)
            self._kept[block_hash] = parts
            self.statuses[block_hash] = HIT
            self.blocks_stored += 1
        self._ended.append(JobReport(job_id, done=True))

    def _check(self, group: int, block_hash: bytes, parts: list[Content]) -> None:
        spec = self.namespace.groups[group]
        read = parts[0]
        if spec.kind is not GroupKind.RECURRENT_STATE:
            tokens = spec.engine_block_tokens
            read = {i * tokens + at: label for i, p in enumerate(parts) for at, label in p.items()}
        wanted = self.expected(group, block_hash)
        wrong = {at for at, label in wanted.items() if read.get(at) != label}
        assert not wrong, f"group {group} stores wrong bytes of tokens {wrong} under a right key"

    def _load(self, job_id: int) -> None:
        job = self._loads.pop(job_id)
        done = self._source.random() > 0.1
        for group, block_hash, blocks in self._places(job):
            parts = self._kept.get(block_hash)
            done &= parts is not None
            for block, part in zip(blocks, parts or [], strict=False):
                if block != NULL_ENGINE_BLOCK:
                    self.device.blocks[group][block] = dict(part)
                    self.blocks_loaded += 1
        self._ended.append(JobReport(job_id, done=done))
