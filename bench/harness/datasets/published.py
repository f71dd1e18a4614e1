"""Published data sets, read from the user's files in their original format.

Prompts are chats of our own: compare scores with those of the full cache in the same table, not
with leaderboards. A text of LongBench that is too long for the model loses its middle, as in the
published protocol; ROUGE-L is over the words of the whole answer.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from bench.harness.datasets.dataset_files import read_questions
from bench.harness.datasets.task_text import Sample
from bench.harness.datasets.tasks import Grade
from bench.harness.datasets.workload import Source, TaskPrompts
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.log import ConfigError

Score = Callable[[str, str, Sequence[str]], float]
"""What is said, one right answer, and all possible ones: from 0 to 1."""


@dataclass(frozen=True)
class Kind:
    """How a line becomes a prompt and right answers, and how an answer is scored.

    ``prompt`` has the line's fields in braces. Of several right answers the best score counts, or
    with ``every`` their mean.
    ``first_line``: what follows the answer's first line does not count.
    ``solved``: a line's question and worked answer, where lines can be exemplars.
    """

    prompt: str
    answers: Callable[[Mapping[str, Any]], Sequence[str]]
    score: Score
    max_new_tokens: int
    first_line: bool = False
    every: bool = False
    solved: Callable[[Mapping[str, Any]], tuple[str, str]] | None = None


@dataclass(frozen=True)
class PublishedSample(Sample):
    """``classes``: the possible answers, if the answer is one of several. ``until``: with it begins
    what is no answer any more."""

    classes: tuple[str, ...] = ()
    until: str = ""


def exemplars(name: str, count: int, file: Path | None) -> str:
    """``count`` solved problems as a prompt has them: a file's first lines, or our own of GSM8K.

    Empty for formats that take none.
    """
    solved = _KINDS[name].solved if name in _KINDS else None
    if not count or solved is None:
        return ""
    if file is None and name != "gsm8k":
        raise ConfigError(f"--num-fewshot: {name} has no solved problems without --fewshot-file")
    source = file or Path(__file__).parent / "gsm8k_exemplars.jsonl"
    found = read_questions(name, source, count, solved, "--fewshot-file")
    if len(found) < count:
        raise ConfigError(f"--num-fewshot: {source} has {len(found)} for {name}, not {count}")
    return "".join(f"{_ASKED}{asked}\nAnswer: {answer}\n\n" for asked, answer in found)


def read(name: str, source: Source) -> TaskPrompts:
    """The first lines of a file of this format, behind ``--num-fewshot`` solved problems."""
    path, tokenizer, longest = source.path, source.tokenizer, source["longest"]
    before = exemplars(name, source["num_fewshot"], source["fewshot_file"])
    samples = read_questions(name, path, source.count, lambda line: _sample(name, line, before))
    if len({sample.task for sample in samples}) > 1:
        raise ConfigError(f"--benchmark: {path} mixes data sets; give a file of each")
    most = source["max_new_tokens"]
    limit, note = most or _KINDS[samples[0].task].max_new_tokens, ""
    if name == "longbench":
        whole, room = samples, longest - limit
        samples = [_shortened(sample, tokenizer, room) for sample in whole]
        if cut := sum(a.turns != b.turns for a, b in zip(samples, whole, strict=True)):
            note = (
                f"{path.stem}: {cut} of {len(whole)} texts lost their middle to fit {room} tokens"
            )
    fits = longest if most is None else None
    return TaskPrompts(samples, tokenizer, limit, _grade, "score", note, fits)


def _sample(name: str, line: Mapping[str, Any], before: str) -> PublishedSample:
    task = str(line["dataset"]).removesuffix("_e") if name == "longbench" else name
    if task in _CHINESE:
        raise ValueError(f"{task} is Chinese, and grading it needs a word segmenter: not built")
    if task not in _KINDS:
        raise ValueError(f"{task} is none of {', '.join(_LONG)}")
    row = _KINDS[task]
    fields = line if row.score is not _boxed else {"problem": _question(line)}
    finals = tuple(str(answer) for answer in row.answers(line))
    if not finals:
        raise ValueError("answers is empty")
    prompt = row.prompt.format_map(fields).strip()
    if before:
        assert row.solved is not None
        prompt = f"{before}{_ASKED}{_question(line)}\nAnswer:"
    classes = tuple(line.get("all_classes") or ())
    return PublishedSample(task, (prompt,), finals[:1], finals, classes, before and f"\n{_ASKED}")


def _grade(sample: Sample, outputs: Sequence[str]) -> Grade:
    assert isinstance(sample, PublishedSample)
    row, said = _KINDS[sample.task], outputs[0]
    if sample.until:
        said = said.partition(sample.until)[0]
    if row.first_line:
        said = said.lstrip("\n").partition("\n")[0]
    scores = [row.score(said, final, sample.classes) for final in sample.finals]
    score = sum(scores) / len(scores) if row.every else max(scores)
    return Grade(score == 1.0, score)


def _shortened(sample: PublishedSample, tokenizer: Tokenizer, room: int) -> PublishedSample:
    """Cut the middle out of the prompt until its chat fits ``room`` tokens."""
    text = sample.turns[0]
    ids = tokenizer.encode(text, add_special_tokens=False)

    def excess() -> int:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return len(chat) - room

    while (over := excess()) > 0:
        half = (len(ids) - over) // 2
        if half < 1:
            raise ConfigError(f"--max-new-tokens: {room} tokens are left for a prompt: too few")
        ids = ids[:half] + ids[-half:]
        text = tokenizer.decode(ids[:half]) + tokenizer.decode(ids[half:])
    return replace(sample, turns=(text,))


# ---- scores -----------------------------------------------------------------------------------

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPELLINGS = (
    *(("\\left", ""), ("\\right", ""), ("\\!", ""), ("\\,", ""), ("\\dfrac", "\\frac")),
    *(("\\tfrac", "\\frac"), ("$", ""), ("\\%", ""), ("%", ""), (" ", "")),
)


def _found(said: str, final: str, classes: Sequence[str]) -> float:
    """Whether the answer contains it, capitals or not."""
    return float(final.lower() in said.lower())


def _last_number(said: str, final: str, classes: Sequence[str]) -> float:
    found = _NUMBER.findall(said)
    return float(bool(found) and _same(found[-1], final))


def _boxed(said: str, final: str, classes: Sequence[str]) -> float:
    box = last_boxed(said)
    return float(box is not None and _same(box, final))


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
    plain = [said, final]
    for spelling, unified in _SPELLINGS:
        plain = [text.replace(spelling, unified) for text in plain]
    plain = [text.rstrip(".") for text in plain]
    try:
        left, right = (float(text.replace(",", "")) for text in plain)
    except ValueError:
        return plain[0] == plain[1]
    return left == right


def _f1(said: str, final: str, classes: Sequence[str]) -> float:
    """F1 of words, without case, articles and punctuation."""
    left, right = (
        _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
        for text in (said, final)
    )
    return _harmonic(sum((Counter(left) & Counter(right)).values()), len(left), len(right))


def _rouge_l(said: str, final: str, classes: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words."""
    left, right = said.split(), final.split()
    lengths = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for j, other in enumerate(right, start=1):
            above = lengths[j]
            lengths[j] = diagonal + 1 if word == other else max(above, lengths[j - 1])
            diagonal = above
    return _harmonic(lengths[-1], len(left), len(right))


