"""Throws mutations of valid bytes at every parser, for as long as wanted.

python -m tests.fuzz --minutes 5 --seed 1
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter

from tests.fuzz.targets import TARGETS, mutated

SLOW_SECONDS = 5.0
ROUNDS = 200  # of each target, between two looks at the clock
GROWTH_KIB = 64 << 10


def fuzz(seconds: float, seed: int) -> Counter[str]:
    """Inputs by target; AssertionError, with the input, where one was not answered properly."""
    dice, done = random.Random(seed), Counter[str]()
    until, grown = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for target, valid in TARGETS.items():
            for _ in range(ROUNDS):
                content = mutated(valid, dice)
                began = time.monotonic()
                try:
                    target(content)
                except Exception as error:
                    raise AssertionError(f"{target.__name__} of {content[:400]!r}") from error
                spent = time.monotonic() - began
                assert spent < SLOW_SECONDS, f"{target.__name__} took {spent:.1f} s: {content!r}"
                done[target.__name__] += 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = grown or peak
        assert peak - grown < GROWTH_KIB, f"memory grew by {peak - grown} KiB"
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    done = fuzz(60 * given.minutes, given.seed)
    sys.stdout.write(f"seed {given.seed}: {done.total()} inputs, 0 crashes: {dict(done)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
