"""What a process of control's reads from control takes no memory of its own."""

from __future__ import annotations

import socket
import tracemalloc

from kvd.mover.frames import FrameKind
from kvd.processes.child import ChannelToControl
from kvd.processes.framing import MAX_FRAME_BYTES, FrameReader, frame, pack_number


def test_receipts_take_no_memory() -> None:
    """New memory for each, cut to what came, made a mover's heap grow by a MiB in 20,000 jobs."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = ChannelToControl(theirs)
        ours.sendall(frame(FrameKind.REVOKE, pack_number(7)))
        tracemalloc.start()
        try:
            received = channel.receive()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2048, f"receiving {len(received)} bytes took {peak}"
        assert list(FrameReader(FrameKind).feed(received)) == [(FrameKind.REVOKE, pack_number(7))]


def test_frames_larger_than_a_receipt_come_whole() -> None:
    ours, theirs = socket.socketpair()
    numbers = bytes(range(256)) * 4096
    assert len(numbers) < MAX_FRAME_BYTES
    with ours, theirs:
        channel, reader = ChannelToControl(theirs), FrameReader(FrameKind)
        ours.setblocking(False)
        left = memoryview(frame(FrameKind.READY, numbers) + frame(FrameKind.STOP))
        found: list[tuple[FrameKind, bytes]] = []
        while len(found) < 2:
            left = left[ours.send(left) :] if left else left
            found += reader.feed(channel.receive())
    assert found == [(FrameKind.READY, numbers), (FrameKind.STOP, b"")]
