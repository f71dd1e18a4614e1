"""Requests in users' own words, by family of phrasing, and everyday texts to put them around.

A family (``locating.yaml``, ``aggregating.yaml``) is one way to phrase a request. Fillers,
greetings, constraints, typos and punctuation vary freely; evaluations hold out whole families.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import yaml

from bench.task_classifier import text
from bench.task_classifier.templates import expand

HERE = Path(__file__).parent
_SLOT = re.compile(r"\{([a-z]+)\}")


def _read(name: str) -> dict[str, list[str]]:
    given: dict[str, list[str] | str] = yaml.safe_load((HERE / name).read_text(encoding="utf-8"))
    return {
        key: values.split("; ") if isinstance(values, str) else values
        for key, values in given.items()
    }


_SENTENCE = re.compile(r"(?<=[.?!]) ")
TEXTS = (HERE / "texts.txt").read_text(encoding="utf-8").splitlines()
SLOTS, REGISTERS = _read("slots.yaml"), _read("registers.yaml")
LOCATING, AGGREGATING = _read("locating.yaml"), _read("aggregating.yaml")


def fill(template: str, rng: random.Random) -> str:
    """Replace choices first, then slots, until neither is left."""
    while True:
        template = expand(template, rng)
        found = _SLOT.search(template)
        if found is None:
            return template
        name = found[1]
        chosen = text.prose(rng, 30) if name == "description" else rng.choice(SLOTS[name])
        template = template[: found.start()] + chosen + template[found.end() :]


def everyday(rng: random.Random, words: int) -> str:
    """A text of one kind, in lines or paragraphs."""
    joint = rng.choice((" ", " ", "\n", "\n\n"))
    if rng.random() < 0.5:
        return _prose(rng, words, joint)
    sentences = REGISTERS[rng.choice(list(REGISTERS))]
    parts: list[str] = []
    count = 0
    while count < words:
        part = fill(rng.choice(sentences), rng)
        parts.append(part[0].upper() + part[1:])
        if rng.random() < 0.15:
            parts.append(text.sentence(rng))
        count += sum(len(part.split()) for part in parts[-2:])
    return joint.join(parts)


def _prose(rng: random.Random, words: int, joint: str) -> str:
    """Random parts of `texts.txt`; now and then cut off."""
    parts: list[str] = []
    while not parts or sum(map(len, parts)) < 6 * words:
        sentences = _SENTENCE.split(rng.choice(TEXTS))
        start = rng.randrange(len(sentences))
        part = sentences[start : start + rng.randint(2, 9)]
        parts += [joint.join(part)]
    prose = rng.choice((joint, "\n\n")).join(parts)
    return " ".join(prose.split(" ")[: max(words, 12)]) if rng.random() < 0.3 else prose


def request(template: str, rng: random.Random) -> str:
    """A request as a user would type it: with or without greetings, typos and capitals."""
    asked = fill(template, rng)
    if rng.random() < 0.3:
        asked = asked[0].upper() + asked[1:]
    before = fill("{hello}{why}", rng) if rng.random() < 0.5 else ""
    after = fill("{bye}", rng) if rng.random() < 0.4 else ""
    if after and rng.random() < 0.5 and asked[-1].isalnum():
        asked += "."
    asked = before + asked + after
    for change, share in _CHANGES:
        if rng.random() < share:
            asked = change(asked, rng)
    return asked


# ---- how people type ----------------------------------------------------------------------------


def _typos(asked: str, rng: random.Random) -> str:
    """Letters left out, doubled or swapped in one to three places."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(asked))
        if asked[at : at + 2].isalpha() and at:
            kinds = (asked[at + 1 : at + 2] + asked[at], asked[at + 1 : at + 2], asked[at] * 2)
            drop = rng.choice(kinds)
            rest = asked[at + 1 :] if drop == asked[at] * 2 else asked[at + 2 :]
            asked = asked[:at] + drop + rest
    return asked


def _capitals(asked: str, rng: random.Random) -> str:
    return asked.upper() if rng.random() < 0.3 else asked.lower()


def _punctuation(asked: str, rng: random.Random) -> str:
    """No punctuation, too much, or that of other languages."""
    marks = rng.choice((
        {"?": "", ".": ""}, {"?": "??"}, {"?": " ?", "!": " !", ":": " :"},
        {"?": "\uff1f", ".": "\u3002"}, {"?": "\u061f"}, {"?": "?!"},
        {"'": "\u2019", '"': "\u201c"}, {"'": ""}, {"?": "."}, {"?": ""},
    ))  # fmt: skip
    if rng.random() < 0.1 and "?" in asked:
        return "¿" + asked
    for mark, other in marks.items():
        asked = asked.replace(mark, other)
    return asked


def _marked(asked: str, rng: random.Random) -> str:
    before, after = rng.choice((
        ("**", "**"), ("### ", ""), ("> ", ""), ("<question>", "</question>"),
        ("[INST] ", " [/INST]"),
        ("User: ", "\nAssistant:"), ("- ", ""), ("===\n", "\n==="), ("(", ")"), ("@bot ", ""),
        ("Instruction: ", ""), ("Request: ", "\nResponse:"), ("<task>", "</task>"),
    ))  # fmt: skip
    return before + asked + after


_CHANGES: tuple[tuple[Callable[[str, random.Random], str], float], ...] = (
    (_typos, 0.15),
    (_capitals, 0.25),
    (_punctuation, 0.3),
    (_marked, 0.1),
)
