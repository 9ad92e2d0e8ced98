"""One registration of a rank: its mover's ring and board, and the mover's death."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence

from kvd_client.worker.descriptors import close_all
from kvd_proto.board import BoardOverrun, BoardReader, BoardRecord
from kvd_proto.ring import RingWriter

FORCED_END_S = 1.0


class Registration:
    """One registration of a rank: its ring, its board and its mover.

    Owns the channel's four descriptors. `close` only when the mover is dead.
    """

    def __init__(self, registration_id: int, descriptors: tuple[int, int, int, int]) -> None:
        self.registration_id = registration_id
        ring_fd, board_fd, self._event_fd, self.pidfd = descriptors
        self._open = [self._event_fd, self.pidfd]
        self.is_dead = False  # no copy of it can touch the rank's memory any more
        self.is_closed = False
        self.is_broken = False  # records were lost: nothing that it reports is complete
        self.is_unwanted = False  # to be given up, dead or not
        self.heard_s = time.monotonic()  # when its board last told of an end
        try:
            self._ring = RingWriter(ring_fd, self._event_fd)
            self._board = BoardReader(board_fd)
        except BaseException:
            for fd in (self._event_fd, self.pidfd):
                os.close(fd)
            raise
        finally:
            os.close(ring_fd)
            os.close(board_fd)

    def mark_ready(self, job_ids: Sequence[int]) -> bool:
        """This rank's half of the jobs is there. False: the ring is full, use the RPC."""
        return self._ring.mark_ready(job_ids)

    def abandon(self, job_id: int) -> None:
        """Give a store up: its blocks may be overwritten from now on."""
        self._ring.abandon(job_id)

    def take_ends(self, take: Callable[[list[BoardRecord]], None]) -> None:
        """Give away what ended since the last call; again where a signal's handler raised amid it.

        `take` may be given it twice.
        """
        if self.is_broken or self.is_closed:
            return
        try:
            records = self._board.look()
        except BoardOverrun:
            self.is_broken = True
            return
        if records:
            self.heard_s = time.monotonic()
            take(records)
            self._board.pass_by()

    def wait_dead(self, timeout_s: float) -> bool:
        """Whether the mover process has ended, waiting for it up to `timeout_s`."""
        if not self.is_dead:
            poller = select.poll()
            poller.register(self.pidfd, select.POLLIN)
            self.is_dead = bool(poller.poll(timeout_s * 1000))
        return self.is_dead

    def end(self, timeout_s: float) -> bool:
        """Whether the mover has ended: by itself within `timeout_s`, or by force where we may."""
        if self.wait_dead(timeout_s):
            return True
        self.kill()
        return self.wait_dead(FORCED_END_S)

    def kill(self) -> None:
        """End the mover without a word of the daemon's; does not wait for its end.

        By signal, and by its ring where it is another user's or in a PID namespace of its own.
        """
        self.is_unwanted = True
        self._ring.ask_to_leave()
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Unmap and close. Nothing but `take_ends` and `close` may be called afterwards.

        `close` again where a signal's handler raised amid it.
        """
        is_first, self.is_closed = not self.is_closed, True
        if is_first:  # what it leaves mapped goes with this object
            self._ring.close()
            self._board.close()
        close_all(self._open)
