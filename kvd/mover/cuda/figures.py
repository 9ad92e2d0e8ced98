"""What a calibration measured, kept in a file for the next mover of the same kind."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvd.core.events import JobKind
from kvd.mover.facts import MOST_BYTES_PER_SECOND
from kvd.mover.layout import GpuConfig, GroupMap

Speeds = Mapping[str, float]  # bytes a second by copier's name
Figures = Mapping[JobKind, Speeds]

_FORMAT = 1  # of the file, and of what is measured
_MOST_BYTES = 64 << 10
MOST_FILES = 256  # layouts are the engines' to choose, and the directory lies in memory


@dataclass(frozen=True, slots=True)
class Key:
    """What measured figures hold for; for anything else they mean nothing."""

    uuid: str
    driver: str
    layout: str  # a digest of what was copied, and by what

    @classmethod
    def of(cls, gpu: GpuConfig, driver: str, sample: GroupMap, names: Sequence[str]) -> Key:
        """The key of figures of these copiers, for that sample."""
        what = [gpu.batch_descriptors, list(names), asdict(sample)]
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode())
        return cls(gpu.uuid, driver, digest.hexdigest()[:16])

    def path(self, directory: Path) -> Path:
        """The file that keeps them."""
        name = f"{self.uuid}-{self.driver}-{self.layout}"
        return directory / (re.sub(r"[^A-Za-z0-9.-]", "_", name) + ".json")


def read(directory: Path, key: Key, names: Sequence[str]) -> Figures | None:
    """What is kept under the key. None where there is nothing, or nothing that can be used: a
    damaged file, another version's, another key's, one with copiers that are not among `names`.
    """
    try:
        with key.path(directory).open("rb") as file:
            kept = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(kept, dict):
        return None
    if kept.get("format") != _FORMAT or kept.get("key") != asdict(key):
        return None
    speeds = {kind: _checked(kept.get(kind.name.lower()), names) for kind in JobKind}
    return speeds if all(speeds.values()) else None


def write(directory: Path, key: Key, found: Figures) -> None:
    """Keep figures, whole or not at all, and the MOST_FILES youngest in all.

    OSError where that can't be.
    """
    kept = {"format": _FORMAT, "key": asdict(key)}
    kept |= {kind.name.lower(): dict(found[kind]) for kind in JobKind}
    directory.mkdir(mode=0o700, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix=".new-", delete=False) as file:
        fresh = Path(file.name)
        try:
            json.dump(kept, file, indent=1)
            file.close()
            fresh.replace(key.path(directory))
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
    by_age = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in by_age[: max(0, len(by_age) - MOST_FILES)]:
        path.unlink(missing_ok=True)


def _checked(speeds: object, names: Sequence[str]) -> Speeds:
    """The speeds as they should be, or none."""
    if not isinstance(speeds, dict):
        return {}
    for name, speed in speeds.items():
        if name not in names or not isinstance(speed, float):
            return {}
        if not 0 < speed <= MOST_BYTES_PER_SECOND:
            return {}
    return speeds
