"""Grammars, stop strings and log-probabilities where tokens, templates and formats meet.

A random model around a tokenizer of bytes and the marks of several families; what it says is forced
by biases and grammars.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from kvserve.config import EngineConfig
from kvserve.engine.frontend.async_engine import AsyncEngine
from kvserve.server.http.app import create_app
from kvserve.server.settings.serve_settings import ServeSettings
from kvserve.server.state.server_state import ServerState
from tests.checkpoints import write_checkpoint, write_tokenizer
from tests.server.conftest import scored
from tests.server.openai import templates

MARKS = (
    *("<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>"),
    *("<|constrain|>", "<|call|>", "<|return|>", "[TOOL_CALLS]"),
)
PLAIN_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "maximum": 99}},
    "required": ["answer"],
    "additionalProperties": False,
}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


ANSWER = form(SCHEMA)
SHORT: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"n": {"$ref": "#/definitions/N"}},
            "required": ["n"],
            "definitions": {"N": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    },
}


class Served:
    """One engine; each request through an application with the options that it needs."""

    def __init__(self, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        flat = EngineConfig.from_flat(model=str(directory), dtype="float32", max_model_len=1000)
        self.config = flat
        self.engine = AsyncEngine(flat, mode="thread")
        self.run(self.engine.start())
        self.apps: dict[str, Any] = {}

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(250)

    def token(self, text: str) -> int:
        assert self.engine.tokenizer is not None
        [token] = self.engine.tokenizer.encode(text, add_special_tokens=False)
        return token

    def post(self, path: str, body: Any, template: str = "QWEN", **options: Any) -> httpx.Response:
        key = f"{template} {options}"
        if key not in self.apps:
            known = getattr(templates, template)
            settings = ServeSettings(served_model_name=("m",), allowed_hosts=("*",), **options)
            state = ServerState(self.engine, self.config, settings)
            state.chat_template = known
            state.mark_ready()
            self.apps[key] = create_app(state)

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.apps[key])
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return await http.post(path, json=body, timeout=250)

        response: httpx.Response = self.run(send())
        return response

    def chat(self, template: str = "QWEN", options: Any = None, **body: Any) -> dict[str, Any]:
        """The only choice of a chat answer, or the error."""
        body = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, **body}
        response = self.post("/v1/chat/completions", body, template, **(options or {}))
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            return dict(response.json()["error"])
        [choice] = response.json()["choices"]
        return dict(choice)

    def stop(self) -> None:
        self.run(self.engine.shutdown())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    size = {"vocab_size": 300, "max_position_embeddings": 1024}
    directory = write_checkpoint("qwen3", tmp_path_factory.mktemp("marks"), **size)
    write_tokenizer(directory, MARKS, PLAIN_MARKS)
    running = Served(directory)
    yield running
    running.stop()


def bias(served: Served, *texts: str) -> dict[str, float]:
    return {str(served.token(text)): 100.0 for text in texts}


def arguments_of(choice: dict[str, Any]) -> Any:
    """Those of the only call."""
    [call] = choice["message"]["tool_calls"]
    return json.loads(call["function"]["arguments"])


# ---- tools together with structured output (CASES F8) -------------------------------------------


FIRST = {"QWEN": "<tool_call>", "MISTRAL": "[TOOL_CALLS]", "LLAMA": None, "DEEPSEEK": "<"}


@pytest.mark.parametrize("template", FIRST)
def test_the_model_calls_or_answers_as_the_schema_says(served: Served, template: str) -> None:
    body: dict[str, Any] = {"tools": [SHORT], "response_format": ANSWER, "max_tokens": 250}
    answered = served.chat(template, **body, logit_bias=bias(served, "{"))
    first = FIRST[template]
    if first is None:
        first = "n"  # of "name": the other begins with "answer"
    else:
        jsonschema.validate(json.loads(answered["message"]["content"]), SCHEMA)
        assert "tool_calls" not in answered["message"]
    called = served.chat(template, **body, logit_bias=bias(served, first))
    [call] = called["message"]["tool_calls"][:1]
    assert call["function"]["name"] == "weather"
    assert set(json.loads(call["function"]["arguments"])) == {"n"}
    assert called["finish_reason"] in ("tool_calls", "length")  # calls may go on
    single = served.chat(
        template, **body, logit_bias=bias(served, first), parallel_tool_calls=False
    )
    assert len(single["message"]["tool_calls"]) == 1 and single["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("pattern", "text"), [(r"a/b\/c", "a/b/c"), (r"a\\/b", "a\\/b"), ("a\nb", "a\nb"), ('a"', 'a"')]
)
def test_a_pattern_beside_tools_is_the_same_pattern(
    served: Served, pattern: str, text: str
) -> None:
    """Kind: what is put into another text without that text's escapes."""
    answer = served.chat(tools=[SHORT], structured_outputs={"regex": pattern},
                         logit_bias=bias(served, "a"), max_tokens=20)  # fmt: skip
    assert answer["message"]["content"] == text


