"""`kvd serve` that lives on without its files, so that a test has time to ask what it finds."""

from __future__ import annotations

import sys

from kvd.pool.pool import Pool

if __name__ == "__main__":
    from kvd.__main__ import main

    setattr(Pool, "upkeep", lambda _pool: None)  # noqa: B010 - mypy takes no other
    sys.exit(main())
