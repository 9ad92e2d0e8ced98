"""The ways to have a GPU's copy engines, or its processors, make a list of copies."""

from __future__ import annotations

from typing import Protocol

from kvd.core.events import JobKind
from kvd.mover.cuda.runs import Runs
from kvd.mover.layout import GpuConfig

BATCH = "batch"
PLAIN = "plain"
STRIDED = "strided"
KERNEL = "kernel"


class CopierUnavailable(Exception):
    """This driver or device has no such way; the message says what is lacking."""


class Copier(Protocol):
    """One way. Any thread in which the device's context is current; several at once."""

    @property
    def name(self) -> str:
        """One of the four names above."""

    def submit(self, kind: JobKind, runs: Runs, stream: int) -> None:
        """Queue the copies on the stream, in order behind what is queued there.

        Never waits for a copy. The runs need not be kept. CudaError or CuPy's
        CUDARuntimeError: any part of the copies may be queued.
        """


def make_copier(name: str, gpu: GpuConfig) -> Copier:
    """The copier of that name; CopierUnavailable where driver or device lack it.

    To be called with the device's context current.
    """
    raise NotImplementedError
