"""Who an engine's rank is to kvd, and all that must agree before it may share pages.

SGLang's keys are chained digests of tokens, of the request's extra key, and of nothing else. All
else that decides what lies in a page is gathered here. What can't be known makes the namespace
that of this start alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvd_client.draft import wire_text
from kvd_client.identity import EngineIdentity, Group, NamespaceFields
from kvd_client.integrations.digests import LIBRARY_VARIABLES, digest_of
from kvd_client.integrations.sglang.options import HiCacheOptions
from kvd_client.integrations.sglang.pools import HostPool
from kvd_client.integrations.weights import (
    WeightsName,
    changed_settings,
    content_digest,
    name_weights,
    settings_digests,
    short_model_name,
)

log = logging.getLogger(__name__)

HASH_BYTES = 32
HASH_ALGORITHM = "sglang sha256 of the previous digest and the page's tokens"
HEX_DIGITS = 2 * HASH_BYTES

# Of SGLang's arguments what may change what a layer computes for a token, which tokens lie on which
# rank, or what the bytes of a pool mean, beside the weights. Other rounding counts, another order
# of the same sums does not. Why the others are not here: tests/sglang/judged_*.py.
SHAPING_ARGUMENTS = (
    "attention_backend",
    "c128_page_size",
    "context_length",
    "cp_strategy",
    "decode_attention_backend",
    "decrypted_config_file",
    "decrypted_draft_config_file",
    "deepep_dispatcher_output_dtype",
    "deepep_mode",
    "dllm_algorithm",
    "dllm_algorithm_config",
    "dsa_decode_backend",
    "dsa_prefill_backend",
    "dsv4_attn_backend",
    "dsv4_prefill_backend",
    "dtype",
    "enable_amd_monokernel",
    "enable_decoder_swa_bounded_replay",
    "enable_deepseek_v4_fp4_indexer",
    "enable_deterministic_inference",
    "enable_dsa_fused_indexer",
    "enable_encoder_swa_bounded_replay",
    "enable_hisparse",
    "enable_mamba_cache_stochastic_rounding",
    "enable_megamoe_for_layernorm_sp",
    "enable_multi_layer_eagle",
    "enable_nvidia_megakernel",
    "enable_precise_embedding_interpolation",
    "enable_quant_communications",
    "enable_tf32_matmul",
    "enable_w4a4_mxfp4_megamoe",
    "enforce_shared_experts_fusion",
    "ep_dispatch_algorithm",
    "ep_size",
    "experts_shared_outer_loras",
    "flashinfer_a2a_dispatch_type",
    "flashinfer_mxfp4_moe_precision",
    "forward_hooks",
    "fp4_gemm_runner_backend",
    "fp8_gemm_runner_backend",
    "hisparse_config",
    "json_model_override_args",
    "kt_max_deferred_experts_per_token",
    "kt_method",
    "kt_num_gpu_experts",
    "kv_cache_dtype",
    "linear_attn_backend",
    "linear_attn_decode_backend",
    "linear_attn_prefill_backend",
    "linear_attn_verify_backend",
    "mamba_backend",
    "mm_attention_backend",
    "mm_process_config",
    "model_config_parser",
    "model_impl",
    "modelopt_quant",
    "moe_a2a_backend",
    "moe_dense_tp_size",
    "moe_dp_size",
    "moe_runner_backend",
    "offload_mode",
    "prefill_attention_backend",
    "prefill_kv_cache_dequant_dtype",
    "qsa_indexer_dtype",
    "quantization",
    "quantization_param_path",
    "rl_on_policy_target",
    "rl_quant_profile",
    "shared_experts_tp_size",
    "speculative_algorithm",
    "speculative_attention_mode",
    "speculative_draft_attention_backend",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_load_format",
    "speculative_draft_model_quantization",
    "speculative_draft_sink_size",
    "speculative_draft_window_size",
    "speculative_enable_w4a4_mxfp4_megamoe",
    "speculative_moe_a2a_backend",
    "speculative_moe_runner_backend",
)

# And of the variables of its environment, also of those that it reads and declares nowhere.
SHAPING_VARIABLES = (
    "AITER_ENABLE_AOT_GLUON_PA_MQA_LOGITS",
    "AITER_FORCE_A8W4",
    "AITER_SITUV2_A4W4",
    "AITER_SITUV2_A8W4",
    "ASCEND_USE_FIA",
    "BIAS_PREP_ONLY",
    "DEEP_NORMAL_MODE_USE_INT8_QUANT",
    "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
    "FLASHINFER_NVFP4_4OVER6",
    "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256",
    "FLA_USE_FAST_OPS",
    "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
    "ROCM_QUICK_REDUCE_QUANTIZATION",
    "SGLANG_AITER_ASM_PREFILL_HD128",
    "SGLANG_AITER_FP8_PREFILL_ATTN",
    "SGLANG_AITER_PAGED_PREFILL_ASM",
    "SGLANG_AMD_FLYDSL_MEGA_QUANT",
    "SGLANG_AMD_USE_FLYDSL_MEGA_MOE",
    "SGLANG_CPU_QUANTIZATION",
    "SGLANG_DEBUG_HISPARSE_SKIP_IO",
    "SGLANG_DEBUG_REVERT_PR",
    "SGLANG_DEEPEP_BF16_DISPATCH",
    "SGLANG_DISABLED_MODEL_ARCHS",
    "SGLANG_DISABLE_AITER_FUSED_FP8_DSA_INDEXER",
    "SGLANG_DISABLE_DSA_INDEXER_FUSION",
    "SGLANG_DISABLE_M3_FP8_ATTN_GEMM",
    "SGLANG_DISABLE_MSA",
    "SGLANG_DISABLE_MSA_V1_Q8KV4",
    "SGLANG_DSA_HIP_DISABLE_PRESHUFFLE",
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD",
    "SGLANG_DSV4_COMPRESSED_KV_LAYOUT",
    "SGLANG_DSV4_COMPRESS_STATE_DTYPE",
    "SGLANG_DSV4_DENSE_MXSCALE",
    "SGLANG_DSV4_DENSE_MXSCALE_SHAPES",
    "SGLANG_DSV4_FP4_DEQUANT",
    "SGLANG_DSV4_FP4_EXPERTS",
    "SGLANG_DSV4_KV_LAYOUT",
    "SGLANG_DSV4_UNIFIED_KV_FP8",
    "SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
    "SGLANG_ENABLE_DP_GATHER_FP8",
    "SGLANG_ENABLE_JIT_DEEPGEMM",
    "SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX",
    "SGLANG_EXPERIMENTAL_ONLINE_C128_MTP",
    "SGLANG_EXTERNAL_MODEL_PACKAGE",
    "SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16",
    "SGLANG_FLASHINFER_MEGAMOE_COMBINE_DTYPE",
    "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION",
    "SGLANG_FORCE_FP8_MARLIN",
    "SGLANG_FORCE_MXFP8_BLOCK_CONVERT",
    "SGLANG_FORCE_MXFP8_BLOCK_CONVERT_DENSE",
    "SGLANG_FP4_IGNORED_LAYERS",
    "SGLANG_FP8_IGNORED_LAYERS",
    "SGLANG_GFX1250_W4A8_MOE",
    "SGLANG_GLM_NEXTN_MOE_PTPC",
    "SGLANG_HACK_FLASHMLA_BACKEND",
    "SGLANG_HIP_DSV41_INDEX_K_PAGE8",
    "SGLANG_HUMMING_INPUT_QUANT_CONFIG",
    "SGLANG_HUMMING_ONLINE_QUANT_CONFIG",
    "SGLANG_HUMMING_USE_F16_ACCUM",
    "SGLANG_INT4_WEIGHT",
    "SGLANG_KV_CANARY_PERTURB_NEXT_TOKEN_SWAP_PROB",
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_POST_FORWARD_PROB",
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_UNUSED_CACHE_PROB",
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_USED_PROB",
    "SGLANG_KV_CANARY_PERTURB_REQ_TO_TOKEN_PROB",
    "SGLANG_MINICPM_DENSE_AS_SPARSE",
    "SGLANG_MINICPM_FORCE_DENSE",
    "SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ",
    "SGLANG_MOE_NVFP4_DISPATCH",
    "SGLANG_MORI_COMBINE_DTYPE",
    "SGLANG_MORI_DISPATCH_DTYPE",
    "SGLANG_NIXL_EP_BF16_DISPATCH",
    "SGLANG_NPU_ARCH35_REQUANT_BLOCK_FP8",
    "SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD",
    "SGLANG_NPU_USE_MLAPO",
    "SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN",
    "SGLANG_NVFP4_CKPT_FP8_NEXTN_MOE",
    "SGLANG_OPT_DEEPGEMM_MEGA_MOE_FUSE_SHARED_EXPERTS",
    "SGLANG_OPT_DSV41_BF16_INDEX_LOGITS",
    "SGLANG_OPT_FP8_WO_A_GEMM",
    "SGLANG_OPT_HOPPER_BLOCK_FP8_BF16",
    "SGLANG_OPT_MINIMAX_M3_FP8_INDEX_CACHE",
    "SGLANG_OPT_SM120_DIRECT_SWA_KV",
    "SGLANG_OPT_USE_BF16_ROUTER_GEMM",
    "SGLANG_OPT_USE_MINIMAX_DENSE_SPARSE_DECODE",
    "SGLANG_OPT_USE_ONLINE_COMPRESS",
    "SGLANG_PLATFORM",
    "SGLANG_PLUGINS",
    "SGLANG_QUANT_ALLOW_DOWNCASTING",
    "SGLANG_ROCM_DISABLE_LINEARQUANT",
    "SGLANG_ROCM_SMALLM_FP8_BS",
    "SGLANG_ROCM_SMALLM_MOE",
    "SGLANG_ROPE_CACHE_FP32",
    "SGLANG_SIMULATE_ACC_LEN",
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
    "SGLANG_SIMULATE_UNIFORM_EXPERTS",
    "SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR",
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR",
    "SGLANG_SM120_FLASHMLA_BACKEND",
    "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND",
    "SGLANG_TRITON_DENSE_PREFILL_ATTN",
    "SGLANG_TRITON_FP8_PREFILL_ATTN",
    "SGLANG_USE_AITER",
    "SGLANG_USE_AITER_FP8_PER_TOKEN",
    "SGLANG_USE_AITER_UNIFIED_ATTN",
    "SGLANG_USE_DEEPGEMM_BMM",
    "SGLANG_USE_FIA_NZ",
    "SGLANG_USE_MLX",
    "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH",
)

# And of the arguments that name weights beside the model's and the drafter's.
WEIGHTS_ARGUMENTS = ("kt_weight_path", "modelopt_checkpoint_restore_path", "uno_lora_path")

# And of those that tell one start from another, alike on all of its ranks on this machine.
STARTING_ARGUMENTS = ("random_seed", "port", "nccl_port", "dist_init_addr", "base_gpu_id")
RUN_VARIABLE = "SGLANG_RUN_ID"  # which SGLang sets anew at each start, before its ranks begin
# Who of SGLang's notes that weights of a running engine have changed.
UPDATES = frozenset({"model_runner.update_model_fields", "scheduler.weight_version"})
RUN_NAME = re.compile(r"sglang-run-(?P<seconds>\d+(\.\d+)?)-")


class ModelFiles(NamedTuple):
    """Of the model, its drafter and others: what the weights are called, and what else they say."""

    weights: list[WeightsName]
    settings: list[dict[str, str]]
    changed: list[str]  # why the engine may have read other settings than those


_files_at_start: weakref.WeakKeyDictionary[Any, ModelFiles] = weakref.WeakKeyDictionary()


def key_of(key: str) -> bytes:
    """A key of SGLang's as the daemon takes it: the digest itself, or one of another text."""
    digests = _digests(key, 1)
    if digests is not None:
        return digests
    return hashlib.sha256(b"text:" + key.encode(errors="surrogatepass")).digest()


