"""What the text must match: by ``response_format``, ``structured_outputs``, tools, or several."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvserve.json_schema import COMPACT, schema_text, within
from kvserve.log import RequestError, log_once
from kvserve.sampling_params import COMPOSED, MAX_GRAMMAR, StructuredOutput
from kvserve.server.parsers.chat_format import CallWriting, ChatFormat

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's older names for the kinds of ``structured_outputs``."""


def structured_output(fields: Mapping[str, Any]) -> StructuredOutput | None:
    """What the given fields ask for. Raises ``RequestError`` if more than one is given."""
    wanted = []
    if fields.get("response_format") is not None:
        wanted.append(_response_format(fields["response_format"]))
    if fields.get("structured_outputs") is not None:
        wanted.append(StructuredOutput.parse(fields["structured_outputs"]))
    for name in GUIDED:
        if fields.get(name) is not None:
            kind = name.removeprefix("guided_")
            log_once(f"{name} is an old name; send structured_outputs: {{{kind!r}: ...}}")
            wanted.append(StructuredOutput.parse({kind: fields[name]}, name))
    found = [one for one in wanted if one is not None]
    if len(found) > 1:
        names = " and ".join(one.field for one in found)
        raise RequestError(f"give one of {names}, not both", param=found[1].field)
    return found[0] if found else None


def _response_format(value: Mapping[str, Any]) -> StructuredOutput | None:
    kind, name = value.get("type"), "response_format"
    if kind == "text":
        return None
    if kind == "json_object" and value.get("schema") is None:
        return StructuredOutput("json_object", "", name)
    if kind not in ("json_object", "json_schema"):
        raise RequestError(
            f"response_format.type must be text, json_object or json_schema, got {kind!r}",
            param=name,
        )
    # The schema is beside the type in requests made for llama.cpp and for the Responses API.
    described = value.get("json_schema", value)
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, dict):
        raise RequestError("response_format needs a schema, which is an object", param=name)
    return StructuredOutput.parse({"json": schema}, name)


# ---- tools ------------------------------------------------------------------------------------

Function = Mapping[str, Any]
_EITHER = ("anyOf", "oneOf", "allOf")
_NAMING = {*_EITHER, "$ref", "properties", "patternProperties", "additionalProperties"}


def one_call(function: Function) -> StructuredOutput:
    """The arguments of one named function, and nothing else."""
    return StructuredOutput("json", _text(parameters(function)), "tools")


def some_calls(functions: Sequence[Function], parallel: bool) -> StructuredOutput:
    """Calls as ``[{"name": ..., "parameters": {...}}]``; only one unless ``parallel``."""
    schema = _objects(functions, "name", "parameters")
    definitions = schema.pop("$defs")
    schema = {"type": "array", "minItems": 1, "items": schema, "$defs": definitions}
    if not parallel:
        schema["maxItems"] = 1
    return StructuredOutput("json", _text(schema), "tools")


def parameters(function: Function) -> dict[str, Any]:
    """A function's schema. Arguments that it does not name are forbidden unless it allows them, or
    names some elsewhere than at its root. They are never null as a whole."""
    given = {**(function.get("parameters") or {"properties": {}})}
    given.pop("nullable", None)
    if "$ref" in given:
        return given
    either = [given[key] for key in _EITHER if isinstance(given.get(key), list)]
    elsewhere = any(isinstance(b, Mapping) and b.keys() & _NAMING for e in either for b in e)
    closed = not (elsewhere or "const" in given or "enum" in given)
    return {**({"additionalProperties": False} if closed else {}), **given, "type": "object"}


