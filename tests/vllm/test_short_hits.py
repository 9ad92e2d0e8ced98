"""`min_load_tokens`: what is found of fewer tokens is computed, not loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.stand_process import Ask, stand_process

LEAST = 128  # eight blocks


@pytest.fixture(scope="module")
def ask(fork_server: None, make_daemon: Callable[[], NodeDaemon]) -> Iterator[Ask]:
    daemon = make_daemon()
    daemon.start()
    with stand_process("short_hits_stand", daemon.socket) as asked:
        assert asked(LEAST) == {"least": LEAST}
        yield asked


@pytest.mark.parametrize(
    ("stored", "warm", "asked", "cached"),
    [
        (LEAST, 0, LEAST + 20, LEAST),
        (LEAST - 16, 0, LEAST + 20, 0),
        (LEAST + 96, 96, LEAST + 96 + 20, LEAST + 96),
        (LEAST + 80, 96, LEAST + 96 + 20, 96),
    ],
    ids=["enough", "a block too few", "enough beside the device's", "too few beside the device's"],
)
def test_too_few_are_not_loaded(ask: Ask, stored: int, warm: int, asked: int, cached: int) -> None:
    assert ask((stored, warm, asked))["cached"] == cached


def test_a_prompt_that_can_have_no_more_is_not_looked_up(ask: Ask) -> None:
    assert ask((LEAST, 0, LEAST)) == {"cached": 0, "lookups": 0}
    assert ask((LEAST, 0, LEAST + 1)) == {"cached": LEAST, "lookups": 1}
