"""llguidance, which compiles grammars.

A client's grammar is a program, so its size, its compilation and its steps are bounded. A failure
in the library, panics included, is that client's error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from kvserve.engine.models.hub import SOURCES
from kvserve.engine.sampling.grammar_gbnf import plain_gbnf
from kvserve.engine.sampling.grammar_numbers import exact_grammar
from kvserve.json_schema import COMPACT
from kvserve.log import RequestError, logger
from kvserve.sampling_params import COMPOSED, StructuredOutput

_LIMITS: Any = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}
"""What llguidance may spend on one grammar: some 50 MiB, and some 0.1 s in a step."""
_TRIAL_TOKENS = 8
_SLOW, _SLOW_IN_A_ROW = 0.01, 6
"""CPU seconds for a mask from which on it is slow, and how many masks in a row may not be. Those of
ordinary grammars take .0004 in the middle, and some take .02 once; all rows of a step wait."""
_STOPPED = dict.fromkeys(
    ("NoExtension", "NoExtensionBias"), "no text matches it: no token may come next"
)
"""Names that llguidance has for the end of a grammar, in words."""
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*?)\]")
_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~/")


class _Meter:
    """How many masks of one grammar were slow in a row, for whatever sequences."""

    in_a_row = 0

    def add(self, seconds: float) -> None:
        self.in_a_row = self.in_a_row + 1 if seconds > _SLOW else 0
        self.check()

    def check(self) -> None:
        if self.in_a_row >= _SLOW_IN_A_ROW:
            raise ValueError(f"it takes more than {1000 * _SLOW:g} ms for each token; shorten it")


class Matcher:
    """A grammar and a place in it; fails where the grammar is too slow, or over its limits."""

    def __init__(self, matcher: Any, meter: _Meter | None = None) -> None:
        """``matcher`` is llguidance's."""
        self._matcher, self._meter = matcher, meter or _Meter()

    def copy(self) -> Matcher:
        """Another one at the same place, whose masks count as this one's."""
        return Matcher(self._matcher.deep_copy(), self._meter)

    def fill(self, mask: np.ndarray[Any, Any]) -> None:
        """Write the bits [W] of the tokens that may come next: int32, 32 tokens each."""
        self._meter.check()
        started = thread_time()
        # The tokenizer may know more tokens than the model, in which case its mask is longer.
        mask[:] = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(mask)]
        self._check()
        self._meter.add(thread_time() - started)

    def accept(self, token_id: int) -> bool:
        """Advance by a token; ``False`` if the grammar does not allow it here."""
        accepted = bool(self._matcher.consume_token(token_id))
        self._check()
        return accepted

    def _check(self) -> None:
        """Raise the matcher's error: over its limits it raises nothing, and allows no token."""
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())


Compile = Callable[[StructuredOutput], Matcher]
"""Compiles a grammar: a matcher at its start."""


@dataclass(frozen=True)
class BackendSource:
    """What the backend is made from: the tokenizer's path and tokens."""

    tokenizer: str
    trust_remote_code: bool
    vocab_size: int
    eos_token_ids: list[int]

    @property
    def words(self) -> int:
        """How many numbers a mask has."""
        return -(-self.vocab_size // 32)


def load_backend(source: BackendSource) -> Compile:
    """Read the tokenizer and prepare the library for it."""
    size, eos = source.vocab_size, source.eos_token_ids
    described = Path(source.tokenizer) / "tokenizer.json"
    if described.is_file():
        # Without transformers, which takes 150 MiB to read the same file.
        return llguidance(Tokenizer.from_file(str(described)), size, eos)
    if (form := SOURCES.get(Path(source.tokenizer).suffix)) is not None:
        tokenizer = form.tokenizer(source.tokenizer)
    else:
        from transformers import AutoTokenizer

        code = source.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(source.tokenizer, trust_remote_code=code)
    return llguidance(tokenizer.backend_tokenizer, size, eos)


def refused(wanted: StructuredOutput, reason: str) -> RequestError:
    """The error for the client; a panic's text is about the library's code, and is only logged."""
    if any(word in reason for word in ("panic", ".rs:", "unwrap()")):
        logger.error("a grammar made its backend fail: %.2000s", reason)
        reason = "it failed there; it may be too complex"
    reason = reason.partition("<state>")[0]  # behind it comes the library's state
    lines = [line.strip() for line in reason.splitlines()]
    reason = " ".join(line for line in lines if line.strip("^"))  # that points at the one above
    reason = _STOPPED.get(reason, reason)
    if keywords := _UNIMPLEMENTED.search(reason):
        reason = (
            f"{keywords[1]} cannot be enforced while a text is generated; leave it out and check "
            "the answer"
        )
    return RequestError(
        f"{wanted.field}: the grammar backend refuses it: {reason[:300]}",
        param=wanted.field,
        code="invalid_grammar",
    )


def is_backends(error: BaseException) -> bool:
    """Whether a backend raised it: an ``Exception``, or a Rust panic, which is a different kind."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def compile_and_try(compile: Compile, wanted: StructuredOutput, words: int) -> Matcher:
    """Compile a grammar and follow a copy for a few tokens, with masks of ``words`` numbers.

    So a grammar that would fail or take long in a step, which all sequences share, fails here. One
    whose masks become slow later fails then.
    """
    first = compile(wanted)
    tried, mask = first.copy(), np.zeros(words, np.int32)
    for _ in range(_TRIAL_TOKENS):
        tried.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed) or not tried.accept(int(allowed[0])):
            break
    return first


def _pattern(text: str) -> str:
    """A regular expression that matches ``text`` alone."""
    escaped = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return "".join(escaped.get(c) or ("\\" + c if c in _SPECIAL else c) for c in text)


def llguidance(backend: Any, vocab_size: int, eos: Sequence[int]) -> Compile:
    """``backend`` is a fast tokenizer of the package tokenizers."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    options: Any = COMPACT
    limits = LLParserLimits(**_LIMITS)
    size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
    vocabulary = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=list(eos))

    def lark(text: str) -> str:
        if "::=" not in text or is_lark_syntax(text):
            return text
        return gbnf_to_lark(plain_gbnf(text))

    def grammar(wanted: StructuredOutput) -> str:
        if wanted.kind == COMPOSED:
            composed = json.loads(wanted.value)
            for each in composed["grammars"]:
                if "grammar" in each:
                    each["lark_grammar"] = lark(each.pop("grammar"))
                elif (exact := exact_grammar(each.get("json_schema"))) is not None:
                    del each["json_schema"]
                    each["lark_grammar"] = exact
            return json.dumps(composed)
        if wanted.kind in ("json", "json_object"):
            schema = wanted.value or '{"type": "object"}'
            if (exact := exact_grammar(json.loads(schema))) is not None:
                return str(LLMatcher.grammar_from_lark(exact))
            return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))
        if wanted.kind == "regex":
            return str(LLMatcher.grammar_from_regex(wanted.value))
        if wanted.kind == "choice":
            either = "|".join(map(_pattern, json.loads(wanted.value)))
            return str(LLMatcher.grammar_from_regex(either))
        return str(LLMatcher.grammar_from_lark(lark(wanted.value)))

    def compile(wanted: StructuredOutput) -> Matcher:
        first = LLMatcher(vocabulary, grammar(wanted), log_level=0, limits=limits)
        if first.is_error():
            raise ValueError(first.get_error())
        return Matcher(first)

    return compile
