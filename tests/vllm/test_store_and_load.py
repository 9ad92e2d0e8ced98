"""What an engine stored comes back from the daemon, with the same tokens."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    HITS,
    LENGTH,
    QUERIES,
    WHOLE,
    Engine,
    prompt,
    tokens,
)
from tests.vllm.node_daemon import NodeDaemon
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def engine(start_with_kvd: StartEngine) -> Engine:
    return start_with_kvd()


def test_every_whole_block_of_a_prompt_comes_back(
    engine: Engine, plain: Plain, kvd: NodeDaemon
) -> None:
    prompts = [prompt(f"whole {n}", LENGTH) for n in range(4)]
    cold = engine.generate(*prompts)
    engine.settle()
    assert kvd.ready_blocks() >= 4 * 6
    asked, hit = engine.count(QUERIES), engine.count(HITS)
    assert engine.reset()
    warm = engine.generate(*prompts)
    assert tokens(cold) == tokens(warm) == plain.tokens(*prompts)
    assert engine.count(HITS) - hit == 4 * WHOLE
    assert engine.count(QUERIES) - asked == 4 * LENGTH
    assert [answer.cached for answer in warm] == [WHOLE] * 4


def test_a_longer_prompt_loads_what_it_has_in_common(engine: Engine, plain: Plain) -> None:
    short = prompt("short", LENGTH)
    engine.store(short)
    longer = prompt("more", 3 * BLOCK_TOKENS, after=short)
    other = prompt("else", 3 * BLOCK_TOKENS, after=short[: 2 * BLOCK_TOKENS])
    answers = engine.generate(longer, other)
    assert tokens(answers) == plain.tokens(longer, other)
    assert [answer.cached for answer in answers] == [WHOLE, 2 * BLOCK_TOKENS]


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_prompt_of_whole_blocks_is_loaded_whole(
    engine: Engine, plain: Plain, blocks: int
) -> None:
    exact = prompt(f"exactly {blocks}", blocks * BLOCK_TOKENS)
    engine.store(exact)
    hit = engine.count(HITS)
    answers = engine.generate(exact)
    assert tokens(answers) == plain.tokens(exact)
    assert engine.count(HITS) - hit == blocks * BLOCK_TOKENS


def test_requests_with_one_prefix_load_it_once_for_all(
    engine: Engine, plain: Plain, kvd: NodeDaemon
) -> None:
    common = prompt("common", LENGTH)
    engine.store(common)
    (before,) = kvd.bytes_loaded()
    prompts = [prompt(f"branch {n}", 20, after=common) for n in range(4)]
    answers = engine.generate(*prompts)
    assert tokens(answers) == plain.tokens(*prompts)
    assert [answer.cached for answer in answers] == [WHOLE] * 4
    engine.settle()
    once = before + WHOLE // BLOCK_TOKENS * BLOCK_BYTES
    wait_until(lambda: kvd.bytes_loaded()[0] >= once)
    assert kvd.bytes_loaded() == [once]


def test_blocks_on_the_device_are_not_loaded_again(engine: Engine, plain: Plain) -> None:
    known = prompt("on the device", LENGTH)
    engine.generate(known)
    engine.settle()
    hit = engine.count(HITS)
    answers = engine.generate(known)
    assert tokens(answers) == plain.tokens(known)
    assert answers[0].cached == WHOLE
    assert engine.count(HITS) == hit


def test_what_was_never_stored_is_no_hit(engine: Engine, plain: Plain) -> None:
    hit = engine.count(HITS)
    new = prompt("new", LENGTH)
    answers = engine.generate(new)
    assert tokens(answers) == plain.tokens(new)
    assert engine.count(HITS) == hit
