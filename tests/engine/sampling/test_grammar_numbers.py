"""Numbers that 64-bit floats do not hold, in schemas: the mask takes the text of what is valid."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvserve.engine.sampling.grammar_backends import Compile, llguidance
from kvserve.log import RequestError
from kvserve.sampling_params import StructuredOutput
from kvserve.server.openai.structured import one_call, some_calls

P = 2**53
BIG = (P + 1, -P - 1, 2**63, 2**64, -(2**63), -(2**63) + 1, 123456789012345678, 10**30 + 1)


@pytest.fixture(scope="module")
def letters() -> tuple[Tokenizer, Compile]:
    """A tokenizer with a token for each byte, and what compiles grammars for it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: place for place, letter in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer, llguidance(tokenizer, len(vocab), [0])


def accepts(letters: tuple[Tokenizer, Compile], wanted: Any, text: str) -> bool:
    """Whether each token of the text may come next, and the end behind it."""
    tokenizer, compile = letters
    if not isinstance(wanted, StructuredOutput):
        wanted = StructuredOutput.parse({"json": wanted})
    matcher = compile(wanted)
    mask = np.zeros(-(-tokenizer.get_vocab_size() // 32), np.int32)
    for token in [*tokenizer.encode(text).ids, 0]:
        matcher.fill(mask)
        if not mask.view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1:
            return False
        matcher.accept(token)
    return True


def is_valid(schema: Any, text: str) -> bool:
    """By jsonschema, whose numbers are as long as they are written."""
    exact, value = (json.loads(each, parse_float=Decimal) for each in (json.dumps(schema), text))
    return bool(jsonschema.Draft202012Validator(exact).is_valid(value))


@pytest.mark.parametrize("n", BIG)
def test_constants_keep_their_digits(letters: tuple[Tokenizer, Compile], n: int) -> None:
    wrong = [str(n + 1), str(n - 1), f"{n}0", str(-n)]
    wrong += [] if int(float(n)) == n else [str(int(float(n)))]
    for schema in (
        {"const": n},
        {"type": "integer", "enum": [n, 1, "x"]},
        {"type": "integer", "const": n, "minimum": n},
        {"anyOf": [{"type": "null"}, {"oneOf": [{"const": n}, {"type": "string"}]}]},
        {"allOf": [{"type": "integer"}, {"const": n}]},
        {"allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": {"const": n}}},
    ):
        assert accepts(letters, schema, str(n)), schema
        assert not any(accepts(letters, schema, text) for text in wrong), schema
    assert accepts(letters, {"enum": [n, 1, "x"]}, '"x"')
    value = {"a": [n, "ü"], "b": True}
    assert accepts(letters, {"const": value}, json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"const": 1.5e300}, ["1.5e300", "1.5e+300"], ["1.5e301", "15" + "0" * 299]),
        ({"enum": [5e-324, 0.5]}, ["5e-324", "0.5"], ["0", "0.0"]),
        ({"type": "array", "items": {"const": P + 1}}, ["[]", f"[{P + 1}, {P + 1}]"], [f"[{P}]"]),
        (
            {"type": "array", "items": {"const": P + 1}, "minItems": 2, "maxItems": 3},
            [f"[{P + 1}, {P + 1}]", f"[{P + 1}, {P + 1}, {P + 1}]"],
            ["[]", f"[{P + 1}]", f"[{', '.join([str(P + 1)] * 4)}]"],
        ),
        (
            {"type": "array", "prefixItems": [{"const": P + 1}, {"type": "null"}], "minItems": 1},
            [f"[{P + 1}]", f"[{P + 1}, null]", f'[{P + 1}, null, 2, "x"]'],
            ["[]", f"[{P}]", f"[{P + 1}, 2]"],
        ),
        (
            {
                "type": "object",
                "properties": {'q"': {"type": "null"}, "id": {"const": P + 1}, "z": {"const": 1}},
                "required": ["id"],
            },
            [f'{{"id": {P + 1}}}', f'{{"q\\"": null, "id": {P + 1}, "z": 1, "x": [0], "y": {{}}}}'],
            ["{}", f'{{"id": {P}}}', f'{{"id": {P + 1}, "id": 1}}', f'{{"id": {P + 1}, "z": 2}}'],
        ),
        (
            {"type": "object", "additionalProperties": {"enum": [P + 1, P + 3]}},
            ["{}", f'{{"a": {P + 1}, "b": {P + 3}}}'],
            [f'{{"a": {P + 2}}}'],
        ),
        (
            {
                "$ref": "#/$defs/n",
                "$defs": {
                    "n": {
                        "type": "object",
                        "properties": {"v": {"const": P + 1}, "next": {"$ref": "#/$defs/n"}},
                        "additionalProperties": False,
                    }
                },
            },
            [f'{{"v": {P + 1}, "next": {{"next": {{"v": {P + 1}}}}}}}', "{}"],
            [f'{{"next": {{"v": {P}}}}}', '{"x": 1}'],
        ),
        ({"minimum": P + 1}, ["null", '"x"', str(P + 1), f"{P + 1}.5"], [str(P), "1"]),
    ],
)
def test_numbers_within_other_schemas(
    letters: tuple[Tokenizer, Compile], schema: Any, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert accepts(letters, schema, text) and is_valid(schema, text), text
    assert not any(accepts(letters, schema, text) for text in bad)


def test_tools_keep_their_digits(letters: tuple[Tokenizer, Compile]) -> None:
    n = 123456789012345678
    arguments = {"type": "object", "properties": {"id": {"const": n}}, "required": ["id"]}
    tools: list[Any] = [{"name": "f", "parameters": arguments}, {"name": "g"}]
    for written, wanted in (
        ('{{"id": {}}}', one_call(tools[0])),
        ('[{{"name": "f", "parameters": {{"id": {}}}}}]', some_calls(tools, False)),
    ):
        assert accepts(letters, wanted, written.format(n))
        assert not accepts(letters, wanted, written.format(int(float(n))))


@pytest.mark.parametrize(
    "bounds",
    [
        *({"minimum": n} for n in BIG[::2]),
        *({"exclusiveMaximum": n} for n in BIG[1::2]),
        {"exclusiveMinimum": P},
        {"maximum": 2**63 - 1},
        {"minimum": -(2**63) + 1, "maximum": 2**63 - 1},
        {"minimum": P + 1, "maximum": P + 3},
        {"minimum": 0, "maximum": 2**64 - 1},
        {"minimum": -1e20, "maximum": 1e20},
        {"minimum": 1e21},
        {"exclusiveMinimum": 1e21, "maximum": 1e300},
        {"minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        {"exclusiveMinimum": 1e-10, "exclusiveMaximum": 1 + 2**-40},
        {"exclusiveMinimum": -2.5e-05, "maximum": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_are_exact(
    letters: tuple[Tokenizer, Compile], kind: str, bounds: dict[str, Any]
) -> None:
    """Integers beyond 64 bits are not asked about: what bounds only these, is left out."""
    schema = {"type": kind, **bounds}
    edges = {Decimal(0), *(Decimal(repr(bound)) for bound in bounds.values())}
    steps = [Decimal(text) for text in ("0", "1", "-1", "1e18", "-1e-12", "1e-12")]
    values = edges | {Decimal(int(edge)) + step for edge in edges for step in steps}
    for value in values:
        whole = value == value.to_integral_value()
        if kind == "integer" and not (whole and -(2**63) <= value < 2**64):
            continue
        text = f"{int(value)}" if whole else f"{value:f}"
        assert accepts(letters, schema, text) is is_valid(schema, text), text


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": P + 1, "multipleOf": 2}, "multipleOf cannot be enforced"),
        ({"patternProperties": {"a": {"const": P + 1}}}, "patternProperties cannot be enforced"),
        ({"const": P + 1, "maximum": 5}, "no value of"),
        ({"multipleOf": 0.07}, "multipleOf 0.07 cannot be enforced"),
        ({"multipleOf": 2**33}, "multipleOf 8589934592 cannot be enforced"),
        ({"const": float("inf")}, "is not JSON"),
    ],
)
def test_what_cannot_be_written_is_refused_in_our_words(
    letters: tuple[Tokenizer, Compile], schema: Any, words: str
) -> None:
    with pytest.raises((RequestError, ValueError), match=words):
        accepts(letters, schema, "1")
