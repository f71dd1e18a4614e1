"""LongBench's format: what is asked, how it is graded, and texts that are too long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvserve.benchmarks.datasets.published import read_benchmark
from kvserve.benchmarks.datasets.workload import TaskPrompts
from kvserve.log import ConfigError
from tests.benchmarks.conftest import Bench
from tests.benchmarks.test_evaluate import WordTokenizer


class Characters(WordTokenizer):
    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def line(dataset: str, *answers: str, **more: Any) -> dict[str, Any]:
    return {"input": "Who?", "context": "A text.", "answers": answers, "dataset": dataset, **more}


def read(tmp_path: Path, *lines: Any, longest: int = 4096) -> TaskPrompts:
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    tokenizer: Any = Characters()
    return read_benchmark("longbench", path, 10, None, tokenizer, longest)


CLASSES = {"all_classes": ["Person", "Place", "Other place", "Date"]}


@pytest.mark.parametrize(
    ("line", "said", "score"),
    [
        (line("hotpotqa", "the Blue Whale"), "Blue, whale!", 1.0),
        (line("hotpotqa", "Rome", "blue whale"), "a whale", 2 / 3),
        (line("hotpotqa_e", "blue whale"), "none", 0.0),
        (line("gov_report", "one two three four"), "one three x four", 0.75),
        (line("trec", "Other place", **CLASSES), "\nOther place\nDate", 1.0),
        (line("trec", "Other place", **CLASSES), "Other place or Date", 0.5),
        (line("trec", "Person", **CLASSES), "Date", 0.0),
        (line("triviaqa", "Rome"), "Rome\nQuestion: what", 1.0),
        (line("samsum", "He left."), "He left.\nDialogue", 1.0),
        (line("passage_count", "7"), "7 of them, not 8", 0.5),
        (line("passage_retrieval_en", "Paragraph 12"), "Paragraph 12", 1.0),
        (line("passage_retrieval_en", "Paragraph 12"), "none", 0.0),
        (line("lcc", "    return x"), "```python\n    return x\n", 1.0),
        (line("repobench-p", "abcd"), "abxx", 0.5),
    ],
)
def test_answers_are_graded(tmp_path: Path, line: dict[str, Any], said: str, score: float) -> None:
    workload = read(tmp_path, line)
    (grade,) = workload.grades([[said]])
    assert grade.score == pytest.approx(score) and grade.exact == (score == 1.0)


def test_every_data_set_has_its_prompt_and_limit(tmp_path: Path) -> None:
    limits = {"hotpotqa": 32, "qasper": 128, "qmsum": 512, "trec": 64, "lcc": 64}
    for name, limit in limits.items():
        workload = read(tmp_path, line(name, "yes"))
        (message,) = workload.messages(0, [])
        assert workload.max_tokens(0) == limit
        assert "A text." in message["content"] and "Who?" in message["content"]


def test_long_texts_lose_their_middle(tmp_path: Path) -> None:
    text = line("hotpotqa", "yes", context="begin " + "x" * 500 + " end")
    (whole,) = read(tmp_path, text).messages(0, [])
    shortened = read(tmp_path, text, longest=400)
    (message,) = shortened.messages(0, [])
    prompt = shortened.prompt(0, [])
    assert prompt is not None and len(whole["content"]) > 600
    assert 400 - 32 - 2 <= len(prompt) <= 400 - 32
    assert message["content"].startswith("begin xx") and message["content"].endswith("Who?")
    with pytest.raises(ConfigError, match="too few"):
        read(tmp_path, text, longest=34)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (line("dureader", "a"), "needs a word segmenter"),
        (line("mmlu", "a"), "mmlu is none of narrativeqa, "),
        (line("hotpotqa"), "answers is empty"),
        ({"dataset": "hotpotqa", "answers": ["a"]}, "context"),
    ],
)
def test_other_lines_are_refused(tmp_path: Path, bad: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="line 2 is not of format longbench") as error:
        read(tmp_path, line("hotpotqa", "a"), bad)
    assert said in str(error.value)


def test_a_file_holds_one_data_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mixes data sets"):
        read(tmp_path, line("hotpotqa", "a"), line("qasper", "a"))


def test_a_file_is_evaluated(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "hotpotqa.jsonl"
    file.write_text(json.dumps(line("hotpotqa", "yes", context="x" * 900)))
    flags = ("--benchmark", f"longbench={file}", "--max-model-len", "300", "--policy", "none")
    status, saved = bench("eval", *flags)
    (row,) = saved["rows"]
    assert status == 0 and row["task"] == "hotpotqa" and row["output_tokens"] <= 32
    assert saved["notes"] == ["hotpotqa: 1 of 1 texts lost their middle to fit 268 tokens"]
