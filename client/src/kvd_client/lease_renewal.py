"""Leases kept while an engine only waits: it then sends no step, which would renew them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvd_client.forks import keep_from_children

log = logging.getLogger(__name__)

RENEWED_EACH = 0.25  # of a lease's time


class LeaseRenewal:
    """Calls `renew` again and again, on a thread that ends once that says that nothing is left."""

    def __init__(self, renew: Callable[[], bool]) -> None:
        self._renew = renew
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._woken = threading.Event()  # by what does not wait for the pause to end
        self._pause_s = 0.0
        self._thread: threading.Thread | None = None
        keep_from_children(self)

    def leave_to_parent(self) -> None:
        """In a forked process nothing is leased."""
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._woken = threading.Event()
        self._thread = None

    def begin(self, lease_s: float) -> None:
        """From now on, until nothing is left. Without a thread leases last as long as one.

        `lease_s` may be another than before: a daemon that comes back has other settings.
        """
        with self._lock:
            before_s, self._pause_s = self._pause_s, lease_s * RENEWED_EACH
            if self._thread is not None and self._pause_s < before_s:
                self._woken.set()
            if self._thread is not None or self._closing.is_set():
                return
            thread: threading.Thread = threading.Thread(
                target=lambda: self._run(thread), name="kvd-leases", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no thread is to be had
                log.warning("kvd: leases are not renewed: %s", str(error))
                return
            self._thread = thread

    def close(self) -> None:
        self._closing.set()
        self._woken.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout=2.0)
        self._renew = _nothing_left  # and hold who asked no longer

    def _run(self, thread: threading.Thread) -> None:
        with self._lock:
            if self._thread is not thread:
                return  # a signal's handler raised as it was begun: the next one renews
        while not self._closing.is_set():
            if self._woken.wait(self._pause_s):
                self._woken.clear()  # first: what woke it is looked at below
            if self._closing.is_set() or self._renew():
                continue
            with self._lock:
                if not self._renew():  # a lease that was taken meanwhile has found us running
                    self._thread = None
                    return


def _nothing_left() -> bool:
    return False
