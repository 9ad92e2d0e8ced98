"""Access lists of files (acl(5)): keep some users from a file whose mode would let them in."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Collection
from pathlib import Path

_NAME = "system.posix_acl_access"
# linux/posix_acl_xattr.h
_VERSION = struct.pack("<I", 2)
_LINE = struct.Struct("<HHI")
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 1, 2, 4, 16, 32
_NOBODY = 0xFFFFFFFF


def has_list(path: Path) -> bool:
    """Whether the file has more of an access list than its mode."""
    try:
        os.getxattr(path, _NAME)
    except OSError as error:
        if error.errno == errno.ENODATA:
            return False
        raise
    return True


def keep_out(path: Path, users: Collection[int]) -> None:
    """Have the file keep out these users, and else let in whom its mode does; the mode stays.

    Its owner and root get in all the same. OSError where there are no access lists.
    """
    if not users:
        os.removexattr(path, _NAME)
        return
    mode = path.stat().st_mode
    group = mode >> 3 & 7
    lines = [
        (_OWNER, mode >> 6 & 7, _NOBODY),
        *((_USER, 0, user) for user in sorted(users)),
        (_GROUP, group, _NOBODY),
        (_MASK, group, _NOBODY),
        (_OTHERS, mode & 7, _NOBODY),
    ]
    os.setxattr(path, _NAME, _VERSION + b"".join(_LINE.pack(*line) for line in lines))
