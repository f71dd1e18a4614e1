"""What the task classifier sees of a prompt: the sentences at its two ends, and its outward shape.

The request usually stands at an end, beside the text that it is about. A sentence has features for
its words and for where it stands; a word that training never saw has no weight.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

DATA = Path(__file__).parents[2] / "data" / "windowkv_classifier"
END = 8  # sentences looked at, at either end
_END_CHARS = 4096
_LONGEST = 28  # words of a sentence's beginning, and half as many of its end
_STEM = 5
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?|\d+|[^\w\s]|_+")
_BREAK = re.compile(r"""(?<=[.!?…。؟])["')\]»”*>]*\s+|(?<=[。])|\s*\n\s*""")
_LABEL = re.compile(r"^\W{0,4}([^\W\d_]+(?: [^\W\d_]+)?)?(?: ?\d+)?\s*(:|->|=>|\]|\))")
_CODE = re.compile(
    r"[;{}]$|^(def|return|import|from|class|public|private|#include|if|for) .*[:;{]?$"
)
_MARKS = str.maketrans("\u2018\u2019\u201c\u201d\u061f\u037e", "''\"\"??")


def _lexicon() -> dict[str, str]:
    """The heading of each known word; words of similar meaning share one."""
    lines = (DATA / "lexicon.txt").read_text(encoding="utf-8").splitlines()
    parts = [line.partition(": ") for line in lines]
    return {word: sort for sort, _, words in reversed(parts) for word in words.split()}


LEXICON = _lexicon()


