"""What the benchmarks set aside, so that two sides get memory of the same kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import scattered

FREE = """\
Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3
Node 0, zone   Normal      7      5      0      0      0      0      0      0      2     99     99
"""


def test_free_stretches_below_two_mebibytes_count() -> None:
    assert scattered.scattered_bytes(FREE) == (7 + 5 * 2 + (1 + 2) * 256) * 4096


def test_it_is_held_and_then_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = tmp_path / "buddyinfo"
    free.write_text(FREE)
    monkeypatch.setattr(scattered, "_FREE", free)
    before = _resident()
    with scattered.set_aside() as size:
        assert size == scattered.scattered_bytes(FREE)
        assert _resident() >= before + size - (1 << 20)
    assert _resident() < before + size // 2


def test_a_kernel_that_says_nothing_sets_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scattered, "_FREE", tmp_path / "missing")
    with scattered.set_aside() as size:
        assert size == 0


def _resident() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024
