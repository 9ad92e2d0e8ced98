"""Is there room for the pool? Asked before a byte is taken, since running out later kills.

A file system that is full turns the first touch of a page into SIGBUS, a memory limit turns it
into the OOM killer. Both are refused at start, with the figures. Huge pages are a store of their
own: what lies on hugetlbfs is not taken from the machine's available memory, nor does a memory
limit count it, unless its control group was told to.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvd.linux.control_groups import huge_limit, memory_limit
from kvd.linux.limits import most_file_bytes
from kvd.linux.proc import filesystem_type, memory_bytes, mount_of, mounts
from kvd.pool.config import CHECKSUM_TABLE, PoolConfig, PoolError
from kvd.pool.ownership import FILES
from kvd.processes.mappings import ExtentFiles

HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
HUGETLBFS = "hugetlbfs"
# What control and a few movers take beside the pool; see the bars on PSS in the benchmarks.
PROCESS_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class HugeFigures:
    """The huge pages that the extents lie on, in bytes; `limit`: of this control group."""

    page: int
    free: int
    limit: int | None = None
    in_memory_limit: bool = False  # the memory limit counts them too


@dataclass(frozen=True, slots=True)
class SpaceFigures:
    """What is there, in bytes. `held`: what the pool's own files take already.

    standing: there is a pool already, which may have spent some of its reserve.
    filesystem_others: what is not the pool's on the tables' file system.
    extents_free, extents_others: of the extents' file system where that is not the tables' own.
    huge: where that is a hugetlbfs.
    """

    filesystem_free: int
    tables_held: int
    extents_held: int
    memory_available: int
    memory_limit: int | None
    extents_free: int | None = None
    huge: HugeFigures | None = None
    standing: bool = False
    filesystem_others: int = 0
    extents_others: int = 0

    @property
    def held(self) -> int:
        return self.tables_held + self.extents_held


def _memory_available() -> int:
    available = memory_bytes("MemAvailable")
    if available is None:
        raise PoolError("/proc/meminfo has no MemAvailable: kvd needs Linux 3.14 or newer")
    return available


def huge_pages_free(page_bytes: int, root: Path = HUGE_PAGES, *, promised: bool = False) -> int:
    """Bytes of huge pages that can still be had: free ones, and those the kernel may make.

    Those promised to mappings that haven't touched them yet count only where `promised`.
    """
    folder = root / f"hugepages-{page_bytes >> 10}kB"
    try:
        free, reserved, more, made = (
            int((folder / name).read_text())
            for name in (
                "free_hugepages",
                "resv_hugepages",
                "nr_overcommit_hugepages",
                "surplus_hugepages",
            )
        )
    except FileNotFoundError:
        raise PoolError(
            f"the kernel has no huge pages of {_size(page_bytes)} ({folder} is missing): mount the"
            " hugetlbfs with a pagesize= that it has"
        ) from None
    return (free - (0 if promised else reserved) + max(0, more - made)) * page_bytes


def measure(config: PoolConfig) -> SpaceFigures:
    """Figures for the pool of this configuration, whose directories may hold one already."""
    tables, extents = standing_of(config.directory), standing_of(config.extents_place)
    own = config.directory.iterdir() if tables == config.directory else ()
    fs = os.statvfs(tables)
    found = SpaceFigures(
        fs.f_bavail * fs.f_frsize,
        sum(taken(path) for path in own if path.is_file() and path.suffix != ".kv"),
        sum(taken(path) for path in config.extents_place.glob("*.kv")),
        _memory_available(),
        memory_limit(),
        standing=(config.directory / "pool.header").exists(),
    )
    together = tables.stat().st_dev == extents.stat().st_dev
    held = found.held if together else found.tables_held
    found = replace(found, filesystem_others=max(0, _used(fs) - held))
    if together:
        return found
    fs = os.statvfs(extents)
    free = fs.f_bavail * fs.f_frsize
    mount = mount_of(extents)
    if mount is None or mount.fs_type != HUGETLBFS:
        others = max(0, _used(fs) - found.extents_held)
        return replace(found, extents_free=free, extents_others=others)
    # A mount without a size says 0 blocks; one with min_size has pages promised to itself.
    kernel = huge_pages_free(fs.f_bsize, promised="min_size=" in mount.options)
    free = min(free, kernel) if fs.f_blocks else kernel
    counted = any(
        m.fs_type == "cgroup2" and "memory_hugetlb_accounting" in m.options for m in mounts()
    )
    huge = HugeFigures(fs.f_bsize, free, huge_limit(fs.f_bsize), counted)
    return replace(found, extents_free=free, huge=huge)


def _used(fs: os.statvfs_result) -> int:
    return (fs.f_blocks - fs.f_bavail) * fs.f_frsize


def _remount(directory: Path, option: str) -> str:
    """The command that gives another option to the file system that a directory is, or will be,
    on.
    """
    point = Path(os.path.realpath(standing_of(directory)))
    while not point.is_mount():
        point = point.parent
    return f"mount -o remount,{option} {shlex.quote(str(point))}"


def require_space(config: PoolConfig, figures: SpaceFigures) -> None:
    """PoolError with the figures and the fix where the pool and its tables don't fit."""
    extents = config.extents * config.extent_bytes
    together = figures.extents_free is None
    tables = config.table_bytes + (0 if figures.standing else config.reserve_bytes)
    need = tables + (extents if together else 0)
    held = figures.held if together else figures.tables_held
    if figures.filesystem_free + held < need:
        whole = _whole_mib(config, figures.filesystem_others, together=together)
        raise PoolError(
            f"{_need(config)}, but the file system of {config.directory} has"
            f" {_size(figures.filesystem_free + held)} ({_size(held)} of it held by the pool"
            f" already){'' if together else f' for its {_size(need)} of tables'}: enlarge it"
            f" ({_remount(config.directory, f'size={whole}m')}, or an emptyDir's sizeLimit)"
            " or lower the pool's size"
        )
    if figures.extents_free is not None:
        _require_extents(config, figures, figures.extents_free + figures.extents_held)
    _require_memory(config, figures)


