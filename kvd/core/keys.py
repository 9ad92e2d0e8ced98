"""Names of things, and batches of block hashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NewType, TypeVar

import numpy as np
import numpy.typing as npt

from kvd_proto import tags

SessionId = NewType("SessionId", int)
JobId = NewType("JobId", int)  # chosen by the session's scheduler; scoped by session
TransferId = NewType("TransferId", int)  # chosen by the core; unique in this incarnation
MoverId = NewType("MoverId", int)  # one registered rank; = registration_id of the protocol
LeaseId = NewType("LeaseId", int)
NamespaceId = NewType("NamespaceId", int)  # small, persistent, from 1
ScopeId = NewType("ScopeId", int)  # (namespace, epoch, account, group); small, persistent, from 1
RowId = NewType("RowId", int)  # = index of the row's leading extent (its shard 0)
TenantId = NewType("TenantId", str)
RequestId = NewType("RequestId", str)
TierId = NewType("TierId", int)  # place in the list of tiers, from 0
CopyId = NewType("CopyId", int)  # a tier's copy, chosen by the core; unique in this incarnation
SearchId = NewType("SearchId", int)  # a question to tiers, likewise

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.int64]  # dense slot numbers

NO_SLOTS: Slots = np.empty(0, dtype=np.int64)
NO_SCOPE = ScopeId(0)  # below the number of any

# Where a checksum of a part's bytes should stand: none is known, and nothing is compared with it.
NO_SUM = np.uint64(0)


class ScopeName(NamedTuple):
    """What may share bytes, by name: so a tier finds it again, whatever a scope's number is.

    `generation` rises when the namespace is cleared.
    """

    namespace: NamespaceId
    epoch: str
    account: str
    group: int
    generation: int

    @property
    def scope(self) -> tuple[NamespaceId, str, str, int]:
        """The name of the scope that is in force under it, if the generation still is."""
        return self[:4]


Number = TypeVar("Number", np.int64, np.uint64)


def each_once(numbers: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """The numbers without repeats, ascending; numpy's `unique` takes thirty times as long."""
    ordered = np.sort(numbers)
    is_first = np.empty(len(ordered), dtype=np.bool_)
    is_first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], is_first[1:])
    return ordered if np.count_nonzero(is_first) == len(ordered) else ordered[is_first]


def are_among(numbers: U32, ascending: Slots) -> Bools:
    """As `np.isin`, which takes as long as sorting both."""
    if not len(ascending):
        return np.zeros(len(numbers), dtype=np.bool_)
    places = np.minimum(np.searchsorted(ascending, numbers), len(ascending) - 1)
    found: Bools = ascending[places] == numbers
    return found


NODE_UNKNOWN = -1  # memory node of an extent, or of a rank's GPU


@dataclass(frozen=True, slots=True, eq=False)
class KeyBatch:
    """n block hashes of one length. `words` has shape [n, ceil(hash_bytes / 8)]."""

    words: U64
    hash_bytes: int

    @classmethod
    def from_bytes(cls, hashes: bytes, hash_bytes: int) -> KeyBatch:
        """View hashes that stand one after the other; len(hashes) is a multiple of hash_bytes."""
        return cls(tags.hash_words(hashes, hash_bytes), hash_bytes)

    def __len__(self) -> int:
        return int(self.words.shape[0])

    def __getitem__(self, rows: slice | npt.NDArray[np.bool_] | Slots) -> KeyBatch:
        return KeyBatch(self.words[rows], self.hash_bytes)

    def to_bytes(self) -> bytes:
        """The hashes one after the other, padding taken off."""
        raw = np.ascontiguousarray(self.words).view(np.uint8)
        return raw.reshape(len(self), 8 * self.words.shape[1])[:, : self.hash_bytes].tobytes()
