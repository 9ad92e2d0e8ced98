"""Ids that an application gives again: vLLM makes them unique, unless it is told not to."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import LENGTH, WHOLE, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon

NAME = "again"


@pytest.mark.parametrize("transfer", [None, {"do_remote_decode": True}], ids=["", "handed off"])
def test_an_id_that_comes_again_at_once_is_another_request(
    transfer: dict[str, bool] | None, start_with_kvd: StartEngine, kvd: NodeDaemon, plain: Plain
) -> None:
    engine = start_with_kvd(environment={"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"})
    prompts = [prompt(f"{transfer} {n}", LENGTH) for n in range(4)]
    right = plain.tokens(*prompts)
    for cached in (0, WHOLE):
        for each, truth in zip(prompts, right, strict=True):
            engine.submit(each, transfer=transfer, name=NAME)
            (answer,) = engine.finish(NAME)
            assert (answer.tokens, answer.cached) == (truth, cached)
        engine.settle()
        assert engine.reset()
    assert tokens(engine.store(*prompts)) == right
    engine.generate(prompt(f"{transfer} unseen", LENGTH))  # its steps give back what came late
    engine.settle()
    sessions = kvd.status().sessions
    assert [(each.leases, each.jobs_in_flight) for each in sessions if each.usable] == [(0, 0)]
    engine.end()