def _harmonic(common: int, left: int, right: int) -> float:
    return 2 * common / (left + right) if common else 0.0


def _class(said: str, final: str, classes: Sequence[str]) -> float:
    """1 over the number of classes named if the right one is among them, else 0; classes that are a
    part of the right one's name do not count."""
    named = [each for each in classes if each in said and (each == final or each not in final)]
    return 1 / len(named) if final in named else 0.0


def _number(said: str, final: str, classes: Sequence[str]) -> float:
    """The share of the numbers in the answer that are the right one."""
    found, wanted = re.findall(r"\d+", said), re.findall(r"\d+", final)
    return found.count(wanted[0]) / len(found) if found else 0.0


def _code_line(said: str, final: str, classes: Sequence[str]) -> float:
    """Similarity of the first line that is neither a comment nor a fence."""
    lines = said.lstrip("\n").split("\n")
    code = [line for line in lines if not any(mark in line for mark in ("`", "#", "//"))]
    return SequenceMatcher(None, code[0] if code else "", final).ratio()


# ---- the table --------------------------------------------------------------------------------


def _after_hashes(line: Mapping[str, Any]) -> list[str]:
    solution, _, final = line["answer"].rpartition("####")
    if not solution:
        raise ValueError("no #### in answer")
    return [final.strip()]


