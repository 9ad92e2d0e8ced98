"""A digest of all in vLLM's model configuration that shapes what lies in the KV cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvd_client.integrations.digests import LIBRARY_VARIABLES, digest_of, shaping_fields
from kvd_client.integrations.weights import content_digest

# Settings of vLLM's model configuration that change what a layer computes.
MODEL_SETTINGS = (
    "architecture",
    "code_revision",
    "convert_type",
    "disable_sliding_window",
    "model_class_overrides",
    "model_impl",
    "quantization_config",
    "runner_type",
)
# How many frames of a video are read, vLLM's hash has where a request says it, and not always else.
MULTIMODAL_SETTINGS = (
    "language_model_only",
    "media_io_kwargs",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
SCALES_SETTING = "mm_encoder_fp8_scale_path"  # names a file, whose content counts
RUST_VARIABLE = "VLLM_USE_RUST_FRONTEND"  # which scales images by code of its own
# Of the cache's configuration what decides which layers compute keys and values for a token.
CACHE_SETTINGS = ("kv_sharing_fast_prefill", "swa_bounded_replay")
# Of a model that denoises a canvas of tokens, each of which sees all of them.
DIFFUSION_SETTINGS = ("canvas_length", "max_denoising_steps")
# The drafter's keys and values are in the cache too, and its hashes may look a token ahead.
SPECULATIVE_SETTINGS = ("disable_lookahead_block_hashes", "method", "moe_backend", "quantization")
# Of what says how tokens are drawn, what a model of vLLM takes for a part of its layers: Llama 4
# whether attention has a temperature, those that denoise when they have done so.
GENERATION_SETTINGS = ("attn_temperature_tuning", "max_denoising_steps", "stability_threshold")
# Of the kernels those that round weights or activations otherwise, or let a token see others.
KERNEL_SETTINGS = ("linear_backend", "linear_backend_per_quant", "moe_backend")
ATTENTION_SETTINGS = (
    "disable_flashinfer_q_quantization",
    "indexer_kv_dtype",
    "indexer_sparse_logits",
    "use_non_causal",
    "use_prefill_query_quantization",
)
# Without a choice vLLM chooses; "no" is one, too: queries are not rounded then.
ATTENTION_CHOICES = ("use_trtllm_attention",)
# A state of recurrent layers may be rounded at random as it is written.
MAMBA_SETTINGS = ("enable_stochastic_rounding",)
# By the part of vLLM's configuration: what counts where it is not as vLLM has it of itself. Which
# kernels attend and keep recurrent states, where a layer's name does not tell; how activations go
# to the experts' ranks; to which token of the drafter's one of the model's is mapped.
UNUSUAL_SETTINGS = {
    "attention_config": (
        "hisparse_config",
        "minimax_m3_msa_decode_backend",
        "mla_prefill_backend",
        "sparse_mla_force_mqa",
    ),
    "mamba_config": ("backend",),
    "parallel_config": ("all2all_backend",),
    "speculative_config": ("use_heterogeneous_vocab",),
}
# And where a model has experts: whether a rank has whole ones, and some of them twice.
EXPERTS_SETTINGS = ("enable_eplb", "enable_expert_parallel")
# And of the environment, with what chooses a token's experts and a video's frames: a block's hash
# has the video's file only. Whoever wants the same whatever the batch wants no other's blocks.
SHAPING_VARIABLES = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_BATCH_INVARIANT",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_DISABLED_KERNELS",
    "VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MEDIA_CONNECTOR",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_USE_FUSED_MOE_GROUPED_TOPK",
    "VLLM_VIDEO_LOADER_BACKEND",
)
# Of plugins each may put other layers in place of vLLM's. An empty list is one, too: no plugin.
PLUGINS_VARIABLE = "VLLM_PLUGINS"
# And those that vLLM has no setting of: libraries, or a file of its own, read them.
UNDECLARED_VARIABLES = (
    *LIBRARY_VARIABLES,
    "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
    "FLASHINFER_NVFP4_4OVER6",
    "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256",
    "FLA_TRIL_PRECISION",
    "FLA_USE_FAST_OPS",
    "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH",
    "USE_FLAGOS",
    "XHS_VIDEO_JPEG_QUALITY",
)
# vLLM chooses other position factors by the longest request it admits.
ROPE_BY_LENGTH = frozenset({"dynamic", "longrope", "su"})


def config_digest(vllm_config: Any) -> str:
    """Hex digest of the configuration after overrides; the same in every process."""
    described = {
        "model": _describe_model(vllm_config.model_config),
        "cache": _pick(vllm_config.cache_config, CACHE_SETTINGS),
    }
    kernels = _kernels(vllm_config)
    described |= {"kernels": kernels} if kernels else {}
    unusual = {
        part: _unusual(getattr(vllm_config, part, None), names)
        for part, names in UNUSUAL_SETTINGS.items()
    }
    unusual["experts"] = _experts(vllm_config.parallel_config)
    unusual["additional_config"] = _additional(getattr(vllm_config, "additional_config", None))
    described |= {part: found for part, found in unusual.items() if found}
    diffusion = getattr(vllm_config, "diffusion_config", None)
    if diffusion is not None:
        described["diffusion"] = _pick(diffusion, DIFFUSION_SETTINGS)
    if diffusion is not None or _may_temper(vllm_config.model_config):
        drawn = _generation_settings(vllm_config.model_config)
        described |= {"generation": drawn} if drawn else {}
    speculative = vllm_config.speculative_config
    if speculative is not None:
        described["speculative"] = _pick(speculative, SPECULATIVE_SETTINGS)
        draft = getattr(speculative, "draft_model_config", None)
        if draft is not None and getattr(draft, "hf_config", None) is not None:
            described["draft"] = _describe_model(draft)
    return digest_of(described)


def _describe_model(model_config: Any) -> dict[str, Any]:
    from vllm import envs  # noqa: PLC0415 - importing vllm takes its time

    described = _pick(model_config, MODEL_SETTINGS)
    described["hf_config"] = shaping_fields(model_config.hf_config)
    described["dtype"] = str(model_config.dtype)
    multimodal = getattr(model_config, "multimodal_config", None)
    if multimodal is not None:
        picked = _pick(multimodal, MULTIMODAL_SETTINGS)
        if SCALES_SETTING in picked:
            picked[SCALES_SETTING] = _content_of(picked[SCALES_SETTING])
        described["multimodal"] = {name: value for name, value in picked.items() if value != {}}
        if getattr(envs, RUST_VARIABLE, False):
            described["multimodal"][RUST_VARIABLE] = True
    if depends_on_length(model_config):
        described["max_model_len"] = model_config.max_model_len
    return described


def scales_file(model_config: Any) -> Path | None:
    """Where the scales of images lie, where they are a file's."""
    multimodal = getattr(model_config, "multimodal_config", None)
    named = getattr(multimodal, SCALES_SETTING, None)
    return None if named is None else Path(named)


