"""The fingerprint's fields: whatever vLLM's block hash leaves out is in one, and named by it."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import DiffusionConfig, MultiModalConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvd_client import GroupKind, NamespaceFields
from kvd_client.integrations.vllm.identity.model import config_digest
from tests.vllm.configurations import (
    LAYERS,
    LAYOUT,
    Configuration,
    cache_of,
    configure,
    full_attention,
    handshake,
    joined,
)
from tests.vllm.engine import FORKS

Change = Callable[[Configuration], NamespaceFields]


@pytest.fixture(scope="module")
def base(model: Path) -> Configuration:
    return configure(model)


def different(one: NamespaceFields, other: NamespaceFields) -> set[str]:
    """Names of the fields in which they differ, as the daemon compares them."""
    return {f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)}


def changed(base: Configuration, change: Callable[[Any], None]) -> Configuration:
    """The same engine but for one setting of vLLM's own objects."""
    vllm_config = copy.deepcopy(base.vllm)
    change(vllm_config)
    return joined(vllm_config, base.cache)


def setting(path: str, value: Any) -> Change:
    """A namespace with one of vLLM's settings changed, of those that no CPU engine can have."""
    *holders, name = path.split(".")

    def change(vllm_config: Any) -> None:
        for holder in holders:
            vllm_config = getattr(vllm_config, holder)
        setattr(vllm_config, name, value)

    return lambda base: changed(base, change).namespace()


def images(prefix_cache: bool, processor_cache_gb: float) -> Change:
    """Of a model that takes images."""

    def change(vllm_config: Any) -> None:
        taken = SimpleNamespace(mm_processor_cache_gb=processor_cache_gb)
        vllm_config.model_config.multimodal_config = taken
        vllm_config.cache_config.enable_prefix_caching = prefix_cache

    return lambda base: changed(base, change).namespace()


def option(**options: Any) -> Change:
    def change(vllm_config: Any) -> None:
        vllm_config.kv_transfer_config.kv_connector_extra_config.update(options)

    return lambda base: changed(base, change).namespace()


def of_ranks(base: Configuration, ranks: int) -> Configuration:
    parallel = replace(base.offloading.parallel, world_size=ranks)
    return base._replace(offloading=replace(base.offloading, parallel=parallel))


def rank_layout(layout: str) -> Change:
    return lambda base: base.namespace([handshake(0, layout=layout)])


# -- what is alike ----------------------------------------------------------------------------


def _tell_namespace(pipe: Connection[Any, Any], model: Path) -> None:
    pipe.send(configure(model).namespace())
    pipe.close()


def test_engines_of_one_configuration_come_to_one_namespace_in_any_process(
    base: Configuration, model: Path
) -> None:
    mine, theirs = FORKS.Pipe()
    other = FORKS.Process(target=_tell_namespace, args=(theirs, model))
    other.start()
    theirs.close()
    told = mine.recv()
    other.join()
    other.close()
    mine.close()
    assert told == base.namespace()
    assert not told.unshared


def test_replicas_of_a_data_parallel_engine_share(base: Configuration) -> None:
    def replica(vllm_config: Any) -> None:
        vllm_config.parallel_config.data_parallel_size = 2
        vllm_config.parallel_config.data_parallel_index = 1

    assert changed(base, replica).namespace() == base.namespace()


@pytest.mark.parametrize(
    "change",
    [
        setting("model_config.hf_config._name_or_path", "/elsewhere"),
        setting("model_config.hf_config.transformers_version", "99.0"),
        setting("model_config.max_model_len", 4096),
        setting("model_config.served_model_name", "nickname"),
        setting("scheduler_config.max_num_seqs", 7),
        setting("cache_config.gpu_memory_utilization", 0.5),
        option(lookup_deadline_s=0.001, engine_name="mine", watch_removals=False),
    ],
)
def test_what_does_not_shape_kv_keeps_nobody_apart(base: Configuration, change: Change) -> None:
    assert change(base) == base.namespace()


# -- what keeps apart, and under which name ------------------------------------------------------

