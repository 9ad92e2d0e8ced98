"""Control's side of a process of its own: its start, its frames, and how its end is known."""

from __future__ import annotations

import asyncio
import enum
import errno
import logging
import os
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import ClassVar

from kvd.core.lifecycle import step
from kvd.linux.proc import state_of
from kvd.processes.complaints import NO_MORE_PROCESSES
from kvd.processes.framing import MAX_FRAME_BYTES, BadFrame, FrameReader, frame
from kvd.processes.launch import Launched, how_it_ended

log = logging.getLogger(__name__)

MAX_BYTES_UNREAD = 64 << 20  # a process that lets this much lie hangs, and is ended
STOP_S = 3.0
STAYS_S = 5.0  # after it was killed; then the log says that it stays
ENDED_STATES = ("Z", "X", "gone")
# Why a process ended that control had no more need of.
KILLED, STOPPED = "killed by control", "stopped"
# What a frame that says the impossible raises where it is read or taken up.
NONSENSE = (BadFrame, TypeError, ValueError, IndexError, RecursionError, struct.error)
_LAST_WORDS_S = 1.0  # for what a dead process wrote to be read
_DYING_S = 1.0  # from the end of its channel to its own
_READ_BYTES = 1 << 18


class StartStage(enum.Enum):
    """How far a process's start came: who has to hear of its end."""

    STARTING = "nobody knows of it"
    NOTED = "the pool's next owner would find it"
    SERVING = "it said hello, and is the sink's"


START_STEPS: frozenset[tuple[StartStage, StartStage]] = frozenset(
    {(StartStage.STARTING, StartStage.NOTED), (StartStage.NOTED, StartStage.SERVING)}
)


class EndSigns(enum.Enum):
    """How much of a process's end was seen. Two signs say it, and either may come first."""

    RUNNING = "no sign"
    CLOSED = "its end of the channel is closed, so all that it said was read"
    REAPED = "it has ended, so no copy of it runs"
    GONE = "both"


END_STEPS: frozenset[tuple[EndSigns, EndSigns]] = frozenset(
    {
        (EndSigns.RUNNING, EndSigns.CLOSED),
        (EndSigns.RUNNING, EndSigns.REAPED),
        (EndSigns.CLOSED, EndSigns.GONE),
        (EndSigns.REAPED, EndSigns.GONE),
    }
)


class ProcessStartError(Exception):
    """The process could not be started, or ended or hung before it said hello."""


