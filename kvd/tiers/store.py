"""The seam of a secondary tier: blocks by key, written from and read into the pool's memory.

A store is used by the tier's own process and nobody else. Its calls are synchronous batches,
made by `concurrency` threads at once. What the daemon decides (what is written where, what is
promoted, what waits) is not a store's business: it keeps bytes under keys, and tells the truth
about them.

What every store promises, and tests/tiers/contract.py holds:

- *No wrong byte.* A read is DONE only for exactly the bytes that a write of the same key was
  DONE for, with as many parts of the same lengths. Everything else is an answer: MISSING, FAILED.
- *Nothing lingers.* When a call has returned or raised, the store touches none of its parts any
  more. A call that can't promise that doesn't return; control then ends the process.
- *A miss is cheap.* A block may leave at any time, to make room or because the store lost it.
- *Scopes are apart.* Two scopes share no block, and what is left of a scope's bytes is never
  readable under another.
- *Few ways to fail.* A block's failure is its Outcome; a call's is a TierError. Nothing else
  comes out, whatever the medium does.

Where the pool keeps checksums of its blocks' bytes (`payload_checksums`), a store needs to know
nothing of it: the tier's process compares what is to be written, and sums up what was read. A
store that takes the same sums anyway spares it that, see `TierBlock.sums`.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from kvd.core.keys import U64
from kvd_proto.limits import MAX_HASH_BYTES, MAX_RANKS

SCOPE_BYTES = 32
NAMESPACE_BYTES = 16  # of those, the first: what all scopes of a namespace begin with
# Lengths of parts are multiples of it: checksums are taken of words.
PART_UNIT = 8
MAX_BLOCKS_PER_CALL = 8192  # keys or blocks; what is more goes in further calls
MAX_SCOPES_PER_CALL = 1024


class TierKey(NamedTuple):
    """What a block is found by: a block hash within what may share bytes.

    `scope` is SCOPE_BYTES long: a digest of the namespace's fingerprint, and one of the epoch, the
    account, the group, the layout's version and the generation, which another clear changes.
    `block` is the engine's hash, 1 to MAX_HASH_BYTES bytes.
    """

    scope: bytes
    block: bytes


class TierBlock(NamedTuple):
    """A block and where its bytes are, or shall go: one part a shard, in the shards' order.

    A part is a contiguous view of bytes (format "B", one dimension) in an extent of the pool:
    what a write reads, and what a read fills. Its length is a positive multiple of PART_UNIT; it
    may begin anywhere, and is fastest where it begins and ends at a multiple of 4096 bytes. The
    caller keeps it mapped, and leaves it alone, until the call has returned.

    `sums`, where they are wanted: the checksum of each part, as `kvd.mover.checksums` takes it; a
    write's may be 0, which says nothing. A store may leave them alone. One that has
    `compares_sums = True` compares a write's with the bytes that it writes (`sums.contradict`), and
    answers DAMAGED, nothing of the block being kept, where they differ.
    A read's are 0; a store that takes them of the bytes it has read into the parts puts them there.
    """

    key: TierKey
    parts: tuple[memoryview, ...]
    sums: U64 | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


class Outcome(enum.IntEnum):
    """What became of one block."""

    DONE = 1  # written: kept, or there already; read: every part holds what was written
    MISSING = 2  # read: no such block, or one of other parts
    FULL = 3  # written: no room, and nothing could or should leave for it
    FAILED = 4  # the store's errors say why; a later call may do better
    DAMAGED = 5  # written: the bytes are not those of the block's `sums`; never without them


class Found(enum.IntEnum):
    """What is said of a block that was asked for; `bool` says the first two."""

    ABSENT = 0
    THERE = 1
    UNKNOWN = 2  # it was not asked for in time, or who keeps it did not say


class TierReason(enum.StrEnum):
    """Why a block or a call failed. Stable: they are labels of a metric."""

    TIMEOUT = "TIMEOUT"  # the deadline passed first
    IO_ERROR = "IO_ERROR"  # the medium refused, or did less than it was told
    NO_SPACE = "NO_SPACE"  # the medium has less room than the store was promised
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"  # bytes came back that were not those written
    INDEX_DAMAGED = "INDEX_DAMAGED"  # what was known of blocks was lost, wholly or in part
    UNREACHABLE = "UNREACHABLE"  # whoever keeps the blocks does not answer
    BUSY = "BUSY"  # whoever keeps the blocks asks for fewer requests
    REFUSED = "REFUSED"  # whoever keeps the blocks answers, and says no
    UNUSABLE = "UNUSABLE"  # the store can't be opened as it is configured
    CLOSED = "CLOSED"  # the store was closed


class TierError(Exception):
    """A whole call failed: nothing is known of any of its blocks, and none was lost by it."""

    reason = TierReason.IO_ERROR

    def __init__(self, message: str, reason: TierReason | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class TierTimeout(TierError):
    """The deadline passed before the call could answer."""

    reason = TierReason.TIMEOUT


class TierUnusable(TierError):
    """The store can't be opened as it is configured; the message names what to change."""

    reason = TierReason.UNUSABLE


