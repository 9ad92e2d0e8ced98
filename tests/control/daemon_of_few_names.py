"""`kvd serve` with few namespaces, so that a test reaches the bound with a few sessions."""

from __future__ import annotations

import sys

from kvd.core.blocks import namespaces

MOST = 10

if __name__ == "__main__":
    from kvd.__main__ import main

    setattr(namespaces, "MAX_NAMESPACES", MOST)  # noqa: B010 - the module does not export it
    sys.exit(main())
