"""Who owns a directory of the disk tier: one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from kvd.linux.own_directory import CLOSED, CLOSED_FIX, NotTrustedError, Wanted, require_own
from kvd.linux.proc import mount_under
from kvd.tiers.store import TierUnusable

NOT_PLAIN = "directories: {} is no plain file, and the tier has one of that name: remove it"
_OWNER_BYTES = 32


def owned(directory: Path) -> int:
    """A descriptor whose lock makes this process the directory's owner. TierUnusable."""
    try:
        require_own(Wanted("directories", directory))
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except NotTrustedError as error:
        raise TierUnusable(str(error)) from error
    except OSError as error:
        if error.errno == errno.EISDIR:
            raise TierUnusable(NOT_PLAIN.format(directory / "lock")) from error
        fix = f"; {CLOSED_FIX}" if error.errno in CLOSED else ""
        raise TierUnusable(f"directories: {directory}: {error.strerror}{fix}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, _OWNER_BYTES, 0).decode(errors="replace").strip()
        os.close(fd)
        raise TierUnusable(
            f"directories: {directory} is in use by another tier, of this or another kvd, process"
            f" {owner or 'unknown'}: stop that kvd, or give each tier directories of its own"
        ) from None
    try:
        os.pwrite(fd, f"{os.getpid()}\n".ljust(_OWNER_BYTES).encode(), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            os.close(fd)
            raise TierUnusable(f"directories: {directory}: {error.strerror}") from error
    return fd


def mount_point_of(owner: int) -> str:
    """Where the file system of an owned directory is mounted; "" where the kernel doesn't tell."""
    with contextlib.suppress(OSError):
        found = mount_under(owner)
        return found.point if found else ""
    return ""
