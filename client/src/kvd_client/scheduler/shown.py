"""What the index page shows of a request's blocks, probed no further than it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvd_client.scheduler.hits import Flags
from kvd_client.scheduler.request import Request
from kvd_client.session import SessionView

FIRST_BLOCKS = 128  # that are asked for behind what the page shows, where it hides what tiers hold


def reaches(
    request: Request,
    session: SessionView,
    unbroken: Iterable[tuple[int, int, int]],
    tokens: range,
) -> bool:
    """Whether the groups of which a hit takes every block have them, for all of these tokens.

    `unbroken` has number, width, and the tokens beyond the last that a group needs. Most requests
    learn that they miss from the first of these probes.
    """
    for group, width, beyond in unbroken:
        last = (tokens.stop - 1 + beyond) // width
        if last >= request.known_blocks(group, width):
            return False
        for block in range(tokens.start // width, last + 1):
            if not session.shows(group, request.account, request.hashes[group][block]):
                return False
    return True


def lead(request: Request, session: SessionView, group: int, blocks: range) -> int:
    """Up to which of these blocks the page shows all. To the end, if it shows the last one."""
    hashes, account = request.hashes[group], request.account
    if not blocks or session.shows(group, account, hashes[blocks[-1]]):
        return blocks.stop
    place, size = blocks.start, FIRST_BLOCKS
    while place < blocks.stop:
        flags = session.present(group, account, hashes[place : min(place + size, blocks.stop)])
        if not flags.all():
            return place + int(flags.argmin())
        place, size = place + len(flags), 2 * size
    return blocks.stop


def is_whole(request: Request, session: SessionView, blocks: Iterable[tuple[int, range]]) -> bool:
    """Whether the page shows all of these, named by group."""
    for group, wanted in blocks:
        hashes = request.hashes[group][wanted.start : wanted.stop]
        if wanted and not session.present(group, request.account, hashes).all():
            return False
    return True


def first_tokens(
    request: Request,
    session: SessionView,
    unbroken: Sequence[tuple[int, int, int]],
    counts: Sequence[int],
    computed_tokens: int,
) -> int | None:
    """Up to where to ask first. None: for all, since most is shown, or no miss ends a hit.

    `counts` are of known blocks, by group. A reuse filter is to say of every block whether it may
    be stored.
    """
    if not unbroken or session.store_threshold > 1:
        return None
    end = max(counts[group] * width for group, width, _ in unbroken)
    first = end
    for group, width, _ in unbroken:
        start = min(computed_tokens // width, counts[group])
        first = min(
            first,
            (lead(request, session, group, range(start, counts[group])) + FIRST_BLOCKS) * width,
        )
    return first if first < end else None


def present(request: Request, session: SessionView, widths: Sequence[int]) -> list[Flags]:
    """What the page shows of the request's known blocks, by group."""
    return [
        session.present(
            group, request.account, request.hashes[group][: request.known_blocks(group, width)]
        )
        for group, width in enumerate(widths)
    ]
