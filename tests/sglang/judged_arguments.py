"""SGLang's arguments that the namespace need not have, by reason. What it has, its code says.

The line: other rounding counts, another order of the same sums does not.
"""

ARGUMENTS = {
    "counted by a pool's layout, or a rank's place": """
        attn_cp_size dcp_size disable_hybrid_swa_memory enable_dsa_cache_layer_split
        enable_page_major_kv_layout enable_prefill_cp enable_scattered_sconv enable_unified_memory
        hicache_mem_layout mamba_ssm_dtype page_size pp_size tp_size
    """,
    "counted by the weights: their format or a note of an update says that they have no name": """
        checkpoint_engine_wait_weights_before_ready custom_weight_loader delete_ckpt_after_loading
        modelexpress_config remote_instance_weight_loader_backend
        remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_start_seed_via_transfer_engine weight_cache_socket
        weight_cache_timeout weight_version
    """,
    "counted by an adapter's contents, which `lora_id` names": """
        lora_paths lora_strict_loading lora_target_modules max_lora_rank
    """,
    "counted by the page's hash: which tokens a prompt becomes": """
        allow_auto_truncate chat_template completion_template default_chat_template_kwargs
        hf_chat_template_name reasoning_parser skip_tokenizer_init tokenizer_backend
        tokenizer_mode tokenizer_path trust_request_chat_template
    """,
    "counted by the page's hash: of what images, videos and audio were made into": """
        disable_fast_image_processor enable_multimodal image_processor_backend
        trust_mm_content_hashes
    """,
    "counted by another argument, which SGLang sets by this one": """
        _speculative_draft_quantization_explicitly_set enable_dp_attention
        enable_return_aux_hidden_states quantize_and_serve speculative_dflash_block_size
        speculative_dspark_block_size
    """,
    "shapes nothing: SGLang takes it with no storage, or has another cache then": """
        disable_radix_cache enable_flexkv enable_int8_mamba_checkpoint enable_kv_cache_sharding
        enable_linker_mla_dedup enable_lmcache enable_mis enable_unified_cache_external_linker
        flexkv_config_file int8_mamba_ckpt_size lmcache_config_file prefill_only_disable_kv_cache
        radix_cache_backend unified_cache_external_linker_backend
        unified_cache_external_linker_config
    """,
    "shapes nothing: experts: on which rank each is, and who is told": """
        deepep_v2_mode disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion
        elastic_ep_backend elastic_ep_scale_timeout enable_elastic_expert_backup enable_eplb
        enable_paged_experts enable_waterfill ep_join_mode ep_num_redundant_experts eplb_algorithm
        eplb_min_rebalancing_utilization_threshold eplb_rebalance_layers_per_chunk
        eplb_rebalance_num_iterations expert_balancedness_report_mode
        expert_distribution_recorder_buffer_size expert_distribution_recorder_mode
        init_expert_location kt_cpuinfer kt_threadpool_count mooncake_ib_device
        paged_experts_num_resident
    """,
    "shapes nothing: kernels that round alike, graphs, and how bytes travel": """
        bf16_gemm_backend boundary_reduction cpu_offload_gb cuda_graph_backend_decode
        cuda_graph_backend_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_config
        cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill
        cuda_graph_prefill_max_context debug_cuda_graph deepep_config
        disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill
        disable_chunked_prefix_cache disable_cuda_graph disable_cuda_graph_padding
        disable_custom_all_reduce disable_decode_cuda_graph disable_flashinfer_autotune
        disable_prefill_cuda_graph dsa_paged_mqa_logits_backend dsa_topk_backend dsa_triton_union
        enable_aiter_allreduce_fusion enable_cudagraph_gc enable_flashinfer_allreduce_fusion
        enable_fused_moe_sum_all_reduce enable_fused_qk_norm_rope enable_layerwise_nvtx_marker
        enable_lean_attention enable_linear_replayssm enable_linear_replayssm_spec enable_mscclpp
        enable_nccl_nvls enable_profile_cuda_graph enable_single_batch_overlap enable_symm_mem
        enable_torch_compile enable_torch_compile_debug_mode enable_torch_symm_mem
        enable_two_batch_overlap enforce_disable_flashinfer_allreduce_fusion
        flashinfer_allreduce_fusion_backend flashinfer_autotune_skip_ops
        flashinfer_mla_disable_ragged fuseep_mode grammar_backend linear_replayssm_cache_len
        lora_backend lora_use_virtual_experts mamba_cache_philox_rounds max_lora_chunk_size
        offload_group_size offload_num_in_group offload_prefetch_step ple_offload_backend
        ple_offload_dir ple_offload_embedding pre_warm_nccl sampling_backend
        speculative_boundary_reduction speculative_dsa_topk_backend
        tbo_token_distribution_threshold torch_compile_max_bs triton_attention_num_kv_splits
        triton_attention_reduce_in_fp32 triton_attention_split_tile_size
    """,
    "shapes nothing: loading media, adapters and weights, not what is in them": """
        allowed_media_domains enable_broadcast_mm_inputs_process enable_lora_overlap_loading
        enable_mm_global_cache enable_prefix_mm_cache engine_info_bootstrap_port
        limit_mm_data_per_request lora_drain_wait_threshold lora_eviction_policy max_loaded_loras
        max_loras_per_batch media_url_max_file_size_mb mm_enable_dp_encoder mm_feature_transport
        mm_global_cache_backend mm_io_worker_num mm_preprocess_cache_size_mb
        mm_processor_worker_num model_checksum modelopt_checkpoint_save_path modelopt_export_path
        startup_weight_load_mode weight_loader_disable_mmap weight_loader_drop_cache_after_load
        weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
    """,
    "shapes nothing: logs, metrics, dumps and checks": """
        bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token
        crash_dump_folder debug_tensor_dump_input_file debug_tensor_dump_layers
        debug_tensor_dump_output_folder decode_log_interval enable_forward_pass_metrics
        enable_metrics enable_metrics_for_all_schedulers enable_mfu_metrics
        enable_request_time_stats_logging enable_trace export_metrics_to_file
        export_metrics_to_file_dir extra_metric_labels forward_pass_metrics_ipc_name
        forward_pass_metrics_worker_id gc_warning_threshold_secs generation_tokens_buckets
        kv_canary kv_canary_real_data kv_canary_sweep_interval kv_events_config
        load_publish_endpoint load_snapshot_publish_interval log_level log_level_http log_requests
        log_requests_format log_requests_level log_requests_target msprobe_dump_config
        otlp_service_name otlp_traces_endpoint prompt_tokens_buckets show_time_cost
        smg_http_sidecar_port stat_loggers tokenizer_metrics_allowed_custom_labels
        tokenizer_metrics_custom_labels_header trace_modules uvicorn_access_log_exclude_prefixes
    """,
    "shapes nothing: processes, devices and who computes which part": """
        attn_dp_size custom_sigquit_handler dcp_comm_backend dcp_replicate_q_proj
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank
        decoupled_spec_role device disable_attn_tp_gather disaggregation_bootstrap_port
        disaggregation_decode_allocation_policy disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_enable_radix_cache disaggregation_decode_extra_slots
        disaggregation_decode_host_receive_threshold disaggregation_decode_polling_interval
        disaggregation_decode_retraction_backup disaggregation_enable_kv_checksum
        disaggregation_ib_device disaggregation_mode disaggregation_transfer_backend dist_timeout
        dp_size dwdp_size elastic_ep_initial_size enable_adaptive_dispatch_to_encoder
        enable_attn_tp_input_scattered enable_cp_decode_attn_tp enable_cp_tp_group_sharing
        enable_dense_mlp_attn_tp enable_dp_attention_local_control_broadcast enable_dp_lm_head
        enable_layernorm_sp enable_p2p_check enable_pd_role_switch enable_pdmux
        enable_shared_experts_attn_tp enable_tp_lm_head_all_to_all encoder_bootstrap_port
        encoder_only encoder_register_urls encoder_transfer_backend encoder_urls
        ep_join_rank_offset gated_launch_port gc_threshold gpu_id_step language_model_only
        language_only load_balance_method max_ep_size mlx_enable_sampling
        nnodes node_rank num_reserved_decode_tokens numa_node
        optimistic_prefill_attempts pdmux_config_path pp_async_batch_depth pp_max_micro_batch_size
        sleep_on_idle sm_group_num soft_watchdog_timeout use_ray
        watchdog_timeout
    """,
    "shapes nothing: requests, answers and their limits": """
        admin_api_key api_key asr_max_buffer_seconds asr_max_concurrent_sessions batch_notify_size
        constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
        constrained_json_whitespace_pattern detokenizer_worker_num disable_tokenizer_batch_decode
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
        enable_cache_report enable_dynamic_batch_tokenizer enable_http2
        enable_http_worker_reuseport enable_response_store enable_ssl_refresh
        enable_streaming_session enable_strict_thinking enable_tokenizer_batch_encode
        fastapi_root_path file_storage_path grpc_mode grpc_port grpc_response_timeout_secs
        grpc_worker_threads host http2_initial_connection_window_size http2_max_concurrent_streams
        incremental_streaming_output preferred_sampling_params return_input_ids return_output_ids
        sampling_defaults served_model_name sidecar sidecar_args skip_server_warmup smg_grpc_mode
        ssl_ca_certs ssl_certfile ssl_keyfile ssl_keyfile_password stream_interval
        stream_response_default_include_usage strip_thinking_cache tokenizer_worker_num
        tool_call_parser tool_server warmups
    """,
    "shapes nothing: what is returned, sampled or saved beside the KV": """
        aux_hidden_state_capture disable_outlines_disk_cache enable_custom_logit_processor
        enable_draft_weights_cpu_backup enable_fp32_lm_head enable_memory_saver
        enable_return_hidden_states enable_return_indexer_topk enable_return_routed_experts
        enable_watermark enable_weights_cpu_backup is_embedding return_aux_hidden_state_layer_ids
        return_hidden_states_mode sampling_mask_max_tokens watermark_config
        watermark_context_window watermark_default_enabled watermark_enforce_all watermark_key
        watermark_key_b watermark_max_probability watermark_mixing_probability
    """,
    "shapes nothing: when and where a request runs, and what is kept for how long": """
        _radix_eviction_policy_explicitly_set _swa_full_tokens_ratio_explicitly_set
        abort_on_priority_when_disabled chunked_prefill_size default_priority_value
        disable_overlap_schedule disable_priority_preemption dllm_fdfo enable_dynamic_chunking
        enable_hierarchical_cache enable_mixed_chunk enable_prefill_delayer
        enable_priority_scheduling enable_session_radix_cache hicache_host_memory_fraction
        hicache_host_memory_mode hicache_io_backend hicache_ratio hicache_size
        hicache_storage_backend hicache_storage_backend_extra_config
        hicache_storage_prefetch_policy hicache_storage_prefetch_retry_max_attempts
        hicache_storage_prefetch_retry_poll_interval hicache_write_policy mamba_full_memory_ratio
        mamba_max_states_per_path mamba_radix_cache_strategy mamba_track_interval
        max_mamba_cache_size max_prefill_tokens max_queued_requests max_running_requests
        max_total_tokens mem_fraction_static min_free_slots_delay num_continuous_decode_steps
        prefill_decode_interval prefill_decode_interval_min_bs
        prefill_delayer_forward_passes_buckets prefill_delayer_max_delay_ms
        prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio
        prefill_delayer_token_usage_low_watermark prefill_delayer_wait_seconds_buckets
        prefill_max_requests priority_scheduling_preemption_threshold radix_eviction_policy
        radix_eviction_policy_config retraction_policy schedule_conservativeness
        schedule_low_priority_values_first schedule_policy scheduler_recv_interval
        swa_full_tokens_ratio swa_prefix_tails uses_mamba_radix_cache
    """,
    "shapes nothing: which tokens are drafted, and which of them are taken": """
        spec_trace_dir speculative_accept_threshold_acc speculative_accept_threshold_single
        speculative_adaptive speculative_adaptive_config speculative_domino_candidate_pool_size
        speculative_dspark_align_verify_tokens_to_graph_tier
        speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path
        speculative_eagle_topk speculative_ngram_capacity
        speculative_ngram_external_corpus_max_tokens speculative_ngram_external_corpus_path
        speculative_ngram_external_sam_budget speculative_ngram_match_type
        speculative_ngram_max_bfs_breadth speculative_ngram_max_trie_depth
        speculative_ngram_min_bfs_breadth speculative_num_draft_tokens speculative_num_steps
        speculative_token_map speculative_use_block_verification
        speculative_use_rejection_sampling
    """,
}