def test_a_format_that_is_not_known_says_so(served: Served) -> None:
    options = {"tool_call_parser": "hermes"}
    error = served.chat("PLAIN", options, tools=[SHORT], response_format=ANSWER)
    assert error["param"] == "response_format"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_forced_calls_beside_an_answers_form(served: Served, choice: Any) -> None:
    answer = served.chat(
        tools=[SHORT],
        tool_choice=choice,
        response_format=ANSWER,
        max_tokens=100,
        parallel_tool_calls=False,
    )
    assert arguments_of(answer).keys() == {"n"}


def test_harmony_forces_the_channel_and_not_the_bracket(served: Served) -> None:
    """Kind: a grammar that does not know the model's own format (CASES F11)."""
    final = served.chat("HARMONY", response_format=ANSWER, max_tokens=150, seed=3, temperature=1,
                        logit_bias=bias(served, "f", "<|end|>"))  # fmt: skip
    jsonschema.validate(json.loads(final["message"]["content"]), SCHEMA)
    for forced in ({}, {"tool_choice": "required"}):
        called = served.chat(
            "HARMONY",
            tools=[SHORT],
            response_format=ANSWER,
            max_tokens=150,
            logit_bias=bias(served, "c", "<|end|>", "<|constrain|>"),
            **forced,
        )
        assert arguments_of(called).keys() == {"n"}
        assert called["finish_reason"] == "tool_calls"


# ---- grammars and reasoning (CASES F9) ----------------------------------------------------------

THINKS = {"reasoning_parser": "qwen3"}
CHOICE: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}}


def test_a_grammar_waits_only_for_a_model_that_thinks(served: Served) -> None:
    """Kind: "unknown whether it thinks" is resolved by what comes first, not by waiting."""
    body: dict[str, Any] = {**CHOICE, "max_tokens": 9, "logit_bias": bias(served, "m")}
    assert served.chat(options=THINKS, **body)["message"]["content"] in ("yes", "no")
    named = {"type": "function", "function": {"name": "weather"}}
    answer = served.chat(options=THINKS, tools=[SHORT], tool_choice=named, max_tokens=20,
                         logit_bias=bias(served, "m"))  # fmt: skip
    assert arguments_of(answer).keys() == {"n"}


def test_a_model_that_thinks_is_free_until_it_ends(served: Served) -> None:
    body: dict[str, Any] = {**CHOICE, "max_tokens": 40, "thinking_token_budget": 6}
    answer = served.chat(options=THINKS, **body, logit_bias=bias(served, "<think>"))
    message = answer["message"]
    assert message["content"] in ("yes", "no")
    assert served.token("<think>") and message["reasoning"] == "<think>" * 5


