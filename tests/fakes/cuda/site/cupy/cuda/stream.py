"""`cupy.cuda` streams and events: handles of the runtime, and which stream is current."""

from __future__ import annotations

import threading
from typing import Any, Self

from . import runtime

_current = threading.local()


class _AnyStream:
    def __init__(self, ptr: int, device_id: int = -1) -> None:
        self.ptr = ptr
        self.device_id = device_id
        self._before: list[_AnyStream] = []

    def __enter__(self) -> Self:
        self._before.append(get_current_stream())
        _current.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _current.stream = self._before.pop()

    def use(self) -> _AnyStream:
        _current.stream = self
        return self

    @property
    def done(self) -> bool:
        return runtime.streamQuery(self.ptr) == 0

    def synchronize(self) -> None:
        runtime.streamSynchronize(self.ptr)

    def wait_event(self, event: Event) -> None:
        runtime.streamWaitEvent(self.ptr, event.ptr)

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        runtime.eventRecord(event.ptr, self.ptr)
        return event

    def launch_host_func(self, callback: Any, arg: Any) -> None:
        runtime.launchHostFunc(self.ptr, callback, arg)


class Stream(_AnyStream):
    """A stream of its own, ended with this; the NULL stream with `null`."""

    def __init__(
        self,
        null: bool = False,
        non_blocking: bool = False,
        ptds: bool = False,
        priority: int | None = None,
    ) -> None:
        self._owned = not null and not ptds
        flags = runtime.streamNonBlocking if non_blocking else runtime.streamDefault
        ptr = runtime.streamCreateWithPriority(flags, priority or 0) if self._owned else 0
        super().__init__(ptr)
        self._foreign: Any = None

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        if not hasattr(obj, "__cuda_stream__"):
            raise TypeError("the argument has no __cuda_stream__")
        version, ptr = obj.__cuda_stream__()
        if version != 0:
            raise TypeError(f"__cuda_stream__ of version {version}")
        stream = cls(null=True)
        stream.ptr, stream._foreign = ptr, obj
        return stream

    def __del__(self) -> None:
        if getattr(self, "_owned", False):
            try:
                runtime.streamDestroy(self.ptr)
            except runtime.CUDARuntimeError:
                pass  # as CuPy: the context may be gone


class ExternalStream(_AnyStream):
    """Somebody else's stream; ended by them."""


class Event:
    """An event, ended with this."""

    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        flags = block * runtime.eventBlockingSync
        flags |= disable_timing * runtime.eventDisableTiming
        flags |= interprocess * runtime.eventInterprocess
        self.ptr = runtime.eventCreateWithFlags(flags)

    def __del__(self) -> None:
        if hasattr(self, "ptr"):
            try:
                runtime.eventDestroy(self.ptr)
            except runtime.CUDARuntimeError:
                pass

    @property
    def done(self) -> bool:
        return runtime.eventQuery(self.ptr) == 0

    def record(self, stream: _AnyStream | None = None) -> None:
        runtime.eventRecord(self.ptr, (stream or get_current_stream()).ptr)

    def synchronize(self) -> None:
        runtime.eventSynchronize(self.ptr)


def get_current_stream(device_id: int = -1) -> _AnyStream:
    """The stream that a kernel of this thread is launched on."""
    if not hasattr(_current, "stream"):
        _current.stream = Stream(null=True)
    stream: _AnyStream = _current.stream
    return stream
