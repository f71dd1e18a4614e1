"""kvserve itself behind the same protocol, so that it is measured like everybody else."""

from __future__ import annotations

import time
from typing import Any

import kvserve
from bench.peers.adapter import Tokens, serve
from kvserve import LLM, SamplingParams


class Kvserve:
    def load(self, *, model: str, **settings: Any) -> dict[str, Any]:
        self._llm = LLM(
            model,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            kv_cache_memory=2**30,
            **settings,
        )
        return {"kvserve": kvserve.__version__}

    def run(self, prompts: Tokens, *, max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": [list(o.outputs[0].token_ids) for o in outputs]}


if __name__ == "__main__":
    serve(Kvserve())