class LibraryMissing(TierUnusable):
    """A library that the store needs can't be loaded; `fix` is what to install."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}: {fix}")
        self.problem = problem
        self.fix = fix


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a store holds and how it fares, since it was opened where nothing else is said.

    `blocks` and `bytes` are resident now; `bytes` is what they take of `capacity_bytes`, which is
    0 where the store doesn't know (a cluster's). `errors` counts blocks, and calls that raised.
    `notes` say in plain words what an operator should know, such as a slower way of reading.
    """

    blocks: int
    bytes: int
    capacity_bytes: int
    evicted_blocks: int = 0
    errors: Mapping[TierReason, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class TierStore(Protocol):
    """Keeps blocks under keys. Any thread may call; at most `concurrency` calls at once, with
    `usage` besides.

    A call takes at most MAX_BLOCKS_PER_CALL keys or blocks, none included, and answers for each
    in the order given. A key may stand in a batch more than once. Calls that run at the same time
    are as if one came after the other, each block by itself.

    `deadline` is in seconds of time.monotonic(). A call begins nothing when it has passed: what is
    not done by then is FAILED, or the call raises TierTimeout where it has nothing to answer. It
    may be late by the one operation that was under way.

    Raises TierError when nothing can be said of the whole batch, and nothing else.
    """

    @property
    def concurrency(self) -> int:
        """Calls that may run at once; more gain nothing. At least 1."""

    def exists(self, keys: Sequence[TierKey], deadline: float) -> Sequence[Found | bool]:
        """Whether each block is there, as far as can be said without reading it. No use of it.

        A block that is ABSENT is told to all who watch as gone: what nobody said is UNKNOWN.
        """

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        """Keep these blocks; DONE, FULL, FAILED or DAMAGED for each.

        A block that is there already is DONE and not written again: one key has one content. With
        parts of other lengths it replaces what is there. Of a key that stands in the batch more
        than once, the first counts. Others may leave to make room.

        A store whose bytes travel though the block is there has `moves_what_is_there = True`: of
        blocks that likely are, `exists` is asked first.
        """

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        """Fill these blocks' parts; DONE, MISSING or FAILED for each.

        Where it is not DONE the parts' bytes mean nothing, and are none of another scope's. A
        block whose bytes prove wrong is FAILED once and MISSING from then on.
        """

    def delete_scopes(self, scopes: Sequence[bytes], deadline: float) -> None:
        """Forget every block of at most MAX_SCOPES_PER_CALL scopes, each named by its first bytes.

        All of them name one scope, the first NAMESPACE_BYTES a namespace, and none all there are.
        When it has returned they are gone for good, after a restart too. A write under way counts
        as before it. Raises TierError where that can't be said; then it is to be called again.
        """

    def usage(self) -> TierUsage:
        """How it fares now. Never waits for the medium, and never raises."""

    def close(self) -> None:
        """Write down what is not yet, and let go of everything. No call may be under way.

        A second call does nothing; every other call then raises TierError with CLOSED.
        """


@runtime_checkable
class MapsMemory(Protocol):
    """What a store has besides where its medium must know the pool's memory before it is used.

    A network card reads and writes only memory that it was told of. Any thread may call.
    """

    def map_memory(self, address: int, nbytes: int) -> None:
        """An extent is mapped here from now on. TierError: it can't be used, and is unmapped."""

    def unmap_memory(self, address: int) -> None:
        """The extent that begins here is about to be unmapped; no block in it is used. Never
        raises."""


@runtime_checkable
class NamesWhatLeaves(Protocol):
    """What a store has besides where it knows which blocks leave it by themselves.

    Then those who watch events hear of it, and what host memory still has is written again. The
    others' blocks are known to be gone when they are asked for.
    """

    def take_left(self) -> Sequence[TierKey] | None:
        """Blocks that have left since the last call: to make room, or since they proved wrong.

        Not those that were deleted, or replaced by a write. A block is named by the next call, as
        soon as nobody finds it any more and before a later write of it has returned. None: nobody
        knows which have left. Any thread may call; never waits for the medium, and never raises.
        """


@runtime_checkable
class NoticesEmptying(Protocol):
    """What a store has besides where it can't name what leaves, but sees when nearly all has.

    What host memory still has is then written again, as with NamesWhatLeaves.
    """

    def was_emptied(self) -> bool:
        """Whether so much has left since the last call. As `NamesWhatLeaves.take_left`, else."""


@runtime_checkable
class HasAPlace(Protocol):
    """What a store has besides where somebody may take away what it keeps its blocks in.

    A process that goes on with files that have no name any more keeps their space, and the next one
    finds none of its blocks. So it is ended, and another begins anew.
    """

    def taken_away(self) -> str:
        """What is not there any more where the next process looks for it; "" where all is.

        Asked now and then by one thread, which may wait for the medium. Never raises.
        """


@runtime_checkable
class LiesBelowMounts(Protocol):
    """What a store has besides where its blocks are in file systems that may be unmounted.

    The next process begins only where all of these are mounted: else it would fill what is below.
    """

    def mount_points(self) -> Sequence[str]:
        """Where these were mounted when it was opened, as mountinfo spells it. Never raises."""


OptionValue = str | int | float | bool | list[str]
TierOptions = Mapping[str, OptionValue]
# Opens a store: what a module path of the configuration names, given its table of options. Raises
# TierUnusable, with what to change; a store that was opened may find its medium ill later.
OpenStore = Callable[[TierOptions], TierStore]


def require_call(deadline: float, errors: Counter[TierReason], *, is_closed: bool) -> None:
    """Raise what a call ends with that comes after `close`, or too late: that one is counted."""
    if is_closed:
        raise TierError("the store is closed", TierReason.CLOSED)
    if time.monotonic() >= deadline:
        errors[TierReason.TIMEOUT] += 1
        raise TierTimeout("the deadline had passed before the call began")


def require_keys(keys: Sequence[TierKey]) -> None:
    """Assert that a batch of keys keeps this seam's rules: only the tier's process makes them."""
    assert len(keys) <= MAX_BLOCKS_PER_CALL, f"{len(keys)} keys in one call"
    for scope, block in keys:
        assert len(scope) == SCOPE_BYTES, f"a scope of {len(scope)} bytes"
        assert 1 <= len(block) <= MAX_HASH_BYTES, f"a block hash of {len(block)} bytes"


def require_blocks(blocks: Sequence[TierBlock], *, to_fill: bool) -> None:
    """Assert likewise for blocks; where they are to be filled, that all of it is writable."""
    require_keys([block.key for block in blocks])
    for block in blocks:
        assert 1 <= len(block.parts) <= MAX_RANKS, f"{len(block.parts)} parts"
        for part in block.parts:
            plain = part.format == "B" and part.ndim == 1 and part.contiguous
            assert plain, "a part is no plain bytes"
            whole = part.nbytes > 0 and part.nbytes % PART_UNIT == 0
            assert whole, f"a part of {part.nbytes} bytes"
            assert not (to_fill and part.readonly), "a part that can't be filled"


def firsts_of(blocks: Sequence[TierBlock]) -> list[int]:
    """For each block of a write, which of the batch counts: the number of the first of its key."""
    first: dict[TierKey, int] = {}
    return [first.setdefault(block.key, number) for number, block in enumerate(blocks)]


def require_scopes(scopes: Sequence[bytes]) -> None:
    """Assert likewise for scopes."""
    assert len(scopes) <= MAX_SCOPES_PER_CALL, f"{len(scopes)} scopes in one call"
    assert all(len(scope) <= SCOPE_BYTES for scope in scopes), "a scope of another length"
