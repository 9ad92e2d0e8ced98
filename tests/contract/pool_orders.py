"""A small pool and the orders that a core would give it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvd.core.actions import GrantRow, OpenNamespace, OpenScope, WriteFree, WriteReady
from kvd.core.events import Event, PoolRecovered, RowsRecovered, ScopesRecovered
from kvd.core.keys import U32, U64, KeyBatch, NamespaceId, RowId, ScopeId, TenantId
from kvd.core.spec import GroupSpec, NamespaceSpec
from kvd.pool import Pool, PoolConfig
from kvd_proto.groups import GroupKind

EXTENT_BYTES = 1 << 18
SLOTS_PER_EXTENT = EXTENT_BYTES // 4096
EXTENTS = 8
HASH_BYTES = 32
NAMESPACE = NamespaceId(1)
SCOPE = ScopeId(1)


def config(directory: Path, extents: int = EXTENTS, extent_bytes: int = EXTENT_BYTES) -> PoolConfig:
    return PoolConfig(directory / "pool", extents * extent_bytes, extent_bytes=extent_bytes)


@contextmanager
def opened(of: PoolConfig) -> Iterator[Pool]:
    """The pool, closed at the end in good order."""
    pool = Pool.open(of, lambda _done, _total: None)
    try:
        yield pool
    finally:
        pool.close()


def spec(parts: Sequence[int] = (4096,), hash_bytes: int = HASH_BYTES) -> NamespaceSpec:
    group = GroupSpec(GroupKind.FULL_ATTENTION, 1, tuple(parts))
    return NamespaceSpec("c0ffee", TenantId("blue"), hash_bytes, (group,))


def introduce(pool: Pool, of: NamespaceSpec | None = None, namespace: int = NAMESPACE) -> None:
    """Open a namespace, and a scope with the same number."""
    named = NamespaceId(namespace)
    order = OpenNamespace(named, of or spec(), page_blocks=EXTENTS * SLOTS_PER_EXTENT)
    pool.open_namespace(order, {"model": "tiny"})
    pool.open_scope(OpenScope(ScopeId(namespace), named, "epoch 1", "salt", 0))


def row(
    extents: Sequence[int], parts: Sequence[int] = (4096,), namespace: int = NAMESPACE
) -> GrantRow:
    """As many slots as fit, numbered as the core numbers them."""
    slots = min(EXTENT_BYTES // part for part in parts)
    return GrantRow(
        RowId(extents[0]),
        NamespaceId(namespace),
        0,
        tuple(extents),
        tuple(parts),
        extents[0] * SLOTS_PER_EXTENT,
        slots,
    )


def keys(count: int, seed: int = 0, hash_bytes: int = HASH_BYTES) -> KeyBatch:
    raw = np.random.default_rng(seed).bytes(count * hash_bytes)
    return KeyBatch.from_bytes(raw, hash_bytes)


def fill_row(pool: Pool) -> None:
    """8 blocks at the beginning of a row that is extent 2."""
    introduce(pool)
    pool.grant_row(row([2]))
    first = 2 * SLOTS_PER_EXTENT
    pool.write_ready(ready(range(first, first + 8), keys(8)))


def ready(slots: Sequence[int], of: KeyBatch, scope: int = SCOPE) -> WriteReady:
    """Stamps are the slots' numbers times ten."""
    numbers = np.array(slots, dtype=np.int64)
    scopes = np.full(len(numbers), scope, dtype=np.uint32)
    return WriteReady(numbers, scopes, of, numbers.astype(np.uint64) * np.uint64(10))


def free(slots: Sequence[int]) -> WriteFree:
    return WriteFree(np.array(slots, dtype=np.int64))


@dataclass(frozen=True)
class FoundRow:
    """A row of a RowsRecovered, with its part of the arrays."""

    namespace: NamespaceId
    group: int
    extents: tuple[int, ...]
    quarantined: bool
    ordinals: U32
    scopes: U32
    keys: KeyBatch
    stamps: U64


def rows_of(events: Sequence[Event]) -> dict[int, FoundRow]:
    found = {}
    for event in (e for e in events if isinstance(e, RowsRecovered)):
        start = 0
        for row in event.rows:
            span = slice(start, start + row.ready)
            found[int(row.row)] = FoundRow(
                event.namespace,
                event.group,
                row.extents,
                row.quarantined,
                event.ordinals[span],
                event.scopes[span],
                event.keys[span],
                event.stamps[span],
            )
            start += row.ready
        assert start == len(event.ordinals), "READY slots of no row"
    return found


def generations_of(directory: Path, slots: Sequence[int]) -> list[int]:
    """How often each of these slots was written, by the table's own word."""
    table = np.memmap(directory / "pool" / "slots.table", dtype=np.uint64, mode="r")
    return [int(word) >> 8 for word in table.reshape(-1, 16)[slots, 0]]


def scopes_of(events: Sequence[Event]) -> list[OpenScope]:
    found = [e for e in events if isinstance(e, ScopesRecovered)]
    return [
        OpenScope(s.scope, e.namespace, s.epoch, s.account, s.group, s.own)
        for e in found
        for s in e.scopes
    ]


def specs_of(events: Sequence[Event]) -> list[NamespaceSpec]:
    return [e.spec for e in events if isinstance(e, ScopesRecovered)]


def blocks_of(recovered: FoundRow) -> dict[int, bytes]:
    """Key by ordinal."""
    hashes = recovered.keys.to_bytes()
    width = recovered.keys.hash_bytes
    return {
        int(ordinal): hashes[i * width : (i + 1) * width]
        for i, ordinal in enumerate(recovered.ordinals)
    }


def tells_of_nothing(events: Sequence[Event]) -> bool:
    """Whether a pool was read back without a scope, a row or a block."""
    return [type(event) for event in events] == [PoolRecovered]
