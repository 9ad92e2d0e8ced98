"""The pool's extents in a mover with a GPU: mapped at once, registered with the driver later.

Registering pins an extent's memory and lets the GPU reach it. It takes a while, so it happens in
the background; until then, and where it fails, copies go through a pinned staging buffer.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np
from cupy.cuda import runtime

from kvd.core.errors import InvalidArgument
from kvd.core.keys import U64
from kvd.mover.copy_engine import DeviceLost, KeepGoing
from kvd.mover.cuda.device import FIELD
from kvd.mover.layout import MoverConfig
from kvd.mover.registration_errors import TRANSPORT_UNSUPPORTED
from kvd.processes.complaints import log_limited
from kvd.processes.mappings import Bytes, Mapping, map_extent, warm

_FEWEST_EXTENTS = 1024
MAX_ATTEMPTS = 3  # to register an extent: by the warm call, then by copies that could use it

# cudaHostRegisterDefault. With unified addressing, which every 64-bit Linux has, it makes the
# memory known to all contexts and mapped for the GPU, as the flags Portable and Mapped do
# elsewhere. Not ReadOnly: stores write there.
_REGISTER_FLAGS = 0
# cudaHostAllocDefault. Write-combined memory would be slow for the host to read.
_ALLOCATE_FLAGS = 0


class _Extent:
    """An open extent. `registered` rises once, under the lock, and falls only when it closes."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.address = mapping.address
        self.registered = False
        self.attempts = 0
        self.lock = threading.Lock()  # who holds it registers or unregisters


class PinnedExtents:
    """The extents that a mover has open, and which of them are registered with the driver.

    `addresses`: of each open extent's first byte, by its number, for the host and for copies of
    the GPU. Opening and closing as in CopyEngine, the rest in any thread. An extent in use is not
    closed, so what `ready` said of it stays true until the use ends.
    """

    def __init__(self, config: MoverConfig) -> None:
        self._config = config
        self._extents: dict[int, _Extent] = {}
        self.addresses: U64 = np.zeros(_FEWEST_EXTENTS, dtype=np.uint64)
        self._lock = threading.Lock()  # over the counts
        self._registered = 0
        self._failed = 0
        self._complained = False

    @property
    def registered_bytes(self) -> int:
        """Bytes of this process's extents that are pinned now."""
        return self._config.extents.extent_bytes * self._registered

    @property
    def unregistered_count(self) -> int:
        """Open extents that could not be registered; those still to come don't count."""
        return self._failed

    def open(self, extent: int) -> Bytes:
        """Map the extent. OSError where its file can't be had."""
        opened = self._extents[extent] = _Extent(map_extent(self._config.extents, extent))
        if extent >= len(self.addresses):
            grown = np.zeros(1 << extent.bit_length(), dtype=np.uint64)
            grown[: len(self.addresses)] = self.addresses
            self.addresses = grown  # who reads the old one reads of extents that are there too
        self.addresses[extent] = opened.address
        return opened.mapping.view

    def close(self, extent: int) -> None:
        """Unregister and unmap. DeviceLost: the driver may still hold the memory."""
        closing = self._extents.pop(extent)
        self.addresses[extent] = 0
        with closing.lock:
            if closing.registered:
                try:
                    runtime.hostUnregister(closing.address)
                except runtime.CUDARuntimeError as error:
                    raise DeviceLost(f"extent {extent} can't be unregistered: {error}") from error
                closing.registered = False
                self._count(registered=-1)
            elif closing.attempts:
                self._count(failed=-1)
        closing.mapping.close()

    def close_all(self) -> None:
        """Close every extent."""
        for extent in list(self._extents):
            self.close(extent)

    def view(self, extent: int) -> Bytes:
        """The bytes of an open extent."""
        return self._extents[extent].mapping.view

    def register(self, extent: int, keep_going: KeepGoing) -> None:
        """Map every page of it and pin them; an extent that can't be pinned is counted.

        DeviceLost: the GPU answers nothing any more.
        """
        found = self._extents[extent]
        # First the pages, in steps that can be stopped: registering alone would fault them in
        # one by one, in a call that can't.
        if not warm(found.mapping, keep_going) or not keep_going():
            return
        with found.lock:
            self._attempt(extent, found)

    def ready(self, extent: int) -> bool:
        """Whether the GPU may copy to and from the extent itself.

        One whose registration failed is tried again here, MAX_ATTEMPTS times in all: what was
        short may be there now.
        """
        found = self._extents[extent]
        if found.registered:
            return True
        if not 0 < found.attempts < MAX_ATTEMPTS or not found.lock.acquire(blocking=False):
            return False
        try:
            self._attempt(extent, found)
        finally:
            found.lock.release()
        return found.registered

    def _attempt(self, extent: int, found: _Extent) -> None:
        """Register, with the extent's lock held."""
        if found.registered or found.attempts >= MAX_ATTEMPTS:
            return
        found.attempts += 1
        again = found.attempts > 1
        try:
            runtime.hostRegister(found.address, self._config.extents.extent_bytes, _REGISTER_FLAGS)
        except runtime.CUDARuntimeError as error:
            if not _answers():
                raise DeviceLost(
                    f"extent {extent} can't be pinned, nor anything: {error}"
                ) from error
            self._count(failed=0 if again else 1)
            self._complain_once(extent, error)
            return
        found.registered = True
        self._count(registered=1, failed=-1 if again else 0)

    def _count(self, registered: int = 0, failed: int = 0) -> None:
        with self._lock:
            self._registered += registered
            self._failed += failed

    def _complain_once(self, extent: int, error: Exception) -> None:
        with self._lock:
            complained, self._complained = self._complained, True
        if not complained:
            log_limited(
                f"extent {extent} can't be pinned ({error}): its copies go through a staging "
                "buffer, and so will others'. Is the limit on locked memory (ulimit -l, "
                "LimitMEMLOCK) below the pool's size? Further failures are only counted."
            )


class Staging:
    """Pinned host memory of this process, for what can't be copied straight.

    InvalidArgument where so much can't be had.
    """

    def __init__(self, size: int) -> None:
        try:
            self.address = int(runtime.hostAlloc(size, _ALLOCATE_FLAGS))
        except runtime.CUDARuntimeError as error:
            raise InvalidArgument(
                f"{size} bytes of pinned host memory can't be had for staging ({error}): lower "
                "gpu_staging_bytes, or raise the daemon's limits on memory and locked memory",
                FIELD,
                TRANSPORT_UNSUPPORTED,
            ) from error
        memory = (ctypes.c_ubyte * size).from_address(self.address)
        self.view: Bytes = np.frombuffer(memoryview(memory), dtype=np.uint8)

    def close(self) -> None:
        """Give it back; no copy may use it."""
        del self.view
        runtime.freeHost(self.address)


def _answers() -> bool:
    """Whether the GPU's context does."""
    try:
        runtime.memGetInfo()
    except runtime.CUDARuntimeError:
        return False
    return True
