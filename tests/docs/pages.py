"""The pages for people, and the commands in their fences.

A fence without a language is commands where its first word is a program; ``python`` ones are
programs. A comment in front of a fence says where it can run: ``<!-- test: needs a GPU -->``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
NEEDS = {
    "needs a GPU",
    "needs a GPU and a network",
    "needs a network",
    "needs a package index",
    "needs a cluster",
    "needs Ray",
    "needs Docker",
    "needs a model of yours",
}
SERVED = "on the server of make run"
PROGRAMS = {
    *("kvserve", "make", "python", "python3", "pip", "curl", "docker", "git", "apt-get", "apt"),
    *("ray", "serve", "helm", "kubectl", "pre-commit"),
}
_FENCE = re.compile(
    r"(?:<!-- test: (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Fence:
    """What stands between two lines of backticks, and the comment in front of them."""

    page: str
    line: int
    language: str
    body: str
    mark: str

    @property
    def commands(self) -> list[list[str]]:
        """Its command lines as words, where it has any."""
        if self.language:
            return []
        joined = self.body.replace("\\\n", " ")
        lines = [shlex.split(line, comments=True) for line in joined.splitlines() if _shell(line)]
        return [without_settings(words) for words in lines]


def _shell(line: str) -> bool:
    words = line.split()
    names = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    return bool(names) and Path(names[0]).name in PROGRAMS


def without_settings(words: list[str]) -> list[str]:
    """``VARIABLE=value`` in front is left out, and the program's folder."""
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return [Path(words[0]).name, *words[1:]]


def fences(page: Path) -> Iterator[Fence]:
    text = page.read_text()
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        name = str(page.relative_to(ROOT))
        yield Fence(name, line, match["language"], match["body"], match["mark"] or "")


ALL_FENCES = [fence for page in PAGES for fence in fences(page)]
