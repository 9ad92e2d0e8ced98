"""The cache outlives the engine: a new one loads what the old one stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_TOKENS, HITS, LENGTH, WHOLE, Engine, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon


@pytest.mark.parametrize("leave", [Engine.end, Engine.kill], ids=["in order", "killed"])
def test_an_engine_is_warm_after_a_restart(
    leave: Callable[[Engine], None], start_with_kvd: StartEngine, kvd: NodeDaemon, plain: Plain
) -> None:
    prompts = [prompt(f"{leave.__name__} {n}", LENGTH) for n in range(4)]
    named = {"engine_name": f"engine-{leave.__name__}"}  # as a node's operator names it
    old = start_with_kvd(named)
    assert tokens(old.generate(*prompts)) == plain.tokens(*prompts)
    old.settle()
    leave(old)
    new = start_with_kvd(named)
    assert tokens(new.generate(*prompts)) == plain.tokens(*prompts)
    assert new.count(HITS) == 4 * WHOLE
    new.end()


def test_an_engine_killed_amid_its_stores_leaves_no_wrong_block(
    start_with_kvd: StartEngine, kvd: NodeDaemon, plain: Plain
) -> None:
    prompts = [prompt(f"amid {n}", 12 * BLOCK_TOKENS) for n in range(6)]
    old = start_with_kvd()
    requests = [old.submit(each, max_tokens=40) for each in prompts]
    old.wait(lambda: any(old.tokens_of(request) for request in requests))
    old.kill()
    new = start_with_kvd()
    assert tokens(new.generate(*prompts)) == plain.tokens(*prompts)
    new.end()
