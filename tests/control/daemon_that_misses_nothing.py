"""`kvd serve` that lives on without its registry, so that a test has time to ask what it finds."""

from __future__ import annotations

import sys

from kvd.pool.registry import Registry

if __name__ == "__main__":
    from kvd.__main__ import main

    setattr(Registry, "missing", lambda _registry: None)  # noqa: B010 - mypy takes no other
    sys.exit(main())
