"""Throws what may not be at every parser and at a real daemon, for as long as wanted.

python -m tests.fuzz --minutes 5 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests import leaks
from tests.fuzz.corpus import CORPUS, keep, kept
from tests.fuzz.live import Live, lives
from tests.fuzz.pool_files import pool_files
from tests.fuzz.targets import TARGETS, mutated

SLOW_SECONDS = 5.0
ROUNDS = 200  # of each target, between two looks at the clock
FILES = 10  # of a whole pool's, which is slow
LIVE_ROUNDS = 500
TOLD_ROUNDS = 20
GROWTH_KIB = 192 << 10  # of this process, which holds many large messages


def fuzz(seconds: float, most: int, dice: random.Random, live: Live) -> Iterator[Counter[str]]:
    """Inputs by target so far; AssertionError, with the input, where one had no proper answer."""
    done = Counter[str]()
    until, grown = time.monotonic() + seconds, 0
    for method, message in kept():
        live.replay(method, message)
    while time.monotonic() < until and (done + live.done).total() < most:
        for target, valid in TARGETS.items():
            for _ in range(FILES if target is pool_files else ROUNDS):
                content = mutated(valid, dice)
                began = time.monotonic()
                try:
                    target(content)
                except Exception as error:
                    raise AssertionError(f"{target.__name__} of {content[:400]!r}") from error
                spent = time.monotonic() - began
                assert spent < SLOW_SECONDS, f"{target.__name__} took {spent:.1f} s: {content!r}"
                done[target.__name__] += 1
        live.round(LIVE_ROUNDS)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = grown or peak
        assert peak - grown < GROWTH_KIB, f"memory grew by {peak - grown} KiB"
        yield done + live.done


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--inputs", type=int, default=1 << 40, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help=f"write what had each answer, as {CORPUS.name}")
    given = parser.parse_args()
    leaks.take_own_shared_memory()
    done, dice = Counter[str](), random.Random(given.seed)
    with contextlib.ExitStack() as stack:
        live = stack.enter_context(lives(dice))
        for sofar in fuzz(60 * given.minutes, given.inputs, dice, live):
            done = sofar
            if live.rounds % TOLD_ROUNDS == 0:
                tell(f"{done.total()} inputs; {live.figures()}")
        if given.keep is not None:
            keep(given.keep, live.seen)
        figures = live.figures()
    tell(f"seed {given.seed}: {done.total()} inputs, 0 crashes: {dict(done)}")
    tell(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
