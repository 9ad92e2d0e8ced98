"""Sums over two tensor-parallel ranks, through shared memory."""

from __future__ import annotations

import mmap
import socket

import torch
from torch import Tensor

from examples.engine.config import EXCHANGE_BYTES


def alone(part: Tensor) -> Tensor:
    """The sum over one rank."""
    return part


class PairSum:
    """Adds the partial results of two ranks, always rank 0's plus rank 1's.

    Each rank writes its part and sends one byte; the other's byte says that its part is there.
    Two areas per rank take turns: a rank is never more than one sum ahead, because it needs the
    other's byte for each, so the area it writes is one that the other has finished reading.
    """

    def __init__(self, rank: int, memory_fd: int, peer: socket.socket) -> None:
        self._rank = rank
        self._peer = peer
        self._turn = 0
        self._mapping = mmap.mmap(memory_fd, 4 * EXCHANGE_BYTES)
        flat = torch.frombuffer(self._mapping, dtype=torch.float32)
        self._areas = flat.view(2, 2, EXCHANGE_BYTES // 4)  # [turn, rank]

    def __call__(self, part: Tensor) -> Tensor:
        """Sum over both ranks. Raises EOFError when the other rank is gone."""
        count = part.numel()
        if count > self._areas.shape[2]:
            raise ValueError(f"a partial result of {count} numbers is larger than the exchange")
        area = self._areas[self._turn]
        self._turn ^= 1
        area[self._rank, :count] = part.reshape(-1)
        try:
            self._peer.sendall(b"x")
            arrived = self._peer.recv(1)
        except OSError as error:
            raise EOFError("the other rank is gone") from error
        if not arrived:
            raise EOFError("the other rank is gone")
        return (area[0, :count] + area[1, :count]).view(part.shape)