@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_forces_nothing_on_a_model_that_does_not_think(
    served: Served, budget: int
) -> None:
    body: dict[str, Any] = {
        "max_tokens": 8,
        "thinking_token_budget": budget,
        "logit_bias": bias(served, "m"),
    }
    answer = served.chat(options=THINKS, **body)
    assert (answer["message"]["content"], answer["message"].get("reasoning")) == ("m" * 8, None)


def test_a_template_that_opens_the_reasoning_is_waited_for(served: Served) -> None:
    options = {"reasoning_parser": "deepseek_r1"}
    body: dict[str, Any] = {
        **CHOICE,
        "max_tokens": 30,
        "thinking_token_budget": 4,
        "logit_bias": bias(served, "m"),
    }
    answer = served.chat("DEEPSEEK", options, **body)
    assert answer["message"]["reasoning"] == "mmmm"
    assert answer["message"]["content"] in ("yes", "no")


# ---- schemas within schemas (CASES F7) ----------------------------------------------------------


def tool(name: str, properties: Any, **more: Any) -> Any:
    parameters = {"type": "object", "properties": properties, "required": [*properties], **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


DIGIT, YES = {"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["yes"]}
NESTED = [
    [tool("f", {"a": {"$ref": "#/definitions/I"}}, definitions={"I": DIGIT})],
    [tool("f", {"a": DIGIT, "b": {"$ref": "#/properties/a"}})],
    [
        tool("f", {"a": {"$ref": "#/$defs/I"}}, **{"$defs": {"I": DIGIT}}),
        tool("g", {"a": {"$ref": "#/$defs/I"}}, **{"$defs": {"I": YES}}),
    ],
    [
        tool("f", {"a": {"$ref": "#i"}}, **{"$defs": {"I": {**DIGIT, "$anchor": "i"}}}),
        tool("g", {"a": {"$ref": "#i"}}, **{"$defs": {"I": {**YES, "$anchor": "i"}}}),
    ],
    [tool("f", {"a": DIGIT}, **{"$schema": "http://json-schema.org/draft-07/schema#", "$id": "x"})],
    [tool("f", {"a": {"anyOf": [DIGIT, {"$ref": "#/properties/a/anyOf/0"}]}})],
    [tool("f", {"$ref": DIGIT, "format": {"enum": [{"format": "zip"}]}})],
]


@pytest.mark.parametrize("tools", NESTED)
@pytest.mark.parametrize("template", ["QWEN", "LLAMA"])
def test_references_point_where_they_did(served: Served, tools: Any, template: str) -> None:
    asked = ({"tool_choice": "required"}, {"response_format": ANSWER})
    for more in asked:
        answer = served.chat(
            template, tools=tools, max_tokens=120, parallel_tool_calls=False, **more,
            logit_bias=bias(served, *(["<tool_call>"] if template == "QWEN" else ["n"])),
        )  # fmt: skip
        [call] = answer["message"]["tool_calls"]
        wanted = next(t for t in tools if t["function"]["name"] == call["function"]["name"])
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, wanted["function"]["parameters"])


NODE = {
    **{"type": "object", "required": ["v", "next"], "additionalProperties": False},
    "properties": {"v": DIGIT, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Node"}]}},
}
A_OR_B = [
    {"properties": {"k": {"const": name}}, "required": ["k"], "additionalProperties": False}
    for name in ("a", "b")
]
ROOTS: list[dict[str, Any]] = [
    {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}},
    {"oneOf": A_OR_B, "discriminator": {"propertyName": "k"}},
    {"type": "object", "anyOf": A_OR_B},
    {"allOf": [{"properties": {"a": DIGIT}}, {"required": ["a"]}]},
    {"properties": {"a": DIGIT, "b": DIGIT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"const": {"a": 1}},
    {"type": ["object", "null"], "properties": {"a": DIGIT}, "required": ["a"]},
]


@pytest.mark.parametrize("schema", ROOTS)
def test_arguments_may_be_named_elsewhere_than_at_the_root(served: Served, schema: Any) -> None:
    """Kind: a valid schema refused: recursive and united models have no properties at the root, and
    to forbid all others there left nothing."""
    own = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        answer = served.chat(
            tools=[own], tool_choice=choice, max_tokens=90, parallel_tool_calls=False,
            logit_bias=bias(served, '"', "}", "]"),
        )  # fmt: skip
        if answer["finish_reason"] != "length":
            arguments = arguments_of(answer)
            jsonschema.validate(arguments, schema)
            assert isinstance(arguments, dict)


# ---- schemas as programs write them (CASES F16) -------------------------------------------------

ANNOTATED = [
    *(
        {"type": "string", "format": name}
        for name in ("path", "binary", "password", "uri-reference")
    ),
    *({"type": "string", "format": name} for name in ("int32", "color", "x-my-own", "regex")),
    {"type": "string", "format": "date"},
    {"oneOf": [{"type": "object", "properties": {"a": DIGIT}}, {"type": "object"}]},
    {"oneOf": [{"type": "integer"}, {"type": "number"}], "discriminator": {"propertyName": "k"}},
    {"type": "string", "contentEncoding": "base64", "nullable": True, "x-order": 3},
    {"const": {"format": "zip"}},
    {"type": "string", "const": "x", "$schema": "https://spec.openapis.org/oas/3.1/dialect/base"},
    {"type": "string", "minLength": 0.0, "maxLength": 2.0},
    {"type": "integer", "minimum": 3, "exclusiveMinimum": False, "maximum": 3},
]


@pytest.mark.parametrize("schema", ANNOTATED)
def test_annotations_are_no_reason_to_refuse(served: Served, schema: Any) -> None:
    whole = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    marks = bias(served, '"', "}")
    answer = served.chat(response_format=form(whole), max_tokens=60, logit_bias=marks)
    if answer["finish_reason"] == "stop":
        found = json.loads(answer["message"]["content"])
        assert not isinstance(schema.get("const"), dict) or found["v"] == schema["const"]


def test_bounds_are_those_that_were_asked_for(served: Served) -> None:
    """Kind: accepted and not enforced. Draft 4 and OpenAPI 3.0 write exclusive bounds as flags."""
    schema = {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 4}
    answer = served.chat(response_format=form(schema), max_tokens=9, logit_bias=bias(served, "3"))
    assert answer["message"]["content"] == "4"
    for beyond in ({"minimum": 2**64 - 9, "maximum": 2**64 - 2}, {"const": -(2**53) - 1}):
        answer = served.chat(response_format=form({"type": "integer", **beyond}), max_tokens=40)
        jsonschema.validate(json.loads(answer["message"]["content"]), beyond)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    ],
)
def test_what_cannot_be_enforced_is_named(served: Served, schema: Any, word: str) -> None:
    error = served.chat(response_format=form(schema))
    assert (
        f'"{word}" cannot be enforced' in error["message"] and error["param"] == "response_format"
    )


