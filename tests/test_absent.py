"""Each name of vLLM's works here, or says what to do instead; bench/peers/vllm_names.py reads them.

No fourth kind: a name that is unknown, or is taken and ignored, fails here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from inspect import signature
from pathlib import Path
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

VLLM: Mapping[str, list[str]] = json.loads(Path(__file__).with_name("vllm_names.json").read_text())
ASKED = object()
"""A value that asks for something, and has no type that anything accepts."""


def names(*kinds: str) -> list[str]:
    return sorted({name for kind in kinds for name in VLLM[kind]})


def said(error: type[Exception], call: Callable[[], object]) -> str:
    """What the refusal says; nothing if there was none."""
    try:
        call()
    except error as refused:
        return str(refused)
    return ""


def test_settings_of_llm() -> None:
    """What exists complains of the value's type; the rest is refused with its sentence."""
    for name in names("settings"):
        found = said(ConfigError, partial(EngineConfig.from_flat, **{name: ASKED}))
        why = absent.why_absent(name, absent.SETTINGS)
        assert " must be " in found or found == f"{name} is not supported: {why}", name


def test_flags() -> None:
    parser = parser_of("serve")
    for name in names("settings", "flags"):
        flag, why = "--" + name.replace("_", "-"), absent.why_absent(name, absent.SETTINGS)
        if flag not in parser._option_string_actions:
            found = said(UsageError, partial(parser.parse, [flag, "asked"]))
            granted = absent.is_switch(name) and absent.means_off(name, True)
            assert why and found == ("" if granted else f"{flag} is not supported: {why}"), name


def test_methods_of_llm() -> None:
    llm = LLM.__new__(LLM)
    for name in names("methods"):
        if name in absent.ATTRIBUTES:
            found = said(AttributeError, partial(getattr, llm, name))
            assert absent.ATTRIBUTES[name] in found and not hasattr(llm, name), name
        else:
            assert hasattr(LLM, name), name


@pytest.mark.parametrize("method", [LLM.generate, LLM.chat])
def test_arguments_of_methods(method: Callable[..., Any]) -> None:
    for name in VLLM[method.__name__]:
        if name not in signature(method).parameters:
            with pytest.raises(RequestError) as refused:
                refuse_others(method, {name: ASKED})
            assert str(refused.value) == f"{name} is not supported: {absent.FIELDS[name]}"
            refuse_others(method, {name: None})


def test_sampling_params() -> None:
    known = {field.name for field in fields(SamplingParams) if field.init}
    for name in set(names("sampling")) - known:
        asked: dict[str, Any] = {name: ASKED}
        with pytest.raises(RequestError) as refused:
            SamplingParams(**asked)
        assert str(refused.value) == f"{name} is not supported: {absent.FIELDS[name]}"
        assert refused.value.param == name


def test_prompts() -> None:
    for name in set(names("prompts")) - {"prompt", "prompt_token_ids", "cache_salt"}:
        asked: Any = {"prompt_token_ids": [1], name: ASKED}
        found = said(RequestError, partial(read_prompts, asked))
        assert found == f"{name} is not supported: {absent.FIELDS[name]}", name


def test_outputs() -> None:
    output = RequestOutput("0", None, [1], [CompletionOutput(0)])
    for name in names("outputs"):
        if not any(hasattr(one, name) for one in (output, output.outputs[0])):
            found = said(AttributeError, partial(getattr, output, name))
            assert absent.ATTRIBUTES[name] in found, name


@pytest.mark.parametrize(
    ("kind", "request_class", "body"),
    [
        ("completions", CompletionRequest, {"prompt": "a"}),
        ("chat_completions", ChatCompletionRequest, {"messages": [{"role": "user"}]}),
        ("responses", ResponsesRequest, {"input": "a"}),
    ],
)
def test_fields_of_requests(kind: str, request_class: Any, body: dict[str, Any]) -> None:
    known = {*request_class.model_fields, *protocol.IGNORED}
    if kind == "responses":
        known |= {*ChatCompletionRequest.model_fields, *responses_protocol.IGNORED}
    for name in set(VLLM[kind]) - known:
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
