"""Each absent name is refused with its sentence, wherever it is written; none of them works."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from inspect import signature
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

import kvserve
from kvserve import (
    LLM,
    CompletionOutput,
    ConfigError,
    RequestError,
    RequestOutput,
    SamplingParams,
    absent,
)
from kvserve.config import EngineConfig
from kvserve.engine.frontend.batch import read_prompts, refuse_others
from kvserve.server.cli.commands import parser_of
from kvserve.server.openai import protocol, responses_protocol
from kvserve.server.openai.chat_protocol import ChatCompletionRequest
from kvserve.server.openai.protocol import CompletionRequest, GenerationRequest
from kvserve.server.openai.responses_protocol import ResponsesRequest
from kvserve.server.settings.args import UsageError

ASKED = object()
"""A value that asks for something, and has no type that anything accepts."""


def said(error: type[Exception], call: Callable[[], object]) -> str:
    """What the refusal says; nothing if there was none."""
    try:
        call()
    except error as refused:
        return str(refused)
    return ""


def names(absent_names: Mapping[str, str]) -> list[str]:
    return [name.replace("*", "any") for name in absent_names]


def test_settings_of_llm() -> None:
    for name in names(absent.SETTINGS):
        found = said(ConfigError, partial(EngineConfig.from_flat, **{name: ASKED}))
        assert found == f"{name} is not supported: {absent.why_absent(name, absent.SETTINGS)}"


def test_flags() -> None:
    parser = parser_of("serve")
    for name in names(absent.SETTINGS):
        flag, why = "--" + name.replace("_", "-"), absent.why_absent(name, absent.SETTINGS)
        if flag not in parser._option_string_actions:
            found = said(UsageError, partial(parser.parse, [flag, "asked"]))
            granted = absent.is_switch(name) and absent.means_off(name, True)
            assert found == ("" if granted else f"{flag} is not supported: {why}"), name


def test_attributes() -> None:
    llm = LLM.__new__(LLM)
    output = RequestOutput("0", None, [1], [CompletionOutput(0)])
    for name, why in absent.ATTRIBUTES.items():
        for one in (llm, output, output.outputs[0]):
            assert not hasattr(one, name) and why in said(
                AttributeError, partial(getattr, one, name)
            )


def test_fields_in_python() -> None:
    """Refused unless they are there: as arguments, of sampling, and in a prompt."""
    known = {field.name for field in fields(SamplingParams) if field.init}
    for name, why in absent.FIELDS.items():
        asked: dict[str, Any] = {name: ASKED}
        sentence = f"{name} is not supported: {why}"
        for method in (LLM.generate, LLM.chat):
            if name not in signature(method).parameters:
                assert said(RequestError, partial(refuse_others, method, asked)) == sentence
                refuse_others(method, {name: None})
        if name not in known:
            with pytest.raises(RequestError, match=re.escape(sentence)) as refused:
                SamplingParams(**asked)
            assert refused.value.param == name
        if name != "prompt":
            given: Any = {"prompt_token_ids": [1], **asked}
            assert said(RequestError, partial(read_prompts, given)) == sentence


@pytest.mark.parametrize(
    ("request_class", "body"),
    [
        (CompletionRequest, {"prompt": "a"}),
        (ChatCompletionRequest, {"messages": [{"role": "user"}]}),
        (ResponsesRequest, {"input": "a"}),
    ],
)
def test_fields_of_requests(request_class: Any, body: dict[str, Any]) -> None:
    known = {*request_class.model_fields, *protocol.IGNORED}
    if request_class is ResponsesRequest:
        known |= {*ChatCompletionRequest.model_fields, *responses_protocol.IGNORED}
    for name in absent.FIELDS.keys() - known:
        refused = (ValidationError, RequestValidationError)
        with pytest.raises(refused, match=re.escape(absent.FIELDS[name])):
            made = request_class.model_validate({**body, name: {"asks": 1}})
            made.as_chat()


@pytest.mark.parametrize("name", ["detokenize", "best_of", "use_beam_search", "output_kind"])
def test_vllm_s_defaults_are_taken(name: str) -> None:
    defaults: dict[str, Any] = {"detokenize": True, "best_of": 1, "use_beam_search": False}
    given: dict[str, Any] = {name: defaults.get(name)}
    assert SamplingParams(**given, top_p=0.5) == SamplingParams(top_p=0.5)


def test_unknown_names_have_the_nearest() -> None:
    with pytest.raises(RequestError, match="'temprature'; did you mean temperature") as refused:
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    assert refused.value.param == "temprature"
    llm: Any = LLM.__new__(LLM)
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'generat'"):
        llm.generat  # noqa: B018


def test_nothing_absent_is_there() -> None:
    """A sentence for a name that works would never be said, or would be wrong."""
    known = parser_of("serve")._option_string_actions
    settings = {n for n in absent.SETTINGS if "--" + n.replace("_", "-") in known}
    assert all("server" in absent.SETTINGS[n] or "chat" in absent.SETTINGS[n] for n in settings)
    assert not [n for n in absent.ATTRIBUTES if hasattr(LLM, n)]
    for named in set(re.findall(r"--[a-z-]+", " ".join(absent.SETTINGS.values()))):
        assert named in known or named == "--help", named
    both = absent.FIELDS.keys() & {*GenerationRequest.model_fields}
    assert both <= {"truncate_prompt_tokens", "truncation_side"}


def test_names_of_the_package() -> None:
    for name, why in absent.EXPORTS.items():
        with pytest.raises(ImportError) as refused:
            exec(f"from kvserve import {name}")
        assert str(refused.value) == f"kvserve.{name} is not supported: {why}"
    with pytest.raises(ImportError, match="cannot import name 'EngineArg' from 'kvserve'"):
        exec("from kvserve import EngineArg")
    assert {*kvserve.__all__, "__version__"} <= set(dir(kvserve))
    assert all(getattr(kvserve, name) is not None for name in kvserve.__all__)
