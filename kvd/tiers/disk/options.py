"""The options of a disk tier, as the configuration's table gives them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvd.core.policy import POLICY_NAMES
from kvd.tiers.options import Reader, path, read_options, size, switch, text, whole
from kvd.tiers.store import OptionValue, TierOptions, TierUnusable

ALIGN = 4096  # of everything in a slab: what O_DIRECT asks of the disks that there are
LEAST_REGION_BYTES = 64 << 10
MOST_REGION_BYTES = 1 << 30
MOST_THREADS = 64


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
        return cls(**read_options(options, _READERS, ["directories", "directory_bytes"]))


def _directories(given: OptionValue) -> tuple[Path, ...]:
    """Absolute paths, or a single one."""
    return tuple(path(each) for each in (given if isinstance(given, list) else [given]))


def _threads(given: OptionValue) -> int:
    """A whole number, which may be written as a text."""
    is_digits = isinstance(given, str) and given.strip().isdecimal()
    count: int = whole(1, MOST_THREADS)(int(str(given)) if is_digits else given)
    return count


_READERS: dict[str, Reader] = {
    "directories": _directories,
    "directory_bytes": size(1, 1 << 60),
    "policy": text("|".join(POLICY_NAMES), f"one of {', '.join(POLICY_NAMES)}"),
    "threads": _threads,
    "region_bytes": size(LEAST_REGION_BYTES, MOST_REGION_BYTES),
    "direct": switch,
}
