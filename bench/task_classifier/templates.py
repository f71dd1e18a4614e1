"""The sixteen kinds of task and their prompts (``templates.yaml``)."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Kind:
    """A kind of task: whether it locates an answer, and its templates."""

    localization: bool
    templates: tuple[str, ...]


def read_kinds(path: Path) -> dict[str, Kind]:
    given: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))

    def spelt_out(template: str) -> str:
        for name, phrase in given["phrases"].items():
            template = template.replace(f"<{name}>", phrase)
        return template

    return {
        name: Kind(
            kind["localization"],
            tuple(map(spelt_out, kind["templates"])),
        )
        for name, kind in given["kinds"].items()
    }


def expand(template: str, rng: random.Random) -> str:
    """Replace the choices, innermost first."""
    while found := _CHOICE.search(template):
        chosen = rng.choice(found[1].split("|"))
        template = template[: found.start()] + chosen + template[found.end() :]
    return template


KINDS = read_kinds(Path(__file__).with_name("templates.yaml"))
