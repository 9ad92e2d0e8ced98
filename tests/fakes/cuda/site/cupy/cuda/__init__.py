"""`cupy.cuda`: the runtime, streams, events, and the device at hand."""

from . import compiler, runtime
from .device import Device
from .stream import Event, ExternalStream, Stream, get_current_stream

__all__ = [
    "Device",
    "Event",
    "ExternalStream",
    "Stream",
    "compiler",
    "get_current_stream",
    "runtime",
]