def keys_of(keys: Sequence[str]) -> list[bytes]:
    """`key_of` each of them, at once where all look like digests."""
    if set(map(len, keys)) == {HEX_DIGITS}:
        digests = _digests("".join(keys), len(keys))
        if digests is not None:
            return [digests[at : at + HASH_BYTES] for at in range(0, len(digests), HASH_BYTES)]
    return [key_of(key) for key in keys]


def _digests(text: str, count: int) -> bytes | None:
    """So many digests; None where the text is anything else."""
    try:
        digests = bytes.fromhex(text)  # which takes capitals and spaces, too
    except ValueError:
        return None
    return digests if len(digests) == count * HASH_BYTES and digests.hex() == text else None


def build_namespace(
    storage_config: Any, pools: Sequence[HostPool], options: HiCacheOptions, *, is_replicated: bool
) -> NamespaceFields:
    """The namespace of these pools' pages on this rank.

    Every rank has one of its own, but for pools whose bytes all ranks of a tensor-parallel group
    hold alike: of these there is one copy.
    """
    arguments = server_arguments()
    files = _files(pools[0].pool, arguments)
    weights, doubts = _weights(arguments, files, options)
    doubts += [*files.changed[:1], *_doubts(arguments, options)]
    if doubts and not options.unshared:
        log.warning("kvd: this engine shares no pages, nor with its next start: %s", doubts)
    is_unshared = bool(doubts) or options.unshared
    if is_unshared and is_replicated:
        # The daemon's own way holds for one session alone, and all ranks shall find the one copy.
        weights, is_unshared = f"of the start {launch_id()} alone", False
    # The name that SGLang gives is the one that it serves the model under, as its user likes.
    model = getattr(arguments, "model_path", "") or storage_config.model_name or "model"
    page_tokens = pools[0].page_tokens
    return NamespaceFields(
        tenant=options.tenant,
        account=options.account,
        model=wire_text(short_model_name(str(model))),
        model_config_digest=digest_of([_shaping(arguments), files.settings]),
        weights_id=wire_text(weights),
        quantization=wire_text(str(getattr(arguments, "quantization", None) or "")),
        kv_dtype=wire_text(" ".join(sorted({_dtype_of(each.pool) for each in pools}))),
        attention_backend=wire_text(f"sglang-{_release()}"),
        kv_layout=digest_of([each.describe() for each in pools]),
        parallel_shape=wire_text(_place(storage_config, is_replicated=is_replicated)),
        lora_digest=wire_text(options.lora_id),
        hash_algorithm=HASH_ALGORITHM,
        hash_bytes=HASH_BYTES,
        groups=tuple(
            Group(tokens_per_block=page_tokens, shard_bytes=(each.page_bytes,)) for each in pools
        ),
        unshared=is_unshared,
    )