def _whole_mib(config: PoolConfig, others: int, *, together: bool) -> int:
    """MiB that hold all that the pool may want of its file system, not only what a start needs:
    its reserve, and the table of checksums that it goes without where there is no room; and what
    others have there, in bytes.
    """
    summed = config.payload_checksums or config.checksums_chosen
    whole = replace(config, payload_checksums=summed)
    extents = config.extents * config.extent_bytes if together else 0
    return -(-(others + extents + whole.table_bytes + whole.reserve_bytes) // (1 << 20))


def _require_extents(config: PoolConfig, figures: SpaceFigures, room: int) -> None:
    """The extents' own file system holds them, and no limit on huge pages stands in the way."""
    need, huge = config.extents * config.extent_bytes, figures.huge
    if room < need:
        whole = -(-(figures.extents_others + need) // (1 << 20))
        fix = _remount(config.extents_place, f"size={whole}m")
        if huge is not None:
            fix = (
                f"{-(-need // huge.page)} huge pages of {_size(huge.page)}: sysctl vm.nr_hugepages"
            )
        raise PoolError(
            f"{_need(config)}, but extents_directory {config.extents_place} has {_size(room)}"
            f" ({_size(figures.extents_held)} of it held by the pool already): enlarge it ({fix})"
            " or lower the pool's size"
        )
    if huge is not None and huge.limit is not None and huge.limit < need:
        raise PoolError(
            f"{_need(config)}, but this control group may have {_size(huge.limit)} of huge pages of"
            f" {_size(huge.page)}: raise the limit (resources.limits of hugepages in Kubernetes,"
            " hugetlb.*.max elsewhere) or lower the pool's size"
        )


def _require_memory(config: PoolConfig, figures: SpaceFigures) -> None:
    """The machine and the control group have the memory that is not in huge pages."""
    extents = config.extents * config.extent_bytes
    common = 0 if figures.huge is not None else extents
    held = figures.held if figures.huge is None else figures.tables_held
    counted = extents if figures.huge is not None and figures.huge.in_memory_limit else common
    tables = config.table_bytes + config.reserve_bytes + config.index_bytes
    need = tables + counted + PROCESS_BYTES
    index = f"up to {_size(config.index_bytes)} for index pages"
    if figures.memory_limit is not None and figures.memory_limit < need:
        raise PoolError(
            f"{_need(config)}, {index} and {_size(PROCESS_BYTES)} for its processes, but the memory"
            f" limit of this control group is {_size(figures.memory_limit)}: raise the limit to"
            f" {_size(need)} (MemoryMax=, or resources.limits.memory) or lower pool_bytes"
        )
    if figures.memory_available < tables + common - held:
        raise PoolError(
            f"{_need(config)} and {index}, of which it holds {_size(held)}, but only"
            f" {_size(figures.memory_available)} of memory are available: free memory or lower"
            " pool_bytes"
        )


def require_new_files(config: PoolConfig) -> None:
    """PoolError where files that the pool lacks can't be made, so many or so large.

    Asked before an earlier pool is given up for them.
    """
    lacking: dict[int, int] = {}
    places: dict[int, Path] = {}
    for place, count in _lacking(config):
        device = standing_of(place).stat().st_dev
        lacking[device] = lacking.get(device, 0) + count
        places.setdefault(device, place)
    for device, place in places.items():
        fs, count = os.statvfs(standing_of(place)), lacking[device]
        if fs.f_files and fs.f_favail < count:  # some count none
            enough = fs.f_files - fs.f_favail + count
            raise PoolError(
                f"the file system of {place} takes {fs.f_favail} more files, and a pool of"
                f" {config.extents} extents needs {count}: allow it more"
                f" ({_remount(place, f'nr_inodes={enough}')}) or raise extent_bytes"
            )
    limit = most_file_bytes()
    extents = ExtentFiles(config.extents_place, 0, config.extent_bytes)
    for path, size in (
        (extents.path(0), config.extent_bytes),
        (config.directory / "slots.table", config.record_bytes),
    ):
        if limit is not None and limit < size and _length(path) < size:
            raise PoolError(
                f"{path} will have {_size(size)}, and this process may have no file of more than"
                f" {_size(limit)}: raise LimitFSIZE= in the unit, or ulimit -f"
            )


def _lacking(config: PoolConfig) -> Iterator[tuple[Path, int]]:
    """How many files and directories are yet to be made, by where."""
    directory, place = config.directory, config.extents_place
    asked = config.payload_checksums and not config.checksums_chosen  # else no start fails for them
    names = [name for name in FILES if name != CHECKSUM_TABLE or asked]
    above = {directory, *directory.parents}
    yield directory, _absent([*above, *(directory / name for name in names)])
    there = sum(1 for kind in ("*.kv", "*.pool") for _ in place.glob(kind))
    directories = _absent({place, *place.parents} - above)
    yield place, directories + max(0, config.extents + 1 - there)


def _absent(paths: Iterable[Path]) -> int:
    return sum(not path.exists() for path in paths)


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def require_memory_files(config: PoolConfig) -> int:
    """Size of the huge pages under the extents, 0 where there are none.

    PoolError where a directory isn't in memory, unless the operator allowed it, or where its
    files can't hold what they must.
    """
    kind = filesystem_type(standing_of(config.directory))
    if kind == HUGETLBFS:
        raise PoolError(
            f"pool_directory {config.directory} is on hugetlbfs, whose files can't be written to"
            " as the pool's tables must be: give pool_directory a directory on a tmpfs, and name"
            " this one as extents_directory"
        )
    if kind != "tmpfs" and not config.any_filesystem:
        raise PoolError(
            f"{config.directory} is on {kind}, not on tmpfs: the pool would go through a disk."
            f" Mount one there ({mount_command(config)}; huge=within_size for huge pages), give"
            " pool_directory a directory on another, or set any_filesystem (--any-filesystem)"
        )
    place = standing_of(config.extents_place)
    kind = filesystem_type(place)
    if kind not in {"tmpfs", HUGETLBFS} and not config.any_filesystem:
        raise PoolError(
            f"extents_directory {config.extents_place} is on {kind}, not on tmpfs or hugetlbfs: the"
            " pool would go through a disk. Give it a directory on one of these, or set"
            " any_filesystem (--any-filesystem)"
        )
    page = huge_page(config)
    if page and config.extent_bytes % page:
        raise PoolError(
            f"extent_bytes is {config.extent_bytes}, but the huge pages of extents_directory"
            f" {config.extents_place} have {page} bytes each: make extent_bytes a multiple of that"
        )
    return page


def huge_page(config: PoolConfig) -> int:
    """Size of the huge pages under the extents, 0 where there are none."""
    place = standing_of(config.extents_place)
    return os.statvfs(place).f_bsize if filesystem_type(place) == HUGETLBFS else 0


def is_shared(directory: Path) -> bool:
    """Whether the file system under the directory is one that others may fill."""
    mount = mount_of(directory)
    if mount is None:
        return False
    try:
        return bool(Path(mount.point).stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    except OSError:
        return False


def mount_command(config: PoolConfig) -> str:
    """The command that makes a tmpfs for the tables and, unless they lie elsewhere, the extents."""
    extents = 0 if config.extents_directory else config.extents * config.extent_bytes
    size = -(-(extents + config.table_bytes + config.reserve_bytes) // (1 << 20))
    user = os.geteuid()
    owner = f",uid={user}" if user else ""
    point = shlex.quote(str(config.directory))
    return f"mount -t tmpfs -o size={size}m,mode=0700{owner} kvd {point}"


def standing_of(directory: Path) -> Path:
    """The directory, or the nearest one above it that is there already."""
    while not directory.exists():
        directory = directory.parent
    return directory


def taken(path: Path) -> int:
    """Bytes of memory behind a file; 0 where it is gone."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _need(config: PoolConfig) -> str:
    extents = config.extents * config.extent_bytes
    tables = config.table_bytes + config.reserve_bytes
    return (
        f"the pool needs {_size(extents + tables)} ({_size(extents)} of extents and {_size(tables)}"
        " of tables)"
    )


def _size(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
