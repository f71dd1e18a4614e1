"""What a step takes with and without drafts, by the number of its rows."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

_WEIGHT = 0.1
_NEWEST = 9
"""Steps whose lower quartile is taken: what disturbs a step makes it longer, never shorter."""
_FEW = 4
"""Steps of either kind that are enough to compare them."""
_OFTEN, _SELDOM = 8, 64
"""Steps with drafts after which one goes without; seldom if drafts pay by far."""
_BY_FAR = 1.25
_RETRY = 128
"""Steps without drafts after which one goes with them, whatever they have seemed to cost."""
_BLIND = 16
"""Steps that may guess before any of them has been measured."""
_UNKNOWN = 0.3
_MARGIN = 0.25
"""By how much more a guess must gain than it seems to cost, unless it is nearly sure."""
_LEAST = 0.2
"""Less likely guesses gain less than such measurements can tell."""
NEVER = 2.0
"""A chance that no guess has."""


@dataclass(slots=True)
class _Steps:
    """Steps of one kind: the newest, each with its guesses, and a mean of the tokens gained."""

    newest: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    count: int = 0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: int, guessed: int) -> None:
        self.count += 1
        self.newest.append((seconds, guessed))
        self.tokens += max(_WEIGHT, 1 / self.count) * (tokens - self.tokens)

    @property
    def seconds(self) -> float:
        return _quartile(seconds for seconds, _ in self.newest)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def cost(self, plain: float) -> float:
        """Seconds by guess, beyond the ``plain`` ones of a step without."""
        costs = ((seconds - plain) / guessed for seconds, guessed in self.newest)
        return max(_quartile(costs), 0.0)


@dataclass(slots=True)
class _Size:
    """Steps of about as many rows."""

    plain: _Steps = field(default_factory=_Steps)
    drafted: _Steps = field(default_factory=_Steps)
    since_plain: int = 0
    since_drafted: int = 0
    since_measured: int = 0
    compared: bool = False
    """Whether ``least`` and ``by_far`` are those of the newest steps."""
    least: float = NEVER
    by_far: bool = False

    def compare(self) -> None:
        """Work out from which chance on a guess pays, and whether drafts pay by far."""
        plain, drafted = self.plain, self.drafted
        lost = drafted.cost(plain.seconds) * max(plain.rate, drafted.rate)
        lost += _MARGIN * lost * max(1.0 - lost, 0.0)
        self.least = min(max(lost, _LEAST), NEVER)
        self.by_far = drafted.rate > _BY_FAR * plain.rate
        self.compared = True

    @property
    def known(self) -> bool:
        return min(self.plain.count, self.drafted.count) >= _FEW

    @property
    def wants_plain(self) -> bool:
        """Whether it is time for a step without drafts."""
        if self.plain.count < _FEW:
            return self.since_plain >= 1
        return self.since_plain >= (_SELDOM if self.by_far else _OFTEN)


class DraftCosts:
    """Says from which chance on a guess is worth the time that it takes.

    A guess that is right with chance p gains p tokens and costs c seconds, by which a step with
    drafts takes longer than one without, by guess. In these c seconds the engine would have made
    ``c * rate`` other tokens. Now and then a step goes without drafts, or with them although they
    have been slow, so that both are known. Steps that also compute prompts, or that compress, are
    not measured; while there are no others, nothing is guessed.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = defaultdict(_Size)

    def record(self, rows: int, guessed: int, tokens: int, seconds: float) -> None:
        """A step of decoding rows alone, in which they got ``tokens``."""
        size = self._sizes[rows.bit_length()]
        size.since_measured = 0
        size.compared = not guessed and size.plain.count % _OFTEN > 0
        if guessed:
            size.drafted.add(seconds, tokens, guessed)
            size.since_plain, size.since_drafted = size.since_plain + 1, 0
        else:
            size.plain.add(seconds, tokens, 0)
            size.since_plain, size.since_drafted = 0, size.since_drafted + 1

    def least_chance(self, rows: int) -> float:
        """The chance from which on a guess pays in a step of so many rows."""
        size = self._sizes[rows.bit_length()]
        size.since_measured += 1
        if size.wants_plain or (size.since_measured > _BLIND and not size.known):
            return NEVER
        if not size.known or size.since_drafted >= _RETRY:
            return _UNKNOWN
        if not size.compared:
            size.compare()
        return size.least

    def pays(self, rows: int) -> bool:
        """Whether it is known that steps of so many rows gain by likely guesses."""
        return self._sizes[rows.bit_length()].known and not self.tries_again(rows)

    def tries_again(self, rows: int) -> bool:
        """Whether a step of so many rows may guess only to learn whether that pays by now."""
        size = self._sizes[rows.bit_length()]
        return size.known and size.since_drafted >= _RETRY


def _quartile(values: Iterable[float]) -> float:
    """A quarter of ``values`` are smaller."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4]
