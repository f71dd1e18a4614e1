"""What Python callers give wrong is named, without a library's traceback."""

from __future__ import annotations

import logging
import re
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvserve import LLM, ConfigError, RequestError, RequestOutput, SamplingParams


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("kvserve/tiny", num_gpu_blocks_override=8, block_size=16)


SAID = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        (
            "prompts",
            123,
            " must be a text, a list of token ids, or a mapping with prompt or prompt_",
        ),
        ("prompts", None, " must be"),
        ("prompts", b"abc", " must be"),
        ("prompts", {}, " must be"),
        ("prompts", {"prompt": 3}, " must be a mapping whose prompt is a text"),
        ("prompts", [{"prompt_token_ids": "a"}], "[0] must be a mapping whose prompt is a text"),
        ("prompts", ["a", 3], "[1] must be"),
        ("prompts", [[1, "a"]], "[0] must be"),
        ("prompts", [1.5, 2], "[0] must be"),
        ("prompts", [True, False], "[0] must be"),
        ("sampling_params", {"temperature": 0}, " must be a SamplingParams, or a list of them"),
        ("sampling_params", [{"temperature": 0}], "[0] must be a SamplingParams, got {'temp"),
        ("sampling_params", "hot", " must be"),
        ("messages", "hello", " must be a list of messages"),
        ("messages", SAID, " must be a list of messages"),
        ("messages", [3], "[0] must be a list of messages, got 3"),
        ("messages", [[SAID, "b"]], "[0][1] must be a mapping like"),
        ("messages", [SAID, "b"], "[1] must be a mapping like"),
    ],
)
def test_what_is_given_wrong_is_named(llm: LLM, name: str, given: Any, said: str) -> None:
    call: Any = llm.chat if name == "messages" else llm.generate
    others = {"prompts": "a"} if name == "sampling_params" else {}
    with pytest.raises(RequestError) as refused:
        call(**{name: given, **others}, use_tqdm=False)
    assert str(refused.value).startswith(name + said) and refused.value.param == name


def test_no_prompts_have_no_outputs(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


# ---- as vLLM's ----------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
QUESTION = "Let Kevin7; Find Kevin"


def answers(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_vllm_s_mappings_are_prompts(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(QUESTION)
    both = [{"prompt": QUESTION}, {"prompt_token_ids": ids, "prompt": "said", "cache_salt": "a"}]
    outputs = llm.generate(both, GREEDY, use_tqdm=False)
    assert answers(outputs) == answers(llm.generate([QUESTION, ids], GREEDY, use_tqdm=False))
    assert [output.prompt for output in outputs] == [QUESTION, "said"]
    assert outputs[1].prompt_token_ids == ids and not outputs[1].num_cached_tokens
    with pytest.raises(RequestError, match="images and audio are not built") as refused:
        llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}}, use_tqdm=False)
    assert refused.value.param == "multi_modal_data"


def test_content_parts_are_read_as_the_server_reads_them(llm: LLM) -> None:
    def chat(content: Any, **more: Any) -> RequestOutput:
        return llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False, **more)[0]

    plain = chat(QUESTION)
    parts = chat([{"type": "text", "text": QUESTION}])
    assert parts.prompt_token_ids == plain.prompt_token_ids and answers([parts]) == answers([plain])
    assert plain.prompt is not None and QUESTION in plain.prompt
    assert llm.get_tokenizer().encode(plain.prompt) == plain.prompt_token_ids
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    for content in (image, [{"type": "text", "text": "a"}, *image]):
        with pytest.raises(RequestError) as refused:
            chat(content)
        said = "content parts of type 'image_url' are not supported; only text is"
        assert str(refused.value) == said and refused.value.param == "messages"


def test_the_template_s_arguments(llm: LLM) -> None:
    def prompt(**more: Any) -> str | None:
        messages = [{"role": "user", "content": "a"}]
        return llm.chat(messages, GREEDY, use_tqdm=False, **more)[0].prompt

    shows = "{{ enable_thinking }}{{ add_generation_prompt }}{{ tools }}"
    given: Any = {"chat_template": shows, "chat_template_kwargs": {"enable_thinking": False}}
    assert prompt(**given) == "FalseTrueNone"
    assert prompt(**given, continue_final_message=False, add_generation_prompt=False) == (
        "FalseFalseNone"
    )
    assert prompt(chat_template_content_format="auto") == prompt()
    for wrong, said in (
        ({"templte": "x"}, "unknown argument 'templte'"),
        ({"enable_thinking": False}, "what the chat template reads goes into chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs must not hold"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs must be a mapping"),
        ({"chat_template_content_format": "openai"}, "is found by trying it"),
        ({"lora_request": 1}, "merge them into the weights"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
    ):
        with pytest.raises(RequestError, match=re.escape(said)) as refused:
            prompt(**wrong)
        assert refused.value.param in wrong


def test_priority_is_each_prompt_s(llm: LLM) -> None:
    with pytest.raises(RequestError, match="priority") as refused:
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, 2, 3])
    assert str(refused.value) == "2 prompts but 3 priority"
    with pytest.raises(RequestError, match="scheduling-policy priority"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, 2])
    assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[0, 0])) == 2


def test_sampling_params_are_made_as_vllm_s() -> None:
    params = SamplingParams.from_optional(temperature=None, top_k=5, max_tokens=None, best_of=1)
    assert params == SamplingParams(top_k=5, max_tokens=None)
    other = params.clone(temperature=0.5)
    assert (other.temperature, other.top_k, params.temperature) == (0.5, 5, 1.0)
    assert params.clone() == params and params.clone() is not params
    with pytest.raises(RequestError, match="temperature must be"):
        params.clone(temperature=-1)


def test_log_probabilities_have_a_sum(llm: LLM) -> None:
    (scored,) = llm.generate("a", GREEDY.clone(logprobs=0), use_tqdm=False)
    answer = scored.outputs[0]
    assert answer.logprobs is not None
    steps = zip(answer.logprobs, answer.token_ids, strict=True)
    each = [step[token].logprob for step, token in steps]
    assert len(each) == 8 and answer.cumulative_logprob == pytest.approx(sum(each))
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].cumulative_logprob is None


def test_the_prefix_cache_is_forgotten(llm: LLM) -> None:
    ids = [*range(20, 60)]

    def cached() -> int:
        return llm.generate(ids, GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert not cached() and cached()
    assert llm.reset_prefix_cache() and not cached()


def test_with_closes_it_and_several_engines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("kvserve/tiny", num_gpu_blocks_override=8) as small:
        monkeypatch.setattr(small.engine.core, "close", lambda: closed.append(1))
        closed: list[int] = []
    assert closed
    with pytest.raises(ConfigError, match=r"data_parallel_size .*this is one engine"):
        LLM("kvserve/tiny", data_parallel_size=2)


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_threads_get_the_answers_of_one(llm: LLM, count: int) -> None:
    """They mixed their answers, and raised KeyError."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    prompts = [[2 + i % 50, 3 + i % 7, *range(10, 10 + i % 9)] for i in range(count)]
    alone = answers(llm.generate(prompts, params, use_tqdm=False))

    def some(first: int) -> list[list[int]]:
        return answers(llm.generate(prompts[first::8], params, use_tqdm=False))

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(some, range(8)))
    assert [found[i % 8][i // 8] for i in range(count)] == alone
    assert llm.stats().num_running == 0


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
