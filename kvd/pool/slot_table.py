"""slots.table: one record for each slot, the truth about what host memory holds.

A record is 16 words of 64 bits: state and generation in the first, then scope and key length,
stamp of the store, checksum of the record, digest of the bytes' checksums (0: none), stamp of the
last use (0: none since the store), two spare words, and 64 bytes of key. The last use is not in
the checksum: it is written while the record stands, and a wrong one costs no more than a recompute.
The body is stored before the first word: on x86-64 whoever sees READY, a later daemon after a kill
-9 included, sees the body too. Record i of extent e is e * slots_per_extent + i.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U32, U64, KeyBatch
from kvd.core.model.slots import STAMP_MASK
from kvd.pool.config import RECORD_BYTES, PoolConfig
from kvd.pool.mapped_table import MappedTable, checksums

Records = npt.NDArray[np.int64]  # record numbers

FREE = np.uint64(0)
READY = np.uint64(1)
_STATE_MASK = np.uint64(0xFF)
_GENERATION_SHIFT = np.uint64(8)
_LENGTH_SHIFT = np.uint64(32)
_SCOPE_MASK = np.uint64(0xFFFFFFFF)

_WORDS = RECORD_BYTES // 8
_STATE, _SCOPE_LENGTH, _STAMP, _CHECKSUM, _PAYLOAD, _USED, _KEY = 0, 1, 2, 3, 4, 5, 8
_CHECKSUM_SEED = np.uint64(0x6B76642D736C6F74)


class SlotTableFile(MappedTable):
    """The file with the records of all slots, mapped. Every call takes whole batches."""

    def __init__(self, config: PoolConfig, path: Path) -> None:
        """Open or make the table; a new one says FREE everywhere."""
        self._per_extent = config.slots_per_extent
        super().__init__(path, config.extents * self._per_extent, RECORD_BYTES)

    def prepare(self, extent: int, slots: int) -> None:
        """Make sure of the memory for an extent's first records; PoolError where there is none."""
        self._prepare(extent * self._per_extent, slots, f"the slot table of extent {extent}")

    def prefetch(self, extent: int, slots: int) -> None:
        """Map an extent's first records at once, where the kernel can, before all are read."""
        self._prefetch(extent * self._per_extent, slots)

    def write_ready(
        self, records: Records, scopes: U32, keys: KeyBatch, stamps: U64, digests: U64
    ) -> None:
        """Make FREE records READY, one generation later. Arrays run along."""
        old = self._words[records, _STATE]
        assert not (old & _STATE_MASK == READY).any(), "a READY record was to be written again"
        generations = (old >> _GENERATION_SHIFT) + np.uint64(1)
        body = np.zeros((len(records), _WORDS), dtype=np.uint64)
        body[:, _STATE] = generations << _GENERATION_SHIFT | FREE
        body[:, _SCOPE_LENGTH] = scopes | np.uint64(keys.hash_bytes) << _LENGTH_SHIFT
        body[:, _STAMP] = stamps
        body[:, _PAYLOAD] = digests
        width = keys.words.shape[1]
        body[:, _KEY : _KEY + width] = keys.words
        body[:, _CHECKSUM] = _checksums(records, generations, body, width)
        self._words[records] = body
        self._words[records, _STATE] = body[:, _STATE] | READY

    def write_stamps(self, records: Records, stamps: U64) -> None:
        """Note when the blocks of READY records were last used."""
        self._words[records, _USED] = stamps

    def write_free(self, records: Records) -> None:
        """Make records FREE; their generation stays."""
        self._words[records, _STATE] &= ~_STATE_MASK

    def free_all(self, extent: int, slots: int) -> None:
        """Make an extent's first records FREE: of a row that was lost, some may say READY."""
        first = extent * self._per_extent
        records = np.arange(first, first + slots)
        if len(left := records[self.ready(records)]):
            self.write_free(left)

    def ready(self, records: Records) -> npt.NDArray[np.bool_]:
        """Which of these records say READY, whether whole or not."""
        mask: npt.NDArray[np.bool_] = self._words[records, _STATE] & _STATE_MASK == READY
        return mask

    def states(self, records: Records) -> U64:
        """State and generation of each: another word is there once a record was written anew."""
        words: U64 = self._words[records, _STATE]
        return words

    def scopes(self, records: Records) -> U32:
        """Scope that each record names, whether whole or not."""
        scopes: U32 = (self._words[records, _SCOPE_LENGTH] & _SCOPE_MASK).astype(np.uint32)
        return scopes

    def whole(self, records: Records, hash_bytes: int) -> npt.NDArray[np.bool_]:
        """Which of these records hold a key of this length and what was once written."""
        body = self._words[records]
        generations = body[:, _STATE] >> _GENERATION_SHIFT
        sums = _checksums(records, generations, body, -(-hash_bytes // 8))
        right_length = body[:, _SCOPE_LENGTH] >> _LENGTH_SHIFT == hash_bytes
        mask: npt.NDArray[np.bool_] = right_length & (sums == body[:, _CHECKSUM])
        return mask

    def stamps(self, records: Records) -> U64:
        """When the block was last used, as far as that was noted, or stored.

        A coarse stamp of its use gets what the stamp of its store says of the order of stores.
        """
        stored, used = self._words[records, _STAMP], self._words[records, _USED]
        used = np.where(used & STAMP_MASK, used, used | stored & STAMP_MASK)
        stamps: U64 = np.maximum(stored, used)
        return stamps

    def digests(self, records: Records) -> U64:
        """Digests of the bytes' checksums; 0 where there are none."""
        digests: U64 = self._words[records, _PAYLOAD]
        return digests

    def keys(self, records: Records, hash_bytes: int) -> KeyBatch:
        """The keys, copied out."""
        width = -(-hash_bytes // 8)
        return KeyBatch(self._words[records, _KEY : _KEY + width], hash_bytes)


def _checksums(records: Records, generations: U64, body: U64, key_words: int) -> U64:
    """Checksum of each record, its place included, so that a copy elsewhere isn't whole."""
    columns = [records.astype(np.uint64), generations]
    columns += [body[:, c] for c in (_SCOPE_LENGTH, _STAMP, _PAYLOAD)]
    columns += [body[:, c] for c in range(_KEY, _KEY + key_words)]
    return checksums(_CHECKSUM_SEED, columns)
