"""What a step takes with and without drafts, by the number of its rows."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import combinations

_WEIGHT = 0.1
_NEWEST = 15
"""Steps whose median is taken, since others may disturb some of them. A lower quartile would find
guesses cheaper than they are where times vary."""
_FEW = 4
"""Steps of either kind that are enough to compare them."""
_OFTEN, _SELDOM = 8, 64
"""Steps with drafts after which one goes without; seldom if drafts pay by far."""
_COMPARED = 16
"""Steps without drafts after which they are compared again."""
_UNASKED = 8
"""Steps before it is asked again whether drafts pay, where they did not. Of steps that rest one in
so many is measured. Asking and measuring take longer than they seem beside compiled kernels."""
_BY_FAR = 1.25
_RETRY, _LONGEST_RETRY = 128, 512
"""Steps without drafts after which one goes with them, whatever they have seemed to cost; twice as
many after each such try in a row."""
_JUDGED = 8
"""Steps with drafts after which these are paused, if they gave fewer tokens per second."""
_FIRST_PAUSE, _LONGEST_PAUSE = 128, 4096
"""Steps; a pause is twice as long as the one before, unless so many steps with drafts paid
(``_PAID``) in between."""
_PAID, _PAYS = 64, 1.05
_WORTH_ALONE, _WORTH = 1.1, 1.25
"""Times the tokens of a step without guesses, in the same time, that make guesses worth a step.
Chances tend to be taken too high; and rows that get ahead of others have their events apart from
theirs, which takes more steps with events."""
_LONGEST_REST = 16
"""Steps without lookups, after one whose guesses were too few to pay; twice as many after each next
one in a row."""
_BLIND = 16
"""Steps that may guess before any of them has been measured."""
_TRIALS = 0.01
"""Part of the time that trials may cost: what a plain step adds to their credit."""
_MOST_CREDIT, _MOST_LOST = 16.0, 8.0
"""Plain steps. Trials may cost so much at first; and no step that catches up with nothing counts as
slower than by so much, since some are disturbed."""
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
        return _median([seconds for seconds, _ in self.newest])

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def costs(self, plain: float) -> tuple[float, float]:
        """Seconds beyond the ``plain`` ones of a step without: of having guesses at all, and of
        each. Medians over pairs of steps, so that a few that were disturbed do not count."""
        more = [(seconds - plain, guessed) for seconds, guessed in self.newest]
        each = max(_median([extra / guessed for extra, guessed in more]), 0.0)
        slopes = [(a - b) / (n - m) for (a, n), (b, m) in combinations(more, 2) if n != m]
        if slopes:
            each = min(max(_median(slopes), 0.0), each)
        return max(_median([extra - each * guessed for extra, guessed in more]), 0.0), each


@dataclass(slots=True)
class _Size:
    """Steps of about as many rows."""

    plain: _Steps = field(default_factory=_Steps)
    drafted: _Steps = field(default_factory=_Steps)
    since_plain: int = 0
    since_drafted: int = 0
    since_measured: int = 0
    retry: int = _RETRY
    tried: bool = False
    """Whether the next step may guess although that has not seemed to pay."""
    judged: int = 0
    """Steps with drafts that were thought to pay, since the last pause."""
    pause: int = _FIRST_PAUSE
    """How long the next pause is."""
    compared: bool = False
    """Whether ``least`` and ``by_far`` are those of the newest steps."""
    least: float = NEVER
    lost_at_all: float = 0.0
    lost_by_guess: float = 0.0
    """Tokens that steps without would give in the time of a step's guesses, and of each."""
    by_far: bool = False
    rest: int = 0
    """Steps that are left in which nothing is guessed or looked up, and few are measured."""
    next_rest: int = 1

    def compare(self) -> None:
        """Work out from which chance on a guess pays, and whether drafts pay by far."""
        plain, drafted = self.plain, self.drafted
        at_all, each = drafted.costs(plain.seconds)
        self.lost_at_all, self.lost_by_guess = at_all * plain.rate, each * plain.rate
        lost = each * max(plain.rate, drafted.rate)
        lost += _MARGIN * lost * max(1.0 - lost, 0.0)
        self.least = min(max(lost, _LEAST), NEVER)
        self.by_far = drafted.rate > _BY_FAR * plain.rate
        self.compared = True

    def judge(self) -> None:
        """Pause drafts that were thought to pay and gave fewer tokens per second."""
        self.judged, self.retry = self.judged + 1, _RETRY
        if self.judged >= _PAID:
            self.pause = _FIRST_PAUSE
        if self.judged >= _JUDGED and self.drafted.rate < _PAYS * self.plain.rate:
            self.judged, self.rest = 0, self.pause
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)

    def enough(self, rows: int, expected: float, guessed: int) -> bool:
        """Whether a step is worth its guesses, of which ``expected`` will be right."""
        lost = self.lost_at_all + self.lost_by_guess * guessed
        return rows + expected >= (_WORTH_ALONE if rows == 1 else _WORTH) * (rows + lost)

    @property
    def known(self) -> bool:
        return min(self.plain.count, self.drafted.count) >= _FEW

    @property
    def tries_again(self) -> bool:
        """Whether it is time for a step with drafts although they have not seemed to pay."""
        return self.since_drafted >= self.retry

    @property
    def wants_plain(self) -> bool:
        """Whether it is time for a step without drafts."""
        if self.plain.count < _FEW:
            return self.since_plain >= 1
        return self.since_plain >= (_SELDOM if self.by_far else _OFTEN)