SETTINGS: list[tuple[Change, set[str]]] = [
    (setting("model_config.hf_config.rope_parameters", {"rope_theta": 1.0}), {"config"}),
    (setting("model_config.hf_config.num_attention_heads", 8), {"config"}),
    (setting("model_config.quantization", "fp8"), {"quantization"}),
    (setting("model_config.disable_sliding_window", True), {"config"}),
    (setting("model_config.code_revision", "0123abc"), {"config"}),
    (setting("cache_config.kv_sharing_fast_prefill", True), {"config"}),
    (setting("kernel_config.moe_backend", "marlin"), {"config"}),
    (setting("kernel_config.linear_backend_per_quant", {"nvfp4": "marlin"}), {"config"}),
    (setting("attention_config.use_prefill_query_quantization", True), {"config"}),
    (setting("diffusion_config", DiffusionConfig(canvas_length=8)), {"config"}),
    (setting("model_config.dtype", torch.float16), {"config", "kv_dtype"}),
    (setting("cache_config.cache_dtype", "fp8_e4m3"), {"kv_dtype", "kv_scale_source"}),
    (setting("cache_config.kv_cache_dtype_skip_layers", ["0"]), {"kv_dtype"}),
    (setting("cache_config.prefix_caching_hash_algo", "sha256_cbor"), {"hash_algorithm"}),
    (setting("parallel_config.pipeline_parallel_size", 2), {"parallel_shape"}),
    (setting("parallel_config.prefill_context_parallel_size", 2), {"parallel_shape"}),
    (option(weights_id="mine"), {"weights_id"}),
    (option(tenant="them"), {"tenant"}),
    (option(account="them"), {"account"}),
    (option(unshared=True), {"unshared"}),
    (option(blocks_per_chunk=2), {"groups"}),
    (rank_layout("LBNHC;CPU_ATTN;avx512/vec"), {"kv_layout"}),
    (rank_layout("LBHNC;CPU_ATTN;avx512/amx"), {"kv_layout"}),
    (rank_layout("LBHNC;FLASH_ATTN;avx512/vec"), {"attention_backend"}),
]


@pytest.mark.parametrize(("change", "named"), SETTINGS)
def test_one_setting_is_another_namespace_by_its_own_field(
    base: Configuration, change: Change, named: set[str]
) -> None:
    names = {"model_config_digest" if name == "config" else name for name in named}
    assert different(base.namespace(), change(base)) == names


def test_another_size_of_blocks_is_another_namespace(base: Configuration, model: Path) -> None:
    other = configure(model, block_size=64).namespace()
    assert {"groups", "hash_algorithm"} <= different(base.namespace(), other)


def test_other_weights_under_the_same_name_are_another_namespace(
    base: Configuration, model: Path, tmp_path: Path
) -> None:
    copied = tmp_path / model.name
    copied.mkdir()
    for file in model.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    weights = copied / "model.safetensors"
    with weights.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"\x7f")
    assert different(base.namespace(), configure(copied).namespace()) == {"weights_id"}


def test_weights_that_came_as_the_engine_started_share_nothing(
    base: Configuration, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / model.name
    shutil.copytree(model, folder)
    begun = configure(folder)
    assert not begun.namespace().unshared
    time.sleep(0.05)  # the times of files are behind the clock's by a tick
    shutil.copy2(model / "model.safetensors", folder)
    made = begun.namespace()
    assert made.unshared
    assert made.weights_id != base.namespace().weights_id


def test_the_hash_seed_keeps_apart_and_is_not_told(
    base: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = base.namespace()
    monkeypatch.setenv("PYTHONHASHSEED", "shared secret")
    other = base.namespace()
    assert different(before, other) == {"hash_algorithm"}
    assert "secret" not in other.hash_algorithm


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"),
        ("VLLM_VIDEO_LOADER_BACKEND", "opencv_dynamic"),
    ],
)
def test_the_environment_keeps_apart_where_it_changes_what_is_computed(
    base: Configuration, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    before = base.namespace()
    monkeypatch.setenv(variable, "")
    assert base.namespace() == before
    monkeypatch.setenv(variable, value)
    assert different(before, base.namespace()) == {"model_config_digest"}


def test_what_a_file_named_by_the_environment_says_keeps_apart(
    base: Configuration, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "humming.json"
    monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", str(file))
    file.write_text('{"b_dtype": "int4"}')
    before = base.namespace()
    file.write_text('{"b_dtype": "int8"}')
    assert different(before, base.namespace()) == {"model_config_digest"}


def test_a_drafter_keeps_apart_by_its_groups_and_its_configuration(
    base: Configuration, model: Path
) -> None:
    drafting = joined(base.vllm, cache_of(full_attention(), drafter=True)).namespace()
    assert different(base.namespace(), drafting) == {"groups"}
    assert drafting.groups[0].drafter
    guessing = configure(
        model,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 4,
        },
    )
    assert different(base.namespace(), guessing.namespace()) == {"model_config_digest"}


def test_the_longest_request_counts_only_where_positions_depend_on_it(
    base: Configuration,
) -> None:
    def digest(rope_type: str, longest: int) -> str:
        def change(vllm_config: Any) -> None:
            rope = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 1e4}
            vllm_config.model_config.hf_config.rope_parameters = rope
            vllm_config.model_config.max_model_len = longest

        return config_digest(changed(base, change).vllm)

    assert digest("longrope", 1024) != digest("longrope", 2048)
    assert digest("linear", 1024) == digest("linear", 2048)