def _objects(functions: Sequence[Function], name: str, arguments: str) -> dict[str, Any]:
    """A schema of one call as a JSON object, of any of the functions."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for place, function in enumerate(functions):
        # References start at the root of the document, which is another one now.
        definitions[f"f{place}"] = within(parameters(function), f"f{place}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    name: {"const": function["name"]},
                    arguments: {"$ref": f"#/$defs/f{place}"},
                },
                "required": [name, arguments],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}


def _text(schema: Any) -> str:
    return schema_text(schema, "tools", "tools")


# ---- an answer or calls, in the model's own format ----------------------------------------------


class _Grammars:
    """Grammars that name one another, as llguidance takes them; a client's ``grammar`` may be GBNF,
    and the engine makes Lark of it."""

    def __init__(self, tokens: Mapping[str, tuple[int, bool]]) -> None:
        self._ids = {text: token_id for text, (token_id, _) in tokens.items()}
        self._made: list[dict[str, Any]] = []

    def schema(self, text: str) -> str:
        """The name of a grammar for JSON text that matches a schema."""
        schema = json.loads(text)
        schema = schema if isinstance(schema, dict) else {"anyOf": [schema]}
        return self._add(json_schema={**schema, "x-guidance": COMPACT})

    def answer(self, wanted: StructuredOutput) -> str:
        if wanted.kind == "json":
            return self.schema(wanted.value)
        if wanted.kind == "json_object":
            return self.schema('{"type": "object"}')
        if wanted.kind == "regex":
            # A slash may be escaped already.
            pattern = re.sub(r"\\.|/", lambda m: m[0] if m[0][-1] != "/" else r"\/", wanted.value)
            return self._add(lark_grammar="start: /" + pattern.replace("\n", r"\n") + "/")
        if wanted.kind == "choice":
            options = " | ".join(map(_quoted, json.loads(wanted.value)))
            return self._add(lark_grammar=f"start: {options}")
        return self._add(grammar=wanted.value)

    def literal(self, text: str) -> str:
        """A text in which tokens that no text is merged into stand for themselves."""
        held = sorted((token for token in self._ids if token in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, held))})", text) if held else [text]
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else _quoted(part)
            for part in parts
            if part
        )

    def finish(self, start: str, field: str) -> StructuredOutput:
        text = json.dumps({"grammars": [{"lark_grammar": f"start: {start}"}, *self._made]})
        if len(text) > MAX_GRAMMAR:
            raise RequestError(
                f"{field}: with the tools it has {len(text)} characters, and at most {MAX_GRAMMAR} "
                "are read",
                param=field,
            )
        return StructuredOutput(COMPOSED, text, field)

    def _add(self, **grammar: Any) -> str:
        name = f"g{len(self._made)}"
        self._made.append({"name": name, **grammar})
        return f"@{name}"


def answer_or_calls(
    form: ChatFormat,
    answer: StructuredOutput | None,
    functions: Sequence[Function],
    *,
    must_call: bool = False,
    parallel: bool = True,
) -> StructuredOutput:
    """What a model may write that has tools and whose answer must match: the answer, or calls.

    ``RequestError`` if it is not known how this model writes calls. ``must_call``: only calls.
    """
    field = "tools" if answer is None else answer.field
    grammars = _Grammars(form.tokens)
    if form.harmony:
        return grammars.finish(_channels(grammars, answer, functions, must_call), field)
    assert answer is not None
    writing = form.writing
    if writing is None:
        raise RequestError(
            f"{field} together with tools: it is not known how this model's calls are written, or "
            "not as JSON; leave one of them out, or send tool_choice none or required",
            param=field,
            code="unsupported_field",
        )
    bare = not writing.before.strip() and answer.kind in ("json", "json_object")
    if bare and writing.keys is not None:
        # Both are JSON without a mark before it: one schema, or the first bracket would decide.
        calls = _objects(functions, *writing.keys)
        own = json.loads(answer.value) if answer.kind == "json" else {"type": "object"}
        definitions = {**calls.pop("$defs"), "answer": within(own, "answer")}
        either = {"anyOf": [{"$ref": "#/$defs/answer"}, *calls["anyOf"]], "$defs": definitions}
        return StructuredOutput("json", _text(either), field)
    wanted = grammars.answer(answer)
    return grammars.finish(f"{wanted} | {_calls(grammars, writing, functions, parallel)}", field)


def _calls(
    grammars: _Grammars, writing: CallWriting, functions: Sequence[Function], parallel: bool
) -> str:
    if writing.keys is not None:
        call = grammars.schema(_text(_objects(functions, *writing.keys)))
    else:
        each = (
            f"{_quoted(function['name'])} {grammars.literal(writing.between)} "
            f"{grammars.schema(_text(parameters(function)))}"
            for function in functions
        )
        call = f"({' | '.join(each)})"
    more = ""
    if parallel and writing.next is not None:
        more = f"({grammars.literal(writing.next)} {call})*"
    return f"{grammars.literal(writing.before)} {call} {more} {grammars.literal(writing.after)}"


def _channels(
    grammars: _Grammars,
    answer: StructuredOutput | None,
    functions: Sequence[Function],
    must_call: bool,
) -> str:
    """Harmony: reasoning, and then the answer or a call."""
    mark = grammars.literal
    text = r"/(.|\n)*/"
    thought = f"{mark('<|channel|>analysis<|message|>')} {text} {mark('<|end|><|start|>assistant')}"
    last = []
    if not must_call:
        wanted = text if answer is None else grammars.answer(answer)
        last.append(f"{mark('<|channel|>final<|message|>')} {wanted}")
    for function in functions:
        to = f"to=functions.{function['name']}"
        heads = (
            f"<|channel|>commentary {to} <|constrain|>json",
            f" {to}<|channel|>commentary json",
        )
        schema = grammars.schema(_text(parameters(function)))
        last += [f"{mark(head + '<|message|>')} {schema}" for head in heads]
    return f"({thought})* ({' | '.join(last)})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
