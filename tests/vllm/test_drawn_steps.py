"""Drawn runs of vLLM's scheduler over several cache groups: no read finds a wrong byte."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.stand_process import stand_process
from tests.waiting import wait_until

STEPS = 120
TRIES = itertools.count()  # of a test that is run once more
FULL, WINDOW, STATE = (16,), (16, 40), (32, 0, True)  # tokens of a block, window, recurrent
ENGINES: dict[str, tuple[list[tuple[Any, ...]], dict[str, Any]]] = {
    "windows, blocks of several": ([FULL, WINDOW, (16, 33)], {"blocks_per_chunk": 2}),
    "a window of wider blocks, stored lazily": ([FULL, (32, 70)], {"store_mode": "lazy"}),
    "states": ([(32,), STATE, STATE], {}),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_several_groups_store_and_load_is_right_and_nothing_stays(
    fork_server: None, kvd: NodeDaemon, engine: str
) -> None:
    groups, options = ENGINES[engine]
    with stand_process("drawn_stand", kvd.socket, groups, options) as ask:
        for seed in (1, 2):
            told = ask(("drawn", seed, STEPS))
            assert told["left"] == {}
            assert told["audited"] > 20, told
            assert told["loaded"] > 20, told
        assert told["updated"] > 0, "no reset let the model become another one"


def test_who_reads_no_cache_stores_again_after_a_reset(fork_server: None, kvd: NodeDaemon) -> None:
    with stand_process("drawn_stand", kvd.socket, [FULL], {}) as ask:
        told = ask(("skipping", "skips"))
        assert told["before"] > 0
        assert told["after"] >= 6, "what it computed anew is of after the reset"


def test_two_resets_may_come_between_two_steps(fork_server: None, kvd: NodeDaemon) -> None:
    with stand_process("drawn_stand", kvd.socket, [FULL], {}) as ask:
        ask(("served", "its memory is registered", 16))
        wait_until(lambda: len(kvd.movers()) == 1)  # those of the stands before have ended
        told = ask(("reset twice", f"reset twice, {next(TRIES)}", *kvd.movers()))
        assert told["under way"]
        assert told["left"] == {}


def test_a_state_beyond_what_a_request_lets_be_stored_is_not(
    fork_server: None, kvd: NodeDaemon
) -> None:
    with stand_process("drawn_stand", kvd.socket, [(32,), STATE], {}) as ask:
        for most, ends in ((0, []), (40, [32]), (64, [32, 64]), (80, [32, 64, 80])):
            assert ask(("bounded", f"bounded {most}", most)) == {"ends": ends}


def test_a_beginning_shorter_than_a_block_is_found(fork_server: None, kvd: NodeDaemon) -> None:
    with stand_process("drawn_stand", kvd.socket, [(32,), STATE, STATE], {}) as ask:
        for length, found in ((20, 16), (31, 16), (40, 32)):
            assert ask(("tail", f"of {length}", length)) == {"found": found}, length
