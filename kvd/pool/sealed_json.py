"""Text lines that prove themselves whole: a checksum, then a JSON object."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

_DIGEST_BYTES = 8


def seal(record: dict[str, Any], size: int = 0) -> bytes:
    """One line, newline included; filled up with blanks to a size."""
    body = json.dumps(record, separators=(",", ":"), sort_keys=True).encode()
    body = body.ljust(size - 2 * _DIGEST_BYTES - 2)
    return digest(body) + b" " + body + b"\n"


def unseal(line: bytes) -> dict[str, Any] | None:
    """The record of a whole line; None where it is torn or altered, or no record."""
    said, separator, body = line.rstrip(b"\n").partition(b" ")
    if not separator or said != digest(body):
        return None
    try:
        record = json.loads(body)
    except (ValueError, RecursionError):  # whole, but of another make
        return None
    return record if isinstance(record, dict) else None


def replace_file(path: Path, content: bytes) -> None:
    """Give the file this content at once: a reader or a crash sees the old or the new one."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_all(fd, content)
    finally:
        os.close(fd)
    fresh.rename(path)


def write_all(fd: int, content: bytes) -> None:
    """Write every byte; OSError where the file system is full."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def digest(body: bytes) -> bytes:
    """What a line with this body begins with."""
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest().encode()
