"""What engines draw from: models, keys of prompts, and what they remember of what they asked."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.core.events import JobKind, JobStatus
from kvd.core.keys import KeyBatch, LeaseId
from kvd_proto.v1 import engine_pb2 as pb
from tests.simulation.whole.movers import SimMover

HIT = 1
HASH_BYTES = 16
BLOCKS = 40  # of its memory, in each group
CHAINS = 18
LONGEST = 6  # blocks of a request
DONE = (JobStatus.DONE, JobStatus.PARTIAL)


@dataclass(frozen=True)
class Model:
    """What some engines run: their namespace, as its messages say it."""

    name: str
    tenant: str
    uid: int
    fields: pb.NamespaceFields
    widths: tuple[int, ...]  # engine blocks in a block, by group
    block_bytes: tuple[int, ...]  # of an engine block in one shard, by group
    shards: int
    ranks: tuple[int, ...]  # the shard that each rank holds


@dataclass(eq=False)
class Job:
    """A job under way: what it copies, and which ranks have not acknowledged it."""

    kind: JobKind
    group: int
    keys: list[bytes]
    blocks: list[list[int]]
    epoch: str
    account: str
    waiting: dict[int, SimMover]  # by rank
    is_checked: bool = True
    failed: bool = False


@dataclass(eq=False)
class Found:
    """What a lookup found, and until when it is promised."""

    group: int
    keys: list[bytes]
    account: str
    lease: LeaseId
    until: float
    request: str
    since_ns: int


def batch(keys: list[bytes]) -> KeyBatch:
    return KeyBatch.from_bytes(b"".join(keys), HASH_BYTES)


def hash_of(name: str) -> int:
    """A number of a name, the same in every process."""
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(name))


def key_of(chain: int, place: int, account: str) -> bytes:
    """Hash of a block: chains share their first blocks with chain // 2."""
    while place < chain % 5 and chain > 1:
        chain //= 2
    return (chain * 1_000_003 + place * 31 + len(account) * 7_919).to_bytes(8, "little") * 2