def rank_identity(storage_config: Any, options: HiCacheOptions, part: str) -> EngineIdentity:
    """This rank as an engine of its own: SGLang's ranks decide for themselves."""
    place = storage_config
    name = (
        options.engine_name or f"sglang-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
    )
    rank = f"dp{place.dp_rank}-pp{place.pp_rank}-cp{place.attn_cp_rank}-tp{place.tp_rank}"
    return EngineIdentity(wire_text(f"{name}-{_replica()}{rank}-{part}"), os.urandom(16))


def _replica() -> str:
    """Which of an engine's data-parallel replicas this is: SGLang counts ranks within each."""
    try:
        from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - of this release

        number = get_parallel().dp_rank
    except (ImportError, RuntimeError, AttributeError):
        return ""
    return "" if number is None else f"replica{number}-"


def launch_id() -> str:
    """The same for all ranks of one start of an engine on this machine, and for no other.

    Ranks are children of one process, which may start several engines, also one after the other
    with the same arguments: SGLang gives each start a name of its own.
    """
    parent, arguments = os.getppid(), server_arguments()
    try:
        began = _start_ticks(parent)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, IndexError):
        began = boot = ""
    own = [str(getattr(arguments, name, None)) for name in STARTING_ARGUMENTS]
    return digest_of([boot, parent, began, os.environ.get(RUN_VARIABLE, ""), own])


