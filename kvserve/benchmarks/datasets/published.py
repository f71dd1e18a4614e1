"""Published benchmarks, read from the user's files in their original format.

Prompts are zero-shot chats and decoding is greedy: compare scores with those of the full cache in
the same table, not with leaderboards, which use other prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvserve.benchmarks.datasets.longbench import longbench_grade, longbench_limit, longbench_sample
from kvserve.benchmarks.datasets.task_text import Sample
from kvserve.benchmarks.datasets.tasks import Grade
from kvserve.benchmarks.datasets.workload import TaskPrompts
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.log import ConfigError

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SPELLINGS = (
    *(("\\left", ""), ("\\right", ""), ("\\!", ""), ("\\,", ""), ("\\dfrac", "\\frac")),
    *(("\\tfrac", "\\frac"), ("$", ""), ("\\%", ""), ("%", ""), (" ", "")),
)


@dataclass(frozen=True)
class Format:
    """How a line becomes a sample, how an answer is graded, how long it may be."""

    help: str
    sample: Callable[[Mapping[str, Any]], Sample]
    grade: Callable[[Sample, Sequence[str]], Grade]
    limit: Callable[[Sample], int]
    shortens: bool = False
    """Whether a text that is too long loses its middle; otherwise the engine refuses it."""


def read_benchmark(
    name: str,
    path: Path,
    count: int,
    max_new_tokens: int | None,
    tokenizer: Tokenizer,
    longest: int,
) -> TaskPrompts:
    """The first ``count`` lines of a JSON Lines file, or all of a shorter one.

    ``longest``: the model's limit in tokens, for prompt and answer together.
    """
    how, samples = FORMATS[name], []
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--benchmark: cannot read {path}: {error.strerror}") from None
    for number, line in enumerate(lines[:count], start=1):
        try:
            samples.append(how.sample(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"--benchmark: {path}: line {number} is not of format {name} ({error!r})"
            ) from None
    if not samples:
        raise ConfigError(f"--benchmark: {path} is empty")
    if len({sample.task for sample in samples}) > 1:
        raise ConfigError(f"--benchmark: {path} mixes data sets; give a file of each")
    limit = max_new_tokens or how.limit(samples[0])
    note = ""
    if how.shortens:
        whole, room = samples, longest - limit
        samples = [_shortened(sample, tokenizer, room) for sample in whole]
        if cut := sum(a.turns != b.turns for a, b in zip(samples, whole, strict=True)):
            note = (
                f"{path.stem}: {cut} of {len(whole)} texts lost their middle to fit {room} tokens"
            )
    return TaskPrompts(samples, tokenizer, limit, how.grade, score_name="score", note=note)


def _shortened(sample: Sample, tokenizer: Tokenizer, room: int) -> Sample:
    """Cut the middle out of the prompt until its chat fits ``room`` tokens."""
    text = sample.turns[0]
    ids = tokenizer.encode(text, add_special_tokens=False)
    while (over := len(_chat(tokenizer, text)) - room) > 0:
        half = (len(ids) - over) // 2
        if half < 1:
            raise ConfigError(f"--max-new-tokens: {room} tokens are left for a prompt: too few")
        ids = ids[:half] + ids[-half:]
        text = tokenizer.decode(ids[:half]) + tokenizer.decode(ids[half:])
    return replace(sample, turns=(text,))


def _chat(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])


# ---- formats ----------------------------------------------------------------------------------


def _gsm8k(line: Mapping[str, Any]) -> Sample:
    solution, _, final = line["answer"].rpartition("####")
    if not solution:
        raise ValueError("no #### in answer")
    prompt = f"{line['question']}\n\nThink step by step, and end with: The answer is NUMBER."
    return Sample("gsm8k", (prompt,), (line["answer"],), (final.strip(),))


def _math(line: Mapping[str, Any]) -> Sample:
    """``problem`` or ``question``, and ``answer``: MATH-500, AIME, AMC."""
    problem = line["problem"] if "problem" in line else line["question"]
    prompt = f"{problem}\n\nThink step by step, and put the final answer into \\boxed{{}}."
    final = str(line["answer"])
    return Sample("math", (prompt,), (line.get("solution") or final,), (final,))


def _ruler(line: Mapping[str, Any]) -> Sample:
    """``input``, and ``outputs`` that an answer has to contain: RULER's needles and the like."""
    outputs = [str(output) for output in line["outputs"]]
    if not outputs:
        raise ValueError("outputs is empty")
    return Sample("ruler", (line["input"],), (" ".join(outputs),), tuple(outputs))


# ---- grading ----------------------------------------------------------------------------------


def _last_number(sample: Sample, outputs: Sequence[str]) -> Grade:
    found = _NUMBER.findall(outputs[0])
    return _graded(bool(found) and _same(found[-1], sample.finals[0]))


def _boxed(sample: Sample, outputs: Sequence[str]) -> Grade:
    said = last_boxed(outputs[0])
    return _graded(said is not None and _same(said, sample.finals[0]))


def _contained(sample: Sample, outputs: Sequence[str]) -> Grade:
    said = outputs[0].lower()
    found = [final.lower() in said for final in sample.finals]
    return Grade(all(found), sum(found) / len(found))


def _graded(right: bool) -> Grade:
    return Grade(right, float(right))


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}``, including braces within it."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for at, char in enumerate(rest if found else ""):
        depth += (char == "{") - (char == "}")
        if not depth:
            return rest[:at]
    return None


def _same(said: str, final: str) -> bool:
    """Whether both are equal as numbers, or as text with unified LaTeX spellings; no algebra."""
    plain = [_plain(said), _plain(final)]
    try:
        left, right = (float(text.replace(",", "")) for text in plain)
    except ValueError:
        return plain[0] == plain[1]
    return left == right


def _plain(text: str) -> str:
    for spelling, plain in _SPELLINGS:
        text = text.replace(spelling, plain)
    return text.rstrip(".")


FORMATS = {
    "gsm8k": Format("question, answer with ####", _gsm8k, _last_number, lambda _: 512),
    "math": Format("problem, answer: MATH-500, AIME, AMC", _math, _boxed, lambda _: 2048),
    "ruler": Format("input, outputs: RULER and needle files", _ruler, _contained, lambda _: 128),
    "longbench": Format(
        "context, input, answers, dataset: a file of LongBench's English ones",
        longbench_sample,
        longbench_grade,
        longbench_limit,
        shortens=True,
    ),
}