class DraftCosts:
    """Says from which chance on a guess is worth the time that it takes.

    A guess that is right with chance p gains p tokens and costs c seconds, by which a step takes
    longer with each guess. In these c seconds the engine would have made ``c * rate`` other tokens.
    A step with guesses also takes longer by what these cost whatever their number, so that a few
    of them among many rows do not pay (``gains``). Chances may be taken too high: what was thought
    to pay is judged by the tokens per second that came of it, and rests if these were fewer.

    Now and then a step goes without drafts, or with them although they have been slow, so that both
    are known. Such trials cost no more than a small part of the time: what a step with guesses has
    lost is paid back by plain ones first. Steps that also compute prompts, or that compress, are
    not measured; in them only guesses that pay by far are made.
    """

    def __init__(self, most_guesses: int) -> None:
        """``most_guesses`` of a row."""
        self._sizes: dict[int, _Size] = defaultdict(_Size)
        self._most_guesses = most_guesses
        self._credit = _MOST_CREDIT
        """Plain steps that trials may cost now."""

    def record(self, rows: int, guessed: int, tokens: int, seconds: float) -> None:
        """A step of decoding rows alone, in which they got ``tokens``."""
        size = self._sizes[rows.bit_length()]
        size.since_measured = 0
        kind = size.drafted if guessed else size.plain
        often = _OFTEN if guessed else _COMPARED
        size.compared = kind.count > _NEWEST and kind.count % often > 0 and size.compared
        if guessed:
            self.spend(rows, tokens, seconds)
            size.drafted.add(seconds, tokens, guessed)
            size.since_plain, size.since_drafted = size.since_plain + 1, 0
            if size.known and not size.tried:
                size.judge()
            elif size.known:
                size.retry = min(2 * size.retry, _LONGEST_RETRY)
        else:
            self._credit = min(self._credit + _TRIALS, _MOST_CREDIT)
            size.plain.add(seconds, tokens, 0)
            size.since_plain, size.since_drafted = 0, size.since_drafted + 1

    def spend(self, rows: int, tokens: int, seconds: float) -> None:
        """A step was for guesses: count what it has lost, or gained."""
        plain, lost = self._sizes[rows.bit_length()].plain, _MOST_LOST
        if plain.count:
            lost = seconds / plain.seconds - tokens / rows
        self._credit = min(self._credit - min(lost, _MOST_LOST), _MOST_CREDIT)

    def least_chance(self, rows: int, *, measured: bool = True) -> float:
        """The chance from which on a guess pays in a step of so many rows. Called once a step.
        ``measured``: if the step is to be recorded; in others, which compute prompts or compress,
        only guesses that pay by far are made."""
        if self.rest(rows):
            return NEVER
        size = self._sizes[rows.bit_length()]
        tried = not size.known or self.tries_again(rows)
        size.since_measured += measured or not tried
        if self.rests(rows, measured=measured):
            asks = size.wants_plain or size.since_measured >= _BLIND or not measured
            size.rest = 0 if asks else _UNASKED
            return NEVER
        size.tried = tried
        return _UNKNOWN if size.tried else size.least

    def rest(self, rows: int) -> bool:
        """Whether a step of so many rows rests; if so, a step less is left of that."""
        size = self._sizes[rows.bit_length()]
        if not size.rest:
            return False
        size.rest, size.since_drafted = size.rest - 1, size.since_drafted + 1
        self._credit = min(self._credit + _TRIALS, _MOST_CREDIT)
        return True

    def measures(self, rows: int) -> bool:
        """Whether a step of so many rows is to be recorded, although it guesses nothing."""
        return self._sizes[rows.bit_length()].rest % _UNASKED == 0

    def rests(self, rows: int, *, measured: bool = True) -> bool:
        """Whether no guess pays in the next step of so many rows, whatever its chance. ``measured``
        as in ``least_chance``."""
        size = self._sizes[rows.bit_length()]
        if size.rest or size.wants_plain:
            return True
        if not size.known:
            return not measured or size.since_measured >= _BLIND or self._credit <= 0
        if self.tries_again(rows):
            return not measured
        if not size.compared:
            size.compare()
        if not (measured or size.by_far):
            return True
        sure = self._most_guesses * rows
        return size.least >= 1.0 or not size.enough(rows, sure, sure)

    def gains(self, rows: int, expected: float, guessed: int) -> bool:
        """Whether a step is worth its guesses, of which ``expected`` will be right."""
        size = self._sizes[rows.bit_length()]
        if not size.known or size.tried:
            return True
        enough = size.enough(rows, expected, guessed)
        size.rest = 0 if enough else size.next_rest
        size.next_rest = 1 if enough else min(2 * size.next_rest, _LONGEST_REST)
        return enough

    def pays(self, rows: int) -> bool:
        """Whether it is known that steps of so many rows gain by likely guesses."""
        return self._sizes[rows.bit_length()].known and not self.tries_again(rows)

    def tries_again(self, rows: int) -> bool:
        """Whether a step of so many rows may guess only to learn whether that pays by now."""
        size = self._sizes[rows.bit_length()]
        return self._credit > 0 and size.known and size.tries_again


def _median(values: list[float]) -> float:
    """Half of ``values`` are smaller."""
    return sorted(values)[len(values) // 2]
