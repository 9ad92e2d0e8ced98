"""What the synchronous manager's jobs are made of, and vLLM's keys on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from vllm.v1.kv_offload.base import OffloadKey

from kvd_client.draft import BlockRun, within_limit
from kvd_proto.v1 import common_pb2

HASH_BYTES = 64  # a whole offload key, its length before it and zeros behind it


class Rank(Protocol):
    """The engine's one rank, whose memory the jobs copy from and to."""

    def begin(self, job_id: int, keys: Sequence[OffloadKey], *, load: bool) -> list[int]:
        """An engine block for each key of the job that is about to be sent."""

    def finish(self, job_id: int) -> None:
        """The rank's half is there: for a store each key's bytes are in its block."""

    def abandon(self, job_id: int) -> None:
        """The store's bytes will not be what they should."""

    def ended(self, job_id: int, *, done: bool) -> None:
        """No copy uses the blocks any more. After a load they hold what was stored."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the daemon was told that this engine may use, and what vLLM wants to hear of it."""

    num_chunks: int
    block_bytes: int
    enable_events: bool = False
    config_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class OpenJob:
    """A job that vLLM has not completed. `left` are the keys that it has not named yet."""

    job_id: int
    context: common_pb2.ReqContext
    is_load: bool
    left: set[OffloadKey]
    has_failed: bool = False


class ChunkNames:
    """Numbers vLLM's tests know blocks by: each key keeps its own from its store to its removal.

    The daemon tells nobody where a block lies. Numbers that were never used go first, then that
    which was given back last.
    """

    def __init__(self) -> None:
        self.by_key: dict[OffloadKey, int] = {}
        self._unused = 0
        self._given_back: list[int] = []

    def give(self, keys: Sequence[OffloadKey], most: int) -> list[int]:
        for key in keys:
            if self._unused < most:
                self.by_key[key] = self._unused
                self._unused += 1
            else:
                self.by_key[key] = self._given_back.pop()
        return [self.by_key[key] for key in keys]

    def take_back(self, keys: Iterable[OffloadKey]) -> None:
        self._given_back += [self.by_key.pop(key) for key in keys if key in self.by_key]


def wire(key: OffloadKey) -> bytes:
    """The key as a block hash of the length that all have in one namespace."""
    assert len(key) < HASH_BYTES, "an offload key is longer than a block hash may be"
    return (bytes([len(key)]) + key).ljust(HASH_BYTES, b"\0")


def unwired(hashes: bytes) -> list[OffloadKey]:
    """Keys of hashes that stand one after the other."""
    pieces = [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
    return [cast(OffloadKey, piece[1 : 1 + piece[0]]) for piece in pieces]


def runs_of(
    keys: Sequence[OffloadKey], places: Sequence[int], blocks: Sequence[int] = ()
) -> list[BlockRun]:
    """The keys in runs of consecutive places."""
    runs: list[BlockRun] = []
    for i, (key, place) in enumerate(zip(keys, places, strict=True)):
        engine_blocks = blocks[i : i + 1]
        last = runs[-1] if runs else None
        if last is not None and place == last.first_block + len(last.block_hashes):
            joined = ([*last.block_hashes, wire(key)], [*last.engine_blocks, *engine_blocks])
            runs[-1] = BlockRun(0, last.first_block, *joined)
        else:
            runs.append(BlockRun(0, place, [wire(key)], list(engine_blocks)))
    return within_limit(runs)
