"""Offline generation: a list of prompts in, a list of outputs back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from kvserve.config import config_of
from kvserve.engine.frontend.batch import (
    Prompt,
    read_conversations,
    read_params,
    read_prompts,
    refuse_others,
)
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.log import ConfigError
from kvserve.outputs import RequestOutput, SaysWhatIsAbsent
from kvserve.sampling_params import SamplingParams
from kvserve.stats import EngineStats

_TEMPLATES = "; what the chat template reads goes into chat_template_kwargs"


class LLM(SaysWhatIsAbsent):
    """A model with its engine, in this process: prompts in, outputs back.

    ``model`` is a directory, a GGUF file, a hub id, or ``kvserve/tiny``, which ships. ``policy`` is
    the KV cache policy: a name, or ``{"name": ..., **fields}``. ``settings`` are the flags of
    ``kvserve serve`` with underscores, as in ``max_num_seqs=8``. Raises ``ConfigError``, which
    names the setting, if it cannot start. With ``tensor_parallel_size`` above 1 the other ranks are
    processes that end with this one, or with ``close``, or with the block of ``with LLM(...) as
    llm``. Calls from several threads run one after the other.

    Example: ``LLM("kvserve/tiny", policy={"name": "kara", "window": 128, "buffer": 16})``.
    """

    def __init__(
        self, model: str, *, policy: str | Mapping[str, Any] = "none", **settings: Any
    ) -> None:
        self.config = config_of(model, policy=policy, **settings)
        self.engine = LLMEngine(self.config)
        self._request_ids = itertools.count()
        self._lock = threading.Lock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; ``None`` with ``skip_tokenizer_init``."""
        return self.engine.tokenizer

    def get_tokenizer(self) -> Any:
        """The tokenizer of transformers. Raises ``ConfigError`` under ``skip_tokenizer_init``."""
        return self._need_tokenizer("get_tokenizer").hf

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``generate`` takes where no settings are given: the checkpoint's suggestion."""
        return SamplingParams(**self.engine.core.info.default_sampling)

    def close(self) -> None:
        """End the other ranks; nothing can be generated afterwards."""
        with self._lock:
            self.engine.core.close()

    def stats(self) -> EngineStats:
        """The pool and the counters, as ``GET /v1/kv/stats`` has them."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prompts and continuations; ``True``, since nothing can hold them."""
        with self._lock:
            self.engine.core.reset_prefix_cache()
        return True

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: int | Sequence[int] | None = None,
        **other: Any,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; returns one output per prompt, in the prompts' order.

        A prompt is a text, a list of token ids, or vLLM's ``{"prompt": ...}`` or
        ``{"prompt_token_ids": ...}``. One ``SamplingParams`` serves all prompts, a sequence gives
        each its own; without any the checkpoint's defaults hold. ``priority`` replaces theirs.
        Raises ``RequestError``, which names the field, before anything runs if a prompt or an
        argument is refused.

        Example: ``llm.generate("Once upon a time", SamplingParams(max_tokens=50))``.
        """
        refuse_others(self.generate, other)
        batch = read_prompts(prompts)
        defaults = self.engine.core.info.default_sampling
        each = read_params(sampling_params, batch, priority, defaults)
        with self._lock:
            ids = [str(next(self._request_ids)) for _ in batch]
            try:
                for request_id, one, params in zip(ids, batch, each, strict=True):
                    self.engine.add_request(request_id, one.prompt, params, one.text)
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
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        **other: Any,
    ) -> list[RequestOutput]:
        """Generate the next turn of one conversation or of several, in their order.

        A conversation is a list of ``{"role": ..., "content": ...}``; a content is a text or a list
        of text parts. ``chat_template`` is a template's text, by default the tokenizer's, and
        ``chat_template_kwargs`` is what else it reads. Raises ``ConfigError`` without a tokenizer,
        ``RequestError`` if the model has no chat template, or if something is refused.
        """
        refuse_others(self.chat, other, _TEMPLATES)
        tokenizer = self._need_tokenizer("chat")
        from kvserve.engine.frontend.chat_template import template_arguments

        arguments = template_arguments(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            **({"tools": tools} if tools else {}),
        )
        prompts: list[Prompt] = []
        for conversation in read_conversations(messages):
            text = tokenizer.render_chat(conversation, **arguments)
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm, priority=priority)

    def _need_tokenizer(self, method: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(f"{method} needs a tokenizer; drop skip_tokenizer_init")
        return self.tokenizer

    def _run(self, use_tqdm: bool | Callable[..., Any], total: int) -> dict[str, RequestOutput]:
        done: dict[str, RequestOutput] = {}
        make = use_tqdm if callable(use_tqdm) else tqdm
        with make(total=total, desc="Generating", unit="request", disable=not use_tqdm) as bar:
            while self.engine.has_unfinished_requests:
                for output in self.engine.step():
                    if output.finished:
                        done[output.request_id] = output
                        bar.update()
        return done
