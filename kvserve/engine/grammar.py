"""Structured output: which tokens a grammar lets pass, for all sequences that follow one.

Grammars are compiled by llguidance (default) or xgrammar, once each; a sequence has a copy of its
own that walks along with its tokens. The mask is a bit per token, made on the host.
"""

from __future__ import annotations

import importlib.util
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from kvserve.config import EngineConfig
from kvserve.engine.messages import EngineInfo
from kvserve.log import ConfigError, RequestError, logger
from kvserve.sampling_params import StructuredOutput

_CACHED_GRAMMARS = 256
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write a document: with free white space a model may never get to its end."""


class Matcher(Protocol):
    """A grammar and a place in it."""

    def fill(self, mask: np.ndarray[Any, Any]) -> None:
        """Write the bits [W] of the tokens that may come next: int32, 32 tokens each."""
        ...

    def accept(self, token_id: int) -> bool:
        """Walk on; ``False`` if the grammar does not know the token here."""
        ...


class SequenceGrammar:
    """One sequence's place in its grammar.

    Nothing is asked of it until ``after`` was sampled, nor once one of ``stop_token_ids`` was.
    """

    def __init__(self, matcher: Matcher, after: int | None, stop_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._after = after
        self._stop_token_ids = stop_token_ids
        self._over = False

    def fill(self, mask: np.ndarray[Any, Any]) -> None:
        if self._after is None and not self._over:
            self._matcher.fill(mask)

    def accept(self, token_id: int) -> None:
        if self._after is not None:
            self._after = None if token_id == self._after else self._after
        elif not self._over:
            accepted = self._matcher.accept(token_id)
            self._over = not accepted or token_id in self._stop_token_ids
            if not accepted:
                logger.error("a grammar refused the token %d that it had allowed", token_id)


def allowed_tokens(
    grammars: Sequence[tuple[int, SequenceGrammar]], count: int, vocab_size: int
) -> Tensor:
    """bool [count, V]: what may be sampled at each place; places without a grammar allow all."""
    bits = np.full((count, -(-vocab_size // 32)), -1, np.int32)
    for place, grammar in grammars:
        grammar.fill(bits[place])
    unpacked = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(unpacked[:, :vocab_size].astype(bool))


class GrammarCompiler:
    """Grammars by what they say; the tokenizer is read when the first one is asked for."""

    def __init__(self, config: EngineConfig, info: EngineInfo) -> None:
        backend = config.grammar_backend
        if backend == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
            raise ConfigError(
                "--grammar-backend: xgrammar is not installed (pip install 'kvserve[xgrammar]')"
            )
        self._load = {"llguidance": _llguidance, "xgrammar": _xgrammar}[backend]
        self._model = config.model
        self._info = info
        self._make: Callable[[StructuredOutput], Callable[[], Matcher]] | None = None
        self._compiled: OrderedDict[tuple[str, str], Callable[[], Matcher]] = OrderedDict()

    def compile(self, wanted: StructuredOutput) -> Matcher:
        """A matcher at the grammar's start; ``RequestError`` where the backend refuses it."""
        key = wanted.kind, wanted.value
        if key not in self._compiled:
            if self._make is None:
                self._make = self._load_backend(wanted.field)
            self._compiled[key] = self._make(wanted)
            if len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]()

    def _load_backend(self, field: str) -> Callable[[StructuredOutput], Callable[[], Matcher]]:
        eos = self._info.eos_token_ids
        if self._model.skip_tokenizer_init or not eos:
            raise RequestError(
                f"{field} needs a tokenizer with an end-of-sequence token", param=field
            )
        tokenizer = AutoTokenizer.from_pretrained(
            self._model.tokenizer or self._info.model_path,
            trust_remote_code=self._model.trust_remote_code,
        )
        return self._load(tokenizer, self._info.vocab_size, eos)


def _refused(wanted: StructuredOutput, reason: str) -> RequestError:
    return RequestError(
        f"{wanted.field}: the grammar backend refuses it: {reason.strip()[:500]}",
        param=wanted.field,
        code="invalid_grammar",
    )


# ---- llguidance -------------------------------------------------------------------------------


class _GuidanceMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, mask: np.ndarray[Any, Any]) -> None:
        # The tokenizer may know more tokens than the model, in which case its mask is longer.
        mask[:] = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(mask)]

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))


def _llguidance(
    tokenizer: Any, vocab_size: int, eos: list[int]
) -> Callable[[StructuredOutput], Callable[[], Matcher]]:
    from llguidance import LLMatcher, LLTokenizer

    backend = tokenizer.backend_tokenizer
    size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
    vocabulary = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=eos)

    def grammar(wanted: StructuredOutput) -> str:
        if wanted.kind == "json":
            return str(LLMatcher.grammar_from_json_schema(wanted.value, overrides=_COMPACT))
        if wanted.kind == "json_object":
            schema = {"type": "object"}
            return str(LLMatcher.grammar_from_json_schema(schema, overrides=_COMPACT))
        if wanted.kind == "regex":
            return str(LLMatcher.grammar_from_regex(wanted.value))
        if wanted.kind == "choice":
            options = " | ".join(map(json.dumps, json.loads(wanted.value)))
            return str(LLMatcher.grammar_from_lark(f"start: {options}"))
        return str(LLMatcher.grammar_from_lark(wanted.value))

    def make(wanted: StructuredOutput) -> Callable[[], Matcher]:
        try:
            first = LLMatcher(vocabulary, grammar(wanted), log_level=0)
        except ValueError as error:
            raise _refused(wanted, str(error)) from None
        if first.is_error():
            raise _refused(wanted, first.get_error())
        return lambda: _GuidanceMatcher(first.deep_copy())

    return make


# ---- xgrammar ---------------------------------------------------------------------------------


class _XgrammarMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, mask: np.ndarray[Any, Any]) -> None:
        self._matcher.fill_next_token_bitmask(torch.from_numpy(mask[None]), 0)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))


def _xgrammar(
    tokenizer: Any, vocab_size: int, eos: list[int]
) -> Callable[[StructuredOutput], Callable[[], Matcher]]:
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=eos
    )
    compiler = xgrammar.GrammarCompiler(info)

    def compiled(wanted: StructuredOutput) -> Any:
        if wanted.kind in ("json", "json_object"):
            schema = wanted.value or '{"type": "object"}'
            separators = (_COMPACT["item_separator"], _COMPACT["key_separator"])
            return compiler.compile_json_schema(
                schema, any_whitespace=False, separators=separators, strict_mode=False
            )
        if wanted.kind == "regex":
            return compiler.compile_regex(wanted.value)
        if wanted.kind == "choice":
            options = " | ".join(map(json.dumps, json.loads(wanted.value)))
            return compiler.compile_grammar(f"root ::= {options}")
        return compiler.compile_grammar(wanted.value)

    def make(wanted: StructuredOutput) -> Callable[[], Matcher]:
        try:
            grammar = compiled(wanted)
        except RuntimeError as error:
            raise _refused(wanted, str(error)) from None
        return lambda: _XgrammarMatcher(xgrammar.GrammarMatcher(grammar))

    return make
