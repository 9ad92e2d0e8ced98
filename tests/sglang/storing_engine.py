"""A rank that stores one prompt after the other until it is killed: `SOCKET BEGAN FIRST`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.sglang import absent

absent.install()

from tests.sglang.prompts import keys, prompt  # noqa: E402 - SGLang can be imported only now
from tests.sglang.rig import Rank  # noqa: E402

if __name__ == "__main__":
    socket, began, first = sys.argv[1:]
    rank = Rank(socket)
    rank.wait_usable()
    Path(began).touch()
    for number in range(int(first), int(first) + 10_000):
        stored = rank.fill(prompt(number), seed=number)
        rank.backend.batch_set_v1(keys(number), stored)
        rank.free(stored)
