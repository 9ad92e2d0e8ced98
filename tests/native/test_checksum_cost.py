"""When the daemon takes checksums for almost free."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvd import native
from kvd.mover.checksum_cost import why_checksums_cost


@pytest.mark.parametrize("library", [True, False], ids=["library", "numpy"])
@pytest.mark.parametrize("cupy", [True, False], ids=["cupy", "no-cupy"])
@pytest.mark.parametrize("device", ["nvidia0", "nvidia11", "nvidiactl", ""])
def test_checksums_cost_where_numpy_copies_and_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, *, library: bool, cupy: bool
) -> None:
    monkeypatch.setattr(native, "library", lambda: object() if library else None)
    monkeypatch.setattr(native, "why_not", lambda: "no compiler")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object() if cupy else None)
    if device:
        (tmp_path / device).touch()
    why = why_checksums_cost(tmp_path)
    if not library:
        assert "no compiler" in why
    elif cupy and device in ("nvidia0", "nvidia11"):
        assert "GPUs" in why
    else:
        assert why == ""
