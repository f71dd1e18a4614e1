"""Names of vLLM and OpenAI that are not here, each with what to do instead.

Python, the command line and HTTP refuse them with the same words; docs/from-vllm.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvserve.fields import did_you_mean


def _by_name(groups: Mapping[str, str]) -> dict[str, str]:
    """``{why: "name name"}`` -> ``{name: why}``."""
    return {name: why for why, names in groups.items() for name in names.split()}


SETTINGS = _by_name(
    {
        "LoRA adapters are not built: merge them into the weights": """
            enable_lora lora_* max_lora* max_cpu_loras default_mm_loras fully_sharded_loras
            specialize_active_lora enable_tower_connector_lora enable_mixed_moe_lora_format
            enable_moe_shared_loras""",
        "images and audio are not built": """
            limit_mm_per_prompt mm_* enable_mm_* media_io_kwargs allowed_local_media_path
            allowed_media_domains interleave_mm_strings skip_mm_profiling language_model_only
            disable_chunked_mm_input video_pruning_* trust_request_mm_kwargs ec_*""",
        "it generates text and has no embeddings": """
            task runner convert pooler_config io_processor_plugin enable_flash_late_interaction""",
        "models that write by diffusion are not built": "diffusion_config",
        "prompts are texts or token ids": "enable_prompt_embeds",
        "layers are not split over devices; see --tensor-parallel-size": "pipeline_parallel_size",
        "each rank has a part of every expert; see --tensor-parallel-size": """
            enable_expert_parallel enable_eplb eplb_config all2all_backend expert_placement_strategy
            enable_ep_weight_filter moe_backend""",
        "sequences are not split over devices; see --tensor-parallel-size": """
            prefill_context_parallel_size decode_context_parallel_size dcp_* cp_*""",
        "ranks are processes of one machine": """
            distributed_* master_* nnodes node_rank worker_* ray_workers_use_nsight numa_*
            max_parallel_loading_workers cpu_distributed_timeout_seconds
            enable_nccl_comm_suspend""",
        "set CUDA_VISIBLE_DEVICES in the environment": "device_ids",
        "replicas are Ray Serve's; see --data-parallel-size": """
            data_parallel_* dp_* enable_elastic_ep elastic_ep_max_dp_size enable_scale_out
            enable_fault_tolerance fault_tolerance_config""",
        "one process answers HTTP; see --data-parallel-size": "api_server_count",
        "weights stay on the device; see --quantization": "cpu_offload_* offload_*",
        "see --swap-space": "kv_offloading_* preemption_mode",
        "see --max-prefill-tokens; prompts of several clients are computed side by side": """
            max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold
            long_prefill_token_threshold_adaptive prefill_schedule_interval""",
        "see --max-num-seqs": "max_num_active_seqs",
        "see --max-num-batched-tokens": "max_num_scheduled_tokens",
        "see --max-queued-requests": "max_num_queued_reqs max_num_queued_tokens",
        "caches are not moved between servers": "kv_transfer_config kv_events_config",
        "scales are of each token and head, and need no calibration": "calculate_kv_scales",
        "a request may ask for 20": "max_logprobs",
        "log-probabilities are those before temperature, filters and penalties": "logprobs_mode",
        "graphs hold any length; see --cudagraph-capture-sizes": "max_seq_len_to_capture",
        "see --cudagraph-capture-sizes and --enforce-eager": """
            compilation_config max_cudagraph_capture_size optimization_level performance_mode
            cudagraph_metrics""",
        "see --attention-backend": "attention_config disable_cascade_attn",
        "kernels are chosen by the device": """
            kernel_config linear_backend enable_flashinfer_autotune sparse_indexer_topk_backend
            ir_op_priority jit_monitor_* disable_custom_all_reduce enable_dbo dbo_* ubatch_size
            use_fp64_gumbel disable_nccl_for_dp_synchronization enable_batch_sharded_sampling""",
        "llguidance compiles all grammars": """
            guided_decoding_backend structured_outputs_config""",
        "see logit_bias, bad_words and grammars in requests": "logits_processors",
        "tokens are not watermarked": "watermark*",
        "see --speculative-config": "spec_*",
        "see --quantization": "quantization_config allow_deprecated_quantization",
        "all layers are stored alike; see --kv-cache-dtype": "kv_cache_dtype_skip_layers",
        "see --generation-config, and fields of requests": "override_generation_config",
        "it needs tokenizer.json": "tokenizer_mode",
        "see --skip-tokenizer-init": "tokens_only",
        "tokenizer and code are those of --revision": "tokenizer_revision code_revision",
        "set HF_TOKEN in the environment": "hf_token",
        "see --model, --model-impl and --hf-overrides": """
            hf_config_path config_format rope_* model_weights model_class_overrides""",
        "see --load-format": """
            model_loader_extra_config ignore_patterns pt_load_map_location use_tqdm_on_load
            safetensors_*""",
        "layers with windows hold their windows; see --kv-layout": """
            disable_sliding_window disable_hybrid_kv_cache_manager kv_sharing_fast_prefill""",
        "models with state spaces are not built": """
            mamba_* enable_mamba_* use_replayssm replayssm_* gdn_* kda_*""",
        "prefixes are found by their blocks; see --enable-prefix-caching": """
            prefix_caching_hash_algo prefix_match_unit prefix_cache_retention_interval""",
        "weights stay loaded while the server runs": """
            enable_sleep_mode sleep_* enable_cumem_allocator weight_transfer_config""",
        "the scheduler is fixed; see --scheduling-policy": """
            scheduler_cls scheduler_reserve_full_isl use_v2_block_manager num_scheduler_steps
            num_lookahead_slots multi_step_stream_outputs disable_async_output_proc""",
        "each token is sent when it is there": "stream_interval",
        "requests are logged only with --enable-log-requests": "disable_log_requests",
        "texts are not logged; see --enable-log-requests": """
            max_log_len enable_log_outputs enable_log_deltas""",
        "see --log-level": """
            disable_log_stats aggregate_engine_logging log_config_file logging_config
            log_error_stack""",
        "see --disable-uvicorn-access-log": "disable_access_log_for_endpoints",
        "see /metrics, /load and --otlp-traces-endpoint": """
            show_hidden_metrics_for_version collect_detailed_traces kv_cache_metrics*
            enable_layerwise_nvtx_tracing enable_mfu_metrics
            enable_logging_iteration_details profiler_config custom_histogram_buckets
            per_request_spec_decode_metrics enable_per_request_metrics
            enable_server_load_tracking""",
        "there are no plug-ins for it": """
            additional_config reasoning_parser_plugin tool_parser_plugin middleware""",
        "see --reasoning-parser": "reasoning_config enable_reasoning",
        "every answer has X-Request-Id": "enable_request_id_headers",
        "it is always so": """
            enable_tokenizer_info_endpoint enable_prompt_tokens_details
            exclude_tools_when_tool_choice_none""",
        "see --no-docs; the documentation loads nothing from elsewhere": """
            disable_fastapi_docs enable_offline_docs""",
        "see --ssl-certfile": "enable_ssl_refresh ssl_cert_reqs ssl_ciphers",
        "see --max-connections and SECURITY.md": "h11_*",
        "quiet streams have pings": "sse_keep_alive_interval",
        "send it in a request": "return_tokens_as_token_ids",
        "send chat_template_kwargs in a request": "default_chat_template_kwargs",
        "send stream_options in a request": "enable_force_include_usage",
        "answers are the assistant's": "response_role",
        "tools are the client's; see tool_choice in requests": "tool_server tool_strict_level",
        "system_fingerprint says model, version and policy": "fingerprint_*",
        "it speaks HTTP alone": "grpc_port",
        "it is about a part of vLLM that is not here": """
            aux_output_config engram_config enable_hc_sp swa_bounded_replay enable_shm_tensor_arena
            enable_trace_replay fail_on_environ_validation renderer_num_workers cohere_*
            return_sampling_mask enable_return_routed_experts anthropic_disabled_thinking_effort""",
        "the form that a template wants is found by trying it": "chat_template_content_format",
        "give it to chat": "chat_template",
        "it is the server's: see kvserve serve --help": """
            served_model_name reasoning_parser otlp_traces_endpoint log_level shutdown_timeout""",
    }
)
"""Of ``LLM(...)``, and with dashes of the command line, which has some of them. A ``*`` stands for
any end."""

FLAGS = {
    "-pp": "pipeline_parallel_size",
    "-asc": "api_server_count",
    "-O": "optimization_level",
    "-cc": "compilation_config",
}
"""Short flags of absent settings; ``-O3`` is ``-O 3``."""

FIELDS = _by_name(
    {
        "take n, and the best of the answers by cumulative_logprob": "best_of",
        "beam search is not built: take n": "use_beam_search length_penalty",
        "text after the gap is not read: put it into the prompt": "suffix",
        "images and audio are not built": """
            audio modalities multi_modal_data multi_modal_uuids mm_processor_kwargs mm_payload
            media_io_kwargs""",
        "prompts are texts or token ids": """
            prompt_embeds encoder_prompt prompt_token_offsets token_type_ids""",
        "LoRA adapters are not built: merge them into the weights": "lora_request",
        "send structured_outputs": "guided_decoding",
        "white space between parts of JSON is fixed": "guided_whitespace_pattern",
        "see logit_bias, bad_words, allowed_token_ids and structured_outputs": """
            logits_processors extra_args vllm_xargs""",
        "see logprobs, which has the 20 most probable tokens": """
            logprob_token_ids prompt_logprob_token_ids prompt_logprob_start""",
        "logprobs are a list with a map for each token": "flat_logprobs",
        "text is made of all tokens; see skip_tokenizer_init": "detokenize",
        "text is what the tokenizer decodes": "spaces_between_special_tokens",
        "LLM returns finished outputs, AsyncEngine.generate growing ones": """
            output_kind stream_interval""",
        "prompts are cut by the server alone: give fewer token ids": """
            truncate_prompt_tokens truncation_side tokenization_kwargs""",
        "send a cache_salt of its own": "skip_reading_prefix_cache",
        "see repetition_penalty and frequency_penalty": "repetition_detection",
        "tokens are not watermarked": "watermarking",
        "tokens cannot be prescribed: see structured_outputs": "trace_decode_token_ids",
        "see return_token_ids": "return_prompt_text",
        "routes of experts are not reported": "routed_experts_prompt_start",
        "caches are not moved between servers": "kv_transfer_params ec_transfer_params",
        "it is of vLLM's own code": "skip_clone output_text_buffer_length",
        "it goes with /v1/completions": "echo",
        "the chat template writes special tokens": "add_special_tokens",
        "it goes with chat requests": "chat_template chat_template_kwargs tools",
        "it goes with /v1/chat/completions": """
            include_reasoning reasoning_effort thinking_token_budget tool_choice top_logprobs""",
        "give them in chat_template_kwargs": "documents",
        "the form that a template wants is found by trying it": "chat_template_content_format",
        "it is an old name: send tools": "functions function_call",
        "answers are not predicted by clients; see --speculative-config": "prediction",
        "it searches no web: give a tool": "web_search_options",
        "nothing is stored, so an answer cannot be fetched later": "background",
        "nothing is stored: send the whole history": """
            conversation previous_response_id previous_input_messages enable_response_messages""",
        "no prompts are stored: send messages, or instructions and input": "prompt",
    }
)
"""Of requests: ``SamplingParams``, prompts, ``generate`` and ``chat``, and bodies; some of these
have some of them."""

EXPORTS = _by_name(
    {
        "give its arguments to LLM(...)": "EngineArgs LLMEngine",
        "write a mapping with prompt or prompt_token_ids": "TextPrompt TokensPrompt PromptType",
        "it generates text and has no embeddings": """
            PoolingParams PoolingOutput PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput
            ClassificationOutput ClassificationRequestOutput ScoringOutput ScoringRequestOutput""",
        "a model is chosen by its config.json; see docs/models.md": "ModelRegistry",
        "replicas are Ray Serve's; see --data-parallel-size": "initialize_ray_cluster",
    }
)
"""Of ``from vllm import ...``."""

ATTRIBUTES = _by_name(
    {
        "beam search is not built: take n": "beam_search",
        "it generates text and has no embeddings": "embed encode classify score reward",
        "weights stay loaded, and the pool with them, while the engine lives": """
            sleep wake_up release_kv_cache_memory init_weight_transfer_engine update_weights
            shutdown_weight_transfer_engine start_weight_update start_draft_weight_update
            finish_weight_update get_weight_version update_weight_version weight_versions
            is_sleeping""",
        "use torch.profiler around generate": "start_profile stop_profile",
        "the parts of an engine are no interface": """
            collective_rpc apply_model llm_engine get_world_size""",
        "see stats()": "get_metrics",
        "give all prompts to one generate, or take AsyncEngine": """
            enqueue enqueue_chat wait_for_completion""",
        "call LLM(...)": "from_engine_args",
        "see config and info": "get_model_config get_vllm_config from_vllm_config",
        "see dead_error": "check_health errored is_running is_stopped",
        "see generate": "add_request",
        "give tokenizer to LLM(...)": "set_tokenizer",
        "see get_default_sampling_params()": "default_sampling_params",
        "LoRA adapters are not built: merge them into the weights": """
            lora_request add_lora remove_lora list_loras pin_lora""",
        "caches are not moved between servers": "kv_transfer_params ec_transfer_params",
        "images and audio are not built": """
            reset_mm_cache encoder_prompt encoder_prompt_token_ids""",
        "routes of experts are not reported": "routed_experts",
        "see logprobs and prompt_logprobs": "sampling_mask prompt_token_id_logprobs",
        "see speculation": "spec_decode_metrics",
        "see num_cached_tokens": "num_cache_creation_tokens",
    }
)
"""Of ``LLM``, ``AsyncEngine``, ``RequestOutput`` and ``CompletionOutput``."""

_OFF: dict[str, tuple[Any, ...]] = {
    "api_server_count": (1,),
    "best_of": (1,),
    "chat_template_content_format": ("auto",),
    "config_format": ("auto", "hf"),
    "decode_context_parallel_size": (1,),
    "detokenize": (True,),
    "disable_async_output_proc": (True, False),
    "disable_custom_all_reduce": (True, False),
    "disable_log_requests": (True,),
    "disable_log_stats": (True, False),
    "distributed_executor_backend": ("mp",),
    "function_call": ("none",),
    "guided_decoding_backend": ("auto", "guidance"),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logprobs_mode": ("raw_logprobs",),
    "max_logprobs": (20,),
    "max_long_partial_prefills": (1,),
    "max_num_partial_prefills": (1,),
    "max_seq_len_to_capture": (8192,),
    "modalities": (["text"],),
    "multi_step_stream_outputs": (True, False),
    "nnodes": (1,),
    "num_scheduler_steps": (1,),
    "pipeline_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "response_role": ("assistant",),
    "runner": ("auto", "generate"),
    "skip_clone": (True, False),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf"),
    "tool_choice": ("none", "auto"),
    "use_tqdm_on_load": (True, False),
    "use_v2_block_manager": (True, False),
    "worker_cls": ("auto",),
}


def means_off(name: str, value: object) -> bool:
    """Whether an absent name with this value asks for nothing: ``None``, or vLLM's default."""
    return value is None or (value in _OFF[name] if name in _OFF else not value)


def is_switch(name: str) -> bool:
    """Whether an absent flag stands alone, as ``--disable-log-stats`` does."""
    return any(isinstance(value, bool) for value in _OFF.get(name, ()))


def why_absent(name: str, absent: Mapping[str, str]) -> str | None:
    """What to do instead; ``None`` for a name that nobody knows."""
    if name in absent:
        return absent[name]
    ends = (each for each in absent if each.endswith("*") and name.startswith(each[:-1]))
    return next((absent[each] for each in ends), None)


def refusal(name: str, why: str) -> str:
    """The error of an absent name."""
    return f"{name} is not supported: {why}"


def take_known(
    given: Mapping[str, Any],
    known: Collection[str],
    absent: Mapping[str, str],
    error: Callable[[str, str], Exception],
) -> dict[str, Any]:
    """What is given of the ``known`` names.

    Raises ``error(message, name)`` for an absent name that asks for something, and for an unknown
    one.
    """
    for name, value in given.items():
        if name in known:
            continue
        why = why_absent(name, absent)
        if why is None:
            raise error(f"unknown setting {name!r}{did_you_mean(name, known)}", name)
        if not means_off(name, value):
            raise error(refusal(name, why), name)
    return {name: value for name, value in given.items() if name in known}
