"""A process that writes into a disk store until it is killed: options as JSON, and a seed."""

from __future__ import annotations

import json
import sys

import numpy as np

from kvd.tiers.disk.store import DiskStore
from tests.tiers.contract import ONE, OTHER, content, key, soon, source

if __name__ == "__main__":
    draw = np.random.default_rng(int(sys.argv[2]))
    store = DiskStore(json.loads(sys.argv[1]))
    sys.stdout.write("open\n")
    sys.stdout.flush()
    while True:
        some = [int(n) for n in draw.choice(200, 8, replace=False)]
        scope = OTHER if draw.integers(4) == 0 else ONE
        store.write([source(key(n, scope), content((n, scope))) for n in some], soon())
        if draw.integers(6) == 0:
            store.delete_scopes([OTHER], soon())
