"""`kvd serve` with few scopes, so that a test reaches the bound with a few accounts."""

from __future__ import annotations

import sys

from kvd.core.blocks import namespaces
from kvd.core.upkeep import clear

MOST = 64

if __name__ == "__main__":
    from kvd.__main__ import main

    for module in (clear, namespaces):
        setattr(module, "MAX_SCOPES", MOST)  # noqa: B010 - the modules do not export it
    sys.exit(main())
