"""What answers to an engine's questions keep leased, until it is loaded or their time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

MAX_CLAIMS = 4096  # answers whose blocks are leased and not loaded yet; the oldest goes first


@dataclass(slots=True)
class LeasedAnswer:
    """What one answer leased, until all of it is loaded or its time is over."""

    request_id: str
    since_s: float
    left: int = 0  # keys that were not loaded yet
    keys: list[tuple[int, Sequence[bytes]]] = field(default_factory=list)  # by group


class LeasedAnswers:
    """A question is a request to the daemon: its end gives back what is leased for it.

    Whoever has these sees to it that one thread at a time calls.
    """

    def __init__(self, end: Callable[[str], object]) -> None:
        """`end` is told the request of each answer of which nothing is needed any more."""
        self._end = end
        self._claims: dict[str, LeasedAnswer] = {}  # by request, oldest first
        self._leased: dict[int, dict[bytes, LeasedAnswer]] = {}  # by group and key

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, request_id: str, keys: Mapping[int, Sequence[bytes]]) -> None:
        """Keys by group, each once. An earlier answer for the same stays until its time is over."""
        claim = LeasedAnswer(request_id, time.monotonic())
        for group, some in keys.items():
            claim.left += len(some)
            claim.keys.append((group, some))
            self._leased.setdefault(group, {}).update(dict.fromkeys(some, claim))
        if claim.left:
            self._claims[request_id] = claim
        else:
            self._end(request_id)
        if len(self._claims) > MAX_CLAIMS:
            self._end_claim(next(iter(self._claims.values())))

    def make_room(self, keys: int) -> None:
        """End the oldest of so many keys."""
        while keys > 0 and self._claims:
            claim = next(iter(self._claims.values()))
            keys -= claim.left
            self._end_claim(claim)

    def end_old(self, lease_s: float) -> bool:
        """End those that are older than this, in seconds. Whether there were any."""
        oldest_s = time.monotonic() - lease_s
        ended = False
        while self._claims:
            claim = next(iter(self._claims.values()))
            if claim.since_s > oldest_s:
                break
            self._end_claim(claim)
            ended = True
        return ended

    def note_loaded(self, group: int, keys: Sequence[bytes]) -> None:
        """Their leases are needed no more."""
        leased = self._leased.get(group, {})
        for key in keys:
            claim = leased.pop(key, None)
            if claim is not None:
                claim.left -= 1
                if not claim.left:
                    self._end_claim(claim)

    def _end_claim(self, claim: LeasedAnswer) -> None:
        self._end(claim.request_id)  # first: a signal's handler may raise in between
        self._claims.pop(claim.request_id, None)
        for group, keys in claim.keys if claim.left else ():
            leased = self._leased[group]
            for key in keys:
                if leased.get(key) is claim:
                    del leased[key]
