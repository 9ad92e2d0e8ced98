"""Messages of a step in plain Python, turned into protobuf on the connection's writer thread."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import struct_pb2

from kvd_proto.v1 import common_pb2, engine_pb2

log = logging.getLogger(__name__)

MAX_ID_BYTES = 256  # of a request's id; these four as the protocol says
MAX_STRUCT_BYTES = 16 * 1024  # of transfer parameters, and of hints
MAX_RUNS = 64  # of a job
MAX_PARTS = 1024  # loads, stores, touches, hand-offs of one step: of each so many


class BlockRun(NamedTuple):
    """Blocks of one group; `engine_blocks` has blocks_per_block ids for each hash, or none."""

    group: int
    first_block: int
    block_hashes: Sequence[bytes]
    engine_blocks: Sequence[int] = ()

    def to_keys(self) -> common_pb2.KeyRun:
        return common_pb2.KeyRun(
            group=self.group, hashes=b"".join(self.block_hashes), first_block=self.first_block
        )

    def to_transfer(self) -> common_pb2.TransferRun:
        return common_pb2.TransferRun(
            group=self.group,
            hashes=b"".join(self.block_hashes),
            engine_blocks=np.asarray(self.engine_blocks, dtype="<u4").tobytes(),
            first_block=self.first_block,
        )


def within_limit(runs: list[BlockRun], most: int = MAX_RUNS) -> list[BlockRun]:
    """The same blocks, in one run for each group where `most` runs are not enough.

    Such a run has gaps; block numbers order blocks within their request, and their order stays.
    """
    if len(runs) <= most:
        return runs
    joined: dict[int, BlockRun] = {}
    for run in runs:
        before = joined.get(run.group, BlockRun(run.group, run.first_block, ()))
        joined[run.group] = BlockRun(
            run.group,
            before.first_block,
            [*before.block_hashes, *run.block_hashes],
            [*before.engine_blocks, *run.engine_blocks],
        )
    return list(joined.values())


@dataclass(slots=True)
class JobDraft:
    job_id: int
    context: common_pb2.ReqContext
    runs: list[BlockRun]
    request_level: bool = False


@dataclass(slots=True)
class QueryDraft:
    context: common_pb2.ReqContext
    run: BlockRun
    lease_all: bool

    def to_proto(self) -> engine_pb2.Query:
        return engine_pb2.Query(
            context=self.context,
            run=self.run.to_keys(),
            lease=engine_pb2.LEASE_MODE_ALL if self.lease_all else engine_pb2.LEASE_MODE_PREFIX,
        )


@dataclass(slots=True)
class HandOffDraft:
    context: common_pb2.ReqContext
    runs: list[BlockRun]
    deadline_ms: int

    def to_proto(self) -> engine_pb2.HandOff:
        return engine_pb2.HandOff(
            context=self.context,
            runs=[run.to_keys() for run in self.runs],
            deadline_ms=self.deadline_ms,
        )


@dataclass(slots=True)
class StepDraft:
    """One `Step` but for its number, which the session gives."""

    touches: list[tuple[common_pb2.ReqContext, BlockRun]] = field(default_factory=list)
    loads: list[JobDraft] = field(default_factory=list)
    stores: list[JobDraft] = field(default_factory=list)
    hand_offs: list[HandOffDraft] = field(default_factory=list)
    completed_loads: list[int] = field(default_factory=list)
    completed_stores: list[int] = field(default_factory=list)
    released_leases: list[int] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    def count_keys(self) -> int:
        """Keys of all parts: what the daemon's limit for one message counts."""
        runs = [run for _, run in self.touches]
        for job in (*self.loads, *self.stores):
            runs += job.runs
        for hand_off in self.hand_offs:
            runs += hand_off.runs
        return sum(len(run.block_hashes) for run in runs)

    def to_proto(self, sequence: int) -> engine_pb2.Step:
        return engine_pb2.Step(
            sequence=sequence,
            touches=[
                engine_pb2.Touch(context=context, runs=[run.to_keys()])
                for context, run in self.touches
            ],
            loads=[
                engine_pb2.LoadJob(
                    job_id=job.job_id,
                    context=job.context,
                    runs=[run.to_transfer() for run in job.runs],
                )
                for job in self.loads
            ],
            stores=[
                engine_pb2.StoreJob(
                    job_id=job.job_id,
                    context=job.context,
                    runs=[run.to_transfer() for run in job.runs],
                    request_level=job.request_level,
                )
                for job in self.stores
            ],
            hand_offs=[hand_off.to_proto() for hand_off in self.hand_offs],
            completed_loads=self.completed_loads,
            completed_stores=self.completed_stores,
            released_leases=self.released_leases,
            preempted_request_ids=[wire_id(each) for each in self.preempted],
            finished_request_ids=[wire_id(each) for each in self.finished],
            end_step=True,
        )


def request_context(
    request_id: str, account: str, priority: int, extras: Iterable[tuple[str, Mapping[str, Any]]]
) -> common_pb2.ReqContext:
    """A request's context; `extras` are the named structs. Raises ValueError for values that
    JSON doesn't know. What users may set and the daemon would refuse is cut to what it takes.
    """
    context = common_pb2.ReqContext(
        request_id=wire_id(request_id), priority=priority, account=account
    )
    for name, values in extras:
        if values:
            struct = struct_pb2.Struct()
            struct.update(dict(values))
            if struct.ByteSize() > MAX_STRUCT_BYTES:
                log.warning("request %.64s: its %s are too long and stay here", request_id, name)
                continue
            getattr(context, name).CopyFrom(struct)
    return context


def wire_id(request_id: str) -> str:
    """The request's id as the daemon takes it: a long one is its beginning and a digest of all.

    Users set ids. One that was refused would take its whole step along, and the session.
    """
    encoded = request_id.encode(errors="replace")
    if 0 < len(encoded) <= MAX_ID_BYTES:
        return encoded.decode()
    digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
    return encoded[: MAX_ID_BYTES - 40].decode(errors="ignore") + "~" + digest
