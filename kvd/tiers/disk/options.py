"""The options of a disk tier, as the configuration's table gives them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvd.core.policy import POLICY_NAMES
from kvd.tiers.store import OptionValue, TierOptions, TierUnusable

ALIGN = 4096  # of everything in a slab: what O_DIRECT asks of the disks that there are
LEAST_REGION_BYTES = 64 << 10
MOST_REGION_BYTES = 1 << 30
MOST_THREADS = 64
_SIZE = re.compile(r"(\d+)\s*(?:([KMGT])i?B?)?")
_UNITS = {None: 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Where, how much and how.

    Each of `directories` gets a slab of `directory_bytes`, cut into regions of `region_bytes`, so
    that no block can be larger. `threads` read and write in each.
    """

    directories: tuple[Path, ...]
    directory_bytes: int
    policy: str = "lru"
    threads: int = 4
    region_bytes: int = 64 << 20
    direct: bool = True

    def __post_init__(self) -> None:
        if not self.directories or len(set(self.directories)) < len(self.directories):
            raise TierUnusable("directories: name at least one, and none twice")
        if self.policy not in POLICY_NAMES:
            raise TierUnusable(f"policy: {self.policy!r} is none of {', '.join(POLICY_NAMES)}")
        if not 1 <= self.threads <= MOST_THREADS:
            raise TierUnusable(f"threads: {self.threads} is not 1..{MOST_THREADS}")
        if self.region_bytes % ALIGN or not (
            LEAST_REGION_BYTES <= self.region_bytes <= MOST_REGION_BYTES
        ):
            raise TierUnusable(
                f"region_bytes: {self.region_bytes} is no multiple of {ALIGN} in"
                f" {LEAST_REGION_BYTES}..{MOST_REGION_BYTES}"
            )
        if self.directory_bytes < self.region_bytes:
            raise TierUnusable(
                f"directory_bytes: {self.directory_bytes} is less than one region of"
                f" {self.region_bytes} bytes"
            )

    @classmethod
    def of(cls, options: TierOptions) -> DiskOptions:
        """Read a table. TierUnusable names the option that is wrong."""
        known = set(cls.__slots__)
        unknown = sorted(set(options) - known)
        if unknown:
            raise TierUnusable(f"{unknown[0]}: no such option; known: {', '.join(sorted(known))}")
        for name in ("directories", "directory_bytes"):
            if name not in options:
                raise TierUnusable(f"{name}: is needed")
        directories = options["directories"]
        named = directories if isinstance(directories, list) else [directories]
        if not all(isinstance(path, str) and path.startswith("/") for path in named):
            raise TierUnusable("directories: absolute paths are needed")
        sizes = {
            name: _size(name, options[name])
            for name in ("directory_bytes", "region_bytes", "threads")
            if name in options
        }
        policy, direct = options.get("policy", "lru"), options.get("direct", True)
        if not isinstance(policy, str):
            raise TierUnusable(f"policy: {policy!r} is no name")
        if not isinstance(direct, bool):
            raise TierUnusable(f"direct: {direct!r} is neither true nor false")
        paths = tuple(Path(str(path)) for path in named)
        return cls(paths, policy=policy, direct=direct, **sizes)


def _size(name: str, value: OptionValue) -> int:
    """A whole number, or one with a unit: 512MiB."""
    match = _SIZE.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool | float | list):
        raise TierUnusable(f"{name}: {value!r} is no size")
    return int(match[1]) * _UNITS[match[2]]
