"""What Python callers give wrong is named, without a library's traceback."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import pytest

from kvserve import LLM, SamplingParams
from kvserve.log import ConfigError, RequestError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("kvserve/tiny", num_gpu_blocks_override=8, block_size=16)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (123, "prompts must be a text, a list of token ids, or a list of these, got 123"),
        (None, "prompts must be"),
        (b"abc", "prompts must be"),
        ({"prompt": "a"}, "prompts must be"),
        ([{"prompt": "a"}], "prompts[0] must be a text or a list of token ids, got {'prompt'"),
        (["a", 3], "prompts[1] must be"),
        ([[1, "a"]], "prompts[0] must be"),
        ([1.5, 2], "prompts[0] must be"),
        ([True, False], "prompts[0] must be"),
    ],
)
def test_a_wrong_prompt_is_named(llm: LLM, prompts: Any, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(prompts, use_tqdm=False)
    assert str(refused.value).startswith(said) and refused.value.param == "prompts"


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"temperature": 0}, "sampling_params must be a SamplingParams, or a list of them"),
        ([{"temperature": 0}], "sampling_params[0] must be a SamplingParams, got {'temp"),
        ("hot", "sampling_params must be"),
    ],
)
def test_wrong_params_are_named(llm: LLM, params: Any, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate("a", params, use_tqdm=False)
    assert str(refused.value).startswith(said) and refused.value.param == "sampling_params"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "messages must be a list of messages"),
        ({"role": "user", "content": "a"}, "messages must be a list of messages"),
        ([3], "messages[0] must be a list of messages, got 3"),
        ([[{"role": "user", "content": "a"}, "b"]], "messages[0][1] must be a mapping like"),
        ([{"role": "user", "content": "a"}, "b"], "messages[1] must be a mapping like"),
    ],
)
def test_wrong_messages_are_named(llm: LLM, messages: Any, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.chat(messages, use_tqdm=False)
    assert str(refused.value).startswith(said) and refused.value.param == "messages"


def test_no_prompts_have_no_outputs(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


@pytest.mark.parametrize("model", ["./nowhere/model", "nowhere/model", "../a", "no/where/at/all"])
def test_a_path_that_is_not_there_is_one_error(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had 77 lines of the hub's tracebacks."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"--model: .*directory") as refused:
        LLM(model)
    text = "".join(traceback.format_exception(refused.value))
    assert model in str(refused.value) and "huggingface_hub" not in text
    assert text.count("Traceback") == 1


@pytest.mark.parametrize("policy", [["kara"], 3, {"window": 128}, None])
def test_a_wrong_policy_is_named(policy: Any) -> None:
    with pytest.raises(ConfigError, match="policy must be a name, or a mapping with one"):
        LLM("kvserve/tiny", policy=policy)


def test_a_long_text_raises_no_false_alarm(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """transformers warned of "indexing errors" before the engine refused the prompt."""
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        with pytest.raises(RequestError, match="this model's context is 4096 tokens"):
            llm.generate("a b c" * 3000, use_tqdm=False)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not caplog.messages


def test_an_answer_that_outgrows_the_pool_says_so(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    whole = SamplingParams(max_tokens=20, ignore_eos=True)
    llm.generate("a", whole, use_tqdm=False)
    assert not caplog.messages
    (output,) = llm.generate("a", SamplingParams(max_tokens=2000, ignore_eos=True), use_tqdm=False)
    answer = output.outputs[0]
    assert answer.finish_reason == "length" and len(answer.token_ids) <= 8 * 16
    (line,) = caplog.messages
    assert f"after {len(answer.token_ids)} tokens" in line and "--kv-cache-memory" in line