def _listed(line: Mapping[str, Any]) -> Sequence[str]:
    return list(line["answers"])


def _question(line: Mapping[str, Any]) -> str:
    """AIME's and AMC's files call it question, MATH's problem."""
    return str(line["problem"] if "problem" in line else line["question"]).strip()


def _solved_sums(line: Mapping[str, Any]) -> tuple[str, str]:
    """GSM8K's answers without the marks of its calculator."""
    steps, _, final = re.sub(r"<<.*?>>", "", line["answer"]).rpartition("####")
    return line["question"].strip(), f"{steps.strip()} The answer is {final.strip()}."


def _solved_maths(line: Mapping[str, Any]) -> tuple[str, str]:
    if last_boxed(line["solution"]) is None:
        raise ValueError("no \\boxed{} in solution")
    return _question(line), line["solution"].strip()


_ASKED = "Question: "
"""In front of a problem that solved ones stand in front of; a model may go on with another one."""
_STEPS = "\n\nThink step by step, and "
_QUESTION = (
    "{context}\n\nAnswer the question from the text above, in as few words as you can and without "
    "an explanation.\n\nQuestion: {input}"
)
_SUMMARY = "{context}\n\nSummarize the text above in one page or less. {input}"
_EXAMPLES = "{context}\n{input}\n\nComplete the last one as the examples before it. Write no more."
_COUNT = (
    "{context}\n\nSome of the paragraphs above repeat others. How many different ones are there? "
    "Answer with the number alone."
)
_WHERE = (
    "{context}\n\nWhich paragraph above does this summary describe? Answer as in: Paragraph 1.\n\n"
    "{input}"
)
_CODE = "{context}{input}\n\nWrite the next line of this code and nothing else."
_CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
_LONG = {
    "narrativeqa": Kind(_QUESTION, _listed, _f1, 128),
    "qasper": Kind(_QUESTION, _listed, _f1, 128),
    "multifieldqa_en": Kind(_QUESTION, _listed, _f1, 64),
    "hotpotqa": Kind(_QUESTION, _listed, _f1, 32),
    "2wikimqa": Kind(_QUESTION, _listed, _f1, 32),
    "musique": Kind(_QUESTION, _listed, _f1, 32),
    "gov_report": Kind(_SUMMARY, _listed, _rouge_l, 512),
    "qmsum": Kind(_SUMMARY, _listed, _rouge_l, 512),
    "multi_news": Kind(_SUMMARY, _listed, _rouge_l, 512),
    "trec": Kind(_EXAMPLES, _listed, _class, 64, first_line=True),
    "triviaqa": Kind(_EXAMPLES, _listed, _f1, 32, first_line=True),
    "samsum": Kind(_EXAMPLES, _listed, _rouge_l, 128, first_line=True),
    "passage_count": Kind(_COUNT, _listed, _number, 32),
    "passage_retrieval_en": Kind(_WHERE, _listed, _number, 32),
    "lcc": Kind(_CODE, _listed, _code_line, 64),
    "repobench-p": Kind(_CODE, _listed, _code_line, 64),
}
_MATHS = Kind(
    "{problem}" + _STEPS + "put the final answer into \\boxed{{}}.",
    lambda line: [line["answer"]],
    _boxed,
    16_384,
    solved=_solved_maths,
)
_KINDS = {
    "ruler": Kind("{input}", lambda line: line["outputs"], _found, 128, every=True),
    "gsm8k": Kind(
        "{question}" + _STEPS + "end with: The answer is NUMBER.",
        *(_after_hashes, _last_number, 2048),
        solved=_solved_sums,
    ),
    "math": _MATHS,
    "aime": replace(_MATHS, max_new_tokens=32_768),
    **_LONG,
}
FORMATS = {
    "ruler": "input, outputs: questions of your own, RULER",
    "gsm8k": "question, answer with ####",
    "math": "problem, answer: MATH-500, AMC",
    "aime": "as math, and answers of twice the length",
    "longbench": "context, input, answers, dataset: a file of LongBench's English ones",
}
"""What ``--benchmark`` names, and what a line of each has."""
SOLVED = tuple(name for name, kind in _KINDS.items() if kind.solved)
"""Formats whose problems solved ones can stand in front of."""