class Channel(asyncio.Protocol):
    """Control's end of a socket pair."""

    def __init__(self, owner: OwnedProcess) -> None:
        self._owner = owner
        self._reader: FrameReader[enum.IntEnum] | None = FrameReader(owner.kinds)

    def data_received(self, data: bytes) -> None:
        if self._reader is None:
            return  # it wrote nonsense: nothing that it says counts any more
        try:
            for kind, body in self._reader.feed(data):
                self._owner.hear(kind, body)
        except NONSENSE as error:
            self._reader = None
            self._owner.end_because(f"wrote nonsense: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:  # a write to a dead process failed before its last words were read
            for data in self._owner.left_unread():
                self.data_received(data)
        self._owner.channel_closed()


class OwnedProcess(ABC):
    """One process, from control's side. Lives on the event loop; nothing here blocks.

    A subclass knows the frames, and tells its sink. `pidfd` is open until the process is gone,
    and -1 then. The end is known once all that the process said was read and it was reaped.
    """

    title: ClassVar[str]  # what such a process is called in messages
    kinds: ClassVar[type[enum.IntEnum]]  # of frames
    start_error: ClassVar[type[ProcessStartError]] = ProcessStartError

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.pid = self.start_time = 0
        self.pidfd = -1
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.WriteTransport | None = None
        self._end_of_ours: socket.socket | None = None  # outlives its transport
        self._reason = ""  # of its end; what it said of that itself, or why control ended it
        self._how_ended = ""  # what the system says of its end, where nobody says more
        self._start_stage = StartStage.STARTING
        self._end_signs = EndSigns.RUNNING
        self._told_late: asyncio.TimerHandle | None = None  # at one that was killed

    # -- for the subclass -------------------------------------------------------------------

    @abstractmethod
    def hear(self, kind: enum.IntEnum, body: bytes) -> None:
        """One frame of the process; what it raises is nonsense that the process wrote."""

    @abstractmethod
    def _note_start(self) -> None:
        """There is a process, which maps nothing before this returns. OSError ends the start."""

    @abstractmethod
    def _note_end(self) -> None:
        """The process is gone, whether or not it ever served. Once for each that was noted."""

    @abstractmethod
    def _tell_gone(self, reason: str) -> None:
        """One that served is gone. Exactly once, last."""

    @abstractmethod
    def _let_go(self) -> None:
        """Close what the process shared. May be called when nothing was opened."""

    # -- life -------------------------------------------------------------------------------

    async def _start(
        self, launch: Callable[[], Launched], configuration: Callable[[], bytes], within_s: float
    ) -> None:
        """Start the process and return once it has said hello; `configuration` is its first frame.

        `start_error`, or what `_hello` was failed with; nothing is left then, and the sink hears
        of no process that is gone.
        """
        try:
            launched = launch()
            self._own(launched)
        except OSError as error:
            self._close()
            why = NO_MORE_PROCESSES if error.errno == errno.EAGAIN else error
            raise self.start_error(f"the {self.title} process can't be started: {why}") from error
        try:
            await self._begin(launched, configuration, within_s)
            if self._gone.done():
                raise self.start_error(f"the {self.title} process ended at once: {self._reason}")
        except BaseException:
            self._hello.cancel()
            self.kill()
            await asyncio.shield(self._gone)
            raise
        self._start_stage = step(START_STEPS, self._start_stage, StartStage.SERVING)

    def kill(self) -> None:
        """End the process now; its end is told as any other."""
        self.end_because(KILLED)

    async def stop(self) -> None:
        """Have the process end in order; returns when it is gone."""
        self._reason = self._reason or STOPPED
        self._ask_to_stop()
        try:
            await asyncio.wait_for(asyncio.shield(self._gone), STOP_S)
        except TimeoutError:
            self.kill()
            await asyncio.shield(self._gone)

    @abstractmethod
    def _ask_to_stop(self) -> None:
        """Tell the process to end in order."""

    def end_because(self, reason: str) -> None:
        """Kill the process and remember why."""
        if self._end_signs in {EndSigns.RUNNING, EndSigns.CLOSED}:
            self._reason = self._reason or reason
            self._child.kill()
            if self._told_late is None:
                self._told_late = self._loop.call_later(STAYS_S, self._tell_that_it_stays)

    def _tell_that_it_stays(self) -> None:
        """Log that the kernel does not end it, unless it has and that is not noted yet."""
        try:
            state = state_of(self.pid)
        except OSError:  # descriptors or memory are short
            state = "unknown"
        if self._end_signs in {EndSigns.RUNNING, EndSigns.CLOSED} and state not in ENDED_STATES:
            log.warning(
                "the %s process %d was killed and has not ended (its state is %s), as where the"
                " kernel waits for a device: until it has, what it maps is kept from use",
                self.title,
                self.pid,
                state,
            )

    def left_unread(self) -> Iterator[bytes]:
        """What the channel still holds once its transport is closed; a frame's length at most."""
        with suppress(OSError):
            for _ in range(MAX_FRAME_BYTES // _READ_BYTES):
                if self._end_of_ours is None:
                    return
                yield self._end_of_ours.recv(_READ_BYTES, socket.MSG_DONTWAIT)

    def channel_closed(self) -> None:
        """The process has closed its end, which a sound one does only by ending."""
        if self._end_signs is EndSigns.RUNNING:
            self._end_signs = step(END_STEPS, self._end_signs, EndSigns.CLOSED)
            # If it is dying already, its own reason stands.
            self._loop.call_later(_DYING_S, self.end_because, "closed its channel and stayed")
        elif self._end_signs is EndSigns.REAPED:
            self._end()

    def _own(self, launched: Launched) -> None:
        self._child = launched.child
        self.pid, self.pidfd = launched.child.pid, launched.pidfd
        self.start_time = launched.start_time
        try:
            self._loop.add_reader(self.pidfd, self._reap)
        except OSError:
            launched.discard()
            raise

    async def _begin(
        self, launched: Launched, configuration: Callable[[], bytes], within_s: float
    ) -> None:
        """From a process that waits to one that serves."""
        try:
            self._end_of_ours = launched.end.dup()
            self._note_start()
            self._start_stage = step(START_STEPS, self._start_stage, StartStage.NOTED)
            transport, _ = await self._loop.create_unix_connection(
                lambda: Channel(self), sock=launched.end
            )
            self._transport = transport
            self._write_frame(configuration())
            await asyncio.wait_for(asyncio.shield(self._hello), within_s)
        except TimeoutError:
            raise self.start_error(
                f"no word from the {self.title} process in {within_s} s"
            ) from None
        except OSError as error:
            raise self.start_error(f"the {self.title} process can't be used: {error}") from error
        finally:
            if self._transport is None:
                launched.end.close()

    def _reap(self) -> None:
        """The pidfd is readable: the process has ended."""
        self._loop.remove_reader(self.pidfd)
        status = self._child.wait()
        self._how_ended = self._how_it_ended(status)
        if self._end_signs is EndSigns.CLOSED:
            self._end()
        else:
            self._end_signs = step(END_STEPS, self._end_signs, EndSigns.REAPED)
            self._loop.call_later(_LAST_WORDS_S, self.channel_closed)

    def _how_it_ended(self, status: int) -> str:
        return how_it_ended(status)

    def _end(self) -> None:
        """Both signs are there, so every frame was read."""
        self._end_signs = step(END_STEPS, self._end_signs, EndSigns.GONE)
        if self._told_late is not None:
            self._told_late.cancel()
        self._reason = self._reason or self._how_ended
        self._gone.set_result(None)
        if not self._hello.done():
            self._hello.set_exception(
                self.start_error(f"the {self.title} process ended at its start: {self._reason}")
            )
        self._close()
        if self._start_stage is not StartStage.STARTING:
            self._note_end()
        if self._start_stage is StartStage.SERVING:
            self._tell_gone(self._reason)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._end_of_ours is not None:
            self._end_of_ours.close()
            self._end_of_ours = None
        self._let_go()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _write(self, kind: enum.IntEnum, body: bytes = b"") -> None:
        self._write_frame(frame(kind, body))

    def _write_frame(self, whole: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(whole)
            if self._transport.get_write_buffer_size() > MAX_BYTES_UNREAD:
                self.end_because("does not read what control writes")
