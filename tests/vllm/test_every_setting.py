"""Every setting of vLLM's has been judged: does it shape what lies in a block, or what is hashed?

With another release of vLLM this fails for each setting that is new or gone. Read what it does.
If two engines that differ in it may come to other bytes for the same hash, by more than the order
of a sum, the namespace must have it (`kvd_client/integrations/vllm/identity`), and so must
`test_shaping_settings`. Then name it here.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm import envs
from vllm.config import VllmConfig

from kvd_client.integrations.vllm.identity import model, namespace
from kvd_client.integrations.weights import HUB_SWITCHES

# What the namespace has by its name.
COUNTED: dict[str, tuple[str, ...]] = {
    "AttentionConfig": (
        *model.ATTENTION_SETTINGS,
        *model.ATTENTION_CHOICES,
        *model.UNUSUAL_SETTINGS["attention_config"],
    ),
    "CacheConfig": model.CACHE_SETTINGS,
    "DiffusionConfig": model.DIFFUSION_SETTINGS,
    "KernelConfig": model.KERNEL_SETTINGS,
    "LoRAConfig": (*namespace.LORA_SETTINGS, "lora_dtype"),
    "MambaConfig": model.MAMBA_SETTINGS + model.UNUSUAL_SETTINGS["mamba_config"],
    "ModelConfig": model.MODEL_SETTINGS,
    "MultiModalConfig": model.MULTIMODAL_SETTINGS,
    "ParallelConfig": (
        *model.UNUSUAL_SETTINGS["parallel_config"],
        *model.EXPERTS_SETTINGS,
        "data_parallel_size",
        "is_moe_model",
    ),
    "SpeculativeConfig": (
        *model.SPECULATIVE_SETTINGS,
        *model.UNUSUAL_SETTINGS["speculative_config"],
    ),
    "VllmConfig": ("additional_config",),
}
# Of these some vLLM finds out by others, and some only other releases have.
NO_FIELDS = {"architecture", "convert_type", "disable_lookahead_block_hashes", "runner_type"}

# What it has by something else: the files of weights, the model's own configuration after all
# overrides, the groups of the cache and their layouts, ranks, releases and hashes. What makes the
# namespace an engine's own.
BY_SOMETHING_ELSE = {
    "VllmConfig": "kv_transfer_config quant_config weight_transfer_config",
    "ModelConfig": """
        model model_weights dtype hf_config hf_text_config hf_config_path revision max_model_len
        quantization hf_overrides generation_config override_generation_config config_format
        trust_remote_code runner convert""",
    "CacheConfig": """
        block_size user_specified_block_size kv_cache_layout cache_dtype sliding_window
        prefix_caching_hash_algo enable_prefix_caching kv_cache_dtype_skip_layers
        mamba_page_size_padded skip_page_size_padded mamba_block_size mamba_cache_dtype
        mamba_ssm_cache_dtype mamba_cache_mode replayssm_buffer_len use_replayssm
        use_kda_recoverssm effective_attention_block_size hash_block_size _block_size_resolved""",
    "MultiModalConfig": "mm_hasher_algorithm mm_processor_cache_gb",
    "ParallelConfig": """
        pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size
        decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
        _allow_auto_resolve_cp_interleave_size""",
    "LoadConfig": "load_format model_loader_extra_config pt_load_map_location ignore_patterns",
    "AttentionConfig": "backend backend_per_kind",
    "SpeculativeConfig": """
        model draft_tensor_parallel_size tensor_parallel_size kv_cache_dtype max_model_len revision
        code_revision draft_model_config draft_parallel_config draft_load_config
        attention_backend target_model_config target_parallel_config
        dspark_draft_topk index_share_for_mtp_iteration""",
    "KVTransferConfig": "engine_id kv_connector_extra_config",
}

# Nothing, whatever they have: how requests come in and answers go out, where work is done, in which
# order things are summed.
NOTHING_AT_ALL = """
    AuxOutputConfig CompilationConfig DeviceConfig DynamicShapesConfig ECTransferConfig EPLBConfig
    EncoderCacheManagerConfig EngramConfig FaultToleranceConfig IrOpPriorityConfig
    KVEventsConfig LoggingConfig ObservabilityConfig OffloadConfig PassConfig PoolerConfig
    PrefetchOffloadConfig ProfilerConfig ReasoningConfig SchedulerConfig StructuredOutputsConfig
    UVAOffloadConfig WatermarkConfig WeightTransferConfig"""
# And by the field that holds them.
HELD_BY_OTHERS = "HiSparseConfig QuantKey QuantSpec QuantizationConfigArgs ScalarType ScaleDesc"

NOTHING = {
    "VllmConfig": """
        model_config cache_config parallel_config scheduler_config device_config load_config
        offload_config attention_config aux_output_config engram_config mamba_config kernel_config
        lora_config speculative_config watermark_config diffusion_config structured_outputs_config
        observability_config logging_config compilation_config profiler_config kv_events_config
        ec_transfer_config ec_manager_config reasoning_config instance_id
        optimization_level performance_mode shutdown_timeout""",
    "ModelConfig": """
        tokenizer tokenizer_mode seed is_submodel_config
        word_embeddings_untied_by_checkpoint allowed_local_media_path allowed_media_domains
        tokenizer_revision spec_target_max_model_len allow_deprecated_quantization enforce_eager
        return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay
        disable_cascade_attn skip_tokenizer_init enable_prompt_embeds served_model_name hf_token
        enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
        sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator
        logits_processors io_processor_plugin renderer_num_workers pooler_config
        multimodal_config""",
    "MultiModalConfig": """
        limit_per_prompt enable_mm_embeds mm_device_do_normalize mm_processor_cache_type
        mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin interleave_mm_strings
        skip_mm_profiling mm_tensor_ipc allow_missing_mm_embeddings mm_ipc_gpu_memory_gb""",
    "CacheConfig": """
        prefix_match_unit gpu_memory_utilization is_attention_free num_gpu_blocks_override
        prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint num_gpu_blocks
        num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency cache_hit_alignment_tokens
        kv_cache_memory_bytes kv_offloading_size kv_offloading_backend""",
    "ParallelConfig": """
        data_parallel_size_local data_parallel_rank data_parallel_rank_local
        data_parallel_master_ip data_parallel_rpc_port dp_sync_interval data_parallel_master_port
        data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
        enable_hc_sp enable_batch_sharded_sampling enable_ep_weight_filter
        eplb_config expert_placement_strategy
        max_parallel_loading_workers disable_custom_all_reduce enable_shm_tensor_arena
        enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold
        dbo_prefill_token_threshold disable_nccl_for_dp_synchronization ray_workers_use_nsight
        ray_runtime_env placement_group distributed_executor_backend worker_cls
        worker_extension_cls master_addr master_port node_rank nnodes numa_bind numa_bind_nodes
        numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds
        cpu_distributed_timeout_seconds world_size rank _data_parallel_master_port_list
        _coord_store_port dcp_comm_backend dcp_q_replicate data_parallel_index _api_process_count
        _api_process_rank enable_fault_tolerance fault_tolerance_config""",
    "LoadConfig": """
        download_dir safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size device use_tqdm_on_load""",
    "AttentionConfig": """
        flash_attn_version flash_attn_max_num_splits_for_cuda_graph
        tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
        sparse_mla_prefill_workspace_factor flex_attn_block_m
        flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size""",
    "MambaConfig": "stochastic_rounding_philox_rounds ssu_algorithm",
    "KernelConfig": """
        ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune
        enable_cutedsl_warmup enable_jit_warmup sparse_indexer_topk_backend""",
    "LoRAConfig": """
        max_lora_rank max_loras fully_sharded_loras max_cpu_loras default_mm_loras
        specialize_active_lora enable_mixed_moe_lora_format max_lora_cls_labels""",
    "SpeculativeConfig": """
        enforce_eager num_speculative_tokens
        disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction
        prompt_lookup_max prompt_lookup_min parallel_drafting
        num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth
        suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
        suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates
        synthetic_acceptance_length enable_adaptive_verification draft_sample_method""",
    "KVTransferConfig": """
        kv_connector kv_buffer_device kv_role kv_port kv_connector_module_path
        enable_permute_local_kv kv_load_failure_policy""",
}

VARIABLES_BY_SOMETHING_ELSE = {
    *HUB_SWITCHES[:1],
    model.PLUGINS_VARIABLE,
    model.RUST_VARIABLE,
    namespace.PARTITION_VARIABLE,
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_MLA_DISABLE",
    "VLLM_MODEL_REDIRECT_PATH",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "VLLM_TARGET_DEVICE",
}
# A star stands for all that begin so. Of other accelerators than kvd has there is no word here.
VARIABLES_OF_NOTHING = """
    VLLM_ROCM_* VLLM_TPU_* VLLM_XLA_* VLLM_XPU_*

    CMAKE_BUILD_TYPE CUDA_HOME CUDA_VISIBLE_DEVICES FORCE_COLOR LD_LIBRARY_PATH LOCAL_RANK MAX_JOBS
    MOONCAKE_* NO_COLOR NVCC_THREADS S3_* VERBOSE VLLM_BUILD_* VLLM_DOCKER_* VLLM_IMAGE_TAG
    VLLM_MAIN_CUDA_VERSION VLLM_SKIP_* VLLM_USE_PRECOMPILED*

    VLLM_API_KEY VLLM_ASSETS_* VLLM_AUDIO_FETCH_TIMEOUT VLLM_CACHE_ROOT VLLM_CHAT_TEMPLATE_*
    VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_CONFIGURE_LOGGING VLLM_CONFIG_ROOT VLLM_CUDART_SO_PATH
    VLLM_CUDA_COMPATIBILITY_PATH VLLM_CUSTOM_SCOPES_* VLLM_DEBUG_* VLLM_DISABLE_COMPILE_CACHE
    VLLM_DISABLE_LOG_LOGO VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_DO_NOT_TRACK VLLM_DP_*
    VLLM_EC_* VLLM_ELASTIC_* VLLM_ENABLE_COHERE_API VLLM_ENABLE_CUDA_COMPATIBILITY
    VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_STARTUP_PLAN VLLM_ENABLE_V1_MULTIPROCESSING
    VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
    VLLM_FORCE_AOT_LOAD VLLM_GC_DEBUG VLLM_GPT_OSS_* VLLM_GPU_NIC_PCIE_MAPPING VLLM_GPU_SYNC_CHECK
    VLLM_HOST_IP VLLM_HTTP_* VLLM_IMAGE_FETCH_TIMEOUT VLLM_KEEP_ALIVE_* VLLM_KV_EVENTS_*
    VLLM_KV_OFFLOAD_* VLLM_LOGGING_* VLLM_LOG_* VLLM_LOOPBACK_IP VLLM_LORA_RESOLVER_* VLLM_MAX_*
    VLLM_MEDIA_CACHE* VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT
    VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MOONCAKE_* VLLM_MQ_* VLLM_MSGPACK_* VLLM_NCCL_* VLLM_NIC_*
    VLLM_NIXL_* VLLM_NO_USAGE_STATS VLLM_NVTX_* VLLM_OBJECT_STORAGE_* VLLM_P2P_*
    VLLM_PATTERN_MATCH_DEBUG VLLM_PORT VLLM_PROCESS_NAME_PREFIX VLLM_RAISE_ON_*
    VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RAY_* VLLM_REGEX_* VLLM_RINGBUFFER_* VLLM_RPC_BASE_PATH
    VLLM_RUST_* VLLM_SERVER_DEV_MODE VLLM_SYSTEM_START_DATE VLLM_TEST_FORCE_LOAD_FORMAT VLLM_TOOL_*
    VLLM_TRACE_FUNCTION VLLM_USAGE_* VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS
    VLLM_USE_RAY_* VLLM_USE_RUST_BENCH VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_USE_SPINLOOP_EXT
    VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_V1_USE_OUTLINES_CACHE VLLM_VIDEO_FETCH_TIMEOUT
    VLLM_WORKER_* VLLM_WSL2_* VLLM_XGRAMMAR_CACHE_MB VLLM_ALLOW_*

    VLLM_ADAPTIVE_VERIFICATION_* VLLM_ALLREDUCE_* VLLM_COMPUTE_NANS_IN_LOGITS
    VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_CI_ENV VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU
    VLLM_CPU_OMP_THREADS_BIND VLLM_DBO_* VLLM_DCP_Q_REPLICATE VLLM_DEEPEP_* VLLM_DEEP_GEMM_WARMUP
    VLLM_DISABLE_PYNCCL
    VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_ENABLE_CUDAGRAPH_GC
    VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_ENABLE_GEMM_RS VLLM_ENABLE_HPC_OPS
    VLLM_ENABLE_INDUCTOR_* VLLM_ENABLE_PREGRAD_PASSES VLLM_FASTSAFETENSORS_QUEUE_SIZE
    VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLASHINFER_AUTOTUNE_*
    VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_GDN_DECODE_KERNEL VLLM_HAS_FLASHINFER_CUBIN
    VLLM_HUMMING_MOE_GEMM_TYPE VLLM_KIMI_K3_GEMM_AR
    VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM
    VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_MOE_SKIP_PADDING
    VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD
    VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_REPLICATE_EMBED
    VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_TRITON_*
    VLLM_TUNED_CONFIG_FOLDER VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH
    VLLM_USE_BYTECODE_HOOK VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_DIRECT_DCP_*
    VLLM_USE_FLASHINFER_SAMPLER
    VLLM_USE_HW_AGNOSTIC VLLM_USE_LAYERNAME VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_NCCL_SYMM_MEM
    VLLM_USE_OINK_OPS VLLM_USE_STANDALONE_COMPILE VLLM_USE_TRITON_AWQ VLLM_USE_V2_MODEL_RUNNER
    VLLM_WEIGHT_OFFLOADING_* VLLM_ZENTORCH_WEIGHT_PREPACK"""

# What vLLM reads and declares nowhere.
READ = re.compile(r"""(?:get_\w*env\w*|getenv|environ(?:\.\w+)?)\s*[(\[]\s*["']([A-Z]\w+)["']""")
UNDECLARED_OF_NOTHING = """
    AITER_* FLASH_ATTENTION_TRITON_AMD_ENABLE HIP_* INKLING_GFX950_GLUON ROCM_* XPU_*

    AWS_ENDPOINT_URL CCL_ATL_TRANSPORT CONDA_* CRIU_CUDA_PLUGIN_DIR CUDA_* CUDNN_LIBRARY
    DO_NOT_TRACK EXA_API_KEY FLASHINFER_CUBINS_REPOSITORY FLYDSL_RUNTIME_CACHE_DIR JAX_PLATFORMS
    LD_PRELOAD LLGUIDANCE_LOG_LEVEL LMCACHE_* LOCAL_WORLD_SIZE MODELSCOPE_API_TOKEN
    MOONCAKE_CONFIG_PATH OPENAI_API_KEY OTEL_* OUTLINES_CACHE_DIR PROGRAMFILES ProgramFiles
    PROMETHEUS_* RANK RAY_* RUNAI_STREAMER_* SAVE_TO_PYTORCH_BENCHMARK_FORMAT SYSTEMROOT TRACE* UV
    VLLM_CPU_SIM_MULTI_NUMA VLLM_DIST_IDENT VLLM_MORIIO_TRANSFER_TIMEOUT_S
    VLLM_PRECOMPILED_WHEEL_LOCATION VLLM_SNAPSHOT_TIMEOUT_S WINDIR WORLD_SIZE XDG_*

    CUBLASLT_WORKSPACE_SIZE CUBLAS_WORKSPACE_CONFIG EP_DISABLE_GIN FLA_CI_ENV FLA_COMPILER_MODE
    FLA_USE_CUDA_GRAPH FLA_USE_TMA FORCE_NUM_KV_SPLITS GDN_RECOMPUTE_SUPPRESS_LEVEL
    GPU_PINNED_MIN_XFER_SIZE INKLING_MULTIMEM_AR INKLING_SPLIT_KV LAMPORT_RS_SCONV MORI_* NCCL_*
    NUMEXPR_MAX_THREADS OMP_NUM_THREADS PYTORCH_* TILELANG_* TORCHINDUCTOR_* TORCH_COMPILE_DISABLE
    TORCH_CUDA_ARCH_LIST TRITON_* UCX_* USE_DEFAULT_FLA_NORM VLLM_CUSTOM_ALLREDUCE_ALGO"""
# What vLLM does not read itself: oneDNN, FlashInfer, cuBLAS, PyTorch and Triton do.
READ_BY_LIBRARIES = {
    "DNNL_DEFAULT_FPMATH_MODE",
    "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
    "FLASHINFER_NVFP4_4OVER6",
    "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_F32_DEFAULT",
    "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH",
}


def configurations() -> dict[str, list[str]]:
    """The fields of each configuration that vLLM's own may hold, by its name."""
    found: dict[str, list[str]] = {}
    waiting: list[Any] = [VllmConfig]
    while waiting:
        kind = waiting.pop()
        waiting += typing.get_args(kind)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__name__ not in found:
            found[kind.__name__] = [field.name for field in dataclasses.fields(kind)]
            waiting += typing.get_type_hints(kind).values()
    return found


CONFIGURATIONS = configurations()


def judged(configuration: str) -> Counter[str]:
    """How often each setting stands above."""
    names = [*set(COUNTED.get(configuration, ())) - NO_FIELDS]
    names += BY_SOMETHING_ELSE.get(configuration, "").split()
    return Counter([*names, *NOTHING.get(configuration, "").split()])


def test_each_configuration_has_been_judged() -> None:
    known = {*NOTHING, *COUNTED, *NOTHING_AT_ALL.split(), *HELD_BY_OTHERS.split()}
    assert set(CONFIGURATIONS) == known


@pytest.mark.parametrize("configuration", sorted({*NOTHING, *COUNTED}))
def test_each_setting_has_been_judged_once(configuration: str) -> None:
    known, found = judged(configuration), Counter(CONFIGURATIONS[configuration])
    assert sorted(found - known) == [], "new: judge them"
    assert sorted(known - found) == [], "gone, or named twice"


def left_of(known: set[str], patterns: list[str]) -> set[str]:
    """Those that no pattern fits; each pattern must fit some."""
    fitting = {each: {name for name in known if fnmatchcase(name, each)} for each in patterns}
    assert [each for each, names in fitting.items() if not names] == [], "gone"
    return known - set().union(*fitting.values())


def test_each_variable_has_been_judged() -> None:
    counted = set(model.SHAPING_VARIABLES) | VARIABLES_BY_SOMETHING_ELSE
    assert left_of(set(envs.environment_variables), VARIABLES_OF_NOTHING.split()) == counted


def test_each_variable_that_vllm_reads_and_declares_nowhere_has_been_judged() -> None:
    files = Path(vllm.__file__).parent.rglob("*.py")
    read = {name for file in files for name in READ.findall(file.read_text())}
    left = left_of(read - set(envs.environment_variables), UNDECLARED_OF_NOTHING.split())
    counted = set(model.UNDECLARED_VARIABLES) - READ_BY_LIBRARIES
    assert left == counted | {namespace.HASH_SEED_VARIABLE}
