"""What several modules of these tests run with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd import native


@pytest.fixture(scope="module", params=["native", "numpy"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything of the module by the native library, and by numpy."""
    if request.param == "native" and native.library() is None:
        pytest.skip(f"no native library: {native.why_not()}")
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "numpy":
            patched.setattr(native, "library", lambda: None)
        yield
