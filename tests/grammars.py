"""What llguidance takes under a schema or a grammar as the engine gives it, by its tokenizer of
bytes."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvserve.engine.sampling.grammar_gbnf import plain_gbnf
from kvserve.json_schema import COMPACT, schema_text

TOKENIZER = LLTokenizer("byte")


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether the grammar of a schema takes a text and may end behind it; it has to compile."""
    options: Any = COMPACT
    given = schema_text(schema, "schema", "f")
    return _follows(LLMatcher.grammar_from_json_schema(given, options), text)


def gbnf_takes(grammar: str, text: str) -> bool:
    """As ``takes``, for GBNF."""
    return _follows(LLMatcher.grammar_from_lark(gbnf_to_lark(plain_gbnf(grammar))), text)


def _follows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
