"""What llguidance takes under a schema as the engine gives it, by its tokenizer of bytes."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLTokenizer

from kvserve.json_schema import COMPACT, schema_text

TOKENIZER = LLTokenizer("byte")


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether the grammar of a schema takes a text and may end behind it; it has to compile."""
    options: Any = COMPACT
    grammar = LLMatcher.grammar_from_json_schema(schema_text(schema, "schema", "f"), options)
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
