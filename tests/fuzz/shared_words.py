"""Ring and board, whose words the other side may write as it likes."""

from __future__ import annotations

import os

import numpy as np

from kvd_proto import layout
from kvd_proto.board import BoardOverrun, BoardReader, create_board
from kvd_proto.ring import RingReader, create_ring

_PLACES = (0, 1, 2, *range(8, 26), 512, 513, 8703, 8704, 16895)


def scribbled(fd: int, content: bytes) -> None:
    """Write pairs of a place and a word, as the bytes say."""
    words = np.frombuffer(content[: len(content) // 8 * 8], dtype=np.uint64).tolist()
    for place, word in zip(words[::2], words[1::2], strict=False):
        os.pwrite(fd, word.to_bytes(8, "little"), 8 * _PLACES[place % len(_PLACES)])


def ring(content: bytes) -> None:
    """What a worker could have written, as its mover takes it: a bounded number of ids a time."""
    fd = create_ring()
    try:
        whole = RingReader(fd)
        try:
            for part in range(0, len(content), 32):
                scribbled(fd, content[part : part + 32])
                assert len(whole.take()) <= layout.RING_ENTRIES
                whole.abandoned(part)
                assert isinstance(whole.leave_asked, bool)
        finally:
            whole.close()
        RingReader(fd).close()
    except ValueError:
        pass
    finally:
        os.close(fd)


def board(content: bytes) -> None:
    """What a mover gone mad could have written, as the worker reads it."""
    fd = create_board()
    try:
        whole = BoardReader(fd)
        try:
            for part in range(0, len(content), 64):
                scribbled(fd, content[part : part + 64])
                assert len(whole.poll()) <= layout.BOARD_LANES * layout.BOARD_RECORDS
        finally:
            whole.close()
        BoardReader(fd).close()
    except (ValueError, BoardOverrun):
        pass
    finally:
        os.close(fd)
