"""Messages of a step in plain Python, turned into protobuf on the connection's writer thread."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf import struct_pb2

from kvd_proto.limits import MAX_KEYS_PER_MESSAGE, MAX_RUNS, MAX_STRING_BYTES, MAX_STRUCT_BYTES
from kvd_proto.v1 import common_pb2, engine_pb2

log = logging.getLogger(__name__)

MAX_STRUCT_DEPTH = 16  # objects and lists within each other; protobuf itself ends near 33
MIN_NUMBER, MAX_NUMBER = -1e308, 1e308  # of a JSON number, which is a double on the wire
TOO_LONG, TOO_DEEP, NO_JSON = "too long", "nested too deep", "no JSON"


class BlockRun(NamedTuple):
    """Blocks of one group; `engine_blocks` has blocks_per_block ids for each of them, or none."""

    group: int
    first_block: int
    block_hashes: Sequence[bytes]
    engine_blocks: Sequence[int] | npt.NDArray[np.uint32] = ()

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


def stretches(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers in an ascending list, as (start, end) places in it."""
    if not blocks:
        return []
    if blocks[-1] - blocks[0] == len(blocks) - 1:
        return [(0, len(blocks))]
    cuts = [0, *(i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1)]
    return list(zip(cuts, [*cuts[1:], len(blocks)], strict=True))


def within_limit(runs: list[BlockRun], most: int = MAX_RUNS) -> list[BlockRun]:
    """The same blocks, in one run for each group where `most` runs are not enough.

    Such a run has gaps; block numbers order blocks within their request, and their order stays.
    """
    if len(runs) <= most:
        return runs
    by_group: dict[int, list[BlockRun]] = {}
    for run in runs:
        by_group.setdefault(run.group, []).append(run)
    return [
        BlockRun(
            group,
            same[0].first_block,
            list(chain.from_iterable(run.block_hashes for run in same)),
            list(chain.from_iterable(run.engine_blocks for run in same)),
        )
        for group, same in by_group.items()
    ]


def in_parts(runs: list[BlockRun], most: int = MAX_KEYS_PER_MESSAGE) -> list[list[BlockRun]]:
    """The same blocks, cut into what one job may have: `most` keys in MAX_RUNS runs."""
    if sum(len(run.block_hashes) for run in runs) <= most:
        return [within_limit(runs)]
    parts: list[list[BlockRun]] = [[]]
    room = most
    for group, first, hashes, engine_blocks in runs:
        width = len(engine_blocks) // len(hashes)
        start = 0
        while start < len(hashes):
            if not room:
                parts.append([])
                room = most
            end = min(start + room, len(hashes))
            row = engine_blocks[start * width : end * width]
            parts[-1].append(BlockRun(group, first + start, hashes[start:end], row))
            room -= end - start
            start = end
    return [within_limit(part) for part in parts]


