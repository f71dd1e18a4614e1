"""kvserve itself behind the same protocol, so that it is measured as its peers are."""

from __future__ import annotations

from typing import Any

import kvserve
from bench.peers.adapter import Stopwatch, Tokens, limits, serve
from kvserve import LLM, SamplingParams
from kvserve.server.state.heap import freeze_heap


class Kvserve:
    def load(self, *, model: str, kv_cache_memory: int = 2**30, **settings: Any) -> dict[str, Any]:
        self._llm = LLM(
            model,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            kv_cache_memory=kv_cache_memory,
            **settings,
        )
        freeze_heap()  # as its server does, and as vLLM does by itself
        return {"kvserve": kvserve.__version__}

    def run(self, prompts: Tokens, *, max_tokens: int | list[int]) -> dict[str, Any]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
            for limit in limits(max_tokens, len(prompts))
        ]
        stopwatch = Stopwatch()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        tokens = [list(o.outputs[0].token_ids) for o in outputs]
        return {**stopwatch.seconds(), "tokens": tokens}


if __name__ == "__main__":
    serve(Kvserve())
