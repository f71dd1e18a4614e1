"""LongBench from local files: its English subsets, zero-shot and greedy, each with its own score.

A text that is too long for the model loses its middle, as in the published protocol. The prompts
are our own, and ROUGE-L is over the words of the whole answer: compare scores with those of the
full cache in the same table, not with published ones.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from kvserve.benchmarks.datasets.task_text import Sample
from kvserve.benchmarks.datasets.tasks import Grade

_CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

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


@dataclass(frozen=True)
class LongBenchSample(Sample):
    """``classes``: the possible answers, if the answer is one of several."""

    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Subset:
    """``score``: grades an answer against one of the right ones, from 0 to 1."""

    prompt: str
    score: Callable[[str, str, Sequence[str]], float]
    max_new_tokens: int
    first_line: bool = False


def longbench_sample(line: Mapping[str, Any]) -> Sample:
    """Reads ``context``, ``input``, ``answers``, ``all_classes`` and ``dataset`` of a line."""
    name = str(line["dataset"]).removesuffix("_e")
    if name in _CHINESE:
        raise ValueError(f"{name} is Chinese, and grading it needs a word segmenter: not built")
    if name not in _SUBSETS:
        raise ValueError(f"{name} is none of {', '.join(_SUBSETS)}")
    answers = tuple(str(answer) for answer in line["answers"])
    if not answers:
        raise ValueError("answers is empty")
    prompt = _SUBSETS[name].prompt.format(context=line["context"], input=line["input"])
    classes = tuple(line.get("all_classes") or ())
    return LongBenchSample(name, (prompt.strip(),), answers[:1], answers, classes)


def longbench_limit(sample: Sample) -> int:
    """Most tokens of an answer."""
    return _SUBSETS[sample.task].max_new_tokens


def longbench_grade(sample: Sample, outputs: Sequence[str]) -> Grade:
    """The best score over the right answers."""
    assert isinstance(sample, LongBenchSample)
    subset, said = _SUBSETS[sample.task], outputs[0]
    if subset.first_line:
        said = said.lstrip("\n").partition("\n")[0]
    best = max(subset.score(said, final, sample.classes) for final in sample.finals)
    return Grade(best == 1.0, best)


# ---- scores -------------------------------------------------------------------------------------


def _f1(said: str, final: str, classes: Sequence[str]) -> float:
    """F1 of words, without case, articles and punctuation."""
    left, right = _words(said), _words(final)
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


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _harmonic(common: int, left: int, right: int) -> float:
    return 2 * common / (left + right) if common else 0.0


_SUBSETS = {
    "narrativeqa": _Subset(_QUESTION, _f1, 128),
    "qasper": _Subset(_QUESTION, _f1, 128),
    "multifieldqa_en": _Subset(_QUESTION, _f1, 64),
    "hotpotqa": _Subset(_QUESTION, _f1, 32),
    "2wikimqa": _Subset(_QUESTION, _f1, 32),
    "musique": _Subset(_QUESTION, _f1, 32),
    "gov_report": _Subset(_SUMMARY, _rouge_l, 512),
    "qmsum": _Subset(_SUMMARY, _rouge_l, 512),
    "multi_news": _Subset(_SUMMARY, _rouge_l, 512),
    "trec": _Subset(_EXAMPLES, _class, 64, first_line=True),
    "triviaqa": _Subset(_EXAMPLES, _f1, 32, first_line=True),
    "samsum": _Subset(_EXAMPLES, _rouge_l, 128, first_line=True),
    "passage_count": _Subset(_COUNT, _number, 32),
    "passage_retrieval_en": _Subset(_WHERE, _number, 32),
    "lcc": _Subset(_CODE, _code_line, 64),
    "repobench-p": _Subset(_CODE, _code_line, 64),
}
