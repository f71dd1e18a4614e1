"""Prompts with their labels, a pure function of the seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from bench.task_classifier import text
from bench.task_classifier.requests import AGGREGATING, LOCATING, everyday, fill, request
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


# Where a request stands; `_TEXT` and `_END` enclose the text that it is about.
_LAYOUTS = (
    *("{ask}\n\n{context}", "{ask}\n{context}", "{ask} {context}", "{ask}\n---\n{context}"),
    *("{ask}:\n\n{context}", '{ask}\n"""\n{context}\n"""', "{ask}\n\n{context}\n\n{bye}"),
    *("{context}\n\n{ask}", "{context}\n{ask}", "{context} {ask}", "{context}\n---\n{ask}"),
    *("{context}\n\n{ask}", "{ask}\n\n{context}", "{why}\n\n{context}\n\n{ask}"),
    *("Text: {context}\n\n{ask}", "[{context}]\n\n{ask}", "Here it is:\n\n{context}\n\n{ask}"),
    *("{ask}\n\n{context}\n\n{ask}", "{hello}{why}{context}\n\n{ask}", "{hello}{ask}\n{context}"),
    *("<doc>{context}</doc>\n{ask}", "```\n{context}\n```\n{ask}", "Context:\n{context}\n\n{ask}"),
    *("{ask}\n\nText:\n{context}", "see below. {ask}\n\n\n{context}", "{ask}"),
)
_TEXT, _END = "\x01", "\x02"

# Prompts without a request: solved examples, and code that breaks off.
_BARE = dict.fromkeys(("question_type", "trivia_shots", "dialogue_shots"), "{context}\n{ask}")
_BARE |= dict.fromkeys(("code_line", "repo_code"), "{context}")


@dataclass(frozen=True)
class Sample:
    """A prompt; ``localization`` is its label, ``texts`` the beginning and end of the texts that
    its request is about."""

    kind: str
    fold: int
    prompt: str
    localization: bool
    texts: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, kind: str, fold: int, marked: str, localization: bool) -> Sample:
        prompt, texts = "", []
        for part in marked.split(_TEXT):
            inside, _, outside = part.rpartition(_END)
            texts.append((len(prompt), len(prompt) + len(inside)))
            prompt += inside + outside
        return cls(kind, fold, prompt, localization, tuple(texts))

    def is_text(self, start: int, end: int) -> bool:
        """Whether this range belongs to a text rather than to a request."""
        middle = (start + end) / 2
        return any(first <= middle < last for first, last in self.texts)


def samples(per_kind: int, seed: int, folds: int = 8) -> list[Sample]:
    """``per_kind`` prompts of each kind and twice as many of each family of requests.

    All prompts of a family are in one fold, and so are all of a template of the paper's kinds of
    task.
    """
    made = []
    for kind, about in KINDS.items():
        rng = random.Random(f"{seed} {kind}")
        for at in range(per_kind):
            place = at % len(about.templates)
            prompt = _prompt(kind, about.templates[place], rng)
            made.append(Sample.of(kind, place % folds, prompt, about.localization))
    for localization, families in ((True, LOCATING), (False, AGGREGATING)):
        for number, (family, templates) in enumerate(families.items()):
            rng = random.Random(f"{seed} {family} {localization}")
            kind = f"{family} ({'locating' if localization else 'aggregating'})"
            for at in range(2 * per_kind):
                prompt = _asked(family, templates[at % len(templates)], rng)
                made.append(Sample.of(kind, number % folds, prompt, localization))
    return made


def _words(rng: random.Random) -> int:
    return int(math.exp(rng.uniform(math.log(15), math.log(500))))


def _asked(family: str, template: str, rng: random.Random) -> str:
    """A request of a family before, after or around a text of any kind."""
    if rng.random() < (0.7 if family.startswith("code") else 0.05):
        about = rng.choice((text.code, text.repository))
    else:
        others = (text.document, text.passages, text.transcript, text.news, text.story)
        about = rng.choice((everyday, everyday, everyday, everyday, rng.choice(others)))
    layout = rng.choice(_LAYOUTS)
    context = about(rng, _words(rng))
    if family == "examples" and rng.random() < 0.8:
        context = "\n".join(_shots(rng.choice(list(_MARKS)), _words(rng), rng))
    if rng.random() < 0.15 and about is everyday:
        context += "\n\n" + everyday(rng, 40)
    ask = request(template, rng)
    layout = layout.replace("{ask}", ask)
    for slot in ("hello", "why", "bye"):
        layout = layout.replace(f"{{{slot}}}", fill(f"{{{slot}}}", rng))
    return layout.replace("{context}", _TEXT + context + _END)


def _prompt(kind: str, template: str, rng: random.Random) -> str:
    """A prompt of one of the paper's kinds of task."""
    words = _words(rng)
    if kind in _BARE and rng.random() < 0.3:
        template = _BARE[kind]
    template = expand(template, rng)
    if kind in _CONTEXTS:
        context = _CONTEXTS[kind](rng, words)
        if kind in _BARE and rng.random() < 0.4:
            context = context.rstrip()[: -rng.randint(1, 12)]
        if kind in _ASKS:
            own = kind != "meeting_query" and rng.random() < 0.3
            ask = fill("{q}", rng) if own else _ASKS[kind](rng)
        else:
            ask = _TEXT + text.prose(rng, 40) + _END
    else:
        context, ask = _shots(kind, words, rng)
        ask = _TEXT + ask + _END
    context = _TEXT + context + _END
    prompt = template.replace("{context}", context).replace("{ask}", ask)
    if rng.random() < 0.1:
        prompt = (
            rng.choice(("You are a helpful assistant.\n", "User: ", "### Instruction\n")) + prompt
        )
    return prompt


def _shots(kind: str, words: int, rng: random.Random) -> tuple[str, str]:
    """Solved examples, and one that ends where its solution would begin."""
    mark = rng.choice(_MARKS[kind])
    if rng.random() < 0.5:
        names = rng.sample(text.WORDS["labels"], len(mark))
        sign, gap = rng.choice((": ", ":\n", " = ", ": ")), rng.choice(("\n", "\n", " "))
        mark = tuple((gap if at else "") + name + sign for at, name in enumerate(names))
    shots = []
    for _ in range(max(3, min(words // 20, 40))):
        if kind == "question_type":
            first = rng.choice((text.question, text.sentence, text.noun, lambda r: fill("{q}", r)))
            parts = [first(rng), rng.choice(text.WORDS["types"])]
        elif kind == "trivia_shots":
            parts = [text.prose(rng, 50), text.question(rng), text.name(rng)]
        else:
            parts = [text.chat(rng), text.sentence(rng)]
        shots.append([m + p for m, p in zip(mark, parts, strict=True)])
    open_end = "".join(shots.pop()[:-1]) + mark[-1].rstrip()
    return text.join_shots(["".join(shot) for shot in shots], rng), open_end
