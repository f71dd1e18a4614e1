"""How next tokens are guessed, if they are."""

from __future__ import annotations

from dataclasses import dataclass

MOST_ROWS = {"cpu": 4, "cuda": 16}
"""Rows that decode in a step with guesses: 6 w. On CPUs w is 1.2 (an EPYC) and 3.4 (a Xeon), as one
row's token and five right guesses took 3.2 and 2.1 times as long as a plain step
(docs/speculation.md). Half of the smaller is taken, since sixteen guesses say little of the next.
It has not been measured on a GPU, where it is larger by far, but steps that guess do not overlap.
"""


@dataclass(frozen=True)
class NgramSettings:
    """At most ``num_tokens`` are guessed from what followed the newest ``longest`` to ``shortest``
    tokens before, while at most ``most_rows`` decode."""

    num_tokens: int
    shortest: int
    longest: int
    most_rows: int = 4
