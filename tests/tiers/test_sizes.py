"""A size says the same of the pool and of a tier: 1 GB is no GiB."""

from __future__ import annotations

import pytest

from kvd.config.values import parse_size
from kvd.tiers.disk.options import DiskOptions
from kvd.tiers.options import UNITS, bytes_of
from kvd.tiers.store import TierUnusable


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("number", ["1", "500", "1.5"])
def test_each_unit_is_as_large_everywhere(number: str, unit: str) -> None:
    for text in (f"{number}{unit}", f"{number} {unit.upper()}"):
        assert bytes_of(text) == parse_size(text, lambda: 0) == int(float(number) * UNITS[unit])


def test_a_disk_of_500_gb_is_asked_for_no_more() -> None:
    options = DiskOptions.of({"directories": ["/data"], "directory_bytes": "500GB"})
    assert options.directory_bytes == 500 * 10**9


@pytest.mark.parametrize("given", ["", "GiB", "-1", "1XB", "60%", "1e9", True, 0.5, ["1GiB"]])
def test_what_is_no_size_is_refused(given: str | bool | float | list[str]) -> None:
    assert bytes_of(given) is None
    with pytest.raises(
        TierUnusable, match=r"directory_bytes: .* is not a size from .* such as 4MiB"
    ):
        DiskOptions.of({"directories": ["/data"], "directory_bytes": given})
