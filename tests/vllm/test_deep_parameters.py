"""Transfer parameters deeper than any message may be: the request is served, the session stays."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_TOKENS, FAILED_LOADS, SESSIONS, Engine, prompt, tokens

WHOLE = 4 * BLOCK_TOKENS
LENGTH = WHOLE + 8


def dicts(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"within": value}
    return value


def lists(depth: int) -> dict[str, Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return {"within": value}


@pytest.fixture(scope="module")
def engine(start_with_kvd: StartEngine) -> Engine:
    return start_with_kvd()


@pytest.mark.parametrize("transfer", [dicts(33), lists(48)], ids=["dicts", "lists"])
def test_a_request_with_deep_parameters_is_stored_and_hits(
    engine: Engine, plain: Plain, transfer: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    before = engine.counts()
    asked = prompt(request.node.name, LENGTH)
    [cold] = engine.finish(engine.submit(asked, transfer=transfer))
    engine.settle()
    assert engine.reset()
    [warm] = engine.finish(engine.submit(asked, transfer=transfer))
    engine.settle()
    assert tokens([cold, warm]) == plain.tokens(asked, asked)
    assert (cold.cached, warm.cached) == (0, WHOLE)
    after = engine.counts()
    assert after[SESSIONS] == before[SESSIONS], "the session was lost"
    assert after.get(FAILED_LOADS, 0) == before.get(FAILED_LOADS, 0)
