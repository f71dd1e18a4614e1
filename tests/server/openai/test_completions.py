"""Completions and chat, not streamed, through the official client and plain HTTP."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from kvserve.outputs import CompletionOutput, KVCacheDetails, RequestOutput, SpeculationDetails
from kvserve.sampling_params import SamplingParams
from kvserve.server.openai import logprobs
from kvserve.server.openai.fields import _parse_prompt
from kvserve.server.openai.responses import usage
from kvserve.server.state import beside
from tests.counting import lines_run
from tests.server.conftest import MODEL, RunningServer, StartServer, payloads, scored
from tests.server.fake_engine import BOS, FakeEngine, FakeTokenizer


def test_answers_with_the_openai_client(server: RunningServer) -> None:
    answer = server.openai().completions.create(model=MODEL, prompt="hi", max_tokens=3)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("0 1 2 ", "length")
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 3)
    assert answer.usage.total_tokens == 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    chat = server.openai().chat.completions.create(
        model="alias", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=2
    )
    message = chat.choices[0].message
    assert (message.role, message.content, chat.model) == ("assistant", "0 1 ", "alias")
    assert server.prompts[-1] == "<user>hi<assistant>"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
def test_the_four_forms_of_a_prompt(
    server: RunningServer, prompt: object, expected: list[list[int]]
) -> None:
    for n in (1, 3):
        server.engine.seen.clear()
        answer = server.complete(prompt, max_tokens=2, n=n).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(n * len(expected)))
        assert sorted(ids for ids, _, _ in server.engine.seen) == sorted(expected)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert answer["usage"]["completion_tokens"] == 2 * n * len(expected)


def test_sampling_fields_reach_the_engine(server: RunningServer) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "max_tokens": 5,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": 3,
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {7: 2.0},
        "allowed_token_ids": [7, 9],
        "bad_words": ["no"],
        "priority": 3,
        "kv_policy": {"name": "kara", "window": 64, "buffer": 8},
    }
    seen = {**fields, "client": "127.0.0.1"}
    assert server.complete("a", stop="x", logprobs=1, **fields).status_code == 200
    assert server.params == SamplingParams(**seen, stop=["x"], logprobs=1)
    assert server.chat("a", stop=["x", "y"], logprobs=True, top_logprobs=4, **fields).is_success
    assert server.params == SamplingParams(**seen, stop=["x", "y"], logprobs=4)


def test_null_means_not_given(server: RunningServer) -> None:
    absent = dict.fromkeys(
        ("temperature", "top_p", "n", "stop", "kv_policy", "stream", "stream_options", "echo")
    )
    chat = dict.fromkeys(("continue_final_message", "add_generation_prompt", "top_logprobs"))
    assert server.chat("a", max_tokens=1, **absent, **chat).status_code == 200
    response = server.complete("a", max_tokens=1, add_special_tokens=None, **absent)
    assert response.status_code == 200
    assert server.params == SamplingParams(max_tokens=1, stop=[], client="127.0.0.1")


def test_max_tokens_when_absent_and_when_null(server: RunningServer) -> None:
    assert server.complete("a").json()["usage"]["completion_tokens"] == 16
    context = server.engine.max_model_len
    assert server.complete("a", max_tokens=None).json()["usage"]["total_tokens"] == context
    assert server.chat("a").json()["usage"]["total_tokens"] == context
    assert (
        server.chat("a", max_tokens=9, max_completion_tokens=4).json()["usage"]["completion_tokens"]
        == 4
    )


def test_defaults_of_the_checkpoint(start_server: StartServer) -> None:
    engine = FakeEngine(default_sampling={"temperature": 0.6, "repetition_penalty": 1.1})
    server = start_server(engine)
    server.complete("a")
    server.complete("a", temperature=1.0)
    assert [params.temperature for _, params, _ in engine.seen] == [0.6, 1.0]


def test_kv_cache_details(server: RunningServer) -> None:
    usage = server.complete("abc", max_tokens=16, kv_policy="kara").json()["usage"]
    assert {name: count for name, count in usage["kv_cache_details"].items() if count} == {
        "policy": "kara",
        "logical_tokens": 20,
        "held_tokens": 4,
        "evicted_tokens": 16,
        "compactions": 2,
        "blocks_released": 1,
    }
    batch = server.complete(["abc", "abc"], max_tokens=16, kv_policy="kara").json()
    assert batch["usage"]["kv_cache_details"]["compactions"] == 4


def test_prompts_of_one_request_have_one_policy_and_table() -> None:
    details = KVCacheDetails("kara", logical_tokens=3, entry_table="0e6c")
    output = RequestOutput("a", None, [1], [], kv_cache_details=details)
    both = usage([output, output])["kv_cache_details"]
    assert (both["policy"], both["entry_table"], both["logical_tokens"]) == ("kara", "0e6c", 6)


def test_usage_counts_guesses_where_there_may_be_some() -> None:
    """Sums over prompts and choices; nothing is said by an engine that never guesses."""
    output = RequestOutput("a", None, [1, 2], [CompletionOutput(0)])
    assert "speculation" not in usage([output])
    found = [
        replace(output, speculation=SpeculationDetails(*counts))
        for counts in ((5, 3, None), (2, 0, None))
    ]
    expected = {"drafted_tokens": 7, "accepted_tokens": 3, "refused": None}
    assert usage(found)["speculation"] == expected
    assert usage([found[0], output])["speculation"]["drafted_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "text", "tokens", "logprobs", "tops", "offsets"),
    [
        (
            {"prompt": "a", "logprobs": 2, "max_tokens": 2},
            "0 1 ",
            ["0 ", "1 "],
            [-0.5, -0.5],
            [{"0 ": -0.5, "alt2": -2.0}, {"1 ": -0.5, "alt2": -2.0}],
            [0, 2],
        ),
        (  # as lm-eval asks
            {"prompt": [97, 98, 99], "echo": True, "logprobs": 1, "max_tokens": 2},
            "abc0 1 ",
            ["a", "b", "c", "0 ", "1 "],
            [None, -1.0, -1.0, -0.5, -0.5],
            [None, {"b": -1.0}, {"c": -1.0}, {"0 ": -0.5}, {"1 ": -0.5}],
            [0, 1, 2, 3, 5],
        ),
        (
            {"prompt": [97, 98], "echo": True, "logprobs": 1, "max_tokens": 1}
            | {"return_tokens_as_token_ids": True},
            "ab0 ",
            ["token_id:97", "token_id:98", "token_id:100"],
            [None, -1.0, -0.5],
            [None, {"token_id:98": -1.0}, {"token_id:100": -0.5}],
            [0, 1, 2],
        ),
    ],
)
def test_log_probabilities_of_completions(
    server: RunningServer,
    body: dict[str, Any],
    text: str,
    tokens: list[str],
    logprobs: list[float | None],
    tops: list[Any],
    offsets: list[int],
    stream: bool,
) -> None:
    answer = server.post("/v1/completions", **body, stream=stream)
    choices = [part["choices"][0] for part in payloads(answer)]
    assert "".join(choice["text"] for choice in choices) == text
    assert [*scored(answer).values()] == [tokens, logprobs, tops, offsets]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("as_ids", "names"),
    [
        (False, [["0 ", "alt2"], ["1 ", "alt2"]]),
        (True, [["token_id:100", "token_id:5002"], ["token_id:101", "token_id:5002"]]),
    ],
)
def test_log_probabilities_of_chats(
    server: RunningServer, as_ids: bool, names: list[list[str]], stream: bool
) -> None:
    body = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": as_ids}
    parts = payloads(server.chat("a", max_tokens=2, stream=stream, **body))
    scores = [part["choices"][0]["logprobs"] for part in parts]
    content = [item for part in scores if part is not None for item in part["content"]]
    assert [[top["token"] for top in item["top_logprobs"]] for item in content] == names
    assert [item["token"] for item in content] == [name for name, _ in names]
    assert content[0]["bytes"] == list(b"d")  # those of its token, 100
    assert server.chat("a", max_tokens=1).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_long_lists_of_log_probabilities_are_encoded_beside_the_loop(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """In a thread, and in slices, between which the others have the interpreter: one call of the
    encoder stopped the loop for 6.6 s."""
    threads, slices = set[str](), list[int]()
    encode, columns = logprobs.Echo.encode, logprobs._columns

    def encode_there(self: logprobs.Echo, *given: Any) -> None:
        threads.add(threading.current_thread().name)
        encode(self, *given)

    def count(steps: list[Any], *given: Any) -> Any:
        slices.append(len(steps))
        return columns(steps, *given)

    monkeypatch.setattr(logprobs.Echo, "encode", encode_there)
    monkeypatch.setattr(logprobs, "_columns", count)
    server = start_server(FakeEngine(max_model_len=5000))
    body: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    assert server.complete([97] * 2000, **body).status_code == 200
    assert threads and all(name.startswith("asyncio_") for name in threads)
    assert max(slices) <= 256 and sum(slices) >= 2000


def test_prompt_logprobs(server: RunningServer) -> None:
    [choice] = server.complete([97, 98], prompt_logprobs=0, max_tokens=1).json()["choices"]
    expected = [None, {"98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}}]
    assert choice["prompt_logprobs"] == expected
    assert server.chat("a", prompt_logprobs=0, max_tokens=1).json()["prompt_logprobs"][0] is None


def test_truncated_prompts(server: RunningServer) -> None:
    for limit, kept in ((2, [98, 99]), (-1, [97, 98, 99])):
        response = server.complete([97, 98, 99], truncate_prompt_tokens=limit, max_tokens=1)
        assert response.status_code == 200
        assert server.engine.seen[-1][0] == kept
    for side, left in (("left", "bc0 "), ("right", "\x01a0 ")):  # the echo is what was read
        body = {"truncate_prompt_tokens": 2, "truncation_side": side, "max_tokens": 1}
        [choice] = server.complete("abc", echo=True, **body).json()["choices"]
        assert choice["text"] == left
    [choice] = server.complete("abc", echo=True, **{**body, "truncate_prompt_tokens": 50}).json()[
        "choices"
    ]
    assert choice["text"] == "abc0 "  # nothing was cut
    first = {"truncate_prompt_tokens": 2, "truncation_side": "right", "max_tokens": 1}
    assert server.complete([97, 98, 99], **first).status_code == 200
    assert server.engine.seen[-1][0] == [97, 98]
    assert server.chat("a" * 600, truncate_prompt_tokens=-1, max_tokens=12).status_code == 200
    assert len(server.engine.seen[-1][0]) == 500


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(server: RunningServer, stream: bool) -> None:
    body = {"max_tokens": 3, "return_token_ids": True, "stream": stream}
    for ask in (server.complete, server.chat):
        parts = payloads(ask("a", **body))
        choices = [choice for part in parts for choice in part["choices"]]
        assert [i for choice in choices for i in choice.get("token_ids", ())] == [100, 101, 102]
        # A whole chat answer has them beside its choices.
        prompts = [each.get("prompt_token_ids") for each in (*parts, *choices)]
        assert [ids for ids in prompts if ids] == [server.engine.seen[-1][0]]


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
SAID = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so"}]


@pytest.mark.parametrize(
    ("messages", "more", "prompt"),
    [
        (
            [{"role": "developer", "content": "be brief"}, {"role": "user", "content": PARTS}],
            {},
            "<system>be brief<user>one\ntwo<assistant>",
        ),
        (SAID, {"continue_final_message": True}, "<user>q<assistant>so"),
    ],
)
def test_what_messages_become(
    server: RunningServer, messages: Any, more: dict[str, Any], prompt: str
) -> None:
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=1, **more)
    assert answer.status_code == 200 and server.prompts[-1] == prompt


def test_harmless_fields_are_accepted(server: RunningServer) -> None:
    response = server.chat(
        "a",
        max_tokens=1,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        a_field_nobody_knows=1,
    )
    assert response.status_code == 200


def test_request_ids(server: RunningServer) -> None:
    headers = {"X-Request-Id": "my-id"}
    body = {"prompt": "a", "max_tokens": 1}
    response = server.http.post("/v1/completions", json=body, headers=headers)
    assert response.headers["X-Request-Id"] == "my-id"
    assert response.json()["id"] == "cmpl-my-id"
    assert server.engine.seen[-1][2].startswith("cmpl-my-id-0-")
    response = server.complete("a", max_tokens=1, request_id="other")
    assert response.headers["X-Request-Id"] == "other"
    assert len(server.complete("a", max_tokens=1).headers["X-Request-Id"]) == 32


class Counting(FakeTokenizer):
    """Remembers how many characters it was given, and in which threads."""

    def __init__(self) -> None:
        self.given: list[tuple[int, str]] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.given.append((len(text), threading.current_thread().name))
        return super().encode(text, add_special_tokens)


def test_long_prompts_are_tokenized_off_the_loop(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And memory that this leaves in the thread goes back: 200 KB of "a " left 48 MiB."""
    trims, tokenizer = list[int](), Counting()
    held = {0: 0, 1: 2**20, 2: 2**23}  # by how many texts were tokenized
    monkeypatch.setattr(beside, "resident_bytes", lambda: held[len(tokenizer.given)])
    monkeypatch.setattr(beside, "trim_memory", lambda: trims.append(len(tokenizer.given)))
    server = start_server(FakeEngine(max_model_len=100_000, tokenizer=tokenizer))
    for _ in range(2):
        answer = server.complete("x" * 30_000, max_tokens=1).json()
        assert answer["usage"]["prompt_tokens"] == 30_001
    assert trims == [2], "the second left 8 MiB"
    assert all(thread.startswith("kvserve-text") for _, thread in tokenizer.given)


