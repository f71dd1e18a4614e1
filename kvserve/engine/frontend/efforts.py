"""How much a model shall reason: the scale of clients, and what a chat template takes of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

SCALE = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_OTHER = "kvserve_effort"
_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class Reasons:
    """The arguments of a template that say how much to reason."""

    efforts: tuple[str, ...] = ()
    """Words that ``reasoning_effort`` may be; none if the template does not read it."""
    switch: str = ""
    """The argument that turns reasoning on or off."""

    def arguments(self, effort: str, known: Collection[str] = SCALE) -> dict[str, Any]:
        """What to give to the template for an effort: the nearest of ``known`` words that it takes,
        or on or off. Nothing if it knows neither."""
        if self.switch and (effort == "none" or not self.efforts):
            return {self.switch: effort != "none"}
        at = SCALE.index(effort)
        words = [word for word in reversed(SCALE) if word in self.efforts and word in known]
        if not words:
            return {}
        return {"reasoning_effort": min(words, key=lambda word: abs(SCALE.index(word) - at))}


def find_reasons(render: Callable[..., str]) -> Reasons:
    """Try a template; ``render`` takes arguments, and gives "" where it refuses."""
    plain, other = render(), render(reasoning_effort=_OTHER)
    texts = {word: render(reasoning_effort=word) for word in SCALE}
    taken = [word for word, text in texts.items() if text]
    if all(text == plain for text in (other, *texts.values())):
        taken = []
    elif other and _OTHER not in other:
        own = {word: text for word, text in texts.items() if text not in ("", other)}
        taken = [w for w in SCALE if w in own or w == _level(other, own.values())] if own else taken
    switch = ""
    for name in _SWITCHES:
        on, off = render(**{name: True}), render(**{name: False})
        if on and off and on != off:
            switch = switch or name
    return Reasons(tuple(taken), switch)


def _level(other: str, own: Collection[str]) -> str:
    """The word for what a template does with words that it does not tell apart: the one that it
    writes then, or else the middle."""
    named = [word for word in SCALE if all(_count(word, other) > _count(word, t) for t in own)]
    return named[0] if len(named) == 1 else "medium"


def _count(word: str, text: str) -> int:
    return text.lower().count(word)
