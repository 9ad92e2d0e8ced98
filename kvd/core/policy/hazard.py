"""How likely a block is to come back, by its class and by how long ago it was used.

For each class and each bin of ages two things are known: the returns of blocks of that age, and the
time that blocks of that age were watched. The first by the second is the chance of coming back in
a unit of time (the hazard). What was watched are intervals that have ended, in a return or not,
and intervals under way. The latter are counted by class and *cohort*, a span of last uses. Spans
are the wider the longer ago they are, so some dozens hold them all. Bins are half octaves, so there
is no unit of time to choose. What has ended counts half after each 4,096 requests.

Where little is known a class is taken to be like all of them: the prior of its hazard is the
pooled one of that age times what the class returns more or less than the pool does, and counts as
much as one request. The pooled hazard of an age that nothing has reached is that of the age before.

The score of a block is the most hits for the time it is kept, over all times after which one might
stop keeping it: a Gittins index (Gittins, J. R. Statist. Soc. B 41, 1979), as for a job whose
length is not known. By the plain hazard a block would leave just before the age of its return.
No age of a class scores more than a younger one. A class gives its oldest block first, so if that
were worth the more the older it gets, it would stay, and with it all younger ones that are worth
less.

Blocks weigh 1 / the blocks of their request that are learnt from, rounded to a power of two: so
sums are exact, and one long request does not speak for all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.core.keys import Bools, Slots

CLASSES = 7  # of turns: the first ones alone, then several together
BINS = 64  # half octaves of ages
COHORTS = 128  # spans of last uses
SPAN = 0.2  # a cohort's span is no more than this part of its age, if there are many
SCORED_EVERY = 32  # requests
HALVED_EVERY = 4096  # requests
WEIGHTS = 16  # powers of two

Floats = npt.NDArray[np.float64]

WEIGHT: Floats = np.array([0.5**power for power in range(WEIGHTS)])
# A bin has the ages from its edge on that are below the next one's.
EDGES: Floats = np.array([2.0 ** (at // 2) * (1 + at % 2 / 2) - 1 for at in range(BINS + 1)])
WIDTHS: Floats = np.diff(EDGES)
_STOPS_LATER = np.triu(np.ones((BINS, BINS), dtype=np.bool_))
_FIRST_BIN = 254  # a float's exponent and the highest bit of its mantissa, for 1.0


class Seen(NamedTuple):
    """Blocks whose intervals change: one element a block."""

    stamps: Slots  # of their last use
    classes: Slots  # 0 .. CLASSES - 1
    weights: Slots  # negative powers of two

    def only(self, which: Bools) -> Seen:
        """Some of them."""
        return Seen(*(each[which] for each in self))


def bins_of(ages: Slots) -> Slots:
    """The bin of each age."""
    halves = (ages + 1).astype(np.float32).view(np.int32) >> 22
    bins: Slots = np.minimum(halves - _FIRST_BIN, BINS - 1).astype(np.int64)
    return bins


class Hazards:
    """What is learnt of one policy's classes, and the scores that follow. Times are its stamps."""

    def __init__(self) -> None:
        self.forget(0)

    def forget(self, now: int) -> None:
        """Know nothing, and watch what begins from now on."""
        self._returned: Floats = np.zeros((CLASSES, BINS))
        self._ended: Floats = np.zeros((CLASSES, BINS))  # intervals that ended there
        self._partly: Floats = np.zeros((CLASSES, BINS))  # their time in that bin
        self._requests = 0
        self.scores: list[list[float]] = [[1.0] * BINS for _ in range(CLASSES)]
        self.watch_from(now)

    def watch_from(self, stamp: int) -> None:
        """Intervals that began before are not watched on; what was learnt counts."""
        self._since = stamp
        self._watched: Floats = np.zeros((CLASSES, COHORTS))  # under way
        self._latest: Slots = np.zeros(COHORTS, np.int64)  # use of each cohort, oldest cohort first
        self._cohorts = 0

    def request_came(self, now: int) -> None:
        """One more request: time to look at what was learnt, perhaps."""
        self._requests += 1
        if self._requests % HALVED_EVERY == 0:
            self._returned /= 2
            self._ended /= 2
            self._partly /= 2
        if self._requests % SCORED_EVERY == 0:
            self.scores = scores(self._returned, self._times(now)).tolist()

    @property
    def under_way(self) -> float:
        """Weight of the blocks that are watched."""
        return float(self._watched.sum())

    # -- intervals --------------------------------------------------------------------------

    def begin(self, now: int, classes: Slots, weight: int) -> None:
        """Blocks were used now."""
        if now < self._since:
            return
        if not self._cohorts or self._latest[self._cohorts - 1] != now:
            if self._cohorts == COHORTS:
                self._merge(now)
            self._latest[self._cohorts] = now
            self._cohorts += 1
        self._watched[:, self._cohorts - 1] += np.bincount(classes, minlength=CLASSES) * 0.5**weight

    def used_longer(self, seen: Seen) -> None:
        """They are still being used: what began with that use has not begun yet."""
        self._let_go(self._known(seen))

    def end(self, now: int, seen: Seen, *, returned: bool) -> None:
        """They are not watched on: they have returned, or will never be known to have."""
        seen = self._known(seen)
        weights = self._let_go(seen)
        ages = now - seen.stamps
        bins = bins_of(ages)
        cells = seen.classes * BINS + bins
        ended = _sums(cells, weights, self._ended.shape)
        self._ended += ended
        self._partly += _sums(cells, weights * (ages - EDGES.take(bins)), self._partly.shape)
        if returned:
            self._returned += ended

    def _known(self, seen: Seen) -> Seen:
        """Those whose interval's beginning was counted."""
        known = seen.stamps >= self._since
        return seen if known.all() else seen.only(known)

    def _let_go(self, seen: Seen) -> Floats:
        weights: Floats = WEIGHT.take(seen.weights)
        cohorts = self._latest[: self._cohorts].searchsorted(seen.stamps)
        cells = seen.classes * COHORTS + np.minimum(cohorts, COHORTS - 1)
        self._watched -= _sums(cells, weights, self._watched.shape)
        return weights

    def _merge(self, now: int) -> None:
        """Join neighbouring cohorts, the wider the older they are; half of them at least go."""
        span = SPAN
        while True:
            firsts = [0]
            for at in range(1, COHORTS):
                latest = int(self._latest[at])
                if latest - int(self._latest[firsts[-1]]) > span * (now - latest):
                    firsts.append(at)
            if len(firsts) <= COHORTS // 2:
                break
            span *= 2
        lasts = np.array([*firsts[1:], COHORTS]) - 1
        self._cohorts = len(firsts)
        self._latest[: self._cohorts] = self._latest[lasts]
        joined = np.add.reduceat(self._watched, firsts, axis=1)
        self._watched[:] = 0
        self._watched[:, : self._cohorts] = joined

    def _times(self, now: int) -> Floats:
        """Time watched, by class and bin."""
        passed = self._ended[:, ::-1].cumsum(axis=1)[:, ::-1] - self._ended
        ages = (now - self._latest[: self._cohorts]).astype(np.float64)
        times = np.clip(ages[:, None] - EDGES[:-1], 0, WIDTHS)
        under_way = self._watched[:, : self._cohorts] @ times
        return np.maximum(passed * WIDTHS + self._partly + under_way, 0)


