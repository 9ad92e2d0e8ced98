"""rows.table: one header for each extent, saying which row it belongs to.

A header is 8 words of 64 bits, its first word (granted or not) stored last. A row is granted
by its leading extent's header, written after those of its other shards and erased before them:
whatever moment the daemon dies at, a row is wholly there or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U64, NamespaceId, RowId
from kvd.pool.config import ROW_HEADER_BYTES, PoolConfig
from kvd.pool.mapped_table import MappedTable, checksums

_STATE, _CLASS, _SHARD, _SLOTS_LEADING, _PART_BYTES, _CHECKSUM = range(6)
_GRANTED = 1
_CHECKSUM_SEED = np.uint64(0x6B76642D726F7773)
_HALF = 32
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class GrantedRow:
    """A granted row as its headers say. `extents` and `part_bytes` by shard."""

    row: RowId
    namespace: NamespaceId
    group: int
    extents: tuple[int, ...]
    part_bytes: tuple[int, ...]
    slots: int


@dataclass(frozen=True, slots=True)
class _Header:
    namespace: int
    group: int
    shard: int
    shards: int
    slots: int
    leading: int
    part_bytes: int


def row_table_bytes(config: PoolConfig) -> int:
    """How large the file of a pool is."""
    return config.extents * ROW_HEADER_BYTES


def why_tables_lost(config: PoolConfig) -> str:
    """Why nobody knows what is there, and whose; "" where both tables are as long as they were."""
    for name, wanted in (
        ("rows.table", row_table_bytes(config)),
        ("slots.table", config.record_bytes),
    ):
        path = config.directory / name
        found = path.stat().st_size if path.exists() else 0
        if found < wanted:
            return f"{name} has {found} bytes of {wanted}"
    return ""


class RowTable(MappedTable):
    """The headers of all rows, mapped and populated (they are few)."""

    def __init__(self, config: PoolConfig, path: Path) -> None:
        super().__init__(path, config.extents, ROW_HEADER_BYTES)

    def grant(self, row: GrantedRow) -> None:
        """Write the row's headers, the leading extent's last."""
        for shard in reversed(range(len(row.extents))):
            words = self._words[row.extents[shard]]
            header = _header(row, shard)
            words[_CLASS:] = header[_CLASS:]
            words[_STATE] = header[_STATE]

    def wrong(self, row: GrantedRow) -> list[int]:
        """Extents of the row whose header is not the one that `grant` wrote."""
        headers = (_header(row, shard) for shard in range(len(row.extents)))
        return [
            extent
            for extent, header in zip(row.extents, headers, strict=True)
            if not np.array_equal(self._words[extent], header)
        ]

    def release(self, extents: tuple[int, ...]) -> None:
        """Erase headers, the leading extent's first."""
        for extent in extents:
            self._words[extent, _STATE] = 0
            self._words[extent] = 0

    def rows(self) -> Iterator[GrantedRow]:
        """Rows whose headers are all there and whole."""
        headers = self._headers()
        members: dict[int, list[int]] = {}
        for extent, header in headers.items():
            members.setdefault(header.leading, []).append(extent)
        for leading, found in members.items():
            by_shard = {headers[extent].shard: extent for extent in found}
            # Two that claim one shard prove nothing, neither the one nor the other.
            if by_shard.get(0) != leading or set(by_shard) != set(range(len(found))):
                continue
            first = headers[leading]
            if first.shards != len(found):
                continue
            extents = tuple(by_shard[shard] for shard in range(first.shards))
            parts = [headers[extent] for extent in extents]
            if any(_kind(part) != _kind(first) for part in parts):
                continue
            yield GrantedRow(
                RowId(leading),
                NamespaceId(first.namespace),
                first.group,
                extents,
                tuple(part.part_bytes for part in parts),
                first.slots,
            )

    def touched(self) -> set[int]:
        """Extents whose header is not plainly empty: granted, torn or damaged."""
        return set(np.flatnonzero(self._words.any(axis=1)).tolist())

    def touched_among(self, first: int, count: int) -> npt.NDArray[np.bool_]:
        """Which of so many extents from one on have a header that is not plainly empty."""
        return np.asarray(self._words[first : first + count].any(axis=1))

    def _headers(self) -> dict[int, _Header]:
        """Headers that say granted and are whole, by extent."""
        granted = np.flatnonzero(self._words[:, _STATE] == _GRANTED)
        words = self._words[granted]
        whole = words[:, _CHECKSUM] == _checksums(granted, words)
        fields = words[whole, _CLASS : _PART_BYTES + 1].tolist()
        return {
            extent: _Header(
                namespace=kind & _LOW,
                group=kind >> _HALF,
                shard=shard & _LOW,
                shards=shard >> _HALF,
                slots=slots & _LOW,
                leading=slots >> _HALF,
                part_bytes=part_bytes,
            )
            for extent, (kind, shard, slots, part_bytes) in zip(
                granted[whole].tolist(), fields, strict=True
            )
        }


def _header(row: GrantedRow, shard: int) -> U64:
    extent = row.extents[shard]
    words = np.zeros(ROW_HEADER_BYTES // 8, dtype=np.uint64)
    words[_CLASS] = row.namespace | row.group << _HALF
    words[_SHARD] = shard | len(row.extents) << _HALF
    words[_SLOTS_LEADING] = row.slots | row.extents[0] << _HALF
    words[_PART_BYTES] = row.part_bytes[shard]
    words[_CHECKSUM] = _checksums(np.array([extent]), words[None])[0]
    words[_STATE] = _GRANTED
    return words


def _kind(header: _Header) -> tuple[int, ...]:
    """What all headers of one row have in common."""
    return (header.namespace, header.group, header.shards, header.slots, header.leading)


def _checksums(extents: npt.NDArray[np.int64], words: U64) -> U64:
    """Checksum of each header, its place included."""
    columns = [words[:, c] for c in range(_CLASS, _PART_BYTES + 1)]
    return checksums(_CHECKSUM_SEED, [extents.astype(np.uint64), *columns])
