"""kvd that says what it has left for Python's collector, once a file asks for it.

What ends in circles waits for a whole collection, and the daemon makes one in a thousand times as
long as Python would. So nothing of an engine that is gone may be in a circle of ours.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from pathlib import Path
from threading import Thread

from kvd.__main__ import main

VARIABLE = "KVD_TEST_GARBAGE"  # the file that it goes to; the same with .asked asks for it


def answer() -> None:
    """Collect whenever that is asked for, and write how many of each type there were."""
    path = Path(os.environ[VARIABLE])
    asked, made = path.with_suffix(".asked"), path.with_suffix(".made")
    while True:
        time.sleep(0.05)
        if not asked.exists():
            continue
        asked.unlink()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
        gc.set_debug(0)
        gc.garbage.clear()
        made.write_text("".join(f"{kind} {count}\n" for kind, count in kinds.most_common()))
        made.rename(path)


if __name__ == "__main__":
    Thread(target=answer, daemon=True).start()
    sys.exit(main())
