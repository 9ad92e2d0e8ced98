"""A tier that is slow now is not asked for what could not arrive in time.

How long a question takes, and a copy that reads, is known from the last ones: means in which each
counts a quarter, and the one before a quarter of the rest. A question that had no answer at its
deadline counts for twice that time, since nobody knows how long it would have taken. Copies are
waited for longer; while one runs the next will take at least as long as that has run.

A request asks a tier only if an answer and a copy, as long as they take now, end before the
request's deadline, and reads only if a copy does. Otherwise its blocks are misses at once. Now and
then a request tries all the same: it finds out when the tier is well again, and then the time that
it took stands alone.

Each tenant has its own times. They take turns at a tier, so how long one waits for what it asks
says nothing of another: what is asked much waits long.

A tier that is silent just now may hang, and nobody knows yet how long. While there are others, it
is asked last.
"""

from __future__ import annotations

from kvd.core.model.tiers import Search, Sought, Tier, TierCopy, TierPace

WEIGHT = 0.25  # of the last one
PROBE_NS = 1_000_000_000  # between two requests that try a slow tier
SILENT_NS = 250_000_000  # since the eldest question: until it is answered others are asked first


def may_ask(tier: Tier, search: Search, now_ns: int) -> bool:
    """Whether what the tier holds of the search's blocks can be here in time, or is to be tried."""
    pace, until_ns = _of(tier, search.sought), _until_ns(tier, search, now_ns)
    if now_ns + pace.answer_ns + _read_ns(pace, now_ns) <= until_ns:
        return True
    if now_ns >= until_ns or not _may_probe(pace, now_ns):
        return False
    search.tries = tier.tier
    return True


def is_silent(tier: Tier, now_ns: int) -> bool:
    """Whether it owes an answer for longer than a lookup likes to wait: it may hang."""
    eldest = next(iter(tier.searches.values()), None)
    return eldest is not None and now_ns - eldest.asked_ns >= SILENT_NS


def may_read(tier: Tier, search: Search, now_ns: int) -> bool:
    """Whether a copy that begins now ends in time, or is to be tried."""
    pace, until_ns = _of(tier, search.sought), _until_ns(tier, search, now_ns)
    in_time = now_ns + _read_ns(pace, now_ns) <= until_ns
    return in_time or search.tries == tier.tier or _may_probe(pace, now_ns)


def asked(search: Search, now_ns: int) -> None:
    """The search is with a tier from now on."""
    search.asked_ns = now_ns


def answered(tier: Tier, search: Search, now_ns: int) -> None:
    """It has an answer."""
    took_ns, most_ns = now_ns - search.asked_ns, tier.terms.seek_ns
    counted_ns = 2 * took_ns if took_ns >= most_ns else took_ns
    own = tier.paces.get(search.sought.owner.tenant.tenant)  # none: the tenant is forgotten since
    for pace in filter(None, (tier.pace, own)):
        pace.answer_ns = _mean(pace.answer_ns, counted_ns, most_ns)


def read_began(copy: TierCopy, now_ns: int) -> None:
    """A copy reads from its tier."""
    _of_copy(copy).reads[copy.copy] = now_ns


def read_ended(copy: TierCopy, now_ns: int, *, some_came: bool) -> None:
    """It has ended. One that failed at once says nothing about how long a good one takes."""
    own = _of_copy(copy)
    took_ns = now_ns - own.reads.pop(copy.copy)
    for pace in (copy.tier.pace, own):
        if some_came or took_ns >= pace.read_ns:
            pace.read_ns = _mean(pace.read_ns, took_ns, copy.tier.terms.seek_ns)


def read_refused(copy: TierCopy) -> None:
    """It never began."""
    del _of_copy(copy).reads[copy.copy]


def _of_copy(copy: TierCopy) -> TierPace:
    assert copy.sought is not None, "a read is for somebody"
    return _of(copy.tier, copy.sought)


def _of(tier: Tier, sought: Sought) -> TierPace:
    return tier.pace_for(sought.owner.tenant.tenant)


def _until_ns(tier: Tier, search: Search, now_ns: int) -> int:
    return min(search.sought.until_ns, now_ns + tier.terms.seek_ns)


def _read_ns(pace: TierPace, now_ns: int) -> float:
    eldest_ns = next(iter(pace.reads.values()), now_ns)
    return max(pace.read_ns, now_ns - eldest_ns)


def _may_probe(pace: TierPace, now_ns: int) -> bool:
    if now_ns < pace.probe_ns:
        return False
    pace.probe_ns = now_ns + PROBE_NS
    return True


def _mean(mean_ns: float, last_ns: float, most_ns: int) -> float:
    if mean_ns > most_ns >= last_ns:
        return last_ns
    return mean_ns + (last_ns - mean_ns) * WEIGHT
