"""Allocations of every kind: which can be exported, and how the driver tells them apart."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_ulonglong, c_void_p
from typing import Any

from benchmarks.gpu.cuda import Cuda, Failed, Pointer
from benchmarks.gpu.probing.remote import remotes, tried
from benchmarks.gpu.probing.scale import Scale

KINDS = ("malloc", "physical, exportable", "physical", "managed", "pool")
PINNED, ON_DEVICE, AS_DESCRIPTOR, READ_WRITE = 1, 1, 1, 3  # CUmem* constants of cuda.h
PIDFD_GETFD = 438  # system call, Linux 5.6
FILL = 0x3C


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", c_int * 2),
        ("windows_only", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", c_int * 2), ("flags", c_int))


class PhysicalMemory:
    """The driver's calls for physical allocations and their mappings, in this process."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._handles: dict[int, int] = {}

    def allocate(self, kind: str, size: int) -> int:
        """Address of a new allocation of that kind; `size` is a multiple of 2 MiB."""
        address = Pointer()
        if kind == "malloc":
            return self._cuda.allocate(size)
        if kind == "managed":
            self._raw("cuMemAllocManaged", byref(address), c_size_t(size), ctypes.c_uint(1))
            return address.value
        if kind == "pool":
            self._raw("cuMemAllocAsync", byref(address), c_size_t(size), c_void_p(None))
            self._cuda.call("cuStreamSynchronize", None)
            return address.value
        wanted = Properties(type=PINNED, location=(c_int * 2)(ON_DEVICE, 0))
        wanted.handle_types = AS_DESCRIPTOR if kind == "physical, exportable" else 0
        handle = c_ulonglong()
        self._raw("cuMemCreate", byref(handle), c_size_t(size), byref(wanted), c_ulonglong(0))
        return self._map(handle, size)

    def export(self, address: int) -> int:
        """A descriptor of the physical allocation that is mapped there."""
        fd, handle = c_int(-1), c_ulonglong(self._handles[address])
        how = (c_int(AS_DESCRIPTOR), c_ulonglong(0))
        self._raw("cuMemExportToShareableHandle", byref(fd), handle, *how)
        return fd.value

    def open(self, pid: int, number: int, size: int) -> int:
        """Map what that process has under that descriptor; the descriptor is not kept."""
        pidfd = os.pidfd_open(pid)
        try:
            fd = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, number, 0)
            if fd < 0:
                raise Failed(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(pidfd)
        handle = c_ulonglong()
        try:
            self._raw("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), c_int(1))
        finally:
            os.close(fd)
        return self._map(handle, size)

    def is_physical(self, address: int) -> bool:
        """Whether the driver names a physical allocation behind the address."""
        handle = c_ulonglong()
        self._raw("cuMemRetainAllocationHandle", byref(handle), c_void_p(address))
        self._raw("cuMemRelease", handle)
        return True

    def _map(self, handle: c_ulonglong, size: int) -> int:
        address, length = Pointer(), c_size_t(size)
        zeros = (c_size_t(0), Pointer(0), c_ulonglong(0))
        self._raw("cuMemAddressReserve", byref(address), length, *zeros)
        self._raw("cuMemMap", address, length, c_size_t(0), handle, c_ulonglong(0))
        access = Access((c_int * 2)(ON_DEVICE, 0), READ_WRITE)
        self._raw("cuMemSetAccess", address, length, byref(access), c_size_t(1))
        self._handles[address.value] = handle.value
        return address.value

    def _raw(self, name: str, *arguments: Any) -> None:
        """Call with arguments that have their C types already."""
        function = getattr(self._cuda.library, name, None)
        if function is None:
            raise Failed(f"this driver has no {name}")
        self._cuda.check(name, int(function(*arguments)))


def kinds(scale: Scale) -> dict[str, Any]:
    """What each kind's pointer says, whether a legacy handle of it can be made, and whether
    exportable physical memory can be opened elsewhere and outlives its exporter."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        with remotes(1) as (engine,):
            order = {"kind": kind, "size": scale.handle}
            made = tried(lambda o=order: engine.call("allocate_kind", **o))  # type: ignore[misc]
            if "failed" in made:
                found[kind] = made
                continue
            at = {"address": made["ok"]}
            found[kind] = {
                "pointer": engine.call("pointer", **at),
                "is physical": tried(lambda: engine.call("is_physical", **at)),  # noqa: B023
                "legacy handle": _worked(tried(lambda: engine.call("export", **at))),  # noqa: B023
            }
    found["opened by descriptor"] = tried(lambda: _by_descriptor(scale))
    return found


def _worked(told: dict[str, Any]) -> dict[str, Any]:
    return told if "failed" in told else {"ok": None}


def _by_descriptor(scale: Scale) -> dict[str, Any]:
    with remotes(3) as (engine, mover, observer):
        pid = engine.call("pid")
        before = observer.call("memory")
        address = engine.call("allocate_kind", kind="physical, exportable", size=scale.handle)
        engine.call("fill", address=address, value=FILL, size=scale.handle)
        fd = engine.call("export_descriptor", address=address)
        there = mover.call("open_descriptor", pid=pid, number=fd, size=scale.handle)
        expected = f"{FILL:02x}" * 16
        found: dict[str, Any] = {
            "bytes arrive": mover.call("sample", address=there) == expected,
            "range of the import": tried(lambda: mover.call("range_of", address=there)),
            "pointer of the import": mover.call("pointer", address=there),
            "bytes taken": before - observer.call("memory"),
        }
        engine.end()
        found["read after the exporter's end"] = tried(lambda: mover.call("sample", address=there))
        mover.kill()
        return found
