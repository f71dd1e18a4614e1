"""Separates a model's reasoning from the content of its answer while it streams."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvserve.log import ConfigError
from kvserve.outputs import CompletionOutput

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class ReasoningParser:
    """``deepseek_r1`` reasons from the first token on; ``qwen3`` opens with ``<think>``."""

    name: str
    end_id: int
    """The token that is ``</think>``."""
    start_id: int | None = None
    """The token that is ``<think>``, if it is one."""

    @classmethod
    def of(cls, name: str, encode: Callable[[str], list[int]]) -> ReasoningParser:
        """``encode`` makes token ids; ``ConfigError`` if it knows no token ``</think>``."""
        start, end = encode(OPEN), encode(CLOSE)
        if len(end) != 1:
            raise ConfigError(
                f"--reasoning-parser: {CLOSE} must be one token of the tokenizer; it is {len(end)}"
            )
        return cls(name, end[0], start[0] if len(start) == 1 else None)

    def opens_by_itself(self, prompt_end: str) -> bool:
        """Whether the prompt does not say if the model reasons: it does once it says ``<think>``.

        R1's first templates left that to the model, too.
        """
        return not prompt_end.rstrip().endswith((OPEN, CLOSE))

    def begins_inside(self, prompt_end: str) -> bool | None:
        """Whether the output starts as reasoning, given how the prompt ends.

        ``None``: only if the output opens with ``<think>``. ``False``: the prompt has already
        closed the reasoning, because the template switched it off.
        """
        tail = prompt_end.rstrip()
        if tail.endswith(CLOSE):
            return False
        return True if tail.endswith(OPEN) or self.name == "deepseek_r1" else None

    def count_tokens(
        self, choice: CompletionOutput, inside: bool | None, calls: Collection[int] = ()
    ) -> int:
        """Reasoning tokens of a choice; ``inside`` is what ``begins_inside`` returned. The tokens
        ``calls`` begin calls, which end it, too."""
        opened = choice.text.lstrip().startswith(OPEN) if inside is None else inside
        if not opened:
            return 0
        ids = choice.token_ids
        if self.end_id in ids:
            return ids.index(self.end_id)
        return next((at for at, token in enumerate(ids) if token in calls), len(ids))


class ReasoningSplit:
    """Splits one choice's text in two; newlines around the marks belong to neither part."""

    def __init__(self, inside: bool | None) -> None:
        self._held = ""
        self._inside = inside
        self._opened = inside is False
        """Whether it is known if the text opens with ``<think>``."""
        self._begun = False
        """Whether the current part has any text yet."""
        self._called = self._left_open = False

    def push(self, text: str, final: bool, called: bool = False) -> tuple[str, str]:
        """New text -> new (reasoning, content). A call behind it (``called``) ends the former."""
        self._held += text
        if called and not self._called:
            return self._end()
        if not self._opened and not self._open(final):
            return "", ""
        if not self._inside:
            return "", self._content(final)
        reasoning, closed = self._to_close(final)
        self._inside = not closed
        return reasoning, self._take(len(self._held)) if closed else ""

    def _to_close(self, final: bool) -> tuple[str, bool]:
        """The text up to the mark, and whether that has come."""
        at = self._held.find(CLOSE)
        if at < 0:
            shown = len(self._held)
            if not final:
                shown = len(self._held[: shown - opening(self._held, CLOSE)].rstrip("\n"))
            return self._take(shown), False
        before = self._take(at).rstrip("\n")
        self._held, self._begun = self._held[len(CLOSE) :], False
        return before, True

    def _end(self) -> tuple[str, str]:
        """What is held before the first call."""
        inside, self._called = self._inside, True
        self._left_open = bool(inside)
        self._opened, self._inside = True, False
        held = self._take(len(self._held))
        self._begun = not inside
        return (held.rstrip("\n"), "") if inside else ("", held)

    def _content(self, final: bool) -> str:
        """Behind a call that has ended the reasoning its own end may still come."""
        if not self._left_open:
            return self._take(len(self._held))
        before, closed = self._to_close(final)
        self._left_open = not closed
        return before + self._take(len(self._held)) if closed else before

    def _open(self, final: bool) -> bool:
        stripped = self._held.lstrip()
        if not final and OPEN.startswith(stripped):
            return False
        self._opened = True
        if stripped.startswith(OPEN):
            self._held, self._inside = stripped[len(OPEN) :], True
        return True

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        if not self._begun:
            taken = taken.lstrip("\n")
            self._begun = bool(taken)
        return taken


def opening(text: str, mark: str) -> int:
    """Length of the longest suffix of ``text`` that may be the beginning of ``mark``."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)
