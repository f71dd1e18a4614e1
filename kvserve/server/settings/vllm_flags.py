"""Flags that are not here, and what to do instead: vLLM's, and those that this server had."""

from __future__ import annotations

_LORA = "LoRA adapters are not built: merge them into the weights"
_MEDIA = "images and audio are not built"
_GRAMMARS = "see --grammar-backend"
_LONG_PROMPTS = "see --max-prefill-tokens; prompts of several clients are computed side by side"

ABSENT = {
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--max-loras": _LORA,
    "--max-lora-rank": _LORA,
    "--pipeline-parallel-size": "layers are not split over devices; see --tensor-parallel-size",
    "-pp": "layers are not split over devices; see --tensor-parallel-size",
    "--enable-expert-parallel": "each rank has a part of every expert; see --tensor-parallel-size",
    "--distributed-executor-backend": "ranks are processes of one machine",
    "--api-server-count": "one process answers HTTP; see --data-parallel-size",
    "--cpu-offload-gb": "weights stay on the device; see --quantization",
    "--kv-offloading-size": "see --swap-space",
    "--preemption-mode": "see --swap-space",
    "--max-num-partial-prefills": _LONG_PROMPTS,
    "--max-long-partial-prefills": _LONG_PROMPTS,
    "--long-prefill-token-threshold": _LONG_PROMPTS,
    "--kv-transfer-config": "caches are not moved between servers",
    "--calculate-kv-scales": "scales are of each token and head, and need no calibration",
    "--max-logprobs": "a request may ask for 20",
    "--max-seq-len-to-capture": "graphs hold any length; see --cudagraph-capture-sizes",
    "--compilation-config": "see --cudagraph-capture-sizes and --enforce-eager",
    "--guided-decoding-backend": _GRAMMARS,
    "--structured-outputs-config": _GRAMMARS,
    "--limit-mm-per-prompt": _MEDIA,
    "--mm-processor-kwargs": _MEDIA,
    "--task": "it generates text and has no embeddings",
    "--runner": "it generates text and has no embeddings",
    "--logits-processors": "see logit_bias, bad_words and grammars in requests",
    "--override-generation-config": "see --generation-config, and fields of requests",
    "--tokenizer-mode": "it needs tokenizer.json",
    "--enable-sleep-mode": "weights stay loaded while the server runs",
    "--disable-log-requests": "requests are logged only with --enable-log-requests",
    "--disable-log-stats": "see --log-level",
    "--enable-request-id-headers": "every answer has X-Request-Id",
}
REMOVED = {
    "--gate": "each event runs when it is due; a longer --policy.period has fewer",
}


def why_absent(flag: str) -> str:
    """What to say behind the name of a flag that is not here; nothing of unknown ones."""
    if flag in REMOVED:
        return f" was removed: {REMOVED[flag]}"
    return f" of vLLM is not here: {ABSENT[flag]}" if flag in ABSENT else ""
