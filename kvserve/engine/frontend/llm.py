"""Offline generation: a list of prompts in, a list of outputs back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from kvserve.config import EngineConfig
from kvserve.engine.frontend.batch import Prompt, read_conversations, read_params, read_prompts
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.log import ConfigError, shown
from kvserve.outputs import EngineStats, RequestOutput
from kvserve.sampling_params import SamplingParams


class LLM:
    """A model with its engine, in this process: prompts in, outputs back.

    ``model`` is a directory, a GGUF file, a hub id, or ``kvserve/tiny``, which ships. ``policy`` is
    the KV cache policy: a name, or ``{"name": ..., **fields}``. ``settings`` are the flags of
    ``kvserve serve`` with underscores, as in ``max_num_seqs=8``. Raises ``ConfigError``, which
    names the setting, if it cannot start. With ``tensor_parallel_size`` above 1 the other ranks are
    processes that end with this one, or with ``close``.

    Example: ``LLM("kvserve/tiny", policy={"name": "kara", "window": 128, "buffer": 16})``.
    """

    def __init__(
        self, model: str, *, policy: str | Mapping[str, Any] = "none", **settings: Any
    ) -> None:
        named = isinstance(policy, str) or (isinstance(policy, Mapping) and "name" in policy)
        if not named:
            wanted = 'a name, or a mapping with one like {"name": "kara", "window": 128}'
            raise ConfigError(f"policy must be {wanted}, got {shown(policy):.200}")
        spec = {"name": policy} if isinstance(policy, str) else dict(policy)
        name = spec.pop("name")
        self.config = EngineConfig.from_flat(model=model, policy=name, policy_args=spec, **settings)
        self.engine = LLMEngine(self.config)
        self._request_ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; ``None`` with ``skip_tokenizer_init``."""
        return self.engine.tokenizer

    def close(self) -> None:
        """End the other ranks; nothing can be generated afterwards."""
        self.engine.close()

    def stats(self) -> EngineStats:
        """The pool and the counters, as ``GET /v1/kv/stats`` has them."""
        return self.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; returns one output per prompt, in the prompts' order.

        A prompt is a text or a list of token ids. One ``SamplingParams`` serves all prompts, a
        sequence gives each its own; without any the checkpoint's defaults hold. Raises
        ``RequestError``, which names the field, before anything runs if a prompt is refused, and
        ``ValueError`` if there are more or fewer settings than prompts.

        Example: ``llm.generate("Once upon a time", SamplingParams(max_tokens=50))``.
        """
        batch = read_prompts(prompts)
        each = read_params(sampling_params, len(batch), self.engine.core.info.default_sampling)
        ids = [str(next(self._request_ids)) for _ in batch]
        try:
            for request_id, prompt, one in zip(ids, batch, each, strict=True):
                self.engine.add_request(request_id, prompt, one)
            done = self._run(use_tqdm, len(batch))
        except BaseException:
            for request_id in ids:
                self.engine.abort_request(request_id)
            raise
        return [done[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Generate the next turn of one conversation or of several, in their order.

        A conversation is a list of ``{"role": ..., "content": ...}``; further arguments go to the
        chat template. Raises ``ConfigError`` without a tokenizer, ``RequestError`` if the model has
        no chat template.
        """
        if self.tokenizer is None:
            raise ConfigError("chat needs a tokenizer; drop skip_tokenizer_init")
        conversations = read_conversations(messages)
        prompts = [self.tokenizer.apply_chat_template(c, **template) for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def _run(self, use_tqdm: bool, total: int) -> dict[str, RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with tqdm(total=total, desc="Generating", unit="request", disable=not use_tqdm) as bar:
            while self.engine.has_unfinished_requests:
                for output in self.engine.step():
                    if output.finished:
                        done[output.request_id] = output
                        bar.update()
        return done
