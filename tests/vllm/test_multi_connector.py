"""kvd as one of several connectors, found by its name alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import HITS, LENGTH, WHOLE, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon, with_kvd
from tests.waiting import wait_until


def test_an_engine_loads_from_kvd_beside_another_connector(
    start_engine: StartEngine, kvd: NodeDaemon, plain: Plain, tmp_path: Path
) -> None:
    ours = with_kvd(kvd.socket)["kv_transfer_config"]
    del ours["kv_connector_module_path"]  # vLLM's plugins have told it who that is
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    engine = start_engine(kv_transfer_config=_multi(ours, other))
    engine.wait_for_daemon()
    prompts = [prompt(f"multi {n}", LENGTH) for n in range(3)]
    cold = engine.store(*prompts)
    warm = engine.generate(*prompts)
    assert tokens(cold) == tokens(warm) == plain.tokens(*prompts)
    assert engine.count(HITS) == 3 * WHOLE
    engine.settle()
    (rank,) = kvd.status().sessions[0].ranks
    assert rank.bytes_stored > 0
    wait_until(lambda: kvd.bytes_loaded() == [rank.bytes_stored])  # all of it came from kvd
    engine.end()


@pytest.mark.parametrize(
    ("outer", "fix"),
    [
        ({"kv_role": "kv_both"}, '"kv_load_failure_policy":"recompute"'),  # vLLM's default is fail
        (
            {"kv_role": "kv_producer", "kv_load_failure_policy": "recompute"},
            '"kv_role":"kv_both"',
        ),
    ],
)
def test_an_outer_configuration_that_cannot_work_is_refused_at_the_start(
    start_engine: StartEngine, kvd: NodeDaemon, outer: dict[str, str], fix: str
) -> None:
    inner = {"connectors": [with_kvd(kvd.socket)["kv_transfer_config"]]}
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": inner, **outer}
    with pytest.raises(AssertionError, match=f"ValueError: .*{fix}"):
        start_engine(kv_transfer_config=both)


@pytest.mark.parametrize("nested", [False, True])
def test_two_of_one_daemons_are_refused_at_the_start(
    start_engine: StartEngine, kvd: NodeDaemon, nested: bool
) -> None:
    ours = with_kvd(kvd.socket)["kv_transfer_config"]
    second = _multi(ours) if nested else ours
    with pytest.raises(AssertionError, match="ValueError: KvdConnector is named twice for the dae"):
        start_engine(kv_transfer_config=_multi(ours, second))


def _multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [copy.deepcopy(each) for each in connectors]},
    }
