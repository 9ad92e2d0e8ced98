"""`kvd serve` with bounds of a test's choice, where reaching the real ones takes long.

KVD_TEST_BOUNDS says them: `kvd.control.access.companion:MAX_STRANGERS=8 …`. One that another module
imports is named in that one.
"""

from __future__ import annotations

import importlib
import os
import sys

VARIABLE = "KVD_TEST_BOUNDS"


def lower(bounds: str) -> None:
    """Set each of them; a bound that is not there is an error."""
    for bound in bounds.split():
        place, _, value = bound.partition("=")
        module, _, name = place.partition(":")
        found = importlib.import_module(module)
        kind = type(getattr(found, name))
        setattr(found, name, kind(value))


if __name__ == "__main__":
    from kvd.__main__ import main

    lower(os.environ[VARIABLE])
    sys.exit(main())
