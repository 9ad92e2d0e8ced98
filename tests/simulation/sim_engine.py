"""An engine in the simulation: stores and loads real bytes, checks every one, and misbehaves."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from random import Random

import numpy as np

from kvd.core import events as ev
from kvd.core.engines.layouts import RankPlacement
from kvd.core.events import JobKind, JobStatus, LeaseMode
from kvd.core.keys import JobId, KeyBatch, LeaseId, MoverId, RequestId, SessionId, TenantId
from kvd.core.spec import GroupSpec, NamespaceSpec
from kvd.runtime.driver import Driver
from kvd_proto.groups import GroupKind
from tests.simulation.sim_mover import Bytes, SimMover

ENGINE_BLOCKS = 48
HIT = 1


def key(chain: int, position: int) -> bytes:
    """Hash of a block: prompts of one chain share their first positions with chain // 2."""
    while position < chain % 5 and chain > 1:
        chain //= 2
    return hashlib.blake2b(f"{chain}/{position}".encode(), digest_size=32).digest()


def content(spec: NamespaceSpec, group: int, shard: int, block_key: bytes) -> Bytes:
    """The bytes that this block must have, [blocks_per_block, engine block bytes]."""
    group_spec = spec.groups[group]
    seed = hashlib.blake2b(
        f"{spec.fingerprint}/{group}/{shard}".encode() + block_key, digest_size=8
    ).digest()
    random = np.random.default_rng(int.from_bytes(seed, "little"))
    shape = (group_spec.blocks_per_block, group_spec.shard_bytes[shard])
    return random.integers(0, 256, shape, dtype=np.uint8)


@dataclass
class SimJob:
    """One job under way: which blocks of which keys, and which ranks have not acknowledged."""

    job: JobId
    kind: JobKind
    group: int
    keys: list[bytes]
    blocks: np.ndarray  # [n, blocks_per_block] of engine block ids
    waiting_ranks: set[int]
    movers: dict[int, MoverId] = field(default_factory=dict)  # by rank, when it started
    failed_ranks: set[int] = field(default_factory=set)


