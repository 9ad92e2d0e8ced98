"""How long the client leaves a daemon alone that it can't work with, and what it logs of it.

A thread that keeps something at the daemon makes one attempt after the other. Whatever ends one,
`Backoff.after` says when the next is due: the engine must survive us, and a dead thread would end
its cache for ever.

A daemon that is away may be there again at any moment: it is looked for every 50 to 200 ms. One
that is there and says no, or whose sessions break as soon as they are open (of another release,
say, that takes no step of ours), does so again the next time: every attempt costs it a session and
a mover, so they come at longer and longer intervals.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable

import grpc

from kvd_client.companion import CompanionRefused
from kvd_proto.libcuda import CudaError

log = logging.getLogger(__name__)

BACKOFF_S = (0.05, 0.2)
REFUSED_BACKOFF_S = (0.5, 1.0)
MAX_DOUBLINGS = 3  # of that: 4 to 8 s
STEADY_S = 10.0  # what held for so long was not in vain
QUICK_TRIES = 3  # after what broke: copies of an earlier session may have to end first
SAID_AGAIN_S = 600.0
MAX_SAID = 16
NOT_CONNECTED = "not connected yet"  # the problem until the first attempt has ended

# The companion socket let us in a moment before.
_WHY_CLOSED = (
    "the daemon keeps this user out for up to a minute, who connected again and again (its log"
    " says so), or this user may not open the socket"
)

DETAILS_KEY = "grpc-status-details-bin"
DRAINING = b"DRAINING"
_FIGURES = re.compile(r"[0-9]+")
# What an attempt may well end by; after any other error the log has the traceback.
EXPECTED = (grpc.RpcError, grpc.FutureCancelledError, CompanionRefused, CudaError, OSError)


def error_of(attempt: Callable[[], None]) -> Exception | None:
    """What the attempt ended by; None: nothing was wrong."""
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 - see above
        return error
    return None


class Backoff:
    """How long to pause before the next attempt, and which problems the log knows already."""

    def __init__(self, max_doublings: int = MAX_DOUBLINGS) -> None:
        self._max_doublings = max_doublings
        self._in_vain = 0
        self._met = False
        self._held_since_s: float | None = None
        self._said: dict[str, float] = {}  # and when

    def meet(self) -> None:
        """There is a daemon, and it has greeted us."""
        self._met = True

    def hold(self) -> None:
        """An attempt has succeeded."""
        self._held_since_s = time.monotonic()

    def after(self, error: Exception | None) -> float:
        """The pause after an attempt that ended by this error; None: what it held has ended."""
        match error:
            case None | grpc.FutureCancelledError():
                return self._broken()
            case grpc.RpcError():
                return self._failed(error)
            case OSError():
                return self._lost()
        return self._refused()

    def _lost(self) -> float:
        """The connection failed. Where nobody was met, the next daemon has refused nothing yet."""
        if self._met:
            return self._broken()
        self._held_since_s, self._in_vain = None, 0
        return random.uniform(*BACKOFF_S)

    def _broken(self) -> float:
        """What held, or was about to, has ended."""
        self._look_back()
        self._in_vain += 1
        if self._in_vain <= QUICK_TRIES:
            return random.uniform(*BACKOFF_S)
        return self._longer(self._in_vain - QUICK_TRIES - 1)

    def _refused(self) -> float:
        """The daemon is there and said no, or we can't read what it says."""
        self._look_back()
        self._in_vain += 1
        return self._longer(self._in_vain - 1)

    def _failed(self, error: grpc.RpcError) -> float:
        """A call has failed or was cancelled."""
        if is_draining(error):
            self._held_since_s, self._met = None, False
            return random.uniform(*REFUSED_BACKOFF_S)  # the next daemon will not be late for us
        return self._broken() if is_absence(error) else self._refused()

    def warn(self, who: str, problem: str, error: Exception | None = None) -> None:
        """Log what is wrong, unless it is known; an error that nobody expects is shown whole."""
        if self.is_news(problem):
            is_expected = error is None or isinstance(error, EXPECTED)
            log.warning("%s: %s", who, problem, exc_info=None if is_expected else error)

    def is_news(self, problem: str) -> bool:
        """Whether to log it: the same one comes with other figures every time."""
        words, now_s = _FIGURES.sub("", problem), time.monotonic()
        if now_s < self._said.get(words, -SAID_AGAIN_S) + SAID_AGAIN_S:
            return False
        self._said.pop(words, None)
        self._said[words] = now_s
        if len(self._said) > MAX_SAID:
            del self._said[next(iter(self._said))]
        return True

    def _look_back(self) -> None:
        since_s = self._held_since_s
        if since_s is not None and time.monotonic() - since_s >= STEADY_S:
            self._in_vain = 0
            self._said.clear()
        self._held_since_s, self._met = None, False

    def _longer(self, doublings: int) -> float:
        return random.uniform(*REFUSED_BACKOFF_S) * (1 << min(doublings, self._max_doublings))


def is_absence(error: grpc.RpcError) -> bool:
    """Whether the daemon is away, or not ready for us, as opposed to there and saying no."""
    code = getattr(error, "code", lambda: None)()
    return code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def is_draining(error: grpc.RpcError) -> bool:
    """Whether the daemon said that it drains."""
    trailing = getattr(error, "trailing_metadata", lambda: None)() or ()
    return any(key == DETAILS_KEY and DRAINING in value for key, value in trailing)


def problem_of(error: Exception, socket_path: str) -> str:
    """The error as one line."""
    match error:
        case grpc.RpcError():
            return describe(error)
        case CompanionRefused() | CudaError():
            return str(error)
        case OSError() | grpc.FutureCancelledError():
            return f"{socket_path}: {error}"
    return f"{type(error).__name__}: {error}"


def describe(error: grpc.RpcError) -> str:
    """The status as one line."""
    code = getattr(error, "code", lambda: None)()
    details = getattr(error, "details", lambda: None)() or str(error)
    if code is grpc.StatusCode.UNAVAILABLE and os.strerror(errno.EACCES) in details:
        details = f"{details}; {_WHY_CLOSED}"
    return f"{getattr(code, 'name', 'ERROR')}: {details}"