def _start_ticks(pid: int) -> str:
    """When a process began, in clock ticks since the machine did. OSError where it is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def server_arguments() -> Any:
    """SGLang's arguments, with what it has decided where none was given; nothing where this
    process has none."""
    try:
        from sglang.srt.arg_groups.model_override_base import (  # noqa: PLC0415 - of this release
            resolved_view,
        )
        from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - of this release

        return resolved_view(get_server_args())
    except (ImportError, ValueError, RuntimeError, AttributeError):
        return None


def _weights(arguments: Any, files: ModelFiles, options: HiCacheOptions) -> tuple[str, list[str]]:
    """What model, drafter and others are called, and why that can't be known."""
    if options.weights_id:
        return f"named:{options.weights_id}", []
    if not files.weights:
        return "", ["SGLang's arguments are not known here; set weights_id"]
    if getattr(arguments, "weight_cache_mode", "off") == "client":
        return "", ["a weight cache daemon may have read other files than these; set weights_id"]
    if _were_updated():
        return "", ["weights were updated since the engine began; set weights_id"]
    problems = [f"{each.problem}; set weights_id" for each in files.weights if each.problem]
    return " ".join(each.name for each in files.weights), problems[:1]


def _files(pool: Any, arguments: Any) -> ModelFiles:
    """As they were when the pool's first backend was made: an engine that a backend is attached to
    once more goes on with what it read at its start, whatever lies there by now."""
    if arguments is None:
        return ModelFiles([], [], [])
    if pool not in _files_at_start:
        models, begun_ns = list(_models(arguments)), _begun_ns()
        _files_at_start[pool] = ModelFiles(
            [name_weights(*each, begun_ns) for each in models],
            # Those of named weights may be edited, too.
            [settings_digests(*each) for each in models],
            [problem for each in models if (problem := changed_settings(*each, begun_ns))],
        )
    return _files_at_start[pool]