@dataclass
class SimEngine:
    """One engine process: a scheduler and its ranks. `step` is one scheduler step."""

    name: str
    spec: NamespaceSpec
    random: Random
    shards: tuple[int, ...] = (0,)  # shard of each rank
    session: SessionId | None = None
    epoch: str = ""  # its own since its last reset
    movers: dict[int, SimMover] = field(default_factory=dict)
    jobs: dict[JobId, SimJob] = field(default_factory=dict)
    leases: list[LeaseId] = field(default_factory=list)
    memory: list[list[Bytes]] = field(default_factory=list)  # by rank, by group
    expected: list[list[Bytes]] = field(default_factory=list)
    free: list[list[int]] = field(default_factory=list)  # engine blocks by group
    next_job: int = 1
    next_request: int = 1
    loads_checked: int = 0
    blocks_hit: int = 0

    def __post_init__(self) -> None:
        for shard in self.shards:
            shapes = [(ENGINE_BLOCKS, g.shard_bytes[shard]) for g in self.spec.groups]
            self.memory.append([np.zeros(shape, dtype=np.uint8) for shape in shapes])
            self.expected.append([np.zeros(shape, dtype=np.uint8) for shape in shapes])
        self.free = [list(range(ENGINE_BLOCKS)) for _ in self.spec.groups]

    # -- SessionSink ------------------------------------------------------------------------

    def job_ended(self, order: object) -> None:
        pass  # this engine learns of ends from its boards alone

    def rank_lost(self, rank: int, reason: str) -> None:
        """The mover is gone: nothing writes to this rank any more, its open jobs failed."""
        self.movers.pop(rank, None)
        for job in list(self.jobs.values()):
            if rank in job.waiting_ranks:
                self._acknowledge(job, rank, JobStatus.FAILED)

    # -- a step -----------------------------------------------------------------------------

    def step(self, driver: Driver) -> None:
        """Read the boards, check all memory, then do something at random."""
        self._read_boards()
        self.check_memory()
        assert self.session is not None
        for _ in range(self.random.randrange(3)):
            self._serve_request(driver)
        if self.leases and self.random.random() < 0.5:
            taken = self.leases.pop(self.random.randrange(len(self.leases)))
            driver.call(ev.LeasesReleased(self.session, (taken,)))
        driver.call(ev.StepEnded(self.session))

    def _serve_request(self, driver: Driver) -> None:
        assert self.session is not None
        request = ev.RequestContext(
            RequestId(f"{self.name}-{self.next_request}"),
            account=self.random.choice(["", "", "", "salt"]),
        )
        self.next_request += 1
        group = self.random.randrange(len(self.spec.groups))
        chain, length = self.random.randrange(1, 24), self.random.randrange(1, 9)
        salt = request.account.encode()
        keys = [
            hashlib.blake2b(key(chain, i) + salt, digest_size=32).digest() for i in range(length)
        ]
        batch = KeyBatch.from_bytes(b"".join(keys), 32)
        mode = self.random.choice(
            [LeaseMode.PREFIX, LeaseMode.PREFIX, LeaseMode.ALL, LeaseMode.NONE]
        )
        query = ev.Query(request, group, batch, mode)
        (answer,) = driver.call(ev.LookupRequested(self.session, (query,)))
        hits = next((i for i, s in enumerate(answer.statuses) if s & 3 != HIT), length)
        self.blocks_hit += hits
        if answer.lease is not None:
            self.leases.append(answer.lease)
        if hits and self.random.random() < 0.8:
            self._start(driver, request, JobKind.LOAD, group, keys[:hits])
        if hits < length:
            self._start(driver, request, JobKind.STORE, group, keys[hits:])
        if self.random.random() < 0.1:
            self._hand_off(driver, request, group, batch)
        if self.random.random() < 0.3:
            driver.call(ev.RequestsEnded(self.session, (request.request,)))

    def _hand_off(
        self, driver: Driver, request: ev.RequestContext, group: int, keys: KeyBatch
    ) -> None:
        """Leave what there is of the request to the other engine of this namespace."""
        assert self.session is not None
        lasting_ns = self.random.randrange(1, 60_000) * 1_000_000
        driver.call(ev.HandOffRequested(self.session, request, group, keys, lasting_ns))

    def _start(
        self,
        driver: Driver,
        request: ev.RequestContext,
        kind: JobKind,
        group: int,
        keys: list[bytes],
    ) -> None:
        width = self.spec.groups[group].blocks_per_block
        if len(self.free[group]) < len(keys) * width:
            return
        assert self.session is not None
        taken = [self.free[group].pop() for _ in range(len(keys) * width)]
        blocks = np.array(taken, dtype=np.uint32).reshape(len(keys), width)
        if kind is JobKind.STORE:
            self._compute(group, keys, blocks)
        job = SimJob(JobId(self.next_job), kind, group, keys, blocks, set(self.movers))
        job.movers = {rank: mover.mover for rank, mover in self.movers.items()}
        self.next_job += 1
        self.jobs[job.job] = job
        run = ev.Run(group, KeyBatch.from_bytes(b"".join(keys), 32), blocks)
        if self.random.random() < 0.95:  # else the workers never say ready
            for mover in self.movers.values():
                if self.random.random() < 0.97:
                    mover.mark_ready(job.job)
        if kind is JobKind.LOAD:
            event: ev.Event = ev.LoadRequested(self.session, job.job, request, (run,))
        else:
            whole = self.random.random() < 0.2
            event = ev.StoreRequested(self.session, job.job, request, (run,), whole)
        driver.call(event)

    def _compute(self, group: int, keys: list[bytes], blocks: np.ndarray) -> None:
        for rank, shard in enumerate(self.shards):
            for block_key, row in zip(keys, blocks, strict=True):
                made = content(self.spec, group, shard, block_key)
                self.memory[rank][group][row] = made
                self.expected[rank][group][row] = made

    # -- checking ---------------------------------------------------------------------------

    def _read_boards(self) -> None:
        for rank, mover in self.movers.items():
            while mover.board:
                job_id, kind, status = mover.board.popleft()
                job = self.jobs.get(job_id)
                if job is None or job.movers.get(rank) != mover.mover:
                    continue  # of an earlier registration, whose jobs failed with its mover
                assert job.kind is kind
                assert rank in job.waiting_ranks, f"job {job_id}: rank {rank} acknowledged twice"
                self._acknowledge(job, rank, status)

    def _acknowledge(self, job: SimJob, rank: int, status: JobStatus) -> None:
        job.waiting_ranks.discard(rank)
        if status is not JobStatus.DONE:
            job.failed_ranks.add(rank)
        if job.kind is JobKind.LOAD:
            # From here on nothing may write to this rank's blocks, whatever the outcome.
            rows = job.blocks.reshape(-1)
            found = self.memory[rank][job.group][rows]
            self.expected[rank][job.group][rows] = found
            if status is JobStatus.DONE:
                self._check_loaded(job, rank)
        if not job.waiting_ranks:
            del self.jobs[job.job]
            self.free[job.group].extend(int(b) for b in job.blocks.reshape(-1))

    def _check_loaded(self, job: SimJob, rank: int) -> None:
        for block_key, row in zip(job.keys, job.blocks, strict=True):
            wanted = content(self.spec, job.group, self.shards[rank], block_key)
            assert np.array_equal(self.memory[rank][job.group][row], wanted), (
                f"{self.name}: wrong bytes loaded for {block_key.hex()[:12]} on rank {rank}"
            )
            self.loads_checked += 1

    def check_memory(self) -> None:
        """Every engine block but those being loaded holds what the engine left there."""
        for rank in range(len(self.shards)):
            for group in range(len(self.spec.groups)):
                loading = np.zeros(ENGINE_BLOCKS, dtype=bool)
                for job in self.jobs.values():
                    is_load = job.kind is JobKind.LOAD and job.group == group
                    if is_load and rank in job.waiting_ranks:
                        loading[job.blocks.reshape(-1)] = True
                same = (self.memory[rank][group] == self.expected[rank][group]).all(axis=1)
                assert (same | loading).all(), f"{self.name}: a late copy wrote to rank {rank}"


def namespace(
    name: str, shards: int, tenant: str = "default", *, unshared: bool = False
) -> NamespaceSpec:
    """Two groups of unlike block sizes, one of them of two engine blocks a block."""
    return NamespaceSpec(
        fingerprint=hashlib.sha256(name.encode()).hexdigest(),
        tenant=TenantId(tenant),
        hash_bytes=32,
        groups=(
            GroupSpec(GroupKind.FULL_ATTENTION, 1, (4096,) * shards),
            GroupSpec(GroupKind.SLIDING_WINDOW, 2, (4096,) * shards),
        ),
        unshared=unshared,
    )


def placements(shards: tuple[int, ...]) -> list[RankPlacement]:
    """Rank r holds shards[r]; the first rank of a shard writes it."""
    return [
        RankPlacement(rank, shard, writer=shards.index(shard) == rank)
        for rank, shard in enumerate(shards)
    ]
