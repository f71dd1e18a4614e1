"""What clients may send. Field names are OpenAI's and vLLM's; ``kv_policy`` is our own.

Three kinds of fields: built (declared below), refused with a 400 that names them (``_REFUSED``: to
accept them and do nothing would be a lie), and unknown ones, which are ignored and logged once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from kvserve.log import RequestError, logger
from kvserve.sampling_params import MAX_LOGPROBS, SamplingParams

# ---- fields that come in several shapes -------------------------------------------------------


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _parse_prompt(value: Any) -> list[str | list[int]]:
    """Any of the four forms of ``prompt`` -> a list of texts or of token id lists."""
    prompts = value if isinstance(value, list) and not _is_token_ids(value) else [value]
    if not (all(isinstance(prompt, str) for prompt in prompts) or all(map(_is_token_ids, prompts))):
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of token id "
            "lists"
        )
    for i, prompt in enumerate(prompts):
        if not prompt:
            where = f"prompt[{i}]" if len(prompts) > 1 else "prompt"
            raise RequestError(f"{where} must not be empty", code="empty_prompt")
    return prompts


def _parse_stop(value: Any) -> list[str]:
    stop = [value] if isinstance(value, str) else value
    if stop is None:
        return []
    if not isinstance(stop, list) or not all(isinstance(item, str) for item in stop):
        raise RequestError("stop must be a string or a list of strings")
    return stop


def _parse_content(value: Any) -> str:
    """A message's text; content parts are joined by newlines, and only text parts are built."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise RequestError("content must be a string or a list of content parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"content parts of type {kind!r} are not supported; only text is")
    return "\n".join(part["text"] for part in value)


def _parse_kv_policy(value: Any) -> str | dict[str, Any] | None:
    if value is None or isinstance(value, str | dict):
        return value
    raise RequestError('kv_policy must be a name or an object like {"name": "kara", "window": 512}')


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(
        _parse_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]
Stop = Annotated[
    list[str], PlainValidator(_parse_stop, json_schema_input_type=str | list[str] | None)
]
Content = Annotated[
    str,
    PlainValidator(_parse_content, json_schema_input_type=str | list[dict[str, Any]] | None),
]
KVPolicy = Annotated[
    str | dict[str, Any] | None,
    PlainValidator(_parse_kv_policy, json_schema_input_type=str | dict[str, Any] | None),
]

# ---- requests ---------------------------------------------------------------------------------

_REFUSED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, False),
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "length_penalty": (None, 1),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "priority": (None, 0),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "store": (None, False),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
"""Fields that change the output and are not built (here) -> their values that mean "off"."""

_IGNORED = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "user",
    )
)
"""Fields that say nothing about the output."""

_SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed"),
    *("stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
    *("prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    "logit_bias",
)

_unknown_fields: set[str] = set()
_Model = TypeVar("_Model", bound=BaseModel)


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What completions and chat share. ``null`` means "not given" throughout."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: Stop = []
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    kv_policy: KVPolicy = None
    return_token_ids: bool | None = None
    request_id: str | None = Field(default=None, pattern=r"^[\x21-\x7e]{1,128}$")

    @model_validator(mode="after")
    def _check(self) -> GenerationRequest:
        extra = self.model_extra or {}
        for name, value in extra.items():
            if name in _REFUSED and value not in _REFUSED[name]:
                raise RequestError(
                    f"{name} is not supported; leave it out", param=name, code="unsupported_field"
                )
            if name not in _REFUSED and name not in _IGNORED:
                _log_once(name)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def token_limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def token_limit(self) -> int | None:
        """New tokens that were asked for; ``None`` is up to the context."""
        return self.max_completion_tokens or self.max_tokens

    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The request over the model's ``defaults``; raises ``RequestError`` naming the field."""
        given = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        return SamplingParams(
            **{
                **defaults,
                **given,
                "stop": self.stop,
                "max_tokens": self.token_limit(),
                "logprobs": self.num_logprobs(),
                "kv_policy": self.kv_policy,
            }
        )


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise RequestError(
                "echo with logprobs is not supported", param="echo", code="unsupported_field"
            )
        return self

    def token_limit(self) -> int | None:
        """OpenAI's default of 16 applies when the field is absent, not when it is ``null``."""
        asked = super().token_limit()
        return 16 if asked is None and "max_tokens" not in self.model_fields_set else asked

    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatMessage(BaseModel):
    """One message. Further keys (``name``, ``tool_calls``, ...) go to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = ""

    def for_template(self) -> dict[str, Any]:
        """``developer`` is the newer name of ``system``, which is the one that templates know."""
        message = self.model_dump()
        return {**message, "role": "system" if self.role == "developer" else self.role}


class ChatPrompt(BaseModel):
    """The part of a chat request that becomes the prompt; ``/tokenize`` takes it too."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_messages(self) -> ChatPrompt:
        if not self.messages:
            raise RequestError("messages must not be empty", param="messages", code="empty_prompt")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        return self


class ChatCompletionRequest(ChatPrompt, GenerationRequest):
    """``POST /v1/chat/completions``."""

    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(BaseModel):
    """``POST /tokenize`` of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatPrompt):
    """``POST /tokenize`` of messages."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


def _log_once(name: str) -> None:
    if name not in _unknown_fields and len(_unknown_fields) < 1000:
        _unknown_fields.add(name)
        logger.warning("requests carry the unknown field %.100r, which is ignored", name)


def parse(kind: type[_Model], body: dict[str, Any]) -> _Model:
    """Validate ``body`` as FastAPI would, for routes that take more than one shape."""
    try:
        return kind.model_validate(body)
    except ValidationError as exc:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in exc.errors()]
        raise RequestValidationError(errors) from None