def test_what_the_library_refuses_is_said_in_a_line_under_the_clients_name(served: Served) -> None:
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "string", "pattern": "(?<=a)"}}
    for path, name, body in (
        ("/v1/responses", "text.format", {"input": "a", "text": {"format": schema}}),
        (
            *("/v1/messages", "output_config.format"),
            {"messages": [{"role": "user", "content": "a"}], "output_config": {"format": schema}},
        ),
    ):
        error = served.post(path, body).json()["error"]
        assert error["param"] == name
        assert error["message"].startswith(f"{name}: the grammar backend refuses it: regex parse")
        assert "\n" not in error["message"] and "look-around" in error["message"]


def test_gbnf_is_a_grammar_too(served: Served) -> None:
    gbnf = 'root ::= word "-" [0-9]{2}\nword ::= "a" | "b"'
    either = {"tools": [SHORT], "logit_bias": bias(served, "a", "b")}
    for more in ({}, either):
        answer = served.chat("QWEN", guided_grammar=gbnf, max_tokens=9, **more)
        text = answer["message"]["content"]
        assert len(text) == 4 and text[0] in "ab" and text[1] == "-"
    assert served.chat(guided_grammar="root ::= [a")["param"] == "guided_grammar"


# ---- stop strings that are special tokens (CASES F20) -------------------------------------------


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("<|im_start|>", "one"),
        ("ne<|im_start|>", "o"),
        ("<|im_start|>t", "one"),
        ("e<|im_start|>t", "on"),
        ("two", "one"),
        ("<|im_end|>", "onetwo"),
    ],
)
def test_special_tokens_stop_whether_shown_or_not(
    served: Served, stop: str, shown: str, include: bool
) -> None:
    grammar = 'start: "one" <|im_start|> "two"'
    for skip in (True, False):
        body: dict[str, Any] = {"structured_outputs": {"grammar": grammar}, "stop": [stop, "never"]}
        choice = served.chat(**body, max_tokens=20, skip_special_tokens=skip,
                             include_stop_str_in_output=include)  # fmt: skip
        whole = shown if skip or len(shown) < 4 else "one<|im_start|>two"
        if not skip and stop == "two":
            whole = "one<|im_start|>"
        if not skip and include and stop == "<|im_end|>":
            whole += "</s>"  # what ended it
        found = stop in "one<|im_start|>two"
        assert choice["message"]["content"] == whole + stop * (include and found)
        assert choice["stop_reason"] == (stop if found else None)