def test_a_text_that_is_much_too_long_is_not_tokenized(start_server: StartServer) -> None:
    """Not at all if no token is so long, else its beginning: 4 MB of "a " took 18 s and 600 MB."""
    tokenizer = Counting()
    server = start_server(FakeEngine(max_model_len=100, tokenizer=tokenizer))
    looked: list[tuple[int, list[int]]] = [(1, []), (10**6, [400])]
    for longest, looked_at in looked:
        tokenizer.longest_token = longest
        answer = server.complete("a " * 2_000_000)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert [length for length, _ in tokenizer.given] == looked_at
    tokenizer.longest_token = 1
    answer = server.chat("a " * 2_000_000)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(tokenizer.given) == 1


def test_without_a_tokenizer(start_server: StartServer) -> None:
    server = start_server(FakeEngine(tokenizer=None))
    assert server.complete([97, 98], max_tokens=1).status_code == 200
    for response in (server.complete("text"), server.chat("text")):
        assert response.status_code == 400
        assert "--skip-tokenizer-init" in response.json()["error"]["message"]


def test_millions_of_ids_are_not_looked_at_one_by_one() -> None:
    """/health waits for as long: three million took .3 s of one core in a loop of Python's."""
    few, many = [1] * 3, [1] * 30_000
    assert _parse_prompt(many) == [many]
    assert lines_run(lambda: _parse_prompt(many)) == lines_run(lambda: _parse_prompt(few))
    lists = (
        lines_run(lambda: _parse_prompt([many, many])),
        lines_run(lambda: _parse_prompt([few, few])),
    )
    assert lists[0] == lists[1]
