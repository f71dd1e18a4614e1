"""Bodies that once ended the server or stopped its loop: grammars, and log-probabilities."""

from __future__ import annotations

import random
from typing import Any


def rules(count: int, rule: str = "r{i}: r{next}") -> str:
    """A Lark grammar of ``count`` rules, each of which names the next one."""
    lines = [rule.format(i=i, next=i + 1) for i in range(count)]
    first, last = rule[0] + "0", rule[0] + str(count)
    return "\n".join([f"start: {first}", *lines, f'{last}: "x"', ""])


def references(count: int) -> dict[str, Any]:
    """A JSON schema of ``count`` definitions, each of which is a reference to the next one."""
    names: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**names, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def nested(count: int, word: str) -> dict[str, Any]:
    """A JSON schema of ``count`` levels of ``anyOf`` or ``allOf``."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(count):
        schema = {word: [schema]}
    return schema


CHAINS = {
    "rules": rules(3000),
    "terminals": rules(3000, "T{i}: T{next}"),
    "optional terminals": rules(3000, 'T{i}: ("a" T{next})?'),
    "many rules": rules(20_000),
}


def grammar_bombs() -> list[dict[str, Any]]:
    """Fields of requests whose grammars overflowed the engine's stack, or took 24 s."""
    return [
        {"guided_json": references(1000)},
        {"guided_json": references(120)},
        {"response_format": _format(nested(80, "anyOf"))},
        {"response_format": _format(nested(80, "allOf"))},
        *({"structured_outputs": {"grammar": chain}} for chain in CHAINS.values()),
    ]


def long_prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Prompts as token ids, of which no two begin alike."""
    drawn = random.Random(seed)
    return [[drawn.randrange(3, 400) for _ in range(length)] for _ in range(count)]


def scored_bombs(context: int) -> list[dict[str, Any]]:
    """Requests for log-probabilities: 580 MB once, then the most that an answer may have."""
    length = context - 96
    most = max(2**19, context * 21) // (21 * length)
    return [
        {"prompt": long_prompts(100, length), "max_tokens": 1, "prompt_logprobs": 20},
        {"prompt": long_prompts(100, length), "max_tokens": 1, "echo": True, "logprobs": 20},
        {"prompt": long_prompts(most, length, 1), "max_tokens": 1, "prompt_logprobs": 20},
        {"prompt": long_prompts(most, length, 2), "max_tokens": 1, "echo": True, "logprobs": 20},
    ]


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
