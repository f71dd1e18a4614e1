"""Published formats: what is asked, and which answers are right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvserve.benchmarks.datasets.exemplars import GSM8K_EXEMPLARS
from kvserve.benchmarks.datasets.published import exemplars, last_boxed, read_benchmark
from kvserve.benchmarks.datasets.tasks import Grade
from kvserve.benchmarks.datasets.workload import TaskPrompts
from kvserve.log import ConfigError
from tests.benchmarks.test_evaluate import WordTokenizer

GSM8K = {"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42\n#### 1,042"}
MATH = {"problem": "Find x.", "solution": "Long.", "answer": "\\frac{1}{2}"}
AIME = {"question": "Find n.", "answer": 73}
RULER = {"index": 0, "input": "A long text.", "outputs": ["8412", "Blue Whale"], "length": 9}


def read(
    tmp_path: Path,
    name: str,
    *lines: Any,
    limit: int | None = None,
    longest: int = 40_000,
    before: str = "",
) -> TaskPrompts:
    path = tmp_path / "lines.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    tokenizer: Any = WordTokenizer()
    return read_benchmark(name, path, 10, limit, tokenizer, longest, before)


@pytest.mark.parametrize(
    ("name", "line", "said", "right"),
    [
        ("gsm8k", GSM8K, "First 7, so The answer is 1042.", True),
        ("gsm8k", GSM8K, "The answer is $1,042.00", True),
        ("gsm8k", GSM8K, "1042 less 2 is 1040", False),
        ("gsm8k", GSM8K, "none", False),
        ("math", MATH, "so \\boxed{2}, no: \\boxed{\\dfrac{1}{2}}.", True),
        ("math", MATH, "\\boxed{\\frac{1}{3}}", False),
        ("math", MATH, "\\frac{1}{2}", False),
        ("math", AIME, "\\boxed{073}", True),
        ("math", AIME, "\\boxed{74}", False),
    ],
)
def test_answers_are_graded(
    tmp_path: Path, name: str, line: dict[str, Any], said: str, right: bool
) -> None:
    workload = read(tmp_path, name, line)
    assert workload.grades([[said]]) == [Grade(right, float(right))]
    assert workload.score_name == "score"


def test_needles_of_ruler_count_one_by_one(tmp_path: Path) -> None:
    workload = read(tmp_path, "ruler", RULER, RULER, RULER)
    assert workload.messages(0, []) == [{"role": "user", "content": "A long text."}]
    said = [["8412 and blue whale"], ["it is 8412"], [""]]
    assert workload.grades(said) == [Grade(True, 1.0), Grade(False, 0.5), Grade(False, 0.0)]
    assert workload.max_tokens(0) == 128
    assert read(tmp_path, "ruler", RULER, limit=7).max_tokens(0) == 7


def test_answers_are_as_long_as_published_or_as_the_context_allows(tmp_path: Path) -> None:
    sizes = {"gsm8k": (GSM8K, 2048), "math": (MATH, 16_384), "aime": (AIME, 32_768)}
    for name, (line, size) in sizes.items():
        assert read(tmp_path, name, line).max_tokens(0) == size
        small = read(tmp_path, name, line, longest=1000)
        prompt = small.prompt(0, [])
        assert prompt is not None and len(prompt) + small.max_tokens(0) == 1000
        assert read(tmp_path, name, line, longest=1000, limit=5000).max_tokens(0) == 5000


def test_solved_problems_stand_in_front(tmp_path: Path) -> None:
    before = exemplars("gsm8k", 2, None)
    assert before.count("Question: ") == 2 and "####" not in before
    workload = read(tmp_path, "gsm8k", GSM8K, GSM8K, GSM8K, GSM8K, before=before)
    [message] = workload.messages(0, [])
    assert message["content"] == f"{before}Question: How many?\nAnswer:"
    said = ["is 1042.", "So 1042.\n\nQuestion: And 7 more?\nAnswer: 1049.", "Question: 1042", "7"]
    grades = workload.grades([[text] for text in said])
    assert [grade.exact for grade in grades] == [True, True, True, False]


def test_solved_problems_of_a_file(tmp_path: Path) -> None:
    """GSM8K's calculator is left out; MATH needs a file, whose solutions end in a box."""
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps(GSM8K))
    text = "Question: How many?\nAnswer: 6 * 7 = 42 The answer is 1,042.\n\n"
    assert exemplars("gsm8k", 1, train) == text
    with pytest.raises(ConfigError, match="has 1 for gsm8k, not 2"):
        exemplars("gsm8k", 2, train)
    with pytest.raises(ConfigError, match="has 8 for gsm8k, not 9"):
        exemplars("gsm8k", 9, None)
    with pytest.raises(ConfigError, match="has 0 for math, not 1"):
        exemplars("math", 1, None)
    with pytest.raises(ConfigError, match=r"--fewshot-file: .* line 1 is not of format math"):
        exemplars("math", 1, train)
    train.write_text(json.dumps({**MATH, "solution": "So \\boxed{\\frac{1}{2}}."}))
    assert exemplars("math", 1, train).endswith("Answer: So \\boxed{\\frac{1}{2}}.\n\n")
    assert exemplars("ruler", 3, None) == ""


def test_our_own_exemplars_are_right() -> None:
    """Each sum that they write holds, and the last one gives the answer."""
    for asked, answer in GSM8K_EXEMPLARS:
        steps, _, final = answer.partition("\n#### ")
        sums = re.findall(r"([\d.][\d. +*/-]*) = ([\d.]*\d)", steps)
        assert asked.endswith("?") and sums
        for left, right in sums:
            assert eval(left) == float(right), f"{left} = {right}"
        assert float(final) in {float(right) for _, right in sums}


def test_boxes_may_hold_braces() -> None:
    assert last_boxed("\\boxed{1} then \\boxed{\\frac{a}{b}} end}") == "\\frac{a}{b}"
    assert last_boxed("\\boxed{open") is None and last_boxed("none}") is None


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gsm8k", MATH),
        ("gsm8k", {"question": "a", "answer": "no mark"}),
        ("math", {"problem": "a"}),
        ("math", {"answer": "7"}),
        ("ruler", {"input": "a", "outputs": []}),
        ("ruler", 7),
    ],
)
def test_other_formats_are_refused_by_line(tmp_path: Path, name: str, line: Any) -> None:
    good = {"gsm8k": GSM8K, "math": MATH, "ruler": RULER}[name]
    with pytest.raises(ConfigError, match=f"line 2 is not of format {name}"):
        read(tmp_path, name, good, line)


def test_files_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        read(tmp_path, "math")
    with pytest.raises(ConfigError, match="cannot read"):
        read_benchmark("math", tmp_path / "gone", 1, None, None, 9)  # type: ignore[arg-type]
