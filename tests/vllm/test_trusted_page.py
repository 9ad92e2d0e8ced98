"""Loads that go by the index page's word: what if it is not true any more?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.stand_process import Ask, stand_process

BLOCKS = 10  # of 16 tokens, in each prompt
TOKENS = BLOCKS * 16


@pytest.fixture(scope="module")
def ask(fork_server: None, make_daemon: Callable[[], NodeDaemon]) -> Iterator[Ask]:
    """Runs a case on a stand, with a daemon that the last case may kill."""
    daemon = make_daemon()
    daemon.start()
    with stand_process("trusting_stand", daemon.socket, daemon.pid) as asked:
        yield asked


def test_what_the_page_shows_whole_is_loaded_without_waiting(ask: Ask) -> None:
    told = ask("shown")
    assert (told["loads"], told["failed"], told["waits"]) == (1, 0, 0)
    assert told["computed"] < TOKENS
    assert told["written"], "the blocks have come"


@pytest.mark.parametrize("case", ["lied", "cleared", "evicted"])
def test_a_page_that_was_wrong_costs_one_load_and_the_request_is_computed(
    ask: Ask, case: str
) -> None:
    told = ask(case)
    assert (told["loads"], told["failed"]) == (1, 1)
    assert told["computed"] >= TOKENS
    assert told["written"] == 0, "a refused load writes nothing"


def test_after_it_was_wrong_it_is_believed_again_of_other_requests(ask: Ask) -> None:
    told = ask("shown")
    assert (told["loads"], told["failed"], told["waits"]) == (1, 0, 0)


def test_a_daemon_that_dies_before_the_load_costs_a_computation(ask: Ask) -> None:
    told = ask("killed")
    assert told["failed"] == 1
    assert told["computed"] >= TOKENS
    assert told["written"] == 0
