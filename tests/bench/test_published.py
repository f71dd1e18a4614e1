"""Published data sets and the needle grid: what is asked, and which answers are right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import needles
from bench.harness.datasets.published import exemplars, last_boxed
from bench.harness.datasets.published import read as read_file
from bench.harness.datasets.task_text import count_units
from bench.harness.datasets.tasks import Grade
from bench.harness.datasets.workload import Source, TaskPrompts
from bench.needle_grid import by_cell, needle_grid
from kvserve.log import ConfigError
from tests.bench.harness.conftest import write_byte_model
from tests.bench.harness.test_evaluate import WordTokenizer

GSM8K = {"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42\n#### 1,042"}
MATH = {"problem": "Find x.", "solution": "Long.", "answer": "\\frac{1}{2}"}
RULER = {"input": " A long text. ", "outputs": ["8412", "Blue Whale"], "length": 9}
AIME = {"question": "Find n.", "answer": 73}


def text(dataset: str, *answers: str, **more: Any) -> dict[str, Any]:
    """A line of LongBench."""
    return {"input": "Who?", "context": "A text.", "answers": answers, "dataset": dataset, **more}


def read(tmp_path: Path, name: str, *lines: Any, longest: int = 40_000, **options: Any) -> Any:
    path = tmp_path / "lines.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    given = {"longest": longest, "max_new_tokens": None, "num_fewshot": 0, "fewshot_file": None}
    source = Source(10, 0, 0, WordTokenizer(), path, False, {**given, **options})
    return read_file(name, source)


CLASSES = {"all_classes": ["Person", "Place", "Other place", "Date"]}


@pytest.mark.parametrize(
    ("name", "line", "said", "score"),
    [
        ("ruler", RULER, "8412 and BLUE whale", 1.0),
        ("ruler", RULER, "it is 8412", 0.5),
        ("ruler", RULER, "", 0.0),
        ("gsm8k", GSM8K, "First 7, so The answer is 1042.", 1.0),
        ("gsm8k", GSM8K, "The answer is $1,042.00", 1.0),
        ("gsm8k", GSM8K, "1042 less 2 is 1040", 0.0),
        ("gsm8k", GSM8K, "none", 0.0),
        ("math", MATH, "so \\boxed{2}, no: \\boxed{\\dfrac{1}{2}}.", 1.0),
        ("math", MATH, "\\boxed{\\frac{1}{3}}", 0.0),
        ("math", MATH, "\\frac{1}{2}", 0.0),
        ("math", AIME, "\\boxed{073}", 1.0),
        ("math", AIME, "\\boxed{74}", 0.0),
        ("longbench", text("hotpotqa", "the Blue Whale"), "Blue, whale!", 1.0),
        ("longbench", text("hotpotqa", "Rome", "blue whale"), "a whale", 2 / 3),
        ("longbench", text("hotpotqa_e", "blue whale"), "none", 0.0),
        ("longbench", text("gov_report", "one two three four"), "one three x four", 0.75),
        ("longbench", text("trec", "Other place", **CLASSES), "\nOther place\nDate", 1.0),
        ("longbench", text("trec", "Other place", **CLASSES), "Other place or Date", 0.5),
        ("longbench", text("trec", "Person", **CLASSES), "Date", 0.0),
        ("longbench", text("triviaqa", "Rome"), "Rome\nQuestion: what", 1.0),
        ("longbench", text("samsum", "He left."), "He left.\nDialogue", 1.0),
        ("longbench", text("passage_count", "7"), "7 of them, not 8", 0.5),
        ("longbench", text("passage_retrieval_en", "Paragraph 12"), "Paragraph 12", 1.0),
        ("longbench", text("passage_retrieval_en", "Paragraph 12"), "none", 0.0),
        ("longbench", text("lcc", "    return x"), "```python\n    return x\n", 1.0),
        ("longbench", text("repobench-p", "abcd"), "abxx", 0.5),
    ],
)
def test_answers_are_graded(
    tmp_path: Path, name: str, line: dict[str, Any], said: str, score: float
) -> None:
    workload = read(tmp_path, name, line)
    (grade,) = workload.grades([[said]])
    assert grade.score == pytest.approx(score) and grade.exact == (score == 1.0)
    assert workload.score_name == "score"


def test_answers_are_as_long_as_published_or_as_the_context_allows(tmp_path: Path) -> None:
    sizes = {
        "ruler": (RULER, 128),
        "gsm8k": (GSM8K, 2048),
        "math": (MATH, 16_384),
        "aime": (AIME, 32_768),
    }
    for name, (line, size) in sizes.items():
        assert read(tmp_path, name, line).max_tokens(0) == size
        small = read(tmp_path, name, line, longest=300 if name != "ruler" else 40)
        assert len(small.prompt(0, [])) + small.max_tokens(0) == small.longest
        given = read(tmp_path, name, line, longest=300, max_new_tokens=5000)
        assert given.max_tokens(0) == 5000
    limits = {"hotpotqa": 32, "qasper": 128, "qmsum": 512, "trec": 64, "lcc": 64}
    for name, size in limits.items():
        workload = read(tmp_path, "longbench", text(name, "yes"))
        (message,) = workload.messages(0, [])
        assert workload.max_tokens(0) == size
        assert "A text." in message["content"] and "Who?" in message["content"]


def test_long_texts_lose_their_middle(tmp_path: Path) -> None:
    line = text("hotpotqa", "yes", context="begin " + "x" * 500 + " end")
    (whole,) = read(tmp_path, "longbench", line).messages(0, [])
    shortened = read(tmp_path, "longbench", line, longest=400)
    (message,) = shortened.messages(0, [])
    assert len(whole["content"]) > 600 and 400 - 32 - 2 <= len(shortened.prompt(0, [])) <= 400 - 32
    assert message["content"].startswith("begin xx") and message["content"].endswith("Who?")
    with pytest.raises(ConfigError, match="too few"):
        read(tmp_path, "longbench", line, longest=34)


def test_solved_problems_stand_in_front(tmp_path: Path) -> None:
    before = exemplars("gsm8k", 2, None)
    assert before.count("Question: ") == 2 and "####" not in before
    workload: TaskPrompts = read(tmp_path, "gsm8k", *[GSM8K] * 4, num_fewshot=2)
    [message] = workload.messages(0, [])
    assert message["content"] == f"{before}Question: How many?\nAnswer:"
    said = ["is 1042.", "So 1042.\n\nQuestion: And 7 more?\nAnswer: 1049.", "Question: 1042", "7"]
    grades = workload.grades([[answer] for answer in said])
    assert [grade.exact for grade in grades] == [True, True, True, False]


def test_solved_problems_of_a_file(tmp_path: Path) -> None:
    """GSM8K's calculator is left out; MATH needs a file, whose solutions end in a box."""
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps(GSM8K))
    solved = "Question: How many?\nAnswer: 6 * 7 = 42 The answer is 1,042.\n\n"
    assert exemplars("gsm8k", 1, train) == solved
    for name, count, file, message in (
        ("gsm8k", 2, train, "has 1 for gsm8k, not 2"),
        ("gsm8k", 9, None, "has 8 for gsm8k, not 9"),
        ("math", 1, None, "math has no solved problems without --fewshot-file"),
        ("math", 1, train, r"--fewshot-file: .* line 1 is not of format math"),
    ):
        with pytest.raises(ConfigError, match=message):
            exemplars(name, count, file)
    train.write_text(json.dumps({**MATH, "solution": "So \\boxed{\\frac{1}{2}}."}))
    assert exemplars("math", 1, train).endswith("Answer: So \\boxed{\\frac{1}{2}}.\n\n")
    assert exemplars("longbench", 3, None) == ""