@dataclass(frozen=True)
class Segment:
    """A sentence or line: ``prompt[start:end]``; its number from the front and from the back.

    ``front_block`` and ``back_block`` are how many sentences the first and the last paragraph have
    if this one belongs to it, else 0. ``begins`` is the kind of its beginning, and ``alike`` says
    whether most other sentences begin the same way.
    """

    text: str
    start: int
    end: int
    front: int
    back: int
    own_line: bool
    front_block: int
    back_block: int
    begins: str
    alike: bool

    def wording(self) -> Iterator[str]:
        """Features of what it says."""
        words = _words(self.text)
        if len(words) > _LONGEST * 3 // 2:
            words = [*words[:_LONGEST], *words[-(_LONGEST // 2) :]]
        yield from words
        yield from (f"{word[:_STEM]}-" for word in words if len(word) > _STEM)
        yield from (f"-{word[-3:]}" for word in words if len(word) > _STEM)
        sorts = [LEXICON.get(word, "") for word in words]
        yield from (f"% {sort}" for sort in sorts if sort)
        yield from (f"% {sort} once" for sort in set(sorts) if sort)
        named = [sort for sort in sorts if sort]
        yield from (f"% {a} {b}" for a, b in pairwise(named))
        frame = [sort or "_" for sort, word in zip(sorts, words, strict=True) if word[0].isalnum()]
        frame += ["?"] if words and words[-1] == "?" else ["."]
        yield from (f"#^ {' '.join(frame[:count])}" for count in (2, 3, 4))
        yield f"#$ {' '.join(frame[-3:])}"
        yield from map(" ".join, pairwise(words))
        yield from (f"{a} * {c}" for a, _, c in zip(words, words[1:], words[2:], strict=False))
        plain = [word for word in words if word[0].isalnum()]
        yield from (f"^ {' '.join(plain[:count])}" for count in (1, 2, 3) if len(plain) >= count)
        if plain and words[-1] == "?":
            yield f"^ {plain[0]} ... ?"
        yield f"$ {words[-1]}" if words else "$"
        yield f"len {min(len(plain).bit_length(), 5)}{'?' if words and words[-1] == '?' else ''}"

    def standing(self) -> Iterator[str]:
        """Features of where it stands."""
        mark = self.text[-1:] if not self.text[-1:].isalnum() else "a"
        yield f"@ {self.begins} {self.alike}"
        yield f"@ {self.begins} {mark}"
        for name, at, size in (
            ("front", self.front, self.front_block),
            ("back", self.back, self.back_block),
        ):
            place = f"{name} {at}" if at < END else f"far from {name}"
            yield f"@ {place}"
            yield f"@ {place} {'line' if self.own_line else ''}"
            yield f"@ {place} {mark}"
            if at < END:
                yield f"@ {place} {self.begins}"
            if size:
                yield f"@ {name} block {min(size, 5)}"
                yield f"@ {name} block {min(size, 5)} {mark}"
                yield f"@ {name} block {min(size, 5)} {self.begins} {self.alike}"


def hashes(features: Iterable[str]) -> list[int]:
    """32 bits of each feature."""
    return [zlib.crc32(feature.encode(errors="replace")) for feature in features]


def segments(prompt: str) -> list[Segment]:
    """The first and the last sentences, and of a short prompt all of them."""
    if len(prompt) <= 2 * _END_CHARS:
        found = _split(prompt, 0)
        ends = found if len(found) <= 2 * END else [*found[:END], *found[-END:]]
        count = len(found)
    else:
        tail = len(prompt) - _END_CHARS
        front, back = _split(prompt[:_END_CHARS], 0)[:END], _split(prompt[tail:], tail)[-END:]
        ends, count = [*front, *back], 10**6
    breaks = [at for at in range(1, len(ends)) if "\n\n" in prompt[ends[at - 1][1] : ends[at][0]]]
    first, last = (breaks[0], len(ends) - breaks[-1]) if breaks else (0, 0)
    starts = [prompt[start:end] for start, end in ends]
    labels = Counter(_label(text) for text in starts)
    begins = [_beginning(text, labels[_label(text)] > 2) for text in starts]
    common = Counter(begins)
    made = []
    for at, (start, end) in enumerate(ends):
        from_back = len(ends) - 1 - at
        before, after = prompt[max(start - 4, 0) : start], prompt[end : end + 4]
        made.append(
            Segment(
                unicodedata.normalize("NFKC", prompt[start:end]).translate(_MARKS),
                start,
                end,
                at if at < END else count - 1 - from_back,
                from_back if from_back < END else count - 1 - at,
                (not start or "\n" in before) and (end == len(prompt) or "\n" in after),
                first if at < first else 0,
                last if from_back < last else 0,
                begins[at],
                2 * common[begins[at]] > len(ends) + 1,
            )
        )
    return made


def _label(text: str) -> str | None:
    """The label that a line begins with, like "Answer:"; numbers in it make no difference."""
    found = _LABEL.match(text)
    return (found[1] or "#").lower() + found[2] if found else None


def _beginning(text: str, again: bool) -> str:
    """How a sentence begins: with a label (``again``: one of several), or its first character."""
    if _label(text):
        return "label again" if again else "label"
    if text[0].isalpha():
        return "lower" if text[0].islower() else "upper"
    return "digit" if text[0].isdigit() else "mark"


def shape(prompt: str) -> list[str]:
    """Features of a prompt's build: solved examples, code, a line that is left open."""
    ends = [prompt[:_END_CHARS], prompt[-_END_CHARS:]] if len(prompt) > 2 * _END_CHARS else [prompt]
    lines = [line.strip() for end in ends for line in end.splitlines() if line.strip()]
    labels = Counter(label for line in lines if (label := _label(line)))
    again = [label for label, times in labels.items() if times > 2]
    made = [f"& again {label}" for label in again]
    made += [f"& {min(len(again), 4)} labels again"]
    if lines:
        last = _label(lines[-1])
        if last in again:
            made.append("& repeated label last")
        if last and lines[-1].endswith(last[-1]):
            made.append(f"& open {last}{' again' if last in again else ''}")
            made.append(f"& open{' again' if last in again else ''}")
        code = [bool(_CODE.search(line)) for line in lines[-8:]]
        made.append(f"& code {sum(code) * 4 // len(code)}")
        made.append("& code last" if code[-1] else "& text last")
    return made


def _split(text: str, offset: int) -> list[tuple[int, int]]:
    """Where the sentences of a text begin and end; each has a letter or a digit at least."""
    places, start = [], 0
    for at, after in [*((m.start(), m.end()) for m in _BREAK.finditer(text)), (len(text),) * 2]:
        while start < at and text[start].isspace():
            start += 1
        end = at + len(text[at:after].rstrip())
        if any(char.isalnum() for char in text[start:end]):
            places.append((start + offset, end + offset))
            start = after
        elif "\n" in text[at:after]:
            start = after
    return places


def _words(text: str) -> list[str]:
    return ["0" if word.isdigit() else word for word in _WORD.findall(text.lower())]
