"""cudaHostRegister of shared pages: in two processes at once, by kind of page, by its cost."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.probing.remote import Remote, remotes, tried, wait_until
from benchmarks.gpu.probing.scale import Scale

MIB = 1 << 20
GIB = 1 << 30
PIECE_BYTES = 64 * MIB
HUGE_PAGE_BYTES = 2 * MIB
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
LIMIT_BYTES = 64 << 10  # a container's usual limit on locked memory
NOBODY = 65534
END_SECONDS = 30.0


def host_memory(scale: Scale) -> dict[str, Any]:
    """Seconds a GiB in every kind of shared memory that can be had here."""
    found: dict[str, Any] = {"bytes": scale.registered}
    with _plain() as folder:
        found["tmpfs"] = tried(lambda: _register(scale, folder))
    if not scale.mounts:
        return found
    for name, mounted in (("tmpfs huge=always", _huge_tmpfs), ("hugetlbfs", _hugetlbfs)):
        try:
            with mounted(scale.registered) as folder:
                found[name] = tried(lambda folder=folder: _register(scale, folder))  # type: ignore[misc]
        except (OSError, subprocess.SubprocessError) as error:
            found[name] = {"not to be had here": str(error)}
    return found


def locked_memory(scale: Scale) -> dict[str, Any]:
    """Whether a small limit on locked memory stops it, for root and for a user without rights."""
    size = min(scale.registered, 256 * MIB)
    found = {}
    for name, user in (("root, limit 64 KiB", 0), ("nobody, limit 64 KiB", NOBODY)):
        with _plain() as folder:
            path = _file(folder, size)
            found[name] = tried(lambda path=path, user=user: _limited(path, size, user))  # type: ignore[misc]
    return found


def _limited(path: Path, size: int, user: int) -> dict[str, Any]:
    remote = Remote()
    try:
        rights = remote.call("limit_locked_memory", size=LIMIT_BYTES, user=user)
        remote.call("start")
        address = remote.call("map_file", path=str(path))["address"]
        order = {"address": address, "size": size, "piece": size}
        return {"rights": rights, "register": tried(lambda: remote.call("register", **order))}
    finally:
        remote.end()


def _register(scale: Scale, folder: Path) -> dict[str, Any]:
    """Two processes, one file: who may register it when, how fast, and what copies make of it."""
    size = scale.registered
    path = _file(folder, size)
    per_gib = GIB / size
    with remotes(2) as (first, second):
        mapped = [remote.call("map_file", path=str(path)) for remote in (first, second)]
        orders = [{"address": told["address"], "size": size} for told in mapped]
        found: dict[str, Any] = {"touch_s_per_gib": mapped[0]["seconds"] * per_gib}
        for name, piece in (("whole", size), ("in pieces of 64 MiB", PIECE_BYTES)):
            took = first.call("register", **orders[0], piece=piece)
            found[f"register_s_per_gib, {name}"] = took * per_gib
            took = first.call("unregister", **orders[0], piece=piece)
            found[f"unregister_s_per_gib, {name}"] = took * per_gib
        first.call("register", **orders[0], piece=size)
        both = tried(lambda: second.call("register", **orders[1], piece=size) * per_gib)
        found["register_s_per_gib, while another process has it registered"] = both
        found["copies, registered in both"] = _copies(scale, second, mapped[1]["address"])
        first.call("unregister", **orders[0], piece=size)
        found["copies, after the other let go"] = _copies(scale, second, mapped[1]["address"])
        second.call("unregister", **orders[1], piece=size)
        piece = min(size, scale.copied) // 2
        second.call("register", **orders[1], piece=piece)
        across = _copies(scale, second, mapped[1]["address"])
        found["copies that run across two registrations"] = across
        found["gone after kill -9, with nothing registered"] = _seconds_to_end(first)
        found[f"gone after kill -9, with {size >> 20} MiB registered"] = _seconds_to_end(second)
    return found


def _seconds_to_end(remote: Remote) -> float | None:
    """How long a killed process takes to be gone, which gives back what it had registered."""
    remote.kill()
    return wait_until(lambda: remote.is_gone, END_SECONDS)


def _copies(scale: Scale, remote: Remote, host: int) -> dict[str, Any]:
    """GB/s of one large copy each way; pages that were not pinned would be much slower."""
    size = min(scale.copied, scale.registered)
    device = remote.call("allocate", size=size)
    case = {"way": "large", "host": host, "device": device, "fragment": size, "total": size}
    found: dict[str, Any] = {}
    for name, is_store in (("store", True), ("load", False)):
        order = {**case, "is_store": is_store, "repeats": scale.repeats}
        took = tried(lambda order=order: remote.call("time_copies", case=order))  # type: ignore[misc]
        if "ok" in took:
            found[f"{name}_gb_s"] = [size / seconds / 1e9 for seconds in took["ok"]["wall_s"]]
        else:
            found[name] = took
    remote.call("free", address=device)
    return found


def _file(folder: Path, size: int) -> Path:
    path = folder / "pages"
    path.touch()
    path.chmod(0o666)
    os.truncate(path, size)
    return path


@contextlib.contextmanager
def _plain() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"kvd-probe-{os.getpid()}-", dir="/dev/shm"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _mounted(kind: str, options: str) -> Iterator[Path]:
    """A file system of our own; OSError where it can't be mounted."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-probe-"))
    try:
        command = ["mount", "-t", kind, "-o", options, "none", str(folder)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise OSError(made.stderr.strip() or f"mount exited with {made.returncode}")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=False)
    finally:
        folder.rmdir()


@contextlib.contextmanager
def _huge_tmpfs(size: int) -> Iterator[Path]:
    with _mounted("tmpfs", f"huge=always,size={size}") as folder:
        yield folder


@contextlib.contextmanager
def _hugetlbfs(size: int) -> Iterator[Path]:
    """Huge pages are set aside for as long as it is mounted, and given back after."""
    before = HUGE_PAGES.read_text()
    wanted = size // HUGE_PAGE_BYTES
    try:
        HUGE_PAGES.write_text(str(int(before) + wanted))
        if int(HUGE_PAGES.read_text()) < wanted:
            raise OSError(
                f"the kernel set aside {HUGE_PAGES.read_text().strip()} of {wanted} pages"
            )
        with _mounted("hugetlbfs", f"pagesize=2M,size={size}") as folder:
            yield folder
    finally:
        with contextlib.suppress(OSError):
            HUGE_PAGES.write_text(before)