def test_our_own_exemplars_are_right() -> None:
    """Each sum that they write holds, and the last one gives the answer."""
    solved = re.findall(r"Question: (.*)\nAnswer: (.*)\n\n", exemplars("gsm8k", 8, None))
    assert len(solved) == 8
    for asked, answer in solved:
        steps, _, final = answer.partition(" The answer is ")
        sums = re.findall(r"([\d.][\d. +*/-]*) = ([\d.]*\d)", steps)
        assert asked.endswith("?") and sums
        for left, right in sums:
            assert eval(left) == float(right), f"{left} = {right}"
        assert float(final.rstrip(".")) in {float(right) for _, right in sums}


def test_boxes_may_hold_braces() -> None:
    assert last_boxed("\\boxed{1} then \\boxed{\\frac{a}{b}} end}") == "\\frac{a}{b}"
    assert last_boxed("\\boxed{open") is None and last_boxed("none}") is None


@pytest.mark.parametrize(
    ("name", "good", "bad", "said"),
    [
        ("gsm8k", GSM8K, MATH, "'answer'"),
        ("gsm8k", GSM8K, {"question": "a", "answer": "no mark"}, "no #### in answer"),
        ("math", MATH, {"answer": "7"}, "'question'"),
        ("ruler", RULER, {"input": "a"}, "'outputs'"),
        ("ruler", RULER, {"input": "a", "outputs": []}, "is empty"),
        ("ruler", RULER, 7, "TypeError"),
        ("longbench", text("qasper", "a"), text("dureader", "a"), "needs a word segmenter"),
        ("longbench", text("qasper", "a"), text("mmlu", "a"), "mmlu is none of narrativeqa, "),
        ("longbench", text("qasper", "a"), text("qasper"), "answers is empty"),
        ("longbench", text("qasper", "a"), {"dataset": "qasper", "answers": ["a"]}, "context"),
    ],
)
def test_other_lines_are_refused(tmp_path: Path, name: str, good: Any, bad: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"line 2 is not of format {name}") as error:
        read(tmp_path, name, good, bad)
    assert said in str(error.value) or name == "gsm8k"
    with pytest.raises(ConfigError, match="is empty"):
        read(tmp_path, name)
    with pytest.raises(ConfigError, match="mixes data sets"):
        read(tmp_path, "longbench", text("hotpotqa", "a"), text("qasper", "a"))


