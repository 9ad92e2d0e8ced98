"""Messages of a step in plain Python, turned into protobuf on the connection's writer thread."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf import struct_pb2

from kvd_proto.limits import (
    MAX_KEYS_PER_MESSAGE,
    MAX_PROMPT_BLOCKS,
    MAX_PROMPT_BYTES,
    MAX_REQUESTS_TOLD,
    MAX_RUNS,
    MAX_STRING_BYTES,
    MAX_STRUCT_BYTES,
    U32_MAX,
)
from kvd_proto.v1 import common_pb2, engine_pb2

log = logging.getLogger(__name__)

MAX_STRUCT_DEPTH = 16  # objects and lists within each other; protobuf itself ends near 33
MIN_NUMBER, MAX_NUMBER = -1e308, 1e308  # of a JSON number, which is a double on the wire
TOO_LONG, TOO_DEEP, NO_JSON = "too long", "nested too deep", "no JSON"

# Which stores of a step each rank's worker is ready for at the same moment: see kvd.v1 StoreJob.
ALONE = 0
BEFORE_THE_STEP = 1  # of blocks that earlier steps computed: it may wait for them before it runs
AFTER_THE_STEP = 2  # of what the step computes


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

    def put_into(self, message: common_pb2.TransferRun) -> None:
        """Fill an empty message. In place: to make parts and copy them takes three times as long,
        and a step may have hundreds."""
        message.group = self.group
        message.hashes = b"".join(self.block_hashes)
        message.engine_blocks = _as_u32(self.engine_blocks)
        message.first_block = self.first_block


def _as_u32(numbers: Sequence[int] | npt.NDArray[np.uint32]) -> bytes:
    if isinstance(numbers, np.ndarray):
        return np.asarray(numbers, dtype="<u4").tobytes()
    return array("I", numbers).tobytes()  # of x86-64, as all of kvd; a sixth of numpy's time


def are_blocks(numbers: Sequence[int] | npt.NDArray[Any]) -> bool:
    """Whether a message can carry them as ids of engine blocks. As fast as to make it."""
    if isinstance(numbers, np.ndarray):  # which would be taken modulo 2^32
        return not numbers.size or bool(numbers.min() >= 0 and numbers.max() <= U32_MAX)
    try:
        array("I", numbers)
    except (OverflowError, TypeError):
        return False
    return True


def are_hashes(values: Sequence[bytes], length: int) -> bool:
    """Whether all are bytes, of this length: others may be no keys, or run into each other."""
    kinds = set(map(type, values))
    return all(issubclass(kind, bytes) for kind in kinds) and {length}.issuperset(map(len, values))


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
    if len(runs) == 1 and len(runs[0].block_hashes) <= most:
        return [runs]
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


def each_in_parts(runs: Sequence[BlockRun]) -> list[tuple[int, BlockRun]]:
    """What one job each may have, and of which run it is; of an empty run nothing."""
    return [
        (number, part)
        for number, run in enumerate(runs)
        if run.block_hashes
        for (part,) in in_parts([run])
    ]


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
    ready_together: int = ALONE  # of a store

    def put_into(
        self, message: engine_pb2.LoadJob | engine_pb2.StoreJob, *, bare: bool = False
    ) -> None:
        """Fill an empty message, but for what a store alone has."""
        message.job_id = self.job_id
        message.context.CopyFrom(bare_context(self.context) if bare else self.context)
        for run in self.runs:
            run.put_into(message.runs.add())

    def put_store_into(self, message: engine_pb2.StoreJob, *, bare: bool = False) -> None:
        """Fill an empty message of a store."""
        message.request_level = self.request_level
        message.ready_together = self.ready_together
        self.put_into(message, bare=bare)


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


class MissedDraft(NamedTuple):
    """The first block of a request that was not found; `status` as in kvd.v1 Answer."""

    group: int
    block: int
    block_hash: bytes
    status: int


@dataclass(slots=True)
class RequestLookup:
    """What one request looked for and found, so that the daemon can say why it missed."""

    context: common_pb2.ReqContext
    prompt_tokens: int
    device_tokens: int
    found_tokens: int
    missed: MissedDraft | None = None
    given_up: str = ""  # of GivenUp
    prompt: Sequence[bytes] = ()  # its blocks' hashes, while somebody records

    def to_proto(self) -> engine_pb2.RequestLookup:
        message = engine_pb2.RequestLookup(
            request_id=self.context.request_id,
            account=self.context.account,
            prompt_tokens=self.prompt_tokens,
            device_tokens=self.device_tokens,
            found_tokens=self.found_tokens,
        )
        if self.missed is not None:
            group, block, block_hash, status = self.missed
            missed = engine_pb2.MissedBlock(
                group=group, block=block, hash=block_hash, status=status
            )
            message.missed.CopyFrom(missed)
        if self.given_up:
            name = f"GIVEN_UP_{self.given_up.upper()}"
            message.MergeFrom(engine_pb2.RequestLookup(given_up=name))
        return message


@dataclass(slots=True)
class LookupCounts:
    """What requests looked for and found since the last step that said so, for statistics.

    `told`: the last of them one by one.
    """

    requests: int = 0
    requests_found: int = 0
    blocks: int = 0
    blocks_found: int = 0
    tokens: int = 0
    tokens_found: int = 0
    told: list[RequestLookup] = field(default_factory=list, compare=False)

    def add(self, other: LookupCounts) -> None:
        """Take another's counts to these."""
        self.requests += other.requests
        self.requests_found += other.requests_found
        self.blocks += other.blocks
        self.blocks_found += other.blocks_found
        self.tokens += other.tokens
        self.tokens_found += other.tokens_found
        self.told += other.told
        del self.told[:-MAX_REQUESTS_TOLD]

    def told_to_proto(self) -> list[engine_pb2.RequestLookup]:
        """Requests one by one, with as many whole prompts as a message takes."""
        messages = [each.to_proto() for each in self.told]
        room = MAX_PROMPT_BYTES
        for message, each in zip(messages, self.told, strict=True):
            hashes = each.prompt[:MAX_PROMPT_BLOCKS]
            if hashes and len(hashes) * len(hashes[0]) <= room:
                message.prompt_hashes = b"".join(hashes)
                room -= len(message.prompt_hashes)
        return messages

    def to_proto(self) -> engine_pb2.LookupCounts | None:
        """None: there is nothing to tell."""
        if not self.requests:
            return None
        return engine_pb2.LookupCounts(
            requests=self.requests,
            requests_found=self.requests_found,
            blocks=self.blocks,
            blocks_found=self.blocks_found,
            tokens=self.tokens,
            tokens_found=self.tokens_found,
        )


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
    generation: int | None = None  # of the session that its orders are for; None: whichever is open

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

    def to_remember(self) -> StepDraft:
        """The same, and of requests the counts alone: their prompts and parameters may be large."""
        return replace(self.without_orders(), lookups=replace(self.lookups, told=[]))

    @property
    def has_orders(self) -> bool:
        return bool(self.touches or self.loads or self.stores or self.hand_offs)

    def contexts(self) -> list[common_pb2.ReqContext]:
        """Of all its parts."""
        return [
            *(job.context for job in self.loads),
            *(job.context for job in self.stores),
            *(hand_off.context for hand_off in self.hand_offs),
            *(context for context, _ in self.touches),
        ]

    @property
    def has_parameters(self) -> bool:
        """Whether it carries what users set of requests, of whatever depth."""
        return any(
            each.HasField("kv_transfer_params") or each.HasField("hints")
            for each in self.contexts()
        )

    def to_proto(self, sequence: int, *, bare: bool = False) -> engine_pb2.Step:
        message = engine_pb2.Step()
        self.put_into(message, sequence, bare=bare)
        return message

    def put_into(self, message: engine_pb2.Step, sequence: int, *, bare: bool = False) -> None:
        """Fill an empty message; a `bare` one without what users may set of requests."""
        rest = engine_pb2.Step(
            sequence=sequence,
            touches=[
                engine_pb2.Touch(
                    context=bare_context(context) if bare else context, runs=[run.to_keys()]
                )
                for context, run in self.touches
            ],
            hand_offs=[hand_off.to_proto(bare=bare) for hand_off in self.hand_offs],
            released_leases=self.released_leases,
            preempted_request_ids=[wire_id(each) for each in self.preempted],
            finished_request_ids=[wire_id(each) for each in self.finished],
            end_step=self.ends_step,
            lookups=self.lookups.to_proto(),
            requests=self.lookups.told_to_proto(),
        )
        message.MergeFrom(rest)
        for job in self.loads:
            job.put_into(message.loads.add(), bare=bare)
        for job in self.stores:
            job.put_store_into(message.stores.add(), bare=bare)


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
                if not value.isascii() and not is_unicode(value):
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


def is_unicode(text: str) -> bool:
    """False for half of a surrogate pair, as JSON's escapes may make: it can't be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
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
