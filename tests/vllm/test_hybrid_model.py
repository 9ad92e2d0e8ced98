"""A model with two kinds of attention: a hit is where every group of layers has what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_TOKENS, HITS, LENGTH, WHOLE, Engine, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.test_lazy_stores import LAZY, SMALL
from tests.vllm.tiny_model import SLIDING_WINDOW


@pytest.fixture(scope="module")
def plain(plain_hybrid: Plain) -> Plain:
    """The same model's answers without a connector."""
    return plain_hybrid


@pytest.fixture(scope="module")
def engine(start_with_kvd: StartEngine, hybrid_model: Path, plain: Plain) -> Engine:
    return start_with_kvd(model=str(hybrid_model))


def test_the_daemon_knows_both_groups(engine: Engine, kvd: NodeDaemon) -> None:
    (namespace,) = kvd.status().namespaces
    groups = {text for name, text in namespace.fields.items() if name.startswith("groups[")}
    assert len(groups) == 2
    assert any(f" window={SLIDING_WINDOW} " in text for text in groups)


def test_both_groups_come_back(engine: Engine, plain: Plain) -> None:
    assert LENGTH > 2 * SLIDING_WINDOW, "so that blocks fall out of the window"
    prompts = [prompt(f"hybrid {n}", LENGTH) for n in range(4)]
    cold = engine.store(*prompts)
    warm = engine.generate(*prompts)
    assert tokens(cold) == tokens(warm) == plain.tokens(*prompts)
    assert engine.count(HITS) == 4 * WHOLE


def test_a_prompt_that_branches_off_gets_the_right_tokens(engine: Engine, plain: Plain) -> None:
    long = prompt("hybrid long", 2 * LENGTH)
    engine.store(long, max_tokens=40)
    branches = [
        prompt(f"hybrid branch {n}", 40, after=long[: n * BLOCK_TOKENS]) for n in (1, 3, 5, 8)
    ]
    assert tokens(engine.generate(*branches, long)) == plain.tokens(*branches, long)


def test_a_new_engine_is_warm(
    engine: Engine, start_with_kvd: StartEngine, hybrid_model: Path, plain: Plain
) -> None:
    known = prompt("hybrid known", LENGTH)
    engine.generate(known)
    engine.settle()
    new = start_with_kvd(model=str(hybrid_model))
    assert tokens(new.generate(known)) == plain.tokens(known)
    assert new.count(HITS) == WHOLE
    new.end()


def test_lazily_both_groups_come_back_once_they_have_left_the_device(
    start_with_kvd: StartEngine, hybrid_model: Path, plain: Plain
) -> None:
    engine = start_with_kvd(LAZY, **SMALL, model=str(hybrid_model))
    prompts = [prompt(f"lazy hybrid {n}", LENGTH) for n in range(16)]
    right = plain.tokens(*prompts)
    assert tokens([engine.generate(each)[0] for each in prompts]) == right
    assert engine.count(HITS) == 0
    engine.settle()
    again = [engine.generate(each)[0] for each in prompts[:4]]
    assert tokens(again) == right[:4]
    assert [answer.cached for answer in again] == [WHOLE] * 4
    assert engine.count(HITS) == 4 * WHOLE
    for _ in range(2):
        assert tokens(engine.generate(*prompts, max_tokens=40)) == plain.tokens(
            *prompts, max_tokens=40
        )
    engine.settle()
    engine.end()
