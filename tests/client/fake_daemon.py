"""An in-memory stand-in for the connection: a daemon that answers as a test tells it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvd_client.draft import QueryDraft, StepDraft
from kvd_client.identity import NamespaceFields
from kvd_client.session import QueryAnswer

HASH_BYTES = 16
MISS, HIT, PENDING, RETRY = range(4)
ADMITTED = 4


def hashes(prefix: str, count: int) -> list[bytes]:
    """`count` distinct block hashes, the same for the same prefix."""
    return [f"{prefix}{i}".encode().ljust(HASH_BYTES, b".") for i in range(count)]


class FakeDaemon:
    """Connection and session in one. `statuses` is what the daemon knows, by hash."""

    def __init__(self, namespace: NamespaceFields, world_size: int = 1) -> None:
        self.namespace = namespace
        self.world_size = world_size
        self.generation = 1
        self.tells_prompts = False
        self.lease_ttl_s = 2.0
        self.store_threshold = 1
        self.statuses: dict[bytes, int] = {}
        self.on_page: set[bytes] | None = None  # None: what is HIT
        self.rooms: dict[int, int] = {}
        self.page_hides_some = False
        self.sources: dict[bytes, int] = {}  # by key: the tier that brought it up
        self.is_there = True
        self.is_silent = False  # and left alone for it
        self.is_quick = False  # was heard of late
        self.answers_at_once = True
        self.answers_when_waited_for = True
        self.blocking_calls = 0
        self.lookups: list[list[QueryDraft]] = []
        self.steps: list[StepDraft] = []
        self.given_up: list[int] = []
        self.resets = 0
        self.doubts: list[float] = []  # what the calls in question are worth, each time
        self.ended: list[tuple[int, bool]] = []
        self._answers: dict[int, tuple[QueryAnswer, ...]] = {}
        self._unanswered: dict[int, list[QueryDraft]] = {}
        self._last_lease = 100

    # -- session ----------------------------------------------------------------------------

    @property
    def session(self) -> FakeDaemon | None:
        return None if self.is_silent else self.open_session

    @property
    def open_session(self) -> FakeDaemon | None:
        return self if self.is_there else None

    def present(
        self, group: int, account: str, block_hashes: Sequence[bytes]
    ) -> npt.NDArray[np.bool_]:
        known = self.on_page
        if known is None:
            known = {each for each, status in self.statuses.items() if status == HIT}
        return np.array([each in known for each in block_hashes], dtype=np.bool_)

    def shows(self, group: int, account: str, block_hash: bytes) -> bool:
        return bool(self.present(group, account, [block_hash])[0])

    def room(self, group: int) -> int:
        return self.rooms.get(group, 1_000_000)

    # -- connection -------------------------------------------------------------------------

    def start_lookup(self, queries: Sequence[QueryDraft]) -> int:
        if not self.is_there:
            return 0
        self.lookups.append(list(queries))
        call_id = len(self.lookups)
        self._unanswered[call_id] = list(queries)
        if self.answers_at_once:
            self.answer()
        return call_id

    def answer(self) -> None:
        """Let the answers of all open calls come, as things stand now."""
        for call_id, queries in self._unanswered.items():
            self._answers[call_id] = tuple(self._answer(query) for query in queries)
        self._unanswered.clear()

    def _answer(self, query: QueryDraft) -> QueryAnswer:
        statuses = bytes(self.statuses.get(each, MISS) for each in query.run.block_hashes)
        lease = 0
        if any(status == HIT for status in statuses):
            self._last_lease += 1
            lease = self._last_lease
        sources = bytes(self.sources.get(each, 0) for each in query.run.block_hashes)
        return QueryAnswer(statuses, lease, sources if any(sources) else b"")

    def gather(self, call_ids: Sequence[int], deadline_s: float) -> None:
        if any(call_id in self._unanswered for call_id in call_ids):
            self.blocking_calls += 1
            if self.answers_when_waited_for:
                self.answer()

    def doubt(self, call_ids: Sequence[int], patience_s: Callable[[], float]) -> None:
        self.doubts.append(patience_s())

    def is_prompt(self, heard_within_s: float, unanswered_s: float) -> bool:
        del heard_within_s, unanswered_s
        return self.is_quick

    def take_answers(self, call_id: int) -> tuple[QueryAnswer, ...] | None:
        return None if call_id in self._unanswered else self._answers.pop(call_id, ())

    def give_up(self, call_id: int) -> None:
        self.given_up.append(call_id)
        self._unanswered.pop(call_id, None)

    def send_step(self, step: StepDraft) -> bool:
        if self.is_there:
            self.steps.append(step)
        return self.is_there

    def take_ended(self) -> list[tuple[int, bool]]:
        ended, self.ended = self.ended, []
        return ended

    def reset_epoch(self) -> None:
        self.resets += 1

    # -- for tests --------------------------------------------------------------------------

    def holds(self, block_hashes: Sequence[bytes], status: int = HIT) -> None:
        for each in block_hashes:
            self.statuses[each] = status

    @property
    def last_step(self) -> StepDraft:
        return self.steps[-1]

    def restart(self) -> None:
        """Another session: leases, jobs and calls of the old one are gone."""
        self.generation += 1
        self._unanswered.clear()
        self._answers.clear()
