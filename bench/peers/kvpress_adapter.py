"""kvpress: one prompt at a time, its cache cut by a press at the prompt's end or while decoding."""

from __future__ import annotations

import time
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.peers.adapter import Tokens, serve, versions


class Kvpress:
    def load(self, *, model: str, dtype: str) -> dict[str, Any]:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        return versions("kvpress", "transformers", "torch")

    @torch.inference_mode()
    def run(
        self,
        prompts: Tokens,
        *,
        max_tokens: int,
        stop: list[int],
        press: dict[str, Any],
        keep: int,
        every: int | None = None,
    ) -> dict[str, Any]:
        """Keep ``keep`` entries at a prompt's end; with ``every``, after each so many decode steps.

        ``held``: entries of a layer when its sequence ends, as a mean over layers.
        """
        started, tokens, held = time.perf_counter(), [], []
        for prompt in prompts:
            cache: Any = DynamicCache()
            with _press(press, keep, every, len(prompt))(self._model):
                tokens.append(self._answer(prompt, max_tokens, stop, cache))
            lengths = [layer.keys.shape[2] for layer in cache.layers]
            held.append(sum(lengths) / len(lengths))
        return {"seconds": time.perf_counter() - started, "tokens": tokens, "held": held}

    def _answer(self, prompt: list[int], max_tokens: int, stop: list[int], cache: Any) -> list[int]:
        """A greedy answer; tokens have the positions that they would have without compression."""
        ids, positions = torch.tensor([prompt]), torch.arange(len(prompt))[None]
        answer: list[int] = []
        while True:
            logits = self._model(ids, past_key_values=cache, position_ids=positions).logits
            answer.append(int(logits[0, -1].argmax()))
            if answer[-1] in stop or len(answer) == max_tokens:
                return answer
            ids, positions = torch.tensor([answer[-1:]]), positions[:, -1:] + 1


def _press(press: dict[str, Any], keep: int, every: int | None, length: int) -> Any:
    if every is None:
        # Presses round down what they keep: half an entry more makes that exact.
        ratio = max(0.0, 1 - (keep + 0.5) / length)
        return _made(**press, compression_ratio=ratio)
    return kvpress.DecodingPress(
        base_press=_made(**press, compression_ratio=0.0),
        compression_interval=every,
        target_size=keep,
    )


def _made(name: str, base: str | None = None, *, compression_ratio: float, **fields: Any) -> Any:
    """The press ``name``; ``base`` is the scorer of a press that uses another's scores."""
    if base is None:
        return getattr(kvpress, name)(compression_ratio=compression_ratio, **fields)
    own = {"chunk_length": fields.pop("chunk_length")}
    scorer = _made(base, compression_ratio=compression_ratio, **fields)
    return getattr(kvpress, name)(press=scorer, **own)


if __name__ == "__main__":
    serve(Kvpress())
