"""Everything that can befall a node, for as long as wanted.

python -m tests.chaos --minutes 60 --seed 1
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter

from tests import daemon_process, leaks
from tests.chaos.loop import TURNS, Worst, adopt_orphans, drawn, episode

START_SECONDS = 150.0  # a busy machine's; what hangs for longer than a loop's bar is told


def chaos(seconds: float, seed: int, turns: int) -> tuple[Counter[str], Worst]:
    """Episodes until the time is over or so many turns are done; each prints a line."""
    done, worst = Counter[str](), Worst()
    until = time.monotonic() + seconds
    number = 0
    own_tmpfs = leaks.take_own_shared_memory()
    adopt_orphans()
    daemon_process.START_SECONDS = START_SECONDS
    while time.monotonic() < until and done["turns"] < turns:
        number += 1
        # Each episode has dice of its own: one can be played again without those before it.
        own = random.Random(f"{seed}/{number}")
        setting = drawn(own, own_tmpfs=own_tmpfs)
        tell(f"episode {number}: {setting}")
        done += episode(own, setting, until, min(TURNS, turns - done["turns"]), worst)
        tell(f"  {done['turns']} turns, {done['verified']} blocks verified, {worst}")
    return done, worst


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1 << 30)
    given = parser.parse_args()
    try:
        done, worst = chaos(60 * given.minutes, given.seed, given.turns)
    except Exception as error:  # noqa: BLE001 - whatever it is, the seed goes with it
        tell(f"seed {given.seed}:\n{''.join(traceback.format_tb(error.__traceback__))}{error!r}")
        for note in getattr(error, "__notes__", ()):
            tell(note)
        return 1
    for name, count in sorted(done.items()):
        tell(f"{count:>9} {name}")
    tell(
        f"longest until all was whole {worst.whole_seconds:.1f} s, longest start"
        f" {worst.start_seconds:.1f} s, descriptors at most {worst.descriptors},"
        f" memory at most {worst.mib:.0f} MiB"
    )
    for line in (*worst.hangs, *worst.leaks):
        tell(line)
    tell(
        f"seed {given.seed}: {done['turns']} turns, 0 wrong bytes, 0 lost blocks,"
        f" {len(worst.hangs)} hangs, {len(worst.leaks)} leaks"
    )
    return 1 if worst.hangs or worst.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
