"""Datasets: prompts, limits and arrivals as their flags or their file say."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.harness.datasets.datasets import add_dataset_arguments, check_dataset, read_dataset
from bench.harness.datasets.workload import Prompts
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.log import ConfigError
from kvserve.server.settings.args import Parser

Read = Callable[..., Prompts]


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(str(model_dir))


@pytest.fixture
def read(tokenizer: Tokenizer) -> Read:
    def read_flags(*flags: str) -> Any:
        return read_dataset(parsed(*flags), 259, tokenizer)

    return read_flags


def parsed(*flags: str) -> argparse.Namespace:
    parser = Parser()
    parser.add_argument("--seed", type=int, default=0)
    add_dataset_arguments(parser, timed=True)
    parser.set_defaults(fail=parser.error)
    args = parser.parse(flags)
    check_dataset(args)
    return args


def written(path: Path, *lines: Any) -> str:
    rows = (json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text("".join(rows), encoding="utf-8")
    return str(path)


def test_random_lengths_stay_within_their_range(read: Read) -> None:
    flags = ("--num-prompts", "200", "--input-len", "20", "--output-len", "10")
    exact, ranged = read(*flags), read(*flags, "--random-range-ratio", "0.5")
    assert {len(prompt) for prompt in exact.prompts} == {20} and set(exact.limits) == {10}
    lengths = {len(prompt) for prompt in ranged.prompts}
    assert min(lengths) == 10 and max(lengths) == 30
    assert min(ranged.limits) == 5 and max(ranged.limits) == 15
    assert exact.ignore_eos and not read(*flags, "--no-ignore-eos").ignore_eos


def test_random_answers_may_be_log_normal(read: Read) -> None:
    flags = ("--num-prompts", "200", "--input-len", "20", "--output-len", "100")
    found = read(*flags, "--random-output-sigma", "0.7", "--random-output-cap", "250")
    assert {len(prompt) for prompt in found.prompts} == {20}
    assert max(found.limits) == 250 and min(found.limits) < 30
    assert 80 < sum(found.limits) / 200 < 110
    assert max(read(*flags, "--random-output-sigma", "0.7").limits) > 250
    with pytest.raises(ConfigError, match="--random-range-ratio"):
        read(*flags, "--random-output-sigma", "0.7", "--random-range-ratio", "0.5")


def test_prefixes_are_shared_evenly(read: Read) -> None:
    made = read(
        *("--dataset", "prefix_repetition", "--num-prompts", "12"),
        *("--prefix-repetition-num-prefixes", "3", "--prefix-repetition-prefix-len", "8"),
        *("--prefix-repetition-suffix-len", "4", "--prefix-repetition-output-len", "5"),
    )
    prefixes = [tuple(prompt[:8]) for prompt in made.prompts]
    assert sorted(map(prefixes.count, set(prefixes))) == [4, 4, 4]
    assert len({tuple(prompt[8:]) for prompt in made.prompts}) == 12
    assert {len(prompt) for prompt in made.prompts} == {12} and set(made.limits) == {5}
    with pytest.raises(ConfigError, match="num-prefixes"):
        read("--dataset", "prefix_repetition", "--num-prompts", "3")


def test_sharegpt_takes_first_turns_of_usable_conversations(
    read: Read, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def conversation(*turns: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": turn} for turn in turns]}

    good = [conversation(f"question {i}", "answer" * (i + 1), "more") for i in range(3)]
    bad = [
        conversation("alone here"),
        conversation("hi", "too short"),
        conversation("x" * 1025, "long"),
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([*bad, *good]))
    flags = ("--dataset", "sharegpt", "--dataset-path", str(path), "--num-prompts", "3")
    made = read(*flags)
    assert sorted(made.texts) == [f"question {i}" for i in range(3)]
    for text, prompt, limit in zip(made.texts, made.prompts, made.limits, strict=True):
        assert prompt == tokenizer.encode(text) and limit == 6 * (int(text[-1]) + 1)
    assert not made.ignore_eos
    assert set(read(*flags, "--sharegpt-output-len", "7", "--ignore-eos").limits) == {7}
    with pytest.raises(ConfigError, match=r"--num-prompts: .* has 3 that can be used, not 4"):
        read(*flags[:-1], "4")


def test_custom_lines_are_user_turns(read: Read, tokenizer: Tokenizer, tmp_path: Path) -> None:
    two = "two\u2028three"  # which ends no line of a file
    path = written(tmp_path / "c.jsonl", {"prompt": "one"}, {"prompt": two, "output_tokens": 3})
    flags = ("--dataset", "custom", "--dataset-path", path, "--num-prompts", "2")
    made = read(*flags, "--custom-output-len", "9")
    assert [tokenizer.decode(prompt) for prompt in made.prompts] == [
        f"[user]{text}[assistant]" for text in ("one", two)
    ]
    assert made.limits == [9, 3] and made.messages(1, []) == [{"role": "user", "content": two}]
    plain = read(*flags, "--skip-chat-template")
    assert plain.prompts == [tokenizer.encode("one"), tokenizer.encode(two)]


def test_traces_share_what_their_hashes_share(read: Read, tmp_path: Path) -> None:
    line = {"input_length": 10, "output_length": 2, "hash_ids": [1, 2]}
    path = written(
        tmp_path / "trace.jsonl",
        {**line, "timestamp": 4500},
        {**line, "timestamp": 2000, "hash_ids": [1, 3], "output_length": 5},
        {**line, "timestamp": 2500, "hash_ids": [7]},
    )
    flags = ("--dataset", "timed_trace", "--dataset-path", path, "--num-prompts", "3")
    made = read(*flags, "--timed-trace-chunk-hash-size", "4")
    assert list(made.arrivals) == pytest.approx([0, 0.5, 2.5]) and list(made.limits) == [5, 2, 2]
    first, second, third = made.prompts
    assert [len(prompt) for prompt in made.prompts] == [10, 10, 10]
    assert first[:4] == third[:4] and first[4:8] != third[4:8] and first[8:] != third[8:]
    assert second[:4] != first[:4]
    hurried = read(*flags, "--timed-trace-sec-multiplier", "0.01")
    assert list(hurried.arrivals) == pytest.approx([0, 5, 25])


def test_each_turn_of_a_conversation_begins_with_the_one_before(read: Read) -> None:
    lengths = {"system": 20, "question": 5, "min-tool": 7, "max-tool": 11, "answer": 4}
    flags = [f"--{name}-len={length}" for name, length in lengths.items()]
    flags += ["--dataset=conversations", "--num-prompts=6", "--min-turns=3", "--max-turns=5"]
    made: Any = read(*flags)
    assert len({tuple(asked[0][:20]) for asked in made.asked}) == 1 and len(made) == 6
    for index, asked in enumerate(made.asked):
        assert 3 <= len(asked) <= 5 and len(asked[0]) == 25
        assert all(7 <= len(new) <= 11 for new in asked[1:])
        answers: list[list[int]] = []
        known: list[int] = []
        while (prompt := made.prompt(index, answers)) is not None:
            assert prompt[: len(known)] == known
            assert prompt[len(known) :] == asked[len(answers)]
            answers.append([index] * 4)
            known = [*prompt, *answers[-1]]
        assert len(answers) == len(asked) == len(made.thinks[index])
        assert made.full_lengths()[index] == len(known) - 1
        assert made.thinks[index][0] == 0 and all(think > 0 for think in made.thinks[index][1:])
    at_once: Any = read(*flags, "--think-seconds=0")
    assert read(*flags) == made and {*map(max, at_once.thinks)} == {0.0}
    with pytest.raises(ConfigError, match="--min-turns and --max-turns"):
        read(*flags, "--min-turns=6")
    with pytest.raises(ConfigError, match="--min-tool-len"):
        read(*flags, "--max-tool-len=6")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("custom", '{"prompt": "a"}\n{"text": "b"}', "line 2 has no 'prompt'"),
        ("custom", '{"prompt": "a"}\n[1]', "line 2"),
        ("custom", '{"prompt": ', "line 1"),
        ("timed_trace", '{"timestamp": 1, "input_length": 3}', "no 'output_length'"),
        ("sharegpt", '{"a": 1}', "list of conversations"),
        ("sharegpt", "[", "not JSON"),
    ],
)
def test_broken_files_are_named(
    read: Read, tmp_path: Path, name: str, content: str, said: str
) -> None:
    path = tmp_path / "broken"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read("--dataset", name, "--dataset-path", str(path), "--num-prompts", "2")
    with pytest.raises(ConfigError, match=r"^--dataset-path: cannot read .*gone: No such file"):
        read("--dataset", name, "--dataset-path", str(path) + "gone")
