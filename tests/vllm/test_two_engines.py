"""Two engines on one daemon at the same time."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import HITS, LENGTH, WHOLE, Engine, prompt, tokens


@pytest.fixture(scope="module")
def engines(start_with_kvd: StartEngine) -> tuple[Engine, Engine]:
    return start_with_kvd(), start_with_kvd()


def test_each_loads_what_the_other_stored_while_both_run(
    engines: tuple[Engine, Engine], plain: Plain
) -> None:
    one, other = engines
    left = [prompt(f"left {n}", LENGTH) for n in range(4)]
    right = [prompt(f"right {n}", LENGTH) for n in range(4)]
    for first, second in ((left, right), (right, left)):
        hits = one.count(HITS), other.count(HITS)
        at_one = [one.submit(each) for each in first]
        at_other = [other.submit(each) for each in second]
        assert tokens(one.finish(*at_one)) == plain.tokens(*first)
        assert tokens(other.finish(*at_other)) == plain.tokens(*second)
        one.settle()
        other.settle()
    assert one.count(HITS) - hits[0] == 4 * WHOLE
    assert other.count(HITS) - hits[1] == 4 * WHOLE


def test_both_may_store_the_same_prompt_at_once(
    engines: tuple[Engine, Engine], plain: Plain
) -> None:
    one, other = engines
    same = [prompt(f"same {n}", LENGTH) for n in range(4)]
    at_one = [one.submit(each) for each in same]
    at_other = [other.submit(each) for each in same]
    assert tokens(one.finish(*at_one)) == plain.tokens(*same)
    assert tokens(other.finish(*at_other)) == plain.tokens(*same)
    for engine in engines:
        engine.settle()
        hit = engine.count(HITS)
        assert engine.reset()
        assert tokens(engine.generate(*same)) == plain.tokens(*same)
        assert engine.count(HITS) - hit == 4 * WHOLE
