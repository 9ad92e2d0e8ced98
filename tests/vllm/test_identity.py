"""An engine's name to the daemon, and the configurations that are refused at start."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from vllm.config.pooler import PoolerConfig

from kvd_client.integrations.vllm.identity.namespace import check_config, engine_identity
from tests.vllm.configurations import Configuration, configure


@pytest.fixture(scope="module")
def base(model: Path) -> Configuration:
    return configure(model)


def with_settings(base: Configuration, **settings: Any) -> Any:
    """The configuration with settings of `kv_transfer_config` or `parallel_config` changed."""
    vllm_config = copy.deepcopy(base.vllm)
    for name, value in settings.items():
        holder = vllm_config.kv_transfer_config
        if not hasattr(holder, name):
            holder = vllm_config.parallel_config
        setattr(holder, name, value)
    return vllm_config


def test_every_process_of_a_start_comes_to_the_same_identity(base: Configuration) -> None:
    in_worker = pickle.loads(pickle.dumps(base.vllm))
    in_worker.parallel_config.rank = 1
    assert engine_identity(in_worker) == engine_identity(base.vllm)


def test_another_start_is_another_engine_unless_it_has_a_name(
    base: Configuration, model: Path
) -> None:
    one, two = engine_identity(base.vllm), engine_identity(configure(model).vllm)
    assert one.engine_id != two.engine_id
    assert one.boot_nonce != two.boot_nonce
    named = [engine_identity(configure(model, {"engine_name": "mine"}).vllm) for _ in range(2)]
    assert [each.engine_id for each in named] == ["mine", "mine"]
    assert named[0].boot_nonce != named[1].boot_nonce


def test_a_start_with_vllms_engine_id_given_is_still_a_start_of_its_own(model: Path) -> None:
    def start() -> Any:
        vllm_config = configure(model).vllm
        vllm_config.kv_transfer_config.engine_id = "fixed"
        return engine_identity(vllm_config)

    one, two = start(), start()
    assert one.engine_id == two.engine_id == "fixed"
    assert one.boot_nonce != two.boot_nonce


def test_replicas_are_engines_of_their_own(base: Configuration) -> None:
    replicas = [
        engine_identity(with_settings(base, data_parallel_size=2, data_parallel_index=index))
        for index in range(2)
    ]
    assert len({each.engine_id for each in replicas}) == 2
    assert len({each.boot_nonce for each in replicas}) == 2


def test_a_sound_configuration_is_taken(base: Configuration) -> None:
    check_config(base.vllm)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy":"recompute"'),
        ({"kv_role": "kv_producer"}, '"kv_role":"kv_both"'),
        ({"nnodes": 2}, "within a node"),
        ({"world_size": 257}, "allows 256"),
        ({"kv_connector_extra_config": {"cpu_bytes_to_use": 1}}, "--pool-bytes"),
    ],
)
def test_what_can_t_work_is_refused_with_the_fix(
    base: Configuration, settings: dict[str, Any], fix: str
) -> None:
    with pytest.raises(ValueError, match=r"kv|rank") as caught:
        check_config(with_settings(base, **settings))
    assert fix in str(caught.value)


def test_another_processor_is_refused(base: Configuration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(ValueError, match="x86-64"):
        check_config(base.vllm)


def pooling(model: Path, kind: str) -> Any:
    """The configuration of an engine that makes one vector of a prompt."""
    pooler = PoolerConfig(pooling_type=kind)
    return configure(model, runner="pooling", convert="embed", pooler_config=pooler).vllm


def test_pooling_over_tokens_that_a_hit_leaves_out_is_refused(model: Path) -> None:
    for kind in ("MEAN", "CLS"):
        with pytest.raises(ValueError, match=f"{kind}.*Leave --kv-transfer-config out"):
            check_config(pooling(model, kind))


def test_pooling_by_the_last_token_is_taken(model: Path) -> None:
    check_config(pooling(model, "LAST"))


def test_what_a_model_with_reference_windows_generates_is_not_to_be_stored(model: Path) -> None:
    def with_windows(**options: Any) -> Any:
        vllm_config = configure(model, options).vllm
        vllm_config.model_config.model_arch_config.rswa_window = 128
        return vllm_config

    check_config(with_windows())
    with pytest.raises(ValueError, match=r"R-SWA.*Leave offload_prompt_only out"):
        check_config(with_windows(offload_prompt_only=False))
