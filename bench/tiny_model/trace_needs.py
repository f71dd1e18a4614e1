"""What a trace of the long chain needs of its own tokens, worked out from its grammar.

`python -m bench.tiny_model.trace_needs long-chain-4000` prints the figures of the model card.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from bench.harness.datasets.long_chain import ALL_NAMES
from bench.harness.datasets.task_text import UNIT, Sample
from bench.harness.datasets.tasks import make_samples


@dataclass(frozen=True)
class Needs:
    """Which tokens of a trace are read again; the numbers are positions in the trace.

    `needed`: tokens from which later ones are computed. `kept`: the part of them that other
    paragraphs read, a value's name and digit where the value is first stated. `distances`: for
    every operand and recalled value that the prompt does not give, how far back its latest mention
    is.
    """

    tokens: int
    needed: frozenset[int]
    kept: frozenset[int]
    distances: tuple[int, ...]


def needs(sample: Sample) -> Needs:
    """The tokens of a trace that suffice for a reader who also has the prompt.

    A paragraph needs its line's name throughout. A sum needs both operands with their digits until
    its result is stated, and its own name and digit for as long as later lines ask for the value.
    Checks, remarks and recaps repeat what is known; nothing is computed from them.
    """
    units = [unit.strip() for unit in UNIT.findall(" " + sample.answers[0])]
    needed: set[int] = set()
    kept: set[int] = set()
    distances: list[int] = []
    made: dict[str, int] = {}  # name -> place of the digit that states its value first
    latest: dict[str, int] = {}  # name -> place of the digit that states it last
    for start, end in _paragraphs(units):
        is_sum, stated = units[start + 1] == "=", "Check" not in units[start:end]
        needed.add(start)
        for i in range(start + 1, end):
            name = units[i - 1]
            if units[i] == "Check":
                stated = True
            if not units[i].isdigit():
                continue
            if name == units[start]:
                made.setdefault(name, i)
            elif not stated or not is_sum:
                if is_sum:
                    needed.update((i - 1, i))
                if name in made:
                    kept.update((made[name] - 1, made[name]))
                    distances.append(i - latest[name])
            latest[name] = i
    kept.update((made[units[-2]] - 1, made[units[-2]]))
    return Needs(len(units), frozenset(needed | kept), frozenset(kept), tuple(distances))


def _paragraphs(units: list[str]) -> list[tuple[int, int]]:
    """Start and end of each paragraph; the answer at the end of the trace is not a paragraph."""
    ends = [i + 2 for i, unit in enumerate(units) if unit == "done" and units[i + 1] == "."]
    ends = [end for end in ends if units[end - 3] == "is" and units[end - 4] in ALL_NAMES]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def main(task: str) -> None:
    found = [needs(sample) for sample in make_samples(task, 60, seed=6)]
    tokens, back = sum(each.tokens for each in found), [d for each in found for d in each.distances]
    again, elsewhere = (
        sum(len(getattr(each, name)) for each in found) / tokens for name in ("needed", "kept")
    )
    half, tenth = np.percentile(back, [50, 90])
    print(
        f"{task}: {again:.1%} of the tokens are read again, {elsewhere:.1%} by another paragraph; "
        f"half of the look-backs go {half:.0f} tokens back or more, a tenth {tenth:.0f}, "
        f"1 in {len(back) / sum(d > 1000 for d in back):.0f} over 1,000"
    )


if __name__ == "__main__":
    main(sys.argv[1])
