"""Published formats: what is asked, and which answers are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvserve.benchmarks.datasets.published import last_boxed, read_benchmark
from kvserve.benchmarks.datasets.tasks import Grade
from kvserve.benchmarks.datasets.workload import TaskPrompts
from kvserve.log import ConfigError

GSM8K = {"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42\n#### 1,042"}
MATH = {"problem": "Find x.", "solution": "Long.", "answer": "\\frac{1}{2}"}
AIME = {"question": "Find n.", "answer": 73}
RULER = {"index": 0, "input": "A long text.", "outputs": ["8412", "Blue Whale"], "length": 9}


def read(tmp_path: Path, name: str, *lines: Any, limit: int | None = None) -> TaskPrompts:
    path = tmp_path / "lines.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    return read_benchmark(name, path, 10, limit, None, 4096)  # type: ignore[arg-type]


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
