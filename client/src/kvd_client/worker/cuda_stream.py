"""Waiting for the GPU's compute without holding up the engine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from kvd_proto.libcuda import EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING, CudaError, libcuda


class CudaStream(Protocol):
    """torch.cuda.Stream has it."""

    @property
    def cuda_stream(self) -> int: ...


class StreamEnd:
    """What was launched on a stream so far. A call waits until that has run.

    The wait sleeps without the interpreter's lock, on whatever thread calls. Make it on a
    thread whose current context is the stream's; CudaError where that is another or none.
    """

    def __init__(self, stream: int) -> None:
        self._event: ctypes.c_void_p | None = None
        self._failure: CudaError | None = None
        driver = libcuda()
        self._context = driver.current_context()
        event = ctypes.c_void_p()
        driver.call(
            "cuEventCreate", ctypes.byref(event), EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING
        )
        self._event = event
        driver.call("cuEventRecord", event, stream)

    def __call__(self) -> None:
        """Wait. CudaError when the stream's work failed, now and every time after."""
        if self._failure is not None:
            raise self._failure
        event = self._event
        if event is None:
            return
        driver = libcuda()
        try:
            with driver.bound(self._context):
                driver.call("cuEventSynchronize", event)
                self._destroy()
        except CudaError as error:
            self._failure = error
            raise

    def __del__(self) -> None:
        """One that nobody called has an event too."""
        with suppress(Exception):
            if self._event is not None:
                with libcuda().bound(self._context):
                    self._destroy()

    def _destroy(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            libcuda().call("cuEventDestroy_v2", event)


def stream_end(stream: int | CudaStream) -> Callable[[], None]:
    """For `Worker.finish_step`: waits for what was launched on the stream up to this call.

    For `Worker.start_step` too. `stream` is a CUstream as a number (0 is the legacy default
    stream) or a torch.cuda.Stream, none that is being captured into a graph:

        worker.finish_step(plan, stream_end(torch.cuda.current_stream()))

    An event of torch's own does as well, if it is made blocking; one that isn't spins:

        event = torch.cuda.Event(blocking=True)
        event.record()
        worker.finish_step(plan, event.synchronize)
    """
    return StreamEnd(stream if isinstance(stream, int) else stream.cuda_stream)