# ---- log-probabilities by token (CASES F13) -----------------------------------------------------

TEXT = "a🫠𠀋b"


def test_bytes_and_offsets_are_those_of_tokens(served: Served) -> None:
    """Kind: text stands in for bytes and for identity."""
    chosen: dict[str, Any] = {"structured_outputs": {"choice": [TEXT]}, "max_tokens": 40}
    content = served.chat(**chosen, logprobs=True, top_logprobs=20)["logprobs"]["content"]
    assert content.pop()["token"] == "</s>"
    assert b"".join(bytes(item["bytes"]) for item in content) == TEXT.encode()
    assert [item["token"] for item in content][::9] == ["a", "b"]
    assert content[1]["token"] == r"bytes:\xf0"
    for item in content:
        assert len({tuple(each["bytes"]) for each in item["top_logprobs"]}) > 15
    body = {**chosen, "prompt": "é🫠", "temperature": 0, "logprobs": 5}
    for echo in (False, True):
        for stream in (False, True):
            answer = served.post("/v1/completions", {**body, "echo": echo, "stream": stream})
            found = scored(answer)
            offsets = [0] + [1] * 4 + [2] * 4 + [3, 4]
            if echo:
                offsets = [0, 0, *[1] * 4, *(2 + at for at in offsets)]
            assert found["text_offset"] == offsets
            assert all(len(names) >= 5 for names in found["top_logprobs"] if names)


# ---- the scores of a prompt (CASES F21) ---------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_no_token_is_generated_where_only_scores_are_asked(served: Served, stream: bool) -> None:
    body = {"prompt": "hello world", "echo": True, "max_tokens": 0, "logprobs": 1}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = served.post("/v1/completions", {**body, "stream": stream, **options})
    assert answer.status_code == 200, answer.text
    found = scored(answer)
    assert "".join(found["tokens"]) == "hello world"
    assert found["token_logprobs"][0] is None and len(found["token_logprobs"]) == 11
    longer = served.post("/v1/completions", {**body, "max_tokens": 1}).json()["choices"][0]
    assert longer["logprobs"]["token_logprobs"][:11] == found["token_logprobs"]
    assert '"finish_reason":"length"' in answer.text and '"completion_tokens":0' in answer.text
    for wrong in ({"echo": False}, {"prompt": "a", "max_tokens": -1}):
        assert served.post("/v1/completions", {**body, **wrong}).status_code == 400
