"""Parts of a namespace's fields, each of which keeps engines apart where all else is the same."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import LoadConfig
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvd_client import NamespaceFields
from kvd_client.integrations.vllm.identity.namespace import engine_identity
from tests.vllm.configurations import (
    BLOCK_TOKENS,
    Configuration,
    cache_of,
    configure,
    full_attention,
    joined,
)


@pytest.fixture(scope="module")
def base(model: Path) -> Configuration:
    return configure(model)


def of_cache(base: Configuration, *specs: KVCacheSpec) -> NamespaceFields:
    return joined(base.vllm, cache_of(*specs)).namespace([])


def with_drafter(base: Configuration, drafter: Path, load: LoadConfig | None) -> NamespaceFields:
    vllm_config = copy.deepcopy(base.vllm)
    model_config = copy.deepcopy(vllm_config.model_config)
    model_config.model = str(drafter)
    how: Any = {"draft_model_config": model_config, "draft_load_config": load}
    vllm_config.speculative_config = SimpleNamespace(method="draft_model", **how)
    return base._replace(vllm=vllm_config).namespace()


def test_a_drafters_weights_are_named_beside_the_models(model: Path, tmp_path: Path) -> None:
    drafters = [tmp_path / name for name in ("one", "other")]
    for number, folder in enumerate(drafters):
        shutil.copytree(model, folder)
        with (folder / "model.safetensors").open("ab") as weights:
            weights.write(bytes([number]))
    base = configure(model)
    made = [with_drafter(base, folder, None) for folder in (model, *drafters)]
    assert not any(each.unshared for each in made)
    assert len({each.weights_id for each in made}) == 3
    assert with_drafter(base, drafters[0], LoadConfig(load_format="dummy")).unshared


def test_which_layers_a_group_has_keeps_apart(base: Configuration) -> None:
    cache = cache_of(full_attention(), full_attention())
    swapped = copy.deepcopy(cache)
    swapped.kv_cache_groups.reverse()
    one, other = (joined(base.vllm, each).namespace([]) for each in (cache, swapped))
    assert one.groups == other.groups
    assert one.kv_layout != other.kv_layout


def test_the_precision_of_adapters_keeps_apart(model: Path) -> None:
    digests = {
        configure(model, {"lora_id": "one"}, enable_lora=True, lora_dtype=kind)
        .namespace()
        .lora_digest
        for kind in ("float16", "bfloat16")
    }
    assert len(digests) == 2


def test_of_quantised_kv_is_told_what_it_was_computed_in_and_where_its_scales_are(
    base: Configuration,
) -> None:
    def kept(dtype: torch.dtype, cache_dtype: str) -> NamespaceFields:
        vllm_config = copy.deepcopy(base.vllm)
        vllm_config.model_config.dtype = dtype
        vllm_config.cache_config.cache_dtype = cache_dtype
        return joined(vllm_config, base.cache).namespace()

    halves = [kept(kind, "fp8_e4m3") for kind in (torch.float16, torch.bfloat16)]
    assert [each.kv_dtype for each in halves] == ["fp8_e4m3 of float16", "fp8_e4m3 of bfloat16"]
    assert {each.kv_scale_source for each in halves} == {"checkpoint"}
    assert kept(torch.float16, "fp8_per_token_head").kv_scale_source == "block"


@pytest.mark.parametrize(
    ("release", "shares"), [("0.32.9", True), ("0.99.0", False), ("0.32.1rc1", False)]
)
def test_an_engine_of_another_release_is_kept_apart_and_of_a_patch_is_not(
    base: Configuration, monkeypatch: pytest.MonkeyPatch, release: str, shares: bool
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.32.0+cpu")
    before = base.namespace()
    monkeypatch.setattr("vllm.__version__", release)
    assert (base.namespace() == before) is shares


def test_tokens_that_are_kept_behind_a_window_count_as_its_own(base: Configuration) -> None:
    window = SlidingWindowSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.float32,
        sliding_window=128,
    )
    kept = [of_cache(base, replace(window, extra_retained_tokens=tokens)) for tokens in (0, 1, 5)]
    assert [each.groups[0].sliding_window_tokens for each in kept] == [128, 128, 132]


def test_a_kind_of_layer_that_is_not_known_is_refused(base: Configuration) -> None:
    cross = CrossAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=64, dtype=torch.float32
    )
    with pytest.raises(ValueError, match="does not know how CrossAttentionSpec is cached"):
        of_cache(base, cross)


def test_a_recurrent_state_amid_a_block_is_refused_with_the_way_out(model: Path) -> None:
    base = configure(model, {"blocks_per_chunk": 2})
    state = MambaSpec(block_size=BLOCK_TOKENS, shapes=((8, 16),), dtypes=(torch.float32,))
    with pytest.raises(ValueError, match=r"blocks_per_chunk .*--mamba-cache-mode align"):
        of_cache(base, full_attention(), state)
    of_cache(base, full_attention(), replace(state, mamba_cache_mode="align"))


def test_a_replica_whose_balancer_is_elsewhere_is_an_engine_of_its_own(
    base: Configuration,
) -> None:
    """It has its number, and says of itself that it is the only one."""
    vllm_config = copy.deepcopy(base.vllm)
    vllm_config.parallel_config.data_parallel_index = 1
    assert vllm_config.parallel_config.data_parallel_size == 1
    assert engine_identity(vllm_config).engine_id == engine_identity(base.vllm).engine_id + "-dp1"
