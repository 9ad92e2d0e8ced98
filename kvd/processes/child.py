"""What each process of control's does for itself: its life, and its end of the socket pair."""

from __future__ import annotations

import enum
import os
import resource
import socket
import sys
import threading

from kvd.linux import calls, proc, signals
from kvd.linux.standard_streams import PromptErrors
from kvd.processes.framing import BadFrame, FrameReader, Kind, frame

EXIT_BROKEN = 70  # EX_SOFTWARE of sysexits.h
_RECEIVE_BYTES = 64 << 10


class ChannelToControl:
    """Sends whole frames; any thread. Control's end being gone ends the process."""

    def __init__(self, end: socket.socket) -> None:
        end.set_inheritable(False)  # whatever a library starts must not speak for us
        self.socket = end
        self._lock = threading.Lock()
        # Kept: new memory for each receipt leaves a hole once it is cut to what came, and the
        # heap grows from hole to hole.
        self._received = memoryview(bytearray(_RECEIVE_BYTES))

    def send(self, kind: enum.IntEnum, body: bytes = b"") -> None:
        """Returns once the kernel has it all."""
        try:
            with self._lock:
                self.socket.sendall(frame(kind, body))
        except OSError:
            os._exit(0)  # nobody is left to work for

    def receive(self) -> memoryview:
        """What control has written, until the next call; the process ends with control.

        One thread receives.
        """
        try:
            size = self.socket.recv_into(self._received)
        except ConnectionResetError:  # it died with words of ours unread
            size = 0
        if not size:
            os._exit(0)
        return self._received[:size]

    def receive_first(self, wanted: Kind) -> bytes:
        """The body of the first frame, after which control waits for an answer. BadFrame."""
        reader = FrameReader(type(wanted))
        while True:
            for kind, body in reader.feed(self.receive()):
                if kind is not wanted:
                    raise BadFrame(f"{kind.name} before {wanted.name}")
                return body


def bind_life_to(parent: int) -> None:
    """End with that process and by it alone. Without a core, with every descriptor there may be.

    To be called from the main thread, before any other. Any thread's failure ends the process
    from now on. What it says waits for nobody who does not read the log.
    """
    sys.stderr = PromptErrors()
    # Control ends its processes itself; a terminal's or an init system's signal to the whole
    # group must not end them before their last copy.
    signals.ignore_all()
    calls.die_with_parent()
    if os.getppid() != parent:
        os._exit(0)  # it went before the line above could see it
    # A core would hold other people's prompts; every mapped extent costs a descriptor. A limit does
    # not count where the kernel hands cores to a program: it would wait for gigabytes to be read.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    proc.leave_memory_out_of_cores()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.excepthook = _die_of


def _die_of(failure: threading.ExceptHookArgs) -> None:
    """A thread broke one of our rules: better no process than one that works no more."""
    threading.__excepthook__(failure)
    sys.stderr.flush()
    os._exit(EXIT_BROKEN)
