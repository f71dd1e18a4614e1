"""transformers: `generate` on one static batch, or its continuous batching."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.peers.adapter import Tokens, serve, versions

_PAGE = 32  # tokens


class Transformers:
    def load(
        self,
        *,
        model: str,
        dtype: str,
        max_num_seqs: int,
        max_model_len: int,
        continuous: bool = False,
    ) -> dict[str, Any]:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self._pages = max_num_seqs * -(-max_model_len // _PAGE)
        self._generate = self._continuously if continuous else self._at_once
        return versions("transformers", "torch")

    def run(self, prompts: Tokens, *, max_tokens: int) -> dict[str, Any]:
        config = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        started = time.perf_counter()
        tokens = self._generate(prompts, config)
        return {"seconds": time.perf_counter() - started, "tokens": tokens}

    @torch.inference_mode()
    def _at_once(self, prompts: Tokens, config: Any) -> Tokens:
        """One static batch of prompts of equal length."""
        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        rows: Tokens = out[:, ids.shape[1] :].tolist()
        return rows

    def _continuously(self, prompts: Tokens, config: Any) -> Tokens:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        # By default it takes most of the memory for pages, and each step attends over all of them.
        pages = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=self._pages,
            max_batch_tokens=2048,
            allow_block_sharing=False,
        )
        outputs = self._model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=pages,
            persistent_manager=True,
        )
        # Outputs come in order of completion.
        answers = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
        return [answers[tuple(prompt)] for prompt in prompts]


if __name__ == "__main__":
    serve(Transformers())