def test_how_tokens_are_drawn_counts_only_where_models_compute_by_it(
    base: Configuration,
) -> None:
    def digest(*, tempers: bool, **drawn: Any) -> str:
        def change(vllm_config: Any) -> None:
            if tempers:
                vllm_config.model_config.hf_config.attn_temperature_tuning = True
            vllm_config.model_config.override_generation_config = drawn

        return config_digest(changed(base, change).vllm)

    as_written = digest(tempers=True)
    assert digest(tempers=True, attn_temperature_tuning=False) != as_written
    assert digest(tempers=True, temperature=0.5) == as_written
    assert digest(tempers=False, attn_temperature_tuning=False) == digest(tempers=False)


def test_long_names_stay_within_a_fields_limit_and_apart(base: Configuration) -> None:
    names = ["m" * 300 + end for end in "ab"]
    made = [setting("model_config.model", name)(base).model for name in names]
    assert all(len(name) <= 256 for name in made)
    assert made[0] != made[1]


# -- what can't be known ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (setting("load_config.load_format", "dummy"), "weights_id"),
        (setting("cache_config.prefix_caching_hash_algo", "xxhash"), "PYTHONHASHSEED"),
        (setting("weight_transfer_config", object()), "weight transfer"),
        (images(prefix_cache=False, processor_cache_gb=0), "numbers images"),
    ],
)
def test_what_can_t_be_known_is_kept_to_this_start_with_the_way_out(
    base: Configuration,
    change: Change,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    # Neither vLLM nor we bring the package: all that is asked of it here is a length.
    digest = SimpleNamespace(xxh3_128_digest=lambda value: bytes(16))
    monkeypatch.setattr("vllm.utils.hashing._xxhash", digest)
    assert change(base).unshared
    assert hint in caplog.text


def test_scales_of_images_whose_file_changed_as_the_engine_started_are_not_known(
    base: Configuration, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """VLLM may have read what was there before."""

    def is_shared(begun_ns: int) -> bool:
        def change(vllm_config: Any) -> None:
            vllm_config.instance_id = f"{begun_ns}_1"
            vllm_config.model_config.multimodal_config = MultiModalConfig()
            vllm_config.model_config.multimodal_config.mm_encoder_fp8_scale_path = str(scales)
            vllm_config.kv_transfer_config.kv_connector_extra_config["weights_id"] = "w"

        return not changed(base, change).namespace().unshared

    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    written_ns = scales.stat().st_ctime_ns
    assert is_shared(written_ns)
    assert not is_shared(written_ns - 1)
    assert f"{scales} was changed as the engine started" in caplog.text
    scales.unlink()
    assert is_shared(written_ns - 1), "a rank alone can read it"


def test_images_are_named_by_their_content_where_vllm_has_any_cache(base: Configuration) -> None:
    assert not images(prefix_cache=True, processor_cache_gb=0)(base).unshared
    assert not images(prefix_cache=False, processor_cache_gb=0.5)(base).unshared


def test_a_name_given_for_the_weights_lets_any_loader_share(base: Configuration) -> None:
    def change(vllm_config: Any) -> None:
        vllm_config.load_config.load_format = "dummy"
        vllm_config.kv_transfer_config.kv_connector_extra_config["weights_id"] = "zeros"

    made = changed(base, change).namespace()
    assert not made.unshared
    assert made.weights_id == "named:zeros"


def test_adapters_share_only_under_a_name_for_what_is_in_them(model: Path) -> None:
    def with_adapters(**options: Any) -> NamespaceFields:
        return configure(model, options, enable_lora=True).namespace()

    assert with_adapters().unshared
    one, two = with_adapters(lora_id="one"), with_adapters(lora_id="two")
    assert not one.unshared
    assert different(one, two) == {"lora_digest"}
    assert different(configure(model).namespace(), one) == {"lora_digest"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("enable_moe_shared_loras", True),
        ("enable_tower_connector_lora", True),
        ("target_modules", ["qkv_proj"]),
        ("target_modules", ["qkv_proj", "o_proj"]),
    ],
)
def test_what_an_adapter_is_applied_to_counts(model: Path, setting: str, value: object) -> None:
    made = configure(model, {"lora_id": "one"}, enable_lora=True)
    assert made.vllm.lora_config is not None

    def change(vllm_config: Any) -> None:
        setattr(vllm_config.lora_config, setting, value)

    assert different(made.namespace(), changed(made, change).namespace()) == {"lora_digest"}
    if isinstance(value, list):

        def turn(vllm_config: Any) -> None:
            setattr(vllm_config.lora_config, setting, value[::-1])

        assert changed(made, turn).namespace() == changed(made, change).namespace()


# -- groups and shards --------------------------------------------------------------------------


def sliding(tokens: int = 128) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=tokens
    )