def _sums(cells: Slots, weights: Floats, shape: tuple[int, ...]) -> Floats:
    sums: Floats = np.bincount(cells, weights, shape[0] * shape[1]).astype(np.float64, copy=False)
    return sums.reshape(shape)


def scores(returned: Floats, watched: Floats) -> Floats:
    """Most hits for the time kept, by class and bin; never more than in an earlier bin."""
    hazards = hazards_of(returned, watched)
    end = np.exp(-hazards * WIDTHS)  # the chance not to have come back in the bin
    kept = np.where(hazards * WIDTHS > 1e-9, (1 - end) / hazards, WIDTHS)
    begin = np.ones((CLASSES, BINS + 1))
    np.cumprod(end, axis=1, out=begin[:, 1:])
    hits, times = np.zeros((2, CLASSES, BINS + 1))
    np.cumsum(begin[:, :-1] * (1 - end), axis=1, out=hits[:, 1:])
    np.cumsum(begin[:, :-1] * kept, axis=1, out=times[:, 1:])
    gained = hits[:, None, 1:] - hits[:, :-1, None]  # from a bin's beginning to another's end
    spent = times[:, None, 1:] - times[:, :-1, None]
    counts = _STOPS_LATER & (spent > 0)
    best: Floats = np.divide(gained, spent, out=np.zeros_like(gained), where=counts).max(axis=2)
    best = np.maximum(best, hazards)  # what stopping at once would give, however little is left
    least: Floats = np.minimum.accumulate(best, axis=1)
    return least


def hazards_of(returned: Floats, watched: Floats) -> Floats:
    """Chance of a return in a unit of time, by class and bin."""
    by_bin, time_by_bin = returned.sum(axis=0).tolist(), watched.sum(axis=0).tolist()
    chance = max((sum(by_bin) + 1e-9) / (sum(time_by_bin) + 1e-9), 1e-15)
    pooled = []
    for returns, time in zip(by_bin, time_by_bin, strict=True):
        chance = (returns + 1) / (time + 1 / chance)
        pooled.append(chance)
    pool = np.array(pooled)
    factors = (returned.sum(axis=1) + 1) / ((watched * pool).sum(axis=1) + 1)
    found: Floats = (returned + 1) / (watched + 1 / (factors[:, None] * pool))
    return found