def test_needles_lie_where_the_grid_says() -> None:
    grid = {"grid_lengths": (300, 500), "grid_depths": (0.0, 0.5, 1.0)}
    workload = needle_grid(Source(2, 0, 0, WordTokenizer(), None, False, grid))
    places = [(length, depth) for length in (300, 500) for depth in (0.0, 0.5, 1.0)]
    for i, sample in enumerate(workload.samples):
        length, depth = places[i // 2]
        story, question = sample.turns[0].rsplit(" What ", 1)
        assert count_units(story) == length and story.count("secret number") == 8
        needle = f"number of {question.rstrip('?').split()[-1]} is {sample.finals[0]}."
        assert story.index(needle) / len(story) == pytest.approx(depth, abs=0.12)
    right = [True] * 4 + [False, True] + [False] * 6
    table = by_cell([Grade(exact, 0.0) for exact in right], (300, 500), (0.0, 0.5, 1.0))
    assert table["exact_match"] == [[1.0, 1.0, 0.5], [0.0, 0.0, 0.0]]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A grid that is drawn, texts that are cut, and a folder's mean, behind solved problems."""
    model, folder, result = tmp_path / "model", tmp_path / "sums", tmp_path / "result.json"
    write_byte_model(model)
    folder.mkdir()
    for name, answer in (("b", "4"), ("a", "0")):
        line = {"question": "2 + 2?", "answer": f"It is\n#### {answer}"}
        (folder / f"{name}.jsonl").write_text(json.dumps(line))
    long = tmp_path / "hotpotqa.jsonl"
    long.write_text(json.dumps(text("hotpotqa", "yes", context="x" * 4200)))
    flags = ["--model", str(model), "--load-format", "dummy", "--save-result", str(result)]
    flags += ["--tasks", "needle-grid", "recall", "--grid-lengths", "256", "300"]
    flags += ["--grid-depths", "0", "0.5", "1", "--num-samples", "2", "--policy", "none"]
    flags += ["--benchmark", f"gsm8k={folder}", "--num-fewshot", "2", "--max-new-tokens", "4"]
    flags += ["--benchmark", f"longbench={long}", "--save-plots", str(tmp_path / "plots")]
    assert needles.main(flags) == 0
    saved = json.loads(result.read_text())
    grid, recall, a, b, cut = saved["rows"]
    assert saved["command"].startswith("python -m bench.needles")
    assert grid["task"] == "needle-grid" and grid["n"] == 2 * 3 * 2 and "grid" not in recall
    assert grid["grid"] == {
        "lengths": [256, 300], "depths": [0.0, 0.5, 1.0], "exact_match": [[0.0] * 3] * 2
    }  # fmt: skip
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"needles.png", "accuracy.png"}
    assert (a["task"], b["task"], cut["task"]) == ("a", "b", "hotpotqa")
    mean = (a["score"] + b["score"] + cut["score"]) / 3
    assert saved["notes"] == [
        "hotpotqa: 1 of 1 texts lost their middle to fit 4092 tokens",
        f"mean score over 3 files: none in auto: {mean:.4f}",
    ]
    assert saved["settings"]["num_fewshot"] == 2
    assert "needles.png" in capsys.readouterr().out


def test_what_the_grid_refuses() -> None:
    for flags, message in (
        (["--grid-depths", "1.5"], "--grid-depths"),
        (["--tasks", "needle-grid", "--match-bytes", "5000"], "--match-bytes is for shipped"),
    ):
        with pytest.raises(SystemExit, match=message):
            needles.main(flags)
