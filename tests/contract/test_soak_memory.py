"""The soak counts what a process itself has taken, not what it shares with its neighbours."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from benchmarks.footprint import anonymous_mib

SIZE = 32 << 20
MIB = 1 << 20


def test_pages_of_files_are_not_counted_and_own_ones_are(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    before = anonymous_mib(os.getpid())
    with path.open("rb") as file, mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # every page is there now
        with_file = anonymous_mib(os.getpid())
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own:
        own.write(b"\1" * SIZE)
        with_own = anonymous_mib(os.getpid())
    assert with_file - before < SIZE / MIB / 2
    assert with_own - before > SIZE / MIB / 2
