"""Entry of a tier's process: `python -m kvd.tiers <descriptor of control> <pid of control>`."""

from __future__ import annotations

import os
import sys

from kvd.tiers.child import serve

if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
    # Straight out: mappings and threads end with the process, nothing is worth unwinding.
    sys.stderr.flush()
    os._exit(0)