def chunked() -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(
        block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, attention_chunk_size=256
    )


def recurrent() -> KVCacheSpec:
    return MambaSpec(block_size=32, shapes=((8, 16),), dtypes=(torch.float32,))


def test_groups_have_their_kinds_windows_and_bytes(base: Configuration) -> None:
    cache = cache_of(full_attention(), sliding(), recurrent())
    made = joined(base.vllm, cache).namespace([])
    kinds = [group.kind for group in made.groups]
    assert kinds == [
        GroupKind.FULL_ATTENTION,
        GroupKind.SLIDING_WINDOW,
        GroupKind.RECURRENT_STATE,
    ]
    assert [group.sliding_window_tokens for group in made.groups] == [0, 128, 0]
    per_layer = (32 * 2 * 128 * 4, 32 * 2 * 128 * 4, 8 * 16 * 4)
    assert [group.shard_bytes for group in made.groups] == [(4 * size,) for size in per_layer]


def test_attention_within_fixed_stretches_needs_one_stretch(base: Configuration) -> None:
    made = joined(base.vllm, cache_of(full_attention(), chunked())).namespace([])
    assert made.groups[1].kind is GroupKind.SLIDING_WINDOW
    assert made.groups[1].sliding_window_tokens == 256
    sliding_one = joined(base.vllm, cache_of(full_attention(), sliding(256))).namespace([])
    assert different(made, sliding_one) == {"kv_layout"}


def test_several_engine_blocks_to_one_of_ours(base: Configuration) -> None:
    [group] = option(blocks_per_chunk=4)(base).groups
    assert (group.tokens_per_block, group.blocks_per_block) == (128, 4)


def test_each_rank_has_its_shard_whatever_order_they_come_in(base: Configuration) -> None:
    ranks = [handshake(1, shard_bytes=(512,)), handshake(0, shard_bytes=(1024,))]
    assert of_ranks(base, 2).namespace(ranks).groups[0].shard_bytes == (1024, 512)


def test_a_replicated_layout_has_one_shard(base: Configuration) -> None:
    ranks = [handshake(rank, shard=0) for rank in range(4)]
    four = of_ranks(base, 4)
    assert four.namespace(ranks).groups[0].shard_bytes == (131072,)
    alike = replace(four.offloading, replicated_layout=True)
    replicated = base._replace(offloading=alike).namespace([])
    assert replicated.groups[0].shard_bytes == (131072,)
    assert replicated.parallel_shape.endswith("-replicated")


def test_ranks_that_contradict_each_other_are_refused(base: Configuration) -> None:
    with pytest.raises(ValueError, match="rank 1: blocks of shard 0 have other sizes"):
        of_ranks(base, 2).namespace([handshake(0), handshake(1, shard=0, shard_bytes=(8,))])
    with pytest.raises(ValueError, match="some shard has no rank"):
        of_ranks(base, 2).namespace([handshake(0), handshake(2)])


def test_without_a_word_of_every_rank_nothing_is_shared_unless_the_layers_are_here(
    base: Configuration, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    two = of_ranks(base, 2)
    alone = two.namespace([handshake(0)])
    assert alone.unshared
    assert "MultiConnector" in caplog.text
    assert alone.groups[0].shard_bytes == (131072, 131072)
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    layers = {f"0.{LAYERS[0]}": SimpleNamespace(get_attn_backend=lambda: backend)}
    monkeypatch.setattr(base.vllm.compilation_config, "static_forward_context", layers)
    here = base.namespace([])
    assert not here.unshared
    assert here.attention_backend.startswith("CPU_ATTN ")


def test_ranks_with_other_layouts_are_named_one_by_one(base: Configuration) -> None:
    other = LAYOUT.replace("CPU_ATTN", "TRITON_ATTN")
    made = of_ranks(base, 2).namespace([handshake(1, layout=other), handshake(0)])
    assert made.attention_backend.startswith("CPU_ATTN|TRITON_ATTN ")
    assert made.kv_layout == base.namespace().kv_layout


def test_one_engine_on_two_ranks_does_not_share_with_one_on_one(base: Configuration) -> None:
    def two_ranks(vllm_config: Any) -> None:
        vllm_config.parallel_config.tensor_parallel_size = 2
        vllm_config.parallel_config.world_size = 2

    halves = [handshake(rank, shard_bytes=(65536,)) for rank in range(2)]
    made = changed(base, two_ranks).namespace(halves)
    assert different(base.namespace(), made) == {"groups", "parallel_shape"}


def test_no_field_is_told_in_a_form_that_changes_between_runs(base: Configuration) -> None:
    told = json.dumps([str(getattr(base.namespace(), f.name)) for f in fields(NamespaceFields)])
    assert " at 0x" not in told
