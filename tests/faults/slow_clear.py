"""kvd, with clears that stand still after the first pieces: to be killed in the middle of one."""

from __future__ import annotations

import sys

from kvd.__main__ import main
from kvd.core.model import backlog
from kvd.core.model.state import Namespace
from kvd.core.model.turn import Turn
from kvd.core.upkeep import clear

PIECES = 3
done: list[int] = []
give_up = clear._give_up


def a_few(turn: Turn, namespace: Namespace, left: backlog.Clear) -> None:
    if len(done) < PIECES:
        done.append(1)
        give_up(turn, namespace, left)


if __name__ == "__main__":
    backlog.BLOCKS_AT_ONCE = 1
    clear._give_up = a_few
    sys.exit(main())
