"""Prompts with their labels, a pure function of the seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from bench.task_classifier import text
from bench.task_classifier.templates import KINDS, expand

_CONTEXTS = {
    "story_qa": text.story,
    "paper_qa": text.paper,
    "document_qa": text.document,
    "two_hop_qa": text.passages,
    "comparison_qa": text.passages,
    "multi_hop_qa": text.passages,
    "report_summary": text.report,
    "meeting_query": text.transcript,
    "news_summary": text.news,
    "passage_count": text.paragraphs,
    "passage_retrieval": text.paragraphs,
    "code_line": text.code,
    "repo_code": text.repository,
}
_ASKS = {
    "story_qa": text.question,
    "paper_qa": text.paper_question,
    "document_qa": text.question,
    "two_hop_qa": text.hop_question,
    "comparison_qa": text.hop_question,
    "multi_hop_qa": text.hop_question,
    "meeting_query": text.meeting_request,
}
_MARKS: dict[str, list[tuple[str, ...]]] = {
    "question_type": [
        ("Question: ", "\nType: "),
        ("Q: ", "\nType: "),
        ("Query: ", "\nLabel: "),
        ("", " -> "),
        ("Question: ", "\nCategory: "),
        ("- ", " => "),
    ],
    "trivia_shots": [
        ("Passage:\n", "\nQuestion:\n", "\nAnswer:\n"),
        ("", "\nQ: ", "\nA: "),
        ("Passage: ", "\nQuestion: ", "\nAnswer: "),
        ("Text: ", "\nQuestion: ", "\nSolution: "),
    ],
    "dialogue_shots": [
        ("Dialogue: ", "\nSummary: "),
        ("Conversation:\n", "\nSummary:\n"),
        ("Chat:\n", "\nIn short: "),
        ("", "\nSummary: "),
        ("###\n", "\nTL;DR: "),
    ],
}


@dataclass(frozen=True)
class Sample:
    """A prompt; ``localization`` is its label."""

    kind: str
    prompt: str
    localization: bool


def samples(per_kind: int, seed: int, held_out: bool) -> list[Sample]:
    """``per_kind`` prompts of each kind, its templates in turn."""
    made = []
    for kind, about in KINDS.items():
        rng = random.Random(f"{seed} {kind} {held_out}")
        templates = about.held_out if held_out else about.train
        for at in range(per_kind):
            prompt = _prompt(kind, templates[at % len(templates)], rng)
            made.append(Sample(kind, prompt, about.localization))
    return made


def _prompt(kind: str, template: str, rng: random.Random) -> str:
    words = int(math.exp(rng.uniform(math.log(20), math.log(900))))
    template = expand(template, rng)
    if kind in _CONTEXTS:
        context = _CONTEXTS[kind](rng, words)
        ask = _ASKS.get(kind, lambda r: text.prose(r, 40))(rng)
    else:
        context, ask = _shots(kind, words, rng)
    prompt = template.replace("{context}", context).replace("{ask}", ask)
    if rng.random() < 0.1:
        prompt = (
            rng.choice(("You are a helpful assistant.\n", "User: ", "### Instruction\n")) + prompt
        )
    return prompt


def _shots(kind: str, words: int, rng: random.Random) -> tuple[str, str]:
    """Solved examples, and one that ends where its solution would begin."""
    mark = rng.choice(_MARKS[kind])
    shots = []
    for _ in range(max(3, min(words // 20, 40))):
        if kind == "question_type":
            parts = [text.question(rng), rng.choice(text.WORDS["types"])]
        elif kind == "trivia_shots":
            parts = [text.prose(rng, 50), text.question(rng), text.name(rng)]
        else:
            parts = [text.chat(rng), text.sentence(rng)]
        shots.append([m + p for m, p in zip(mark, parts, strict=True)])
    open_end = "".join(shots.pop()[:-1]) + mark[-1].rstrip()
    return text.join_shots(["".join(shot) for shot in shots], rng), open_end
