"""pool.header: what the pool was made with. Written last, so a half-made pool has none."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvd.linux.proc import boot_id
from kvd.pool import sealed_json
from kvd.pool.config import RECORD_BYTES, PoolConfig
from kvd.pool.ownership import why_not_here

POOL_LAYOUT_VERSION = 2
EXTENTS_MARK_BYTES = 16
MAX_HEADER_BYTES = 1 << 20
_HEX = re.compile(r"([0-9a-f]{2})*")
NO_POOL = "no pool was here before"


@dataclass(frozen=True, slots=True)
class PoolHeader:
    """What the pool's header file says of the pool.

    `tag_secret` is hex; `boot_id` makes a pool of an earlier boot cold (torn by nature).

    nodes: the NUMA nodes that the extents were dealt to, in equal shares; empty: to none.
    extents_mark: names this pool beside its extents, which may lie in a directory elsewhere.
    """

    layout_version: int
    record_bytes: int
    extents: int
    extent_bytes: int
    boot_id: str
    extents_directory: str
    nodes: list[int]
    extents_mark: str
    tag_secret: str

    @classmethod
    def wanted(cls, config: PoolConfig, nodes: Sequence[int], tag_secret: bytes) -> PoolHeader:
        """The header of a pool that this configuration and this version make."""
        return cls(
            layout_version=POOL_LAYOUT_VERSION,
            record_bytes=RECORD_BYTES,
            extents=config.extents,
            extent_bytes=config.extent_bytes,
            boot_id=boot_id(),
            extents_directory=str(config.extents_place),
            nodes=list(nodes),
            extents_mark=os.urandom(EXTENTS_MARK_BYTES).hex(),
            tag_secret=tag_secret.hex(),
        )

    def write(self, path: Path) -> None:
        """Put the header in place; from then on the pool is warm."""
        sealed_json.replace_file(path, sealed_json.seal(asdict(self)))


def read_header(path: Path, wanted: PoolHeader) -> tuple[PoolHeader | None, str]:
    """The header found, None where it can't be read; and why the pool starts cold, or "".

    Whether its files are here is another question (ownership.py).
    """
    try:
        record = sealed_json.unseal(_content(path))
    except FileNotFoundError:
        return None, NO_POOL
    if record is None:
        return None, "the pool's header is damaged"
    version = record.get("layout_version")
    if version != wanted.layout_version:
        return None, (
            f"the pool has layout version {version}, this kvd knows {wanted.layout_version}"
        )
    found = _header_of(record)
    if found is None:
        return None, "the pool's header is damaged"
    if found.boot_id != wanted.boot_id:
        return found, "the machine was started anew since"
    before, now = _extents_of(found), _extents_of(wanted)
    if before != now:
        return found, f"the pool was made with {before}; pool_bytes and extent_bytes give {now} now"
    if found.record_bytes != wanted.record_bytes:
        return found, (
            f"the pool has records of {found.record_bytes} bytes, this kvd of {wanted.record_bytes}"
        )
    return found, ""


def _extents_of(header: PoolHeader) -> str:
    return f"{header.extents} extents of {header.extent_bytes / (1 << 20):.12g} MiB"


def standing_extent_bytes(config: PoolConfig) -> int:
    """The extents' size of the pool that lies there, if that would be warm with it; else 0.

    The directory must have been found to be the daemon's own.
    """
    path = config.directory / "pool.header"
    now = PoolHeader.wanted(config, [], b"")
    found, _ = read_header(path, now)
    if found is None or config.pool_bytes // found.extent_bytes != found.extents:
        return 0
    _, cold_reason = read_header(
        path, replace(now, extents=found.extents, extent_bytes=found.extent_bytes)
    )
    if cold_reason or why_not_here(config, found.extents_directory):
        return 0
    return found.extent_bytes


def _header_of(record: dict[str, Any]) -> PoolHeader | None:
    """None where a field is missing, or is none that a header of ours has."""
    texts = ("boot_id", "extents_directory", "extents_mark", "tag_secret")
    numbers = ("layout_version", "record_bytes", "extents", "extent_bytes")
    nodes = record.get("nodes")
    if (
        record.keys() != {*texts, *numbers, "nodes"}
        or not all(isinstance(record[name], str) for name in texts)
        or not all(type(record[name]) is int and record[name] > 0 for name in numbers)
        or not isinstance(nodes, list)
        or not all(type(node) is int and node >= 0 for node in nodes)
        or not _HEX.fullmatch(record["tag_secret"])
        or not _HEX.fullmatch(record["extents_mark"])
        or "\0" in record["extents_directory"]
    ):
        return None
    return PoolHeader(**record)


def _content(path: Path) -> bytes:
    """What a regular file of the daemon's user holds; of anything else, nothing."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return b""
        return file.read(MAX_HEADER_BYTES)
