"""`kvd serve` with few descriptors, so that a test reaches the bound of connections soon."""

from __future__ import annotations

import resource
import sys

MOST = 128  # a quarter of the descriptors

if __name__ == "__main__":
    from kvd.__main__ import main

    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * MOST, 4 * MOST))
    sys.exit(main())
