"""Lookups on their way to the daemon: those that are asked while one waits to leave share its call.

No lock: the connection calls under its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvd_client.draft import QueryDraft
from kvd_client.session import QueryAnswer
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE, MAX_QUERIES
from kvd_proto.v1 import engine_pb2


@dataclass(slots=True)
class SharedCall:
    """The queries of one lookup message, and whose they are: (call id, how many) in order."""

    number: int
    asked_s: float
    queries: list[QueryDraft] = field(default_factory=list)
    askers: list[tuple[int, int]] = field(default_factory=list)
    keys: int = 0

    def add(self, call_id: int, queries: Sequence[QueryDraft]) -> bool:
        """Take these along. False: they would make the message too large."""
        keys = sum(len(query.run.block_hashes) for query in queries)
        if self.queries and (
            self.keys + keys > MAX_KEYS_PER_MESSAGE
            or len(self.queries) + len(queries) > MAX_QUERIES
        ):
            return False
        self.queries += queries
        self.askers.append((call_id, len(queries)))
        self.keys += keys
        return True

    def to_proto(self, *, bare: bool = False) -> engine_pb2.LookupCall:
        return engine_pb2.LookupCall(
            call_id=self.number, queries=[query.to_proto(bare=bare) for query in self.queries]
        )


class LookupCalls:
    """The lookups under way: who has asked, since when, and what has been answered."""

    def __init__(self) -> None:
        self.stray_leases: list[int] = []  # of answers that nobody wants any more
        self._last_call_id = 0
        self._asked_s: dict[int, float] = {}  # unanswered: call id -> when it was asked
        self._answers: dict[int, tuple[QueryAnswer, ...]] = {}
        self._sent: dict[int, SharedCall] = {}
        self._open: SharedCall | None = None  # waits to leave, and takes more along

    def start(self, queries: Sequence[QueryDraft], now: float) -> tuple[int, SharedCall | None]:
        """A new call id, and the message to send for it; None: one that waits takes it along."""
        self._last_call_id += 1
        call_id = self._last_call_id
        self._asked_s[call_id] = now
        if self._open is not None and self._open.add(call_id, queries):
            return call_id, None
        self._open = SharedCall(call_id, now)
        self._open.add(call_id, queries)
        self._sent[call_id] = self._open
        return call_id, self._open

    def close_open(self) -> None:
        """What waits to leave takes nothing more along: it leaves, or another message follows."""
        self._open = None

    def take_reply(self, reply: engine_pb2.LookupReply) -> None:
        """Hand the answers out. A refused call has none, for nobody."""
        call = self._sent.pop(reply.call_id, None)
        if call is None:
            return
        answers = [
            QueryAnswer(answer.statuses, answer.lease_id, answer.sources)
            for answer in reply.answers
        ]
        first = 0
        for call_id, count in call.askers:
            own = tuple(answers[first : first + count])
            first += count
            if self._asked_s.pop(call_id, None) is None:
                self.stray_leases += [answer.lease_id for answer in own if answer.lease_id]
            else:
                self._answers[call_id] = own

    def take_answers(self, call_id: int) -> tuple[QueryAnswer, ...] | None:
        if call_id in self._asked_s:
            return None
        return self._answers.pop(call_id, ())

    def give_up(self, call_id: int) -> None:
        self._asked_s.pop(call_id, None)
        for answer in self._answers.pop(call_id, ()):
            self.stray_leases += [answer.lease_id] if answer.lease_id else []

    def waits_for(self, call_ids: Sequence[int]) -> bool:
        return any(call_id in self._asked_s for call_id in call_ids)

    def oldest_s(self, call_ids: Sequence[int]) -> float:
        """Since when the longest unanswered of these has waited; infinity when none does."""
        return min((self._asked_s.get(i, float("inf")) for i in call_ids), default=float("inf"))

    @property
    def sent_since_s(self) -> float:
        """Since when the oldest without a reply is on its way, also one that nobody wants any
        more; infinity when none is.
        """
        return next((call.asked_s for call in self._sent.values()), float("inf"))

    def clear(self) -> None:
        """The session is gone, and all of this with it."""
        self.stray_leases.clear()
        self._asked_s.clear()
        self._answers.clear()
        self._sent.clear()
        self._open = None
