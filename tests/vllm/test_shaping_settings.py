"""Each setting of vLLM's that changes what is computed keeps engines apart, named here once more.

A name that went from the lists of the code would else go unnoticed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import envs
from vllm.config import DiffusionConfig, MultiModalConfig, VllmConfig
from vllm.config.attention import HiSparseConfig
from vllm.config.mamba import MambaBackendEnum
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvd_client.integrations.vllm.identity.model import config_digest
from tests.vllm.configurations import Configuration, configure, joined

MODEL = {
    "code_revision": "0123abc",
    "convert_type": "embed",
    "disable_sliding_window": True,
    "model_class_overrides": {"LlamaForCausalLM": "plugin:Other"},
    "model_impl": "transformers",
    "quantization_config": {"ignored_layers": ["lm_head"]},
    "runner_type": "pooling",
}
MULTIMODAL = {
    "language_model_only": True,
    "media_io_kwargs": {"video": {"num_frames": 16}},
    "mm_encoder_attn_backend": AttentionBackendEnum.TORCH_SDPA,
    "mm_encoder_attn_dtype": "fp8",
    "mm_encoder_fp8_scale_path": "/scales.json",
    "mm_processor_kwargs": {"num_crops": 4},
    "video_pruning_method": "another",
    "video_pruning_rate": 0.5,
}
OTHERS = {
    "attention_config.disable_flashinfer_q_quantization": True,
    "attention_config.hisparse_config": HiSparseConfig(),
    "attention_config.indexer_kv_dtype": "fp8",
    "attention_config.indexer_sparse_logits": True,
    "attention_config.minimax_m3_msa_decode_backend": "cutlass",
    "attention_config.mla_prefill_backend": MLAPrefillBackendEnum.FLASHINFER,
    "attention_config.sparse_mla_force_mqa": True,
    "attention_config.use_non_causal": True,
    "attention_config.use_prefill_query_quantization": True,
    "attention_config.use_trtllm_attention": False,
    "cache_config.kv_sharing_fast_prefill": True,
    "cache_config.swa_bounded_replay": False,
    "kernel_config.linear_backend": "marlin",
    "kernel_config.linear_backend_per_quant": {"nvfp4": "marlin"},
    "kernel_config.moe_backend": "marlin",
    "mamba_config.backend": MambaBackendEnum.FLASHINFER,
    "mamba_config.enable_stochastic_rounding": True,
    "parallel_config.all2all_backend": "deepep_low_latency",
}
VARIABLES = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": "1",
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": "1",
    "VLLM_DISABLED_KERNELS": "CutlassFP8",
    "VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION": "1",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": "1",
    "VLLM_FLOAT32_MATMUL_PRECISION": "high",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "int8"}',
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"b_dtype": "int8"}',
    "VLLM_HUMMING_USE_F16_ACCUM": "1",
    "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM": "1",
    "VLLM_MARLIN_INPUT_DTYPE": "int8",
    "VLLM_MEDIA_CONNECTOR": "a_site",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
    "VLLM_MOE_USE_DEEP_GEMM": "0",
    "VLLM_PLUGINS": "",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
    "VLLM_USE_FLASHINFER_MOE_INT4": "1",
    "VLLM_USE_FUSED_MOE_GROUPED_TOPK": "0",
    "VLLM_VIDEO_LOADER_BACKEND": "opencv_dynamic",
}
UNDECLARED = {
    "DNNL_DEFAULT_FPMATH_MODE": "BF16",
    "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH": "1",
    "FLASHINFER_NVFP4_4OVER6": "1",
    "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256": "1",
    "FLA_TRIL_PRECISION": "tf32",
    "FLA_USE_FAST_OPS": "1",
    "NVIDIA_TF32_OVERRIDE": "0",
    "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "TRITON_F32_DEFAULT": "ieee",
    "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH": "1",
    "USE_FLAGOS": "1",
    "XHS_VIDEO_JPEG_QUALITY": "50",
}


@pytest.fixture(scope="module")
def base(model: Path) -> Configuration:
    return configure(model)


def digest_with(base: Configuration, change: Callable[[VllmConfig], None]) -> str:
    vllm_config = copy.deepcopy(base.vllm)
    change(vllm_config)
    return config_digest(vllm_config)


@pytest.mark.parametrize("name", MODEL)
def test_each_setting_of_the_model_counts(base: Configuration, name: str) -> None:
    assert hasattr(base.vllm.model_config, name), "vLLM has it under another name"
    changed = digest_with(base, lambda made: setattr(made.model_config, name, MODEL[name]))
    assert changed != config_digest(base.vllm)


@pytest.mark.parametrize("path", OTHERS)
def test_each_setting_of_the_cache_and_the_kernels_counts(base: Configuration, path: str) -> None:
    part, name = path.split(".")
    assert hasattr(getattr(base.vllm, part), name), "vLLM has it under another name"
    changed = digest_with(base, lambda made: setattr(getattr(made, part), name, OTHERS[path]))
    assert changed != config_digest(base.vllm)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_each_setting_of_what_is_made_of_images_counts(base: Configuration, name: str) -> None:
    def digest(**given: Any) -> str:
        def change(made: VllmConfig) -> None:
            made.model_config.multimodal_config = MultiModalConfig()
            for each, value in given.items():
                assert hasattr(made.model_config.multimodal_config, each)
                setattr(made.model_config.multimodal_config, each, value)

        return digest_with(base, change)

    assert digest(**{name: MULTIMODAL[name]}) != digest()


@pytest.mark.parametrize("name", [*VARIABLES, *UNDECLARED])
def test_each_variable_that_changes_what_is_computed_counts(
    base: Configuration, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert (name in envs.environment_variables) is (name in VARIABLES), "vLLM names it otherwise"
    monkeypatch.delenv(name, raising=False)
    before = config_digest(base.vllm)
    monkeypatch.setenv(name, (VARIABLES | UNDECLARED)[name])
    assert config_digest(base.vllm) != before


def test_what_a_platform_or_a_model_is_told_beside_counts(base: Configuration) -> None:
    told = {"gdn_prefill_backend": "flashinfer"}
    changed = digest_with(base, lambda made: setattr(made, "additional_config", told))
    assert changed != config_digest(base.vllm)


class Told:
    """What vLLM takes in place of a dict: it says itself what counts of it."""

    __slots__ = ("_says",)

    def __init__(self, says: str) -> None:
        self._says = says

    def compute_hash(self) -> str:
        return self._says


def test_an_object_that_a_platform_is_told_counts_by_its_own_hash(base: Configuration) -> None:
    def digest(told: Told) -> str:
        return digest_with(base, lambda made: setattr(made, "additional_config", told))

    one, same, other = Told("a"), Told("a"), Told("b")
    assert digest(one) == digest(same) != digest(other)


def test_scales_of_images_count_by_what_is_in_their_file(
    base: Configuration, tmp_path: Path
) -> None:
    def digest(name: str, scales: str) -> str:
        file = tmp_path / name
        file.write_text(scales)
        made = copy.deepcopy(base.vllm)
        made.model_config.multimodal_config = MultiModalConfig()
        made.model_config.multimodal_config.mm_encoder_fp8_scale_path = str(file)
        return config_digest(made)

    assert digest("scales", "{1}") == digest("the-same", "{1}") != digest("scales", "{2}")


def test_a_front_end_that_scales_images_itself_counts_where_there_are_images(
    base: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digests() -> set[str]:
        monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
        found = {config_digest(made)}
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
        return found | {config_digest(made)}

    made = copy.deepcopy(base.vllm)
    assert len(digests()) == 1
    made.model_config.multimodal_config = MultiModalConfig()
    assert len(digests()) == 2


def test_what_vllm_has_of_itself_needs_no_word(
    base: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = config_digest(base.vllm)
    monkeypatch.setattr("kvd_client.integrations.vllm.identity.model.UNUSUAL_SETTINGS", {})
    assert config_digest(base.vllm) == before


NO_ROPE = {"rope_type": "default"}
BY_LENGTH: list[dict[str, Any]] = [
    {"trust_remote_code": True},
    {"hf_config.attn_temperature_tuning": True},
    {"hf_config.text_config": {"attn_temperature_tuning": False}},
    {"hf_config.rope_parameters": {"type": "dynamic"}},
    {"hf_config.rope_parameters": {"sliding": NO_ROPE, "full": {"rope_type": "longrope"}}},
    {"hf_config.layers": [NO_ROPE, {"rope": {"rope_type": "su"}}]},
]


@pytest.mark.parametrize(("given", "counts"), [({}, False), *((each, True) for each in BY_LENGTH)])
def test_the_longest_request_counts_where_what_is_computed_may_depend_on_it(
    base: Configuration, given: dict[str, Any], counts: bool
) -> None:
    def digest(longest: int) -> str:
        def change(made: VllmConfig) -> None:
            made.model_config.max_model_len = longest
            for path, value in given.items():
                *holders, name = path.split(".")
                holder: Any = made.model_config
                for each in holders:
                    holder = getattr(holder, each)
                setattr(holder, name, value)

        return digest_with(base, change)

    assert (digest(1024) != digest(2048)) is counts


def test_how_ranks_share_a_models_experts_counts(base: Configuration) -> None:
    def digest(**given: Any) -> str:
        def change(made: VllmConfig) -> None:
            for name, value in given.items():
                assert hasattr(made.parallel_config, name), "vLLM has it under another name"
                setattr(made.parallel_config, name, value)

        return digest_with(base, change)

    whole = {"enable_expert_parallel": True}
    shared: list[dict[str, Any]] = [
        {"data_parallel_size": 2},
        {"data_parallel_size": 4},
        whole,
        {**whole, "enable_eplb": True},
        {**whole, "data_parallel_size": 2},
    ]
    assert {digest(**each, is_moe_model=False) for each in shared} == {digest()}
    found = [digest(**each, is_moe_model=True) for each in [{}, *shared]]
    assert found[0] == digest()
    assert len(set(found)) == 1 + len(shared)
    assert digest(**whole, data_parallel_size=4, is_moe_model=True) == found[-1]


def test_how_a_canvas_is_denoised_counts(base: Configuration) -> None:
    def digest(drawn: dict[str, Any] | None = None, **given: Any) -> str:
        def change(made: VllmConfig) -> None:
            made.diffusion_config = DiffusionConfig(**({"canvas_length": 8} | given))
            made.model_config.override_generation_config = drawn or {}

        return digest_with(base, change)

    drawn = [digest({name: 3}) for name in ("max_denoising_steps", "stability_threshold")]
    given = [digest(canvas_length=16), digest(max_denoising_steps=3)]
    assert len({digest(), *drawn, *given}) == 5


def test_how_a_drafter_drafts_and_what_it_is_counts(base: Configuration) -> None:
    def digest(**given: Any) -> str:
        drafter = copy.deepcopy(base.vllm.model_config)
        for name in set(given) & {"dtype", "code_revision"}:
            setattr(drafter, name, given.pop(name))
        how: dict[str, Any] = {"method": "eagle", "draft_model_config": drafter} | given

        def change(made: VllmConfig) -> None:
            made.speculative_config = SimpleNamespace(**how)

        return digest_with(base, change)

    others: list[dict[str, Any]] = [
        {"method": "eagle3"},
        {"quantization": "fp8"},
        {"moe_backend": "marlin"},
        {"use_heterogeneous_vocab": True},
        {"disable_lookahead_block_hashes": True},
        {"dtype": "float16"},
        {"code_revision": "0123abc"},
    ]
    assert len({digest(), *(digest(**each) for each in others)}) == 1 + len(others)


@pytest.mark.parametrize("sizes", [{"dcp_size": 2}, {"pcp_size": 2}])
def test_how_many_tokens_in_a_row_a_rank_has_counts_where_ranks_share_them(
    base: Configuration, sizes: dict[str, int]
) -> None:
    parts = replace(base.offloading.parallel, **sizes)
    shapes = set()
    for interleave in (1, 16):
        vllm_config = copy.deepcopy(base.vllm)
        vllm_config.parallel_config.cp_kv_cache_interleave_size = interleave
        made = joined(vllm_config, base.cache)
        several = made._replace(offloading=replace(made.offloading, parallel=parts))
        shapes |= {made.namespace().parallel_shape, several.namespace().parallel_shape}
    assert len(shapes) == 3


def test_which_layers_a_pipeline_stage_has_counts(
    base: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = replace(base.offloading.parallel, pp_size=2)
    staged = base._replace(offloading=replace(base.offloading, parallel=parts))
    one, shapes = base.namespace().parallel_shape, {staged.namespace().parallel_shape}
    for layers in ("3,1", "1,3"):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", layers)
        shapes.add(staged.namespace().parallel_shape)
        assert base.namespace().parallel_shape == one, "it has no other stage"
    assert len(shapes) == 3
