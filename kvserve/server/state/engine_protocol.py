"""What the server expects of an engine, and of a request that is being answered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from kvserve.outputs import EngineStats, RequestOutput
from kvserve.sampling_params import SamplingParams


class Tokenizer(Protocol):
    def describe(self) -> dict[str, Any]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **chat_template_kwargs: Any,
    ) -> list[int]: ...


class Engine(Protocol):
    """The part of ``AsyncEngine`` that the server uses."""

    @property
    def summary(self) -> list[tuple[str, str, str]]: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def policy_name(self) -> str: ...
    @property
    def default_sampling(self) -> Mapping[str, Any]: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def stats_by_engine(self) -> Mapping[str, EngineStats]: ...
    @property
    def dead_error(self) -> BaseException | None: ...
    async def start(self) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]: ...
    async def shutdown(self) -> None: ...


class OpenRequest(Protocol):
    """A request that is being answered: what it takes of the queue, and two ways to end it."""

    request_id: str
    num_sequences: int

    def fail(self, exc: Exception) -> None: ...
    def close(self) -> None: ...
