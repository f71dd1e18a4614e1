"""The sampling settings of a request, validated when they are created."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar

from kvserve.fields import FINITE, limited, settings_of
from kvserve.log import RequestError, shown

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
_MAX_WORDS, _MAX_WORD_LENGTH = 128, 1000
_MAX_INT = 2**31 - 1
_MAX_BIAS = 2**16
MAX_CHOICES, MAX_GRAMMAR = 10_000, 2**20
"""The most strings of a choice, and the most characters of any structured output."""
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
COMPOSED = "composed"
"""The kind of what a server has made of several grammars; no request may send it."""


@dataclass(frozen=True)
class StructuredOutput:
    """What the text must match.

    ``value`` is the JSON schema, the regular expression, the choices as a JSON list or the grammar,
    as ``kind`` says; for ``json_object`` it is empty. ``field`` is the field of the request that
    asked for it, for error messages.
    """

    kind: str
    value: str
    field: str = "structured_outputs"

    @classmethod
    def parse(cls, spec: Mapping[str, Any], field: str = "structured_outputs") -> StructuredOutput:
        """From ``{"json": schema}``, ``{"regex": ...}``, ``{"choice": [...]}`` and so on.

        Raises ``RequestError`` unless ``spec`` holds exactly one valid kind.
        """
        given = {kind: value for kind, value in spec.items() if value is not None}
        if unknown := sorted(given.keys() - set(_KINDS)):
            raise RequestError(
                f"{field} has no {unknown[0]!r}; it may hold one of {', '.join(_KINDS)}",
                param=field,
            )
        if len(given) != 1:
            raise RequestError(f"{field} must hold one of {', '.join(_KINDS)}", param=field)
        [(kind, value)] = given.items()
        text = _value_text(kind, value, field)
        if len(text) > MAX_GRAMMAR:
            raise RequestError(
                f"{field}.{kind} has {len(text)} characters, and at most {MAX_GRAMMAR} are read",
                param=field,
            )
        return cls(kind, text, field)


def _value_text(kind: str, value: Any, field: str) -> str:
    if kind == "json_object" and value is True:
        return ""
    if kind == "json" and isinstance(value, str | dict | bool):
        from kvserve.json_schema import schema_text

        return schema_text(value, f"{field}.json", field)
    if kind == "choice" and isinstance(value, list) and value:
        if len(value) > MAX_CHOICES:
            raise RequestError(
                f"{field}.choice has {len(value)} strings, and at most {MAX_CHOICES} are read",
                param=field,
            )
        if all(isinstance(item, str) and item for item in value):
            return json.dumps(value)
    elif kind in ("regex", "grammar") and isinstance(value, str) and value:
        return value
    needed = {
        "json": "a JSON schema",
        "json_object": "true",
        "choice": "a list of non-empty strings",
    }.get(kind, "a non-empty string")
    raise RequestError(f"{field}.{kind} must be {needed}", param=field)


_Kind = TypeVar("_Kind")


def refused(message: str, name: str) -> RequestError:
    """The error for a name that is not here."""
    return RequestError(message, param=name, code="unsupported_field")


def _naming_what_is_absent(kind: type[_Kind]) -> type[_Kind]:
    """Give a dataclass a ``RequestError`` for names that it does not have."""
    build = kind.__init__
    known = {each.name for each in fields(kind) if each.init}  # type: ignore[arg-type]

    @wraps(build)
    def init(self: _Kind, **given: Any) -> None:
        if not given.keys() <= known:
            from kvserve import absent

            given = absent.take_known(given, known, absent.FIELDS, refused)
        build(self, **given)

    kind.__init__ = init  # type: ignore[assignment, method-assign]
    return kind


@_naming_what_is_absent
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; names and defaults are vLLM's (``kv_...``: ours).

    Example: ``SamplingParams(temperature=0, max_tokens=400, kv_policy="none")``. Raises
    ``RequestError``, whose ``param`` names the field that is unknown or out of range. Fields stay
    as they are: ``clone(temperature=0.5)`` is another one.
    """

    n: int = limited(1, least=1, most=128)
    """How many choices to generate, 1 to 128."""
    temperature: float = limited(1.0, least=0, most=100)
    """0 to 100; 0 is greedy."""
    top_p: float = limited(1.0, above=0, most=1)
    """Draw from the most probable tokens that together have this probability; above 0, at most
    1."""
    top_k: int = limited(0, least=-1, most=_MAX_INT)
    """Draw from the k most probable tokens; 0 and -1: from all."""
    min_p: float = limited(0.0, least=0, most=1)
    """Draw from tokens at least this probable, relative to the most probable one; 0 to 1."""
    max_tokens: int | None = limited(16, least=1, most=2**63 - 1)
    """The most tokens to generate, at least 1; ``None``: up to the model's context."""
    min_tokens: int = limited(0, least=0, most=_MAX_INT)
    """The answer does not stop before it has this many tokens."""
    stop: str | Sequence[str] | None = None
    """A string, or up to 128, that end the answer; each has at most 1,000 characters."""
    stop_token_ids: Sequence[int] | None = None
    """Up to 128 token ids that end the answer."""
    include_stop_str_in_output: bool = False
    """Leave the stop string in the text."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    seed: int | None = limited(None, least=-(2**63), most=2**63 - 1)
    """Seed of the draws, 64 bits; ``None``: derived from the engine's seed."""
    logprobs: int | None = limited(None, least=0, most=MAX_LOGPROBS)
    """Report log-probabilities of each token and of this many most probable ones, 0 to 20."""
    prompt_logprobs: int | None = limited(None, least=0, most=MAX_LOGPROBS)
    """The same for prompt tokens; needs a policy that does not compress during the prompt."""
    presence_penalty: float = limited(0.0, least=-2, most=2)
    """Subtracted from the logits of tokens that the answer already has; -2 to 2."""
    frequency_penalty: float = limited(0.0, least=-2, most=2)
    """Subtracted once for each time that the answer already has the token; -2 to 2."""
    repetition_penalty: float = limited(1.0, above=0, most=FINITE)
    """Divides positive and multiplies negative logits of tokens that the prompt or the answer has;
    above 1 discourages them."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens; -100 to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these token ids are drawn."""
    bad_words: Sequence[str] | None = None
    """Up to 128 strings, of at most 100 characters, that the answer may not contain."""
    structured_outputs: Mapping[str, Any] | StructuredOutput | None = None
    """What the text must match: ``{"json": schema}``, ``{"regex": ...}``, ``{"choice": [...]}``,
    ``{"grammar": ...}`` or ``{"json_object": True}``."""
    thinking_end: int | None = limited(None, least=0, most=_MAX_INT)
    """The token that ends the model's reasoning. Structured output applies after it."""
    thinking_start: int | None = limited(None, least=0, most=_MAX_INT)
    """The token that begins the reasoning, if it is not known whether the model reasons: it does if
    this is its first token. ``None``: it reasons, if ``thinking_end`` is given."""
    thinking_token_budget: int | None = limited(None, least=0, most=_MAX_INT)
    """The most tokens of reasoning; then ``thinking_end`` is forced, which must be given."""
    priority: int = limited(0, least=-_MAX_INT - 1, most=_MAX_INT)
    """Lower numbers run first; needs ``scheduling_policy="priority"``."""
    kv_policy: str | Mapping[str, Any] | None = None
    """This request's policy in place of the engine's: a name, or ``{"name": ..., **fields}``;
    ``"none"`` is the exact cache."""
    kv_trace: bool = False
    """Report in ``CompletionOutput.kv_trace`` which positions each event drops."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prompts and continuations."""
    kv_resume: bool = True
    """Resume from the cache that an earlier turn left (``--continuations on``), if the prompt
    begins with that turn's tokens."""
    speculation: bool = True
    """Guess this request's next tokens (``--speculative-config``); the answer does not change."""
    client: str = ""
    """Who sent the request: clients take turns, and their grammars do. A server fills this in, by
    API key or by address."""
    stop_strings: tuple[str, ...] = field(init=False)
    structured_output: StructuredOutput | None = field(init=False)

    @classmethod
    def from_optional(cls, **settings: Any) -> SamplingParams:
        """As ``SamplingParams(...)``, but ``None`` stands for the default (of ``max_tokens`` for
        no limit)."""
        given = {k: v for k, v in settings.items() if v is not None or k == "max_tokens"}
        return cls(**given)

    def clone(self, **changes: Any) -> SamplingParams:
        """The same settings, with these changed."""
        return replace(self, **changes)

    def __post_init__(self) -> None:
        check_types(self)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop_strings", stop)
        spec = self.structured_outputs
        parsed = StructuredOutput.parse(spec) if isinstance(spec, Mapping) else spec
        object.__setattr__(self, "structured_output", parsed)
        for name, ok, allowed in self._checks():
            if not ok:
                _refuse(name, allowed, getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if self.thinking_token_budget is not None and self.thinking_end is None:
            raise RequestError(
                "thinking_token_budget: nothing says where the reasoning ends; start the server "
                "with --reasoning-parser, or set thinking_end offline",
                param="thinking_token_budget",
            )
        if parsed is not None:
            self._check_grammar(parsed)

    def _checks(self) -> tuple[tuple[str, bool, str], ...]:
        """Of what is no number: the field, whether it may be so, and what it must be."""
        bias, stop_ids = self.logit_bias or {}, self.stop_token_ids or ()
        allowed, salt = self.allowed_token_ids, self.cache_salt
        return (
            ("stop", _short(self.stop_strings), "up to 128 non-empty strings of 1000 characters"),
            (
                "stop_token_ids",
                _token_ids(stop_ids) and len(stop_ids) <= _MAX_WORDS,
                "up to 128 token ids",
            ),
            ("logit_bias", len(bias) <= _MAX_BIAS, f"of at most {_MAX_BIAS} tokens"),
            (
                "logit_bias",
                _token_ids(list(bias)) and all(abs(b) <= MAX_LOGIT_BIAS for b in bias.values()),
                f"token ids with values between -{MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}",
            ),
            (
                "allowed_token_ids",
                allowed is None or (len(allowed) > 0 and _token_ids(allowed)),
                "at least one token id",
            ),
            (
                "bad_words",
                _short(self.bad_words or (), 100),
                "up to 128 non-empty strings of 100 characters",
            ),
            (
                "cache_salt",
                salt is None or (isinstance(salt, str) and 1 <= len(salt) <= 1000),
                "a string of 1 to 1000 characters",
            ),
        )

    def _check_grammar(self, wanted: StructuredOutput) -> None:
        """Refuse settings that ban tokens: with a grammar they could leave no token to choose."""
        for name, used in (
            ("min_tokens", self.min_tokens > 0),
            ("ignore_eos", self.ignore_eos),
            ("allowed_token_ids", self.allowed_token_ids is not None),
            ("bad_words", bool(self.bad_words)),
        ):
            if used:
                raise RequestError(f"{name} does not go with {wanted.field}", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _token_ids(ids: Sequence[int]) -> bool:
    return not ids or 0 <= min(ids) <= max(ids) <= _MAX_INT


def _short(texts: Sequence[str], longest: int = _MAX_WORD_LENGTH) -> bool:
    """Whether the strings are few and short: every generated token is compared with them."""
    return len(texts) <= _MAX_WORDS and all(0 < len(text) <= longest for text in texts)


def check_types(settings: Any) -> None:
    """``RequestError`` for the first field of a ``SamplingParams`` that has the wrong type, or is a
    number beyond its limits."""
    for item in settings_of(type(settings)):
        value = getattr(settings, item.name)
        if (wanted := item.complaint(value)) is not None:
            _refuse(item.name, wanted, value)
    for name, kind, wanted in _SEVERAL:
        value = getattr(settings, name)
        items = () if value is None else value
        if not isinstance(items, Iterable) or not _all_are(items, kind):
            _refuse(name, wanted, value)
    bias = settings.logit_bias
    if bias is not None and not (isinstance(bias, Mapping) and _all_are(bias.values(), Real)):
        _refuse("logit_bias", "a mapping of token ids to numbers", bias)
    if not isinstance(settings.client, str):
        _refuse("client", "a string", settings.client)


_SEVERAL: tuple[tuple[str, Any, str], ...] = (
    ("stop_token_ids", Integral, "a list of token ids"),
    ("allowed_token_ids", Integral, "a list of token ids"),
    ("logit_bias", Integral, "a mapping of token ids to numbers"),
    ("bad_words", str, "a list of strings"),
    ("stop", str, "a string or a list of strings"),
)


def _all_are(items: Iterable[Any], kind: Any) -> bool:
    """Whether all are of a kind. There may be 200,000, so each type is looked at once."""
    return all(issubclass(each, kind) for each in set(map(type, items)))


def _refuse(name: str, wanted: str, value: object) -> NoReturn:
    raise RequestError(f"{name} must be {wanted}, got {shown(value):.200}", param=name)
