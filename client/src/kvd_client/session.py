"""One session with one daemon, as the scheduler side sees it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvd_client.draft import QueryDraft, StepDraft
from kvd_client.identity import NamespaceFields
from kvd_proto import tags
from kvd_proto.page import PageReader
from kvd_proto.v1 import engine_pb2

# Up to here one probe after the other is cheaper than an array of them.
FEW_HASHES = 6
MAX_SEEDS = 4096  # of accounts and groups; an engine may serve an account for each of its users


class QueryAnswer(NamedTuple):
    """One query's answer: a status byte for each key, and the lease taken (0 = none).

    `sources`: for each key the tier that brought it up, as in kvd.v1 Answer; empty: none did.
    """

    statuses: bytes
    lease_id: int
    sources: bytes = b""


class SessionView(Protocol):
    """A usable session: what may be asked on the spot, without a call."""

    generation: int  # another number = another session: leases and jobs of the old one are gone
    lease_ttl_s: float
    store_threshold: int

    def present(
        self, group: int, account: str, block_hashes: Sequence[bytes]
    ) -> npt.NDArray[np.bool_]:
        """Which blocks the index page shows. A hint; raises ValueError for a wrong hash length."""

    def shows(self, group: int, account: str, block_hash: bytes) -> bool:
        """`present` for a single block: nearly all misses are known by one."""

    @property
    def page_hides_some(self) -> bool:
        """Blocks that the page doesn't show may lie in a tier: only a call tells."""

    def room(self, group: int) -> int:
        """Blocks that a store could get now."""


class Lookups(Protocol):
    """The part of a connection that asks for blocks. Nothing here raises for an absent daemon."""

    @property
    def session(self) -> SessionView | None:
        """None while the daemon is absent or silent, or a rank is not registered."""

    def start_lookup(self, queries: Sequence[QueryDraft]) -> int:
        """Send a lookup; its call id, 0 when it can't be sent. Never waits."""

    def gather(self, call_ids: Sequence[int], deadline_s: float) -> None:
        """Return when all these calls are answered or lost, or at the deadline."""

    def doubt(self, call_ids: Sequence[int], patience_s: Callable[[], float]) -> None:
        """Leave the daemon alone for a while if it has been silent for so long beside these calls.

        `patience_s` is asked only where the silence is remarkable at all.
        """

    def is_prompt(self, heard_within_s: float, unanswered_s: float) -> bool:
        """Whether the daemon spoke so lately, and no lookup has gone unanswered for longer."""

    def take_answers(self, call_id: int) -> tuple[QueryAnswer, ...] | None:
        """A call's answers, once; None while there are none; empty when the call is lost."""

    def give_up(self, call_id: int) -> None:
        """Want no answer any more; a lease that still comes is released."""


class Connection(Lookups, Protocol):
    """All that the scheduler side needs of the daemon, and what it was told of the engine."""

    namespace: NamespaceFields
    world_size: int
    tells_prompts: bool  # somebody records: whole prompts are told

    @property
    def open_session(self) -> SessionView | None:
        """The session that takes steps: `session`, and also one that is silent for the first time.

        What is stored meanwhile would be lost where the daemon is only late. One that goes on
        being silent takes none, for its stores would have to be waited for when blocks go.
        """

    def send_step(self, step: StepDraft) -> bool:
        """Queue the step's one message. False: its session is gone, nothing will be done."""

    def take_ended(self) -> list[tuple[int, bool]]:
        """Jobs that have ended on every rank, by the daemon's word: (job id, whether done)."""

    def reset_epoch(self) -> None:
        """Move on to a new epoch of this engine's own."""


class EpochSeeds:
    """Seeds of one epoch's tags.

    Another epoch has its own: who still probes for this one, while another thread enters the next,
    leaves nothing there.
    """

    def __init__(self, of_groups: Sequence[int]) -> None:
        self._of_groups = tuple(of_groups)
        self.of_accounts: dict[tuple[int, str], int] = {}

    def __bool__(self) -> bool:
        return bool(self._of_groups)

    def of(self, group: int, account: str) -> int:
        """The seed of an account's blocks in this group."""
        key = (group, account)
        seed = self.of_accounts.get(key)
        if seed is None:
            if len(self.of_accounts) >= MAX_SEEDS:
                self.of_accounts.clear()
            seed = tags.account_seed(self._of_groups[group], account)
            self.of_accounts[key] = seed
        return seed


class DaemonSession:
    """A `SessionView` over an open stream's answers and a mapped index page.

    Any thread may probe while another enters an epoch.
    """

    def __init__(self, generation: int, opened: engine_pb2.SessionOpened, hash_bytes: int) -> None:
        self.generation = generation
        self.session_id = opened.session_id
        self.namespace_id = opened.namespace_id
        self.fingerprint = opened.namespace_fingerprint
        self.lease_ttl_s = opened.lease_ttl_ms / 1000
        self.store_threshold = max(1, opened.store_threshold)
        self.epoch = opened.epoch.epoch
        self.ranks_ready = False
        self._hash_bytes = hash_bytes
        self._page: PageReader | None = None
        self.seeds = EpochSeeds(opened.epoch.group_seeds)

    def map_page(self, fd: int) -> None:
        """Map the index page; closes the descriptor."""
        try:
            self._page = PageReader(fd)
        finally:
            os.close(fd)

    def enter_epoch(self, epoch: str, seeds: Sequence[int]) -> None:
        """Probe under these seeds from now on; no seeds = nothing is known yet."""
        self.epoch = epoch
        self.seeds = EpochSeeds(seeds)

    @property
    def is_usable(self) -> bool:
        return (
            self.ranks_ready
            and bool(self.seeds)
            and self._page is not None
            and not self._page.closed
        )

    def present(
        self, group: int, account: str, block_hashes: Sequence[bytes]
    ) -> npt.NDArray[np.bool_]:
        joined = b"".join(block_hashes)
        if len(joined) != len(block_hashes) * self._hash_bytes:
            raise ValueError(f"every block hash must have {self._hash_bytes} bytes")
        seeds = self.seeds
        if self._page is None or not seeds:
            return np.zeros(len(block_hashes), dtype=np.bool_)
        seed = seeds.of(group, account)
        if len(block_hashes) <= FEW_HASHES:
            probe = self._page.probe_first
            return np.array([probe(each, seed) for each in block_hashes], dtype=np.bool_)
        words = tags.hash_words(joined, self._hash_bytes)
        return self._page.probe(tags.tags_of(words, seed))

    def shows(self, group: int, account: str, block_hash: bytes) -> bool:
        if len(block_hash) != self._hash_bytes:
            raise ValueError(f"every block hash must have {self._hash_bytes} bytes")
        seeds = self.seeds
        if self._page is None or not seeds:
            return False
        return self._page.probe_first(block_hash, seeds.of(group, account))

    @property
    def page_hides_some(self) -> bool:
        return self._page is not None and self._page.hides_some

    def room(self, group: int) -> int:
        return 0 if self._page is None else self._page.room(group)