def count_parts(keys: int) -> int:
    """In how many parts `in_parts` cuts so many keys."""
    return max(1, -(-keys // MAX_KEYS_PER_MESSAGE))


@dataclass(slots=True)
class JobDraft:
    """A store or load that is to be asked for."""

    job_id: int
    context: common_pb2.ReqContext
    runs: list[BlockRun]
    request_level: bool = False

    def to_load(self, *, bare: bool = False) -> engine_pb2.LoadJob:
        return engine_pb2.LoadJob(
            job_id=self.job_id,
            context=bare_context(self.context) if bare else self.context,
            runs=[run.to_transfer() for run in self.runs],
        )

    def to_store(self, *, bare: bool = False) -> engine_pb2.StoreJob:
        return engine_pb2.StoreJob(
            job_id=self.job_id,
            context=bare_context(self.context) if bare else self.context,
            runs=[run.to_transfer() for run in self.runs],
            request_level=self.request_level,
        )


@dataclass(slots=True)
class QueryDraft:
    """One question of a lookup: are these blocks of this request there?"""

    context: common_pb2.ReqContext
    run: BlockRun
    lease_all: bool

    def to_proto(self, *, bare: bool = False) -> engine_pb2.Query:
        return engine_pb2.Query(
            context=bare_context(self.context) if bare else self.context,
            run=self.run.to_keys(),
            lease=engine_pb2.LEASE_MODE_ALL if self.lease_all else engine_pb2.LEASE_MODE_PREFIX,
        )


@dataclass(slots=True)
class HandOffDraft:
    """The blocks of an ended request that are to be kept for another engine."""

    context: common_pb2.ReqContext
    runs: list[BlockRun]
    deadline_ms: int

    def to_proto(self, *, bare: bool = False) -> engine_pb2.HandOff:
        return engine_pb2.HandOff(
            context=bare_context(self.context) if bare else self.context,
            runs=[run.to_keys() for run in self.runs],
            deadline_ms=self.deadline_ms,
        )


@dataclass(slots=True)
class LookupCounts:
    """What requests looked for and found since the last step that said so, for statistics."""

    requests: int = 0
    requests_found: int = 0
    blocks: int = 0
    blocks_found: int = 0
    tokens: int = 0
    tokens_found: int = 0

    def add(self, other: LookupCounts) -> None:
        """Take another's counts to these."""
        self.requests += other.requests
        self.requests_found += other.requests_found
        self.blocks += other.blocks
        self.blocks_found += other.blocks_found
        self.tokens += other.tokens
        self.tokens_found += other.tokens_found

    def to_proto(self) -> engine_pb2.LookupCounts | None:
        """None: there is nothing to tell."""
        return engine_pb2.LookupCounts(**asdict(self)) if self.requests else None


@dataclass(slots=True)
class StepDraft:
    """What one `Step` will say, but for its number, which the session gives; see `messages_of`."""

    touches: list[tuple[common_pb2.ReqContext, BlockRun]] = field(default_factory=list)
    loads: list[JobDraft] = field(default_factory=list)
    stores: list[JobDraft] = field(default_factory=list)
    hand_offs: list[HandOffDraft] = field(default_factory=list)
    released_leases: list[int] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    lookups: LookupCounts = field(default_factory=LookupCounts)
    ends_step: bool = True

    def job_ids(self) -> list[int]:
        return [job.job_id for job in (*self.loads, *self.stores)]

    def take_ends(self, other: StepDraft) -> None:
        """What has ended and what is released, from another."""
        self.released_leases = other.released_leases
        self.preempted = other.preempted
        self.finished = other.finished

    def count_keys(self) -> int:
        """Keys of all parts: what the daemon's limit for one message counts."""
        runs = [run for _, run in self.touches]
        for job in (*self.loads, *self.stores):
            runs += job.runs
        for hand_off in self.hand_offs:
            runs += hand_off.runs
        return sum(len(run.block_hashes) for run in runs)

    def without_orders(self) -> StepDraft:
        """What it says of ends alone."""
        return replace(self, touches=[], loads=[], stores=[], hand_offs=[])

    @property
    def has_orders(self) -> bool:
        return bool(self.touches or self.loads or self.stores or self.hand_offs)

    def to_proto(self, sequence: int, *, bare: bool = False) -> engine_pb2.Step:
        """The message; a `bare` one without what users may set of requests."""
        return engine_pb2.Step(
            sequence=sequence,
            touches=[
                engine_pb2.Touch(
                    context=bare_context(context) if bare else context, runs=[run.to_keys()]
                )
                for context, run in self.touches
            ],
            loads=[job.to_load(bare=bare) for job in self.loads],
            stores=[job.to_store(bare=bare) for job in self.stores],
            hand_offs=[hand_off.to_proto(bare=bare) for hand_off in self.hand_offs],
            released_leases=self.released_leases,
            preempted_request_ids=[wire_id(each) for each in self.preempted],
            finished_request_ids=[wire_id(each) for each in self.finished],
            end_step=self.ends_step,
            lookups=self.lookups.to_proto(),
        )


def request_context(
    request_id: str, account: str, priority: int, extras: Iterable[tuple[str, Mapping[str, Any]]]
) -> common_pb2.ReqContext:
    """A request's context; `extras` are the named structs. Never raises for what users may set:
    what the daemon would refuse is cut to what it takes, or stays here.
    """
    context = common_pb2.ReqContext(
        request_id=wire_id(request_id), priority=wire_priority(priority), account=account
    )
    for name, values in extras:
        if not values:
            continue
        flaw = flaw_of(values)
        if not flaw:
            struct = struct_pb2.Struct()
            struct.update(dict(values))
            if struct.ByteSize() <= MAX_STRUCT_BYTES:
                getattr(context, name).CopyFrom(struct)
                continue
            flaw = TOO_LONG
        log.warning("request %.64s: its %s are %s and stay here", wire_id(request_id), name, flaw)
    return context


def read_only_from(context: common_pb2.ReqContext, tiers: Iterable[int]) -> None:
    """Have the request read from these tiers below host memory alone; none: from host memory."""
    allowed = set(tiers)
    below = [tier for tier in (common_pb2.TIER_DISK, common_pb2.TIER_CLUSTER) if tier in allowed]
    context.tiers_allowed[:] = [common_pb2.TIER_HOST, *below]


def bare_context(context: common_pb2.ReqContext) -> common_pb2.ReqContext:
    """What the daemon must know of a request, without its parameters and hints."""
    return common_pb2.ReqContext(
        request_id=context.request_id,
        priority=context.priority,
        account=context.account,
        tiers_allowed=context.tiers_allowed,
    )


def flaw_of(values: Mapping[str, Any]) -> str:
    """Why these can't be sent; empty: they can. Looks at no more of them than may be sent."""
    room = MAX_STRUCT_BYTES
    left: list[tuple[Any, int]] = [(values, 0)]
    while left:
        value, depth = left.pop()
        room -= 2  # what the least value takes
        children: Iterable[Any] = ()
        match value:
            case bool() | None:
                pass
            case str():
                if len(value) > room:
                    return TOO_LONG
                if not value.isascii() and not _is_unicode(value):
                    return NO_JSON
                room -= len(value)
            case int() | float():
                if not MIN_NUMBER <= value <= MAX_NUMBER:  # NaN and infinity, too
                    return NO_JSON
            case Mapping():
                if not all(isinstance(key, str) for key in islice(value, MAX_STRUCT_BYTES)):
                    return NO_JSON
                children = chain(value.keys(), value.values())
            case list():
                children = value
            case _:
                return NO_JSON
        if children:
            if depth >= MAX_STRUCT_DEPTH:
                return TOO_DEEP
            if len(value) > room:
                return TOO_LONG
            left += [(child, depth + 1) for child in children]
        if room < 0:
            return TOO_LONG
    return ""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON's escapes may make
        return False
    return True


def wire_priority(priority: int) -> int:
    """The priority as the protocol takes it: 32 bits."""
    return max(-(1 << 31), min(int(priority), (1 << 31) - 1))


def wire_text(text: str) -> str:
    """The text as the daemon takes it: a long one becomes its beginning and a digest of all, so
    that two that differ never meet.
    """
    return wire_id(text) if text else ""


def wire_id(request_id: str) -> str:
    """The request's id as the daemon takes it: like any text, but never empty.

    Users set ids. One that was refused would take its whole step along, and the session.
    """
    encoded = request_id.encode(errors="replace")
    if 0 < len(encoded) <= MAX_STRING_BYTES:
        return encoded.decode()
    digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
    return encoded[: MAX_STRING_BYTES - 40].decode(errors="ignore") + "~" + digest
