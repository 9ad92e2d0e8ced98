"""Lookups on their way to the daemon: those that are asked while one waits to leave share its call.

Calls leave one by one, each when the stream takes it: however many wait, a step's message waits
behind one of them, and what nobody wants any more by then never leaves.

No lock: the connection calls under its own.
"""

from __future__ import annotations

from collections import deque
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

    def is_answered_by(self, answers: Sequence[QueryAnswer]) -> bool:
        """Whether there is one for each query, with a status for each of its keys."""
        return [len(answer.statuses) for answer in answers] == [
            len(query.run.block_hashes) for query in self.queries
        ]

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
        self._sent: dict[int, SharedCall] = {}  # without a reply, those that wait included
        self._waiting: deque[SharedCall] = deque()  # to leave, in this order
        self._open: SharedCall | None = None  # the last of them, while it takes more along
        self.is_leaving = False  # the stream was told that some wait

    def start(self, queries: Sequence[QueryDraft], now: float) -> int:
        """A new call id. Unless one `is_leaving`, the stream was told just before that some wait.

        A signal's handler may raise at any call here: others still leave.
        """
        self._last_call_id += 1
        call_id = self._last_call_id
        self._asked_s[call_id] = now
        if self._open is None or not self._open.add(call_id, queries):
            call = SharedCall(call_id, now)
            call.add(call_id, queries)
            self._sent[call_id] = call
            self._waiting.append(call)
            self._open = call
        self.is_leaving = True
        return call_id

    def leave(self) -> tuple[SharedCall | None, bool]:
        """The call that is next to leave, and whether the stream must be told that others wait.

        None where nobody wants it any more. The one behind it does not leave in its place: it may
        have been asked after a step that has not left yet.
        """
        call = self._waiting.popleft() if self._waiting else None
        self.is_leaving = bool(self._waiting)
        if call is self._open:
            self._open = None
        if call is not None and not self.waits_for([call_id for call_id, _ in call.askers]):
            del self._sent[call.number]
            call = None
        return call, self.is_leaving

    def close_open(self) -> None:
        """What waits to leave takes nothing more along: it leaves, or another message follows."""
        self._open = None

    def take_reply(self, reply: engine_pb2.LookupReply) -> None:
        """Hand the answers out. A refused call has none, for nobody; nor has one that was answered
        for other keys than it named.
        """
        call = self._sent.pop(reply.call_id, None)
        if call is None:
            return
        answers = [
            QueryAnswer(answer.statuses, answer.lease_id, answer.sources)
            for answer in reply.answers
        ]
        if not call.is_answered_by(answers):
            self.stray_leases += [answer.lease_id for answer in answers if answer.lease_id]
            answers = []
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
        self._waiting.clear()
        self._open = None
        self.is_leaving = False
