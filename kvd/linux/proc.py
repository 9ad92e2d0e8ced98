"""What /proc tells of processes and of the machine."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvd.linux.calls import most_descriptors

PROC = Path("/proc")
_BOOT_ID = Path("sys/kernel/random/boot_id")
CAP_CHOWN = 1 << 0
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    device: str
    root: str
    point: str
    fs_type: str
    options: str
    number: int  # by which fdinfo names it


@dataclass(frozen=True, slots=True)
class OwnUse:
    """What this process has used and holds."""

    cpu_seconds: float
    resident_bytes: int
    shared_bytes: int  # of the resident ones


def numbers_of(text: str) -> frozenset[int]:
    """What the kernel writes as "0-3,8": ValueError for anything else."""
    numbers: set[int] = set()
    for stretch in filter(None, text.strip().split(",")):
        first, _, last = stretch.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


# -- processes --------------------------------------------------------------------------------


def start_time_of(pid: int) -> int | None:
    """Clock ticks after boot at which a process was started; None when there is none.

    OSError where descriptors or memory are too short to ask.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def state_of(pid: int) -> str:
    """The letter of a process's state; "gone" when there is none."""
    return (_stat(pid) or ["gone"])[0]


def mapped_inodes(pid: int) -> frozenset[int]:
    """Inodes of the files that a process maps now. OSError where the kernel doesn't say.

    By each of its threads: where the first one has ended and another can't yet, as one that waits
    for a disk, the process's own list is empty, and its memory is still there.
    """
    found: set[int] = set()
    for thread in (PROC / str(pid) / "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            lines = filter(None, _lines(thread / "maps"))
            found.update(int(line.split(maxsplit=5)[4]) for line in lines)
    return frozenset(found)


def _stat(pid: int | str) -> list[str]:
    """The fields from the state on; empty when there is no such process, or none that we may see.

    OSError where descriptors or memory are short: then nobody can say.
    """
    try:
        stat = os.fsdecode((PROC / str(pid) / "stat").read_bytes())
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        return []
    # The name in parentheses may hold anything, so count from its end.
    return stat.rpartition(")")[2].split()


def _lines(path: Path) -> list[str]:
    """Of a file with names in it that others chose: of any bytes but line ends."""
    return os.fsdecode(path.read_bytes()).rstrip("\n").split("\n")


def shows_the_machine(proc: Path = PROC) -> bool:
    """Whether more than processes is there: a mount of it may leave the rest out."""
    return (proc / "meminfo").exists() and (proc / _BOOT_ID).exists()


# -- this process -----------------------------------------------------------------------------


def shows_this_process(proc: Path = PROC) -> bool:
    """Whether it is there, and of this process's pid namespace: in another's, a pid that we know
    is another process.
    """
    try:
        return (proc / "self").readlink().name == str(os.getpid())
    except OSError:
        return False


def own_use() -> OwnUse:
    """CPU time and memory of this process."""
    user, system = map(int, _stat("self")[11:13])
    _size, resident, shared, *_ = map(int, (PROC / "self" / "statm").read_text().split())
    page = os.sysconf("SC_PAGE_SIZE")
    return OwnUse((user + system) / os.sysconf("SC_CLK_TCK"), resident * page, shared * page)


def own_capabilities() -> int:
    """The capabilities that this process may use now, as a mask."""
    lines = (PROC / "self" / "status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return int(fields["CapEff"], 16)


def own_descriptors() -> Iterator[int]:
    """Descriptors of this process; they may be others by the next moment."""
    for name in (PROC / "self" / "fd").iterdir():
        yield int(name.name)


def leave_memory_out_of_cores() -> None:
    """A core of this process has no memory in it, where the kernel writes cores at all."""
    with contextlib.suppress(OSError):
        (PROC / "self" / "coredump_filter").write_text("0")


def let_end_sooner(pid: int, more: int) -> None:
    """Where memory is short, have the kernel end this process before others.

    It counts as larger by so many thousandths of the memory that is short.
    """
    path = PROC / str(pid) / "oom_score_adj"
    with contextlib.suppress(OSError):
        path.write_text(str(min(1000, int(path.read_text()) + more)))


def count_own_descriptors() -> int:
    """How many descriptors this process has open; as many as it may where none is left to look."""
    directory = PROC / "self" / "fd"
    # The directory's size is the number of descriptors since Linux 6.2, and 0 before.
    try:
        return directory.stat().st_size or sum(1 for _ in directory.iterdir())
    except OSError as error:
        if error.errno not in SHORTAGES:
            raise
        return most_descriptors()


def locker_of(path: Path) -> int | None:
    """The process whose flock of the file keeps others out; None where none does, or none is told.

    Asked by nobody's lock: whoever wants it in this moment gets it.
    """
    found = path.stat()
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in (PROC / "locks").read_text().splitlines():
        _number, kind, *rest = line.split()
        if kind == "FLOCK" and rest[1:2] == ["WRITE"] and rest[3:4] == [device]:
            return int(rest[2])
    return None


def open_again(fd: int, flags: int) -> int:
    """Open the file behind a descriptor anew, with flags of its own."""
    return os.open(PROC / "self" / "fd" / str(fd), flags | os.O_CLOEXEC)


def allowed_nodes(proc: Path = PROC) -> frozenset[int]:
    """Nodes whose memory this process may have; empty where the kernel has no such limits."""
    for line in (proc / "self" / "status").read_text().splitlines():
        if line.startswith("Mems_allowed_list:"):
            return numbers_of(line.partition(":")[2])
    return frozenset()


# -- the machine ------------------------------------------------------------------------------


def memory_bytes(name: str, proc: Path = PROC) -> int | None:
    """A line of meminfo, in bytes; None where the kernel has no such line, or no /proc is there."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except FileNotFoundError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def boot_id() -> str:
    """Random name of this boot."""
    return (PROC / _BOOT_ID).read_text().strip()


def mounts(proc: Path = PROC) -> Iterator[Mount]:
    """Mounts that this process sees."""
    for line in _lines(proc / "self" / "mountinfo"):
        left, _, right = line.partition(" - ")
        fields, ending = left.split(" "), right.split(" ")
        yield Mount(fields[2], fields[3], fields[4], ending[0], ending[-1], int(fields[0]))


def is_mounted(point: str) -> bool:
    """Whether something is mounted there."""
    return any(mount.point == point for mount in mounts())


def mount_under(descriptor: int) -> Mount | None:
    """The mount by which a file was opened; None where it is there no longer. OSError."""
    text = (PROC / "self" / "fdinfo" / str(descriptor)).read_text()
    found = re.search(r"^mnt_id:\s*(\d+)$", text, re.MULTILINE)
    return next((m for m in mounts() if found and m.number == int(found[1])), None)


def mount_of(directory: Path) -> Mount | None:
    """The mount of the file system under a directory; None where the kernel doesn't tell."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next((m for m in mounts() if m.device == wanted), None)


def may_have_huge_pages(address: int, proc: Path = PROC) -> bool:
    """Whether this process's memory there is of a file system that gives huge pages."""
    for line in _lines(proc / "self" / "maps"):
        extent, _, _, device, *_ = line.split()
        start, end = (int(bound, 16) for bound in extent.split("-"))
        if start <= address < end:
            major, minor = (int(number, 16) for number in device.split(":"))
            found = [m for m in mounts(proc) if m.device == f"{major}:{minor}"]
            return any(
                m.fs_type == "hugetlbfs"
                or bool({"huge=always", "huge=within_size"} & set(m.options.split(",")))
                for m in found
            )
    return False


def filesystem_type(directory: Path) -> str:
    """Type of the file system under a directory; "unknown" where the kernel doesn't tell."""
    mount = mount_of(directory)
    return "unknown" if mount is None else mount.fs_type
