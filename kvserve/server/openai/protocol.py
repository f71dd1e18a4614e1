"""What clients may send. Field names are OpenAI's and vLLM's; ``kv_...`` are our own.

Supported fields are declared below. Fields in ``absent.FIELDS`` would change the output but are not
supported: a 400 names them, because to ignore them would mislead clients. Fields in ``IGNORED`` do
not change the output. Unknown fields are ignored and logged once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvserve import absent
from kvserve.log import RequestError, log_once
from kvserve.sampling_params import SamplingParams, StructuredOutput, refused
from kvserve.server.openai.fields import (
    DistinctIds,
    KVPolicy,
    LogitBias,
    Prompts,
    Stop,
    Strings,
    TokenIds,
)
from kvserve.server.openai.structured import structured_output

# ---- requests ---------------------------------------------------------------------------------

IGNORED = frozenset(
    (
        *("metadata", "service_tier", "store", "user", "safety_identifier", "prompt_cache_key"),
        *("parallel_tool_calls", "session_id", "stream_interval", "guided_decoding_backend"),
        # These say how media are read, or are of routes that only render prompts.
        *("media_io_kwargs", "mm_processor_kwargs", "return_mm_kwargs", "return_token_offsets"),
    )
)
"""Fields that do not change the output."""

_Model = TypeVar("_Model", bound=BaseModel)


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What completions and chat share.

    ``null`` means "not given", except as ``max_tokens`` of completions.
    """

    model_config = ConfigDict(extra="allow")
    further_fields: ClassVar = (*absent.FIELDS, *IGNORED)
    """Fields that are none of the model's, and are not ignored."""

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
    stop_token_ids: DistinctIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = None
    allowed_token_ids: DistinctIds | None = None
    bad_words: Strings | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    kv_policy: KVPolicy = None
    kv_trace: bool | None = None
    kv_resume: bool | None = None
    speculation: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = Field(default=None, pattern=r"^[\x21-\x7e]{1,128}$")

    @model_validator(mode="after")
    def _check(self) -> GenerationRequest:
        extra = self.model_extra or {}
        for name, value in extra.items():
            if name in IGNORED:
                continue
            if name not in absent.FIELDS:
                log_once(f"requests carry the unknown field {name[:100]!r}, which is ignored")
            elif not absent.means_off(name, value):
                raise refused(absent.refusal(name, absent.FIELDS[name]), name)
        self.answer_form  # noqa: B018  # read here, beside the event loop if the body is large
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs do not go with stream", param="prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens"
            )
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
        """The most new tokens; ``None``: as many as fit the context."""
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given

    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    @cached_property
    def answer_form(self) -> StructuredOutput | None:
        """What the output must match."""
        return structured_output(self.__dict__)

    def sampling_params(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """The request over the model's ``defaults``; a ``RequestError`` names the wrong field."""
        known = GenerationRequest.model_fields.keys() & SamplingParams.__dataclass_fields__.keys()
        given = {name: value for name in known if (value := getattr(self, name)) is not None}
        given |= {
            "max_tokens": self.token_limit(),
            "logprobs": self.num_logprobs(),
            "structured_outputs": self.answer_form,
        }
        try:
            return SamplingParams(**{**defaults, **given, **more})
        except RequestError as error:
            raise error.renamed({"max_tokens": self.token_limit_field}) from None


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def token_limit(self) -> int | None:
        """OpenAI's default of 16 applies when the field is absent, not when it is ``null``."""
        if self.scores_only:
            return 1
        asked = super().token_limit()
        return 16 if asked is None and "max_tokens" not in self.model_fields_set else asked

    @property
    def scores_only(self) -> bool:
        """Whether the prompt's log-probabilities are the answer: no token shall be generated."""
        return bool(self.echo) and self.max_tokens == 0 and self.max_completion_tokens is None

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def sampling_params(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """Adds ``prompt_logprobs``, which ``echo`` with ``logprobs`` needs."""
        if self.echo and self.logprobs is not None:
            more["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return super().sampling_params(defaults, **more)


class TokenizeRequest(BaseModel):
    """``POST /tokenize`` of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: TokenIds


def parse(kind: type[_Model], body: dict[str, Any]) -> _Model:
    """Validate ``body`` as FastAPI would, for routes that take more than one shape."""
    try:
        return kind.model_validate(body)
    except ValidationError as exc:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in exc.errors()]
        raise RequestValidationError(errors) from None