def _begun_ns() -> int:
    """A time before this rank read its model's files.

    SGLang names a start by its time; where it names none (Ray), it is when this process began.
    """
    named = RUN_NAME.match(os.environ.get(RUN_VARIABLE, ""))
    if named is not None:
        return int(float(named["seconds"]) * 1e9)
    ticks = int(_start_ticks(os.getpid()))
    began_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")  # since the machine did
    return time.time_ns() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - began_ns)


def _models(arguments: Any) -> Iterator[tuple[Any, Any]]:
    """The model, its drafter and others: where each lies, and how it is loaded."""
    model, draft = arguments.model_path, getattr(arguments, "speculative_draft_model_path", None)
    named = [(model, getattr(arguments, "revision", None))]
    if draft and draft != model:
        named.append((draft, getattr(arguments, "speculative_draft_model_revision", None)))
    others = [getattr(arguments, name, None) for name in WEIGHTS_ARGUMENTS]
    named += [(other, None) for other in others if other]
    trust_remote_code = bool(getattr(arguments, "trust_remote_code", False))
    how = SimpleNamespace(
        load_format=getattr(arguments, "load_format", "auto"),
        model_loader_extra_config=_loader_settings(arguments),
        download_dir=getattr(arguments, "download_dir", None),
    )
    # The engine's own has the commit that it was read from.
    read = getattr(getattr(arguments, "_model_config", None), "hf_config", None)
    for number, (path, revision) in enumerate(named):
        where = SimpleNamespace(
            model=str(path),
            revision=revision,
            trust_remote_code=trust_remote_code,
            hf_config=None if number else read,
        )
        yield where, how


def _were_updated() -> bool:
    try:
        from sglang.srt.runtime_context import get_context  # noqa: PLC0415 - of this release

        return any(source in UPDATES for source, _ in get_context().overrides_log())
    except (ImportError, AttributeError):
        return False


def _loader_settings(arguments: Any) -> Any:
    """What SGLang has as a text of JSON; another text stays one, of which nothing is known."""
    settings = getattr(arguments, "model_loader_extra_config", None) or {}
    try:
        return json.loads(settings) if isinstance(settings, str) else settings
    except ValueError:
        return settings


def _doubts(arguments: Any, options: HiCacheOptions) -> Iterator[str]:
    if getattr(arguments, "enable_lora", False) and not options.lora_id:
        yield "SGLang's keys have an adapter's name, not what is in it; set lora_id"


def _shaping(arguments: Any) -> dict[str, str]:
    picked = {name: getattr(arguments, name, None) for name in SHAPING_ARGUMENTS}
    variables = (*SHAPING_VARIABLES, *LIBRARY_VARIABLES)
    picked |= {name: os.environ.get(name) or None for name in variables}  # empty: not set
    return {name: _told(value) for name, value in picked.items() if value is not None}


def _told(value: Any) -> str:
    """A value as text; of a file's path, what is in the file as well.

    Of JSON, whose names may stand in any order, only a digest: it may be long, and names no file.
    """
    if isinstance(value, (dict, list)):
        return digest_of(value)
    text = str(value)
    try:
        return f"{text} {content_digest(Path(text))}" if Path(text).is_file() else text
    except OSError:  # no path, or one that only the engine may read
        return text


def _dtype_of(pool: Any) -> str:
    """Of a pool that has none: of its table, of which it has at least one; or plain bytes."""
    tables = getattr(pool, "kv_buffer", None)
    table = tables[0] if isinstance(tables, (list, tuple)) and tables else tables
    named = getattr(pool, "dtype", None) or getattr(pool, "conv_dtype", None)
    return str(named or getattr(table, "dtype", "bytes")).removeprefix("torch.")


def _place(place: Any, *, is_replicated: bool) -> str:
    """Which part of a page's layers, heads and tokens lies here. Replicas (dp) have the same."""
    tensor = f"tp{place.tp_size}"
    if not is_replicated:
        tensor = f"tp{place.tp_rank}of{place.tp_size}"
    context = f"cp{place.attn_cp_rank}of{place.attn_cp_size}"
    decode = f"dcp{place.dcp_rank}of{place.dcp_size}"
    return f"{tensor}-pp{place.pp_rank}of{place.pp_size}-{context}-{decode}"


def _release() -> str:
    from sglang import __version__  # noqa: PLC0415 - importing sglang takes its time

    return str(__version__)
