"""File descriptors: clients make the daemon hold some, and must never take its last ones.

Its own work (a mover's start, a new index page, a file that is replaced) needs a few at any
moment, and an order half carried out ends the daemon. So what a client asks for is refused
while as few as RESERVED are left.
"""

from __future__ import annotations

import logging
import resource

from kvd.core.errors import LimitExceeded
from kvd.core.shares import Bound, Shares
from kvd.linux.calls import most_descriptors
from kvd.linux.proc import count_own_descriptors

RESERVED = 256
# Below this nothing is left for clients beside what the daemon needs for itself: it holds 26 when
# it serves nobody, 16 more for an engine of one rank, and needs some at any moment.
LEAST = 128
COMFORTABLE = 1024
BESIDE_EXTENTS = 64  # of a mover, which holds one for each extent that it maps
# More than there may be companion connections, as every client has one; each takes some 20 KiB, and
# all can come at once, before anybody has looked whose they are.
MAX_GRPC_CONNECTIONS = 512
OPERATORS_PART = 16  # one of so many that users share is for operators
DESCRIPTORS_OF_A_PAGE = 2  # its own, and its mapping's
log = logging.getLogger(__name__)


def raise_limit() -> None:
    """Take as many descriptors as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require_enough() -> None:
    """OSError, with the fix, where the daemon could not work."""
    limit = most_descriptors()
    if limit < LEAST:
        raise OSError(
            f"this process may have {limit} file descriptors, and needs {LEAST} at least:"
            f" raise the limit, best to {COMFORTABLE} or more"
            " (LimitNOFILE= in the unit, ulimit -n, --ulimit nofile= of a container)"
        )


def warn_where_tight(extents: int) -> None:
    """Say so where movers may come to need more than there are."""
    limit = most_descriptors()
    wanted = max(COMFORTABLE, extents + BESIDE_EXTENTS)
    if limit < wanted:
        log.warning(
            "this process may have %d file descriptors; with fewer than %d (a mover may map %d"
            " extents) engines and rows may be refused: raise LimitNOFILE",
            limit,
            wanted,
            extents,
        )


def shared_by_users(name: str, most: int, field: str = "") -> Shares:
    """Of so many, or of half of what the daemon may have open: a user has half of them at most, and
    some are for operators."""
    most = min(most, most_descriptors() // 2)
    return Shares(Bound(name, most, most // 2, most // OPERATORS_PART, field))


def most_connections() -> int:
    """How many connections gRPC may take; it accepts them itself, so a number must bound them."""
    limit = most_descriptors()
    return max(8, min(MAX_GRPC_CONNECTIONS, limit // 4))


def most_namespaces(at_most: int) -> int:
    """How many may be known: each holds DESCRIPTORS_OF_A_PAGE, whether anybody uses it or not."""
    limit = most_descriptors()
    return max(4, min(at_most, limit // 4 // DESCRIPTORS_OF_A_PAGE))


def are_scarce() -> bool:
    """True when clients may take no more."""
    limit = most_descriptors()
    return count_own_descriptors() >= limit - min(RESERVED, limit // 4)


def require_room(field: str = "") -> None:
    """Raise LimitExceeded while descriptors are scarce."""
    if are_scarce():
        raise LimitExceeded(
            "the daemon is short of file descriptors: end some clients, or raise its limit"
            " (LimitNOFILE)",
            field,
        )
