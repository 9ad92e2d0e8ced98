"""Calls of libc that Python lacks, and numbers of Linux that it has no name for.

By ctypes, which lets go of the interpreter's lock during a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import resource
import signal
import stat
import struct
import termios
from collections.abc import Iterator
from pathlib import Path

MADV_POPULATE_READ = 22  # linux/mman.h, since Linux 5.14
MADV_POPULATE_WRITE = 23
SO_PEERPIDFD = 77  # asm-generic/socket.h, since Linux 6.5
SO_PASSRIGHTS = 83  # since Linux 6.16

_F_GET_SEALS = 1034  # linux/fcntl.h
_F_SEAL_FUTURE_WRITE = 0x0010
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC = 0x1000, 0x4000
_STATX_TYPE = 1  # linux/stat.h
_STATX_BYTES, _STATX_MODE_AT, _STATX_MODE = 256, 28, struct.Struct("=H")
_MPOL_PREFERRED = 1  # linux/mempolicy.h: elsewhere only where the node has no more
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # asm/unistd.h
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # linux/sched/types.h, SCHED_ATTR_SIZE_VER0
_WORD_BITS = 64
_M_ARENA_MAX = -8  # malloc.h
_HEAPS_CHOSEN = ("MALLOC_ARENA_MAX", "glibc.malloc.arena_max")  # a variable, and a tunable's name
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29

# linux/falloc.h
FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2
FALLOC_FL_ZERO_RANGE = 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_libc.memset.restype = ctypes.c_void_p
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.statx.argtypes = (
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_char_p,
)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


@contextlib.contextmanager
def address_of(mapping: mmap.mmap) -> Iterator[int]:
    """Where a mapping begins; it can't be closed meanwhile."""
    anchor = ctypes.c_char.from_buffer(mapping)
    try:
        yield ctypes.addressof(anchor)
    finally:
        del anchor


def advise(address: int, size: int, advice: int) -> None:
    """madvise(2), again where a signal came between. OSError where the kernel refuses."""
    while _libc.madvise(address, size, advice) != 0:
        error = ctypes.get_errno()
        if error not in (errno.EINTR, errno.EAGAIN):
            raise OSError(error, os.strerror(error))


def present_pages(address: int, size: int, into: int) -> bool:
    """mincore(2): a byte a page, its lowest bit set where the page is there. False: not told."""
    return int(_libc.mincore(address, size, into)) == 0


def write_zeros(address: int, size: int) -> None:
    """memset(3) to zero."""
    _libc.memset(address, 0, size)


def allocate(fd: int, mode: int, start: int, size: int) -> None:
    """fallocate(2), and never libc's own way of it, which writes. OSError where it is refused."""
    while _libc.fallocate(fd, mode, start, size) != 0:
        error = ctypes.get_errno()
        if error != errno.EINTR:
            raise OSError(error, os.strerror(error))


def lies_in_memory(fd: int) -> bool:
    """Whether it is a plain file on tmpfs or hugetlbfs, or of memfd_create. Asks no file system.

    Only such files have seals, and the kernel says so by itself: fstatfs(2) of a file on a remote
    file system, or on one that a user serves, waits for as long as its server likes.
    """
    try:
        fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        return False
    return True


def is_sealed_against_writes(fd: int) -> bool:
    """Whether nobody can map it to write there. OSError unless it `lies_in_memory`."""
    return bool(fcntl.fcntl(fd, _F_GET_SEALS) & (fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE))


def unread_bytes(fd: int) -> int:
    """What lies in a connected Unix socket's peer unread, with what the kernel keeps beside it.

    0 also where the peer is gone: what it did not read went with it.
    """
    count = struct.Struct("=i")
    return int(count.unpack(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(count.size)))[0])


def type_of(fd: int) -> int:
    """S_IFMT of what a descriptor is open on, without asking a file system's server. OSError.

    As far as that can be: a file system of the kernel's may ask it nevertheless, and before Linux
    4.11, or where a sandbox keeps statx(2) away, fstat(2) does.
    """
    status = ctypes.create_string_buffer(_STATX_BYTES)
    flags = _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC
    if _libc.statx(fd, b"", flags, _STATX_TYPE, status) == 0:
        return stat.S_IFMT(_STATX_MODE.unpack_from(status, _STATX_MODE_AT)[0])
    return stat.S_IFMT(os.fstat(fd).st_mode)


def anonymous_name_of(fd: int) -> str:
    """What kind of anonymous inode a descriptor is open on, as eventfd; "" where it is on none."""
    try:
        target = str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return ""
    prefix, _, name = target.partition("anon_inode:")
    return "" if prefix else name.strip("[]")


def prefer_memory_of(node: int) -> bool:
    """Have this thread's new pages lie on a node while it has memory. False: not allowed here."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    # The kernel reads one bit less than it is told.
    bits = ctypes.c_ulong(words * _WORD_BITS + 1)
    call = (ctypes.c_long(number), ctypes.c_int(_MPOL_PREFERRED), mask, bits)
    return int(_libc.syscall(*call)) == 0


def ask_for_short_slices(slice_ns: int) -> bool:
    """Have whoever wakes up get the processor from this thread after so long, at the latest.

    Also from threads and processes that it starts from now on. Without it that may be at the next
    tick of Linux, 4 ms away. False: not from this kernel (Linux 6.12 is the first that listens), or
    somebody chose another policy for this process.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
    # 0, twice: this thread, and no flags.
    call = (ctypes.c_long(number), ctypes.c_int(0), ctypes.c_char_p(wanted), ctypes.c_uint(0))
    return int(_libc.syscall(*call)) == 0


def share_one_heap() -> bool:
    """Have all threads of this process take their memory from one heap; to be called before any
    is started.

    glibc gives threads heaps of their own, up to eight a processor. What is free in one is of no
    use to the others, and most of what a message took is freed by another thread than took it:
    so a process with gRPC's threads grows, though what it uses does not. False: another libc, or
    whoever started the process has chosen (`MALLOC_ARENA_MAX`).
    """
    variable, tunable = _HEAPS_CHOSEN
    if variable in os.environ or tunable in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(_libc, "mallopt", None)
    return mallopt is not None and int(mallopt(_M_ARENA_MAX, 1)) == 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def name_process(name: str) -> None:
    """What ps and the kernel's log call this process; the first 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def set_timer_slack(slack_ns: int) -> None:
    """Let each sleep of the calling thread last so much longer than asked for; 0: as at first.

    Linux lets it be 50 us, if nobody said otherwise. A thread that looks for something every few us
    then wakes less often.
    """
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(slack_ns), 0, 0, 0)


def most_descriptors() -> int:
    """How many descriptors this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def set_number_of(library: str, name: str, value: int) -> None:
    """A C int that a loaded library, or one that it needs, has by this name.

    OSError where there is no such library, ValueError where none has the name.
    """
    ctypes.c_int.in_dll(ctypes.CDLL(library), name).value = value


def give_memory_back() -> None:
    """Give every free page of the allocator back (malloc_trim(3)); nothing without glibc."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
