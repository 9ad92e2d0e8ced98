"""A short run of the loop of crashes with a disk tier; a long one is started by hand."""

from __future__ import annotations

from tests.faults.crash_loop import crash_loop


def test_what_comes_from_crashed_disks_is_right() -> None:
    done = crash_loop(120.0, seed=7, turns=5, tier=True)
    assert done["turns"] == 5
    assert done["from the tier"] > 0