def _content_of(file: str) -> str:
    """A digest of what is in the file; its name where only a rank can read it."""
    try:
        return content_digest(Path(file))
    except OSError:
        return file


def _additional(given: Any) -> Any:
    """A dict, or what vLLM takes in its place: an object that says itself what counts of it, and
    may hold what is another in each process."""
    return given.compute_hash() if hasattr(given, "compute_hash") else given or {}


def _kernels(vllm_config: Any) -> dict[str, Any]:
    """What was chosen in place of vLLM's own choice; of a variable that names a file its content.

    Another processor is another layout, so vLLM's own choice needs no word here.
    """
    from vllm import envs  # noqa: PLC0415 - importing vllm takes its time

    picked = _pick(vllm_config.kernel_config, KERNEL_SETTINGS)
    picked |= _pick(vllm_config.attention_config, ATTENTION_SETTINGS)
    picked |= _pick(getattr(vllm_config, "mamba_config", None), MAMBA_SETTINGS)
    chosen = {name: value for name, value in picked.items() if value not in ("auto", False)}
    chosen |= _pick(vllm_config.attention_config, ATTENTION_CHOICES)
    given = tuple(name for name in SHAPING_VARIABLES if os.environ.get(name))
    undeclared = {name: os.environ[name] for name in UNDECLARED_VARIABLES if os.environ.get(name)}
    return chosen | undeclared | _pick(envs, (*given, PLUGINS_VARIABLE))


def _experts(parallel: Any) -> dict[str, Any]:
    """How the ranks share the experts of a model that has some; empty where each has a slice of
    all by tensor parallelism alone.

    What a slice of an expert computes may be rounded by itself, and by the way of sharing vLLM
    chooses kernels, of which some round activations.
    """
    if not getattr(parallel, "is_moe_model", None):
        return {}
    shared = _unusual(parallel, EXPERTS_SETTINGS)
    replicas = parallel.data_parallel_size
    if replicas > 1:  # of whole experts each replica computes the same, however many there are
        shared["replicas"] = "several" if parallel.enable_expert_parallel else replicas
    return shared


def _pick(settings: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the settings that this version of vLLM has, and that are set."""
    picked = {name: getattr(settings, name, None) for name in names}
    return {name: value for name, value in picked.items() if value is not None}


def _unusual(settings: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the settings that are set to another value than the configuration's own default."""
    usual = {name: getattr(type(settings), name, None) for name in names}
    picked = _pick(settings, names)
    return {name: value for name, value in picked.items() if value != usual[name]}


def depends_on_length(model_config: Any) -> bool:
    """Whether what the model computes for a token may depend on `max_model_len`.

    So it does in vLLM for some kinds of rotary positions and for Llama 4's attention temperature;
    of code that is not vLLM's own nothing is known.
    """
    if model_config.trust_remote_code:
        return True
    if str(getattr(model_config, "architecture", "")).startswith("Transformers"):
        return True
    rope_types = _rope_types(shaping_fields(model_config.hf_config))
    return _may_temper(model_config) or bool(ROPE_BY_LENGTH & rope_types)


def _may_temper(model_config: Any) -> bool:
    """Whether attention may have a temperature that grows with the position, as Llama 4's has."""
    return "attn_temperature_tuning" in _names(shaping_fields(model_config.hf_config))


def _generation_settings(model_config: Any) -> dict[str, Any]:
    """As vLLM's models have them: by `generation_config.json`, and what was given over that."""
    given = model_config.try_get_generation_config() | model_config.override_generation_config
    return {name: given[name] for name in GENERATION_SETTINGS if name in given}


def _names(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*(_names(each) for each in value.values()))
    return set().union(*(_names(each) for each in value)) if isinstance(value, list) else set()


def _rope_types(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*(_rope_types(each) for each in value))
    if not isinstance(value, dict):
        return set()
    own = {str(value[name]) for name in ("rope_type", "type") if name in value}
    return own.union(*(_rope_types(each) for each in value.values()))
