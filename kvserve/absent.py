"""Names of vLLM and OpenAI that people use and that are not here, with what to do instead.

Python, the command line and HTTP refuse them with the same words.
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
        "LoRA adapters are not built: merge them into the weights": "enable_lora lora_* max_lora*",
        "images and audio are not built": """
            limit_mm_per_prompt mm_* media_io_kwargs allowed_local_media_path""",
        "it generates text and has no embeddings": "task runner convert pooler_config",
        "prompts are texts or token ids": "enable_prompt_embeds",
        "layers are not split over devices; see --tensor-parallel-size": "pipeline_parallel_size",
        "each rank has a part of every expert; see --tensor-parallel-size": """
            enable_expert_parallel enable_eplb""",
        "ranks are processes of one machine": """
            distributed_executor_backend nnodes node_rank worker_cls""",
        "replicas are Ray Serve's; see --data-parallel-size": "data_parallel_*",
        "one process answers HTTP; see --data-parallel-size": "api_server_count",
        "weights stay on the device; see --quantization": "cpu_offload_* offload_*",
        "see --swap-space": "kv_offloading_* preemption_mode",
        "see --max-prefill-tokens; prompts of several clients are computed side by side": """
            max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold""",
        "caches are not moved between servers": "kv_transfer_config kv_events_config",
        "scales are of each token and head, and need no calibration": "calculate_kv_scales",
        "a request may ask for 20": "max_logprobs",
        "log-probabilities are those before temperature, filters and penalties": "logprobs_mode",
        "see --cudagraph-capture-sizes and --enforce-eager": """
            compilation_config optimization_level""",
        "graphs hold any length; see --cudagraph-capture-sizes": "max_seq_len_to_capture",
        "kernels are chosen by the device": "disable_custom_all_reduce",
        "llguidance compiles all grammars": "guided_decoding_backend structured_outputs_config",
        "see logit_bias, bad_words and grammars in requests": "logits_processors",
        "see --generation-config, and fields of requests": "override_generation_config",
        "it needs tokenizer.json": "tokenizer_mode",
        "tokenizer and code are those of --revision": "tokenizer_revision code_revision",
        "set HF_TOKEN in the environment": "hf_token",
        "see --model, --model-impl and --hf-overrides": "config_format rope_scaling rope_theta",
        "see --load-format": "model_loader_extra_config use_tqdm_on_load safetensors_*",
        "layers with windows hold their windows; see --kv-layout": """
            disable_sliding_window disable_hybrid_kv_cache_manager""",
        "prefixes are found by their blocks; see --enable-prefix-caching": """
            prefix_caching_hash_algo""",
        "weights stay loaded while the server runs": "enable_sleep_mode",
        "the scheduler is fixed; see --scheduling-policy": """
            scheduler_cls use_v2_block_manager num_scheduler_steps disable_async_output_proc""",
        "each token is sent when it is there": "stream_interval",
        "requests are logged only with --enable-log-requests": "disable_log_requests",
        "texts are not logged; see --enable-log-requests": "max_log_len enable_log_outputs",
        "see --log-level": "disable_log_stats",
        "see /metrics, /load and --otlp-traces-endpoint": """
            collect_detailed_traces profiler_config enable_server_load_tracking""",
        "there are no plug-ins for it": "reasoning_parser_plugin tool_parser_plugin middleware",
        "see --reasoning-parser": "enable_reasoning",
        "every answer has X-Request-Id": "enable_request_id_headers",
        "it is always so": "enable_prompt_tokens_details",
        "see --no-docs; the documentation loads nothing from elsewhere": "disable_fastapi_docs",
        "send it in a request": "return_tokens_as_token_ids",
        "send chat_template_kwargs in a request": "default_chat_template_kwargs",
        "answers are the assistant's": "response_role",
        "the form that a template wants is found by trying it": "chat_template_content_format",
        "give it to chat": "chat_template",
        "it is the server's: see kvserve serve --help": "served_model_name reasoning_parser",
    }
)
"""Of ``LLM(...)``, and with dashes of the command line, which has some of them. A ``*`` stands for
any end."""

FLAGS = {"-pp": "pipeline_parallel_size", "-O": "optimization_level", "-cc": "compilation_config"}
"""Short flags of absent settings; ``-O3`` is ``-O 3``."""

FIELDS = _by_name(
    {
        "take n, and the best of the answers by cumulative_logprob": "best_of",
        "beam search is not built: take n": "use_beam_search length_penalty",
        "text after the gap is not read: put it into the prompt": "suffix",
        "images and audio are not built": "audio modalities multi_modal_data mm_processor_kwargs",
        "prompts are texts or token ids": "prompt_embeds",
        "LoRA adapters are not built: merge them into the weights": "lora_request",
        "send structured_outputs": "guided_decoding",
        "white space between parts of JSON is fixed": "guided_whitespace_pattern",
        "see logit_bias, bad_words, allowed_token_ids and structured_outputs": """
            logits_processors extra_args vllm_xargs""",
        "text is made of all tokens; see skip_tokenizer_init": "detokenize",
        "text is what the tokenizer decodes": "spaces_between_special_tokens",
        "LLM returns finished outputs, AsyncEngine.generate growing ones": "output_kind",
        "prompts are cut by the server alone: give fewer token ids": """
            truncate_prompt_tokens truncation_side""",
        "see logprobs, which has the 20 most probable tokens": "logprob_token_ids",
        "see repetition_penalty and frequency_penalty": "repetition_detection",
        "caches are not moved between servers": "kv_transfer_params",
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
        "nothing is stored: send the whole history": "conversation previous_response_id",
        "no prompts are stored: send messages, or instructions and input": "prompt",
    }
)
"""Of requests: ``SamplingParams``, prompts, ``generate`` and ``chat``, and bodies; some of these
have some of them."""

EXPORTS = _by_name(
    {
        "give its arguments to LLM(...)": "EngineArgs LLMEngine",
        "write a mapping with prompt or prompt_token_ids": "TextPrompt TokensPrompt",
        "it generates text and has no embeddings": "PoolingParams",
        "a model is chosen by its config.json; see docs/models.md": "ModelRegistry",
    }
)
"""Of ``from vllm import ...``."""

ATTRIBUTES = _by_name(
    {
        "beam search is not built: take n": "beam_search",
        "it generates text and has no embeddings": "embed encode classify score reward",
        "weights stay loaded, and the pool with them, while the engine lives": "sleep wake_up",
        "use torch.profiler around generate": "start_profile stop_profile",
        "the parts of an engine are no interface": "collective_rpc apply_model llm_engine",
        "see stats()": "get_metrics",
        "see config and info": "get_model_config get_vllm_config",
        "see dead_error": "check_health errored is_running is_stopped",
        "see generate": "add_request",
        "give tokenizer to LLM(...)": "set_tokenizer",
        "LoRA adapters are not built: merge them into the weights": "lora_request add_lora",
    }
)
"""Of ``LLM``, ``AsyncEngine``, ``RequestOutput`` and ``CompletionOutput``."""

_OFF: dict[str, tuple[Any, ...]] = {
    "api_server_count": (1,),
    "best_of": (1,),
    "chat_template_content_format": ("auto",),
    "config_format": ("auto", "hf"),
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
    "nnodes": (1,),
    "num_scheduler_steps": (1,),
    "pipeline_parallel_size": (1,),
    "response_role": ("assistant",),
    "runner": ("auto", "generate"),
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
