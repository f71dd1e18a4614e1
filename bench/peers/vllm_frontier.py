"""vLLM's 8-bit cache on the frontier: KL to its own cache in the model's type.

Run by bench/frontier.py in vLLM's own environment; first writes the checkpoint that vLLM loads.
Logits of a prompt are taken where vLLM computes them for `prompt_logprobs`. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GgufConfig


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="GGUF")
    parser.add_argument("checkpoint", type=Path, help="the folder for its model in bfloat16")
    parser.add_argument("texts", type=Path, help="JSON: lists of token ids")
    args = parser.parse_args()
    texts = json.loads(args.texts.read_text())
    wide = AutoModelForCausalLM.from_pretrained(
        args.file.parent,
        gguf_file=args.file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    wide.save_pretrained(args.checkpoint)
    model = str(args.checkpoint)
    full, fewer = (_log_probs(model, texts, dtype) for dtype in ("auto", "fp8"))
    kl = [
        float((a.float().exp() * (a.float() - b.float())).sum(-1).mean())
        for a, b in zip(full, fewer, strict=True)
    ]
    print(
        json.dumps(
            {"kl": float(np.mean(kl)), "kl_error": float(np.std(kl, ddof=1) / len(kl) ** 0.5)}
        )
    )
    return 0


def _log_probs(model: str, texts: list[list[int]], dtype: str) -> list[torch.Tensor]:
    """float32 [second half, V] of each text."""
    from vllm import LLM, SamplingParams

    longest = max(map(len, texts))
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=True,
        dtype="bfloat16",
        kv_cache_dtype=dtype,
        max_model_len=longest + 8,
        max_num_batched_tokens=512,
        max_num_seqs=1,
        block_size=32,
    )
    seen: list[torch.Tensor] = []

    def wrap(module: Any) -> None:
        computed = module.compute_logits

        def compute_logits(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
            logits: torch.Tensor = computed(hidden, *rest)
            if len(logits) > 1:  # rows of a prompt, not the one that is sampled
                seen.append(logits.float().log_softmax(-1))
            return logits

        module.compute_logits = compute_logits

    llm.apply_model(wrap)
    found = []
    for text in texts:
        seen.clear()
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
        rows = torch.cat(seen)
        assert len(rows) >= len(text) - 1 - 8, len(rows)
        found.append(rows[len(text) // 2 :])
    return found


if __name__ == "__main__":
    raise SystemExit(main())
