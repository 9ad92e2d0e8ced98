"""Blocks that have left a store by themselves, in a tier's process, until control has heard of it.

Control hears the words of this process one after the other, but calls run side by side: a block
may leave while the call that wrote it has not been answered. What control knows when it has heard
both must be right, so here is decided what the call may still say. Its answer goes out under
`lock`, as do the names of what has left:

- A block that left while a call ran is none that the call wrote or found there, whichever was
  first: it may be there nevertheless, which costs another write.
- A block that was written or found there is not named any more, if it left before that call began.

What a store says is bounded: beyond it nobody knows what has left, and control is told so.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

import numpy as np

from kvd.core.keys import KeyBatch
from kvd.processes.complaints import log_limited
from kvd.tiers.frames import (
    MAX_LEFT_KEYS,
    MAX_LEFT_SCOPES,
    Order,
    OrderEnd,
    OrderId,
    ScopedKeys,
    TierAnswer,
    TierFrame,
    TierLeft,
)
from kvd.tiers.store import (
    SCOPE_BYTES,
    NamesWhatLeaves,
    NoticesEmptying,
    Outcome,
    TierKey,
    TierStore,
)
from kvd_proto.limits import MAX_HASH_BYTES

KeysOf = Callable[[Order], Sequence[TierKey]]
MAX_LEFT = 131_072  # blocks that have left, and of which control has not heard: 250 bytes each

# What an answer says of a block that is there, and what it says instead.
_THERE: Final = {
    TierFrame.EXISTS: (1, 0),
    TierFrame.WRITE: (int(Outcome.DONE), int(Outcome.FULL)),
}


def _asking(store: TierStore) -> Callable[[], Sequence[TierKey] | None] | None:
    """What asks the store what has left it; None where it can't say."""
    if isinstance(store, NamesWhatLeaves):
        return store.take_left
    if isinstance(store, NoticesEmptying):
        return lambda: None if store.was_emptied() else ()
    return None


class Departures:
    """Of one store. Any thread; `checked` and `some` while it holds `lock`."""

    def __init__(self, store: TierStore) -> None:
        self.lock = threading.Lock()
        self._take_left = _asking(store)
        self._untold: dict[TierKey, None] = {}
        self._in_doubt = False
        self._count = 0  # of all that left
        # Who left while calls run, and as which of all; the last at the end.
        self._recent: OrderedDict[TierKey, int] = OrderedDict()
        self._sure_from = 0  # what ran before so many had left can't be sure of anything
        self._began: dict[OrderId, int] = {}

    @property
    def are_named(self) -> bool:
        """Whether the store names them at all."""
        return self._take_left is not None

    def begin(self, order: OrderId) -> None:
        """The store is called now."""
        if self._take_left is not None:
            with self.lock:
                self._began[order] = self._count

    def checked(self, order: Order, answer: TierAnswer, keys_of: KeysOf) -> TierAnswer:
        """What the call may say; it has ended."""
        if self._take_left is None:
            return answer
        since = self._began.pop(order.order)
        self._take()
        if self._recent or self._untold or since < self._sure_from:
            answer = self._without_those_that_left(order, answer, keys_of, since)
        self._forget_recent()
        return answer

    def some(self) -> TierLeft:
        """Some of what control has not heard of."""
        found: dict[tuple[bytes, int], list[bytes]] = {}
        taken = 0
        for scope, block in self._untold:
            group = (scope, len(block))
            full = group not in found and len(found) == MAX_LEFT_SCOPES
            if full or taken == MAX_LEFT_KEYS:
                break
            found.setdefault(group, []).append(block)
            taken += 1
        for key in list(islice(self._untold, taken)):
            del self._untold[key]
        in_doubt, self._in_doubt = self._in_doubt, False
        parts = [
            ScopedKeys(scope, KeyBatch.from_bytes(b"".join(blocks), size))
            for (scope, size), blocks in found.items()
        ]
        return TierLeft(tuple(parts), in_doubt, bool(self._untold))

    def _take(self) -> None:
        """Ask the store what has left."""
        assert self._take_left is not None
        try:
            left = self._take_left()
            for key in left if left is not None else ():
                self._note(key)
                if self._in_doubt:
                    self._doubt()  # for the calls that run now: the others are not noted
                    break
        except BaseException as error:  # noqa: BLE001 - a store of a site's own may raise anything
            log_limited(f"the store does not say what has left it: {error!r}")
            left = None
        if left is None:
            self._doubt()

    def _note(self, key: TierKey) -> None:
        scope, block = key
        if type(scope) is not bytes or type(block) is not bytes:
            raise TypeError("a key that is no bytes")
        if len(scope) != SCOPE_BYTES or not 1 <= len(block) <= MAX_HASH_BYTES:
            raise ValueError("a key of an impossible length")
        self._count += 1
        self._recent.pop(key, None)
        self._recent[key] = self._count
        self._untold[key] = None
        if len(self._untold) > MAX_LEFT:
            self._doubt()
        elif len(self._recent) > MAX_LEFT:
            self._recent.clear()
            self._sure_from = self._count

    def _doubt(self) -> None:
        self._in_doubt = True
        self._untold.clear()
        self._recent.clear()
        self._count += 1
        self._sure_from = self._count

    def _without_those_that_left(
        self, order: Order, answer: TierAnswer, keys_of: KeysOf, since: int
    ) -> TierAnswer:
        there, otherwise = _THERE.get(order.kind, (0, 0))
        if not there or answer.end is not OrderEnd.ANSWERED:
            return answer
        values, keys = answer.values.copy(), keys_of(order)
        for row in np.flatnonzero(values == there).tolist():
            key = keys[row]
            if since < self._sure_from or self._recent.get(key, 0) > since:
                values[row] = otherwise
            else:
                self._untold.pop(key, None)
        return replace(answer, values=values)

    def _forget_recent(self) -> None:
        """What left before every call that runs is of no interest to any."""
        if not self._began:
            self._recent.clear()
            return
        eldest = min(self._began.values())
        while self._recent:
            key, left = next(iter(self._recent.items()))
            if left > eldest:
                break
            del self._recent[key]
