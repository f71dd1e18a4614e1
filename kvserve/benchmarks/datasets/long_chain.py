"""The long chain: a trace of thousands of tokens that is redundant as reasoning is.

Every line of the program is six tokens and one paragraph of the trace. A sum states its operands and
its result, says whether it passed ten, checks the result once more from its definition and talks a
little; a recap restates three earlier values. Names are assigned once. A sum in five is a dead end: its
value is never asked for again. Of the others the last one is always an operand, and the second operand is
drawn by how long ago it was last mentioned, so look-backs reach from a few tokens to the whole trace.
"""

import random
import re
from dataclasses import dataclass

from kvserve.benchmarks.datasets.task_text import NAMES, UNIT, Sample, draw_names

MORE_NAMES = tuple(
    (
        "Agnes Albert Alma Arthur Astrid Axel Basil Bertha Cecil Celia Conrad Dario Della Dennis "
        "Edith Elias Elsa Felix Flora Gavin Gilda Gustav Hazel Hector Hugo Ida Ines Iris Jasper "
        "Joel Judith Kira Lars Lena Liam Lydia Magnus Marta Max Naomi Nils Olga Otto Pablo Petra "
        "Ralph Rosa Ruth"
    ).split()
)
ALL_NAMES = (*NAMES, *MORE_NAMES)
REMARKS = (
    "Now this value holds and we go on with the next line of the list.",
    "Nothing before it changes so the list above is right as it stands.",
    "Both were read from the lines above and the sum is right.",
    "Again a small step and still a long way to go.",
    "Then we look back at the lines above and all of it holds.",
    "As before we add one line and do not drop a value.",
    "Here we can keep it as it is and read on.",
    "That was plain and it is not the last of the lines.",
    "So far all values are right and none of it changes.",
    "Well this is done right and we do know what comes next.",
)
LONG_WORDS = tuple(
    dict.fromkeys(
        (*MORE_NAMES, "Explain", "Check", *re.findall(r"[A-Za-z]{2,}", " ".join(REMARKS)))
    )
)
DEAD_SHARE = 0.2
RECAP_SHARE = 0.15
RECAP_SIZE = 3
FIRST_VALUES = 2


@dataclass(frozen=True)
class Line:
    """One line of the program: a sum of two operands, or a recap of three names."""

    name: str
    operands: tuple[str, ...]
    dead: bool = False

    @property
    def is_sum(self) -> bool:
        return len(self.operands) == 2

    def text(self) -> str:
        if self.is_sum:
            return f"{self.name}= {self.operands[0]}+ {self.operands[1]};"
        return f"{self.name}: {' '.join(self.operands)};"


def long_chain(
    rng: random.Random,
    lines: int,
    held_out: bool,
    task: str = "long-chain",
    names: tuple[str, ...] = ALL_NAMES,
) -> Sample:
    """A program of that many lines over two given values, worked out paragraph by paragraph."""
    drawn = draw_names(rng, lines + FIRST_VALUES, held_out, names)
    values = {name: rng.randrange(10) for name in drawn[:FIRST_VALUES]}
    given = [f"{name}{value};" for name, value in values.items()]
    program = draw_program(rng, drawn)
    trace = [paragraph(line, values) for line in program]
    final = program[-1].name
    turn = f"Explain {' '.join(given)} {' '.join(line.text() for line in program)} Find {final}"
    answer = f"{' '.join(trace)} answer {final}{values[final]}"
    return Sample(task, (turn,), (answer,), (f"{final}{values[final]}",))


def draw_program(rng: random.Random, names: list[str]) -> list[Line]:
    """Lines for all names but the first two; the last line is a sum whose value is asked for."""
    mentioned = list(names[:FIRST_VALUES])  # live names, the longest unmentioned first
    head, program = mentioned[-1], []
    for i, name in enumerate(names[FIRST_VALUES:], start=FIRST_VALUES + 1):
        last = i == len(names)
        if not last and len(mentioned) > RECAP_SIZE and rng.random() < RECAP_SHARE:
            recalled = tuple(rng.sample(mentioned, RECAP_SIZE))
            program.append(Line(name, recalled))
            _mention(mentioned, recalled)
            continue
        other = _draw_old(rng, [n for n in mentioned if n != head])
        dead = not last and rng.random() < DEAD_SHARE
        program.append(Line(name, (other, head), dead))
        _mention(mentioned, (other, head))
        if not dead:
            mentioned.append(name)
            head = name
    return program


def _draw_old(rng: random.Random, names: list[str]) -> str:
    """Half the draws take any name, the others one of the third that was unmentioned longest."""
    if rng.random() < 0.5:
        return rng.choice(names)
    return names[rng.randrange((len(names) + 2) // 3)]


def _mention(mentioned: list[str], names: tuple[str, ...]) -> None:
    for name in names:
        mentioned.remove(name)
        mentioned.append(name)


def paragraph(line: Line, values: dict[str, int]) -> str:
    """What the trace says about one line; a sum adds its result to `values`."""
    stated = [f"{name}{values[name]}" for name in line.operands]
    remark = REMARKS[values[line.operands[-1]]]
    if not line.is_sum:
        return f"{line.name}: {' '.join(stated)}; {remark} {line.name} is done."
    total = sum(values[name] for name in line.operands)
    result = f"{line.name}{total % 10}"
    values[line.name] = total % 10
    carry = "passes ten so we drop the ten" if total > 9 else "stays below ten so we keep it"
    return (
        f"{line.name}= {stated[0]}+ {stated[1]}, {result}; the sum {carry}. "
        f"Check {result}= {stated[0]}+ {stated[1]}. {remark} {line.name} is done."
    )


@dataclass(frozen=True)
class Needs:
    """What of a trace is read again, in tokens.

    `tokens`: length of the trace; `needed`: tokens that some later token is worked out from, each
    value counted once, where it was made; `later`: those among them that another paragraph reads;
    `distances`: for every operand and recalled value not given in the prompt, how far back the
    latest mention of name and digit stands.
    """

    tokens: int
    needed: int
    later: int
    distances: tuple[int, ...]

    @property
    def share(self) -> float:
        return self.needed / self.tokens


def needs(sample: Sample) -> Needs:
    """Read off a trace what a reader needs who looks up each value where it was made.

    A sum needs its line's name, both operands' names and digits and, later, its own name and digit;
    a recap needs its line's name. Everything else is restatement, check or talk.
    """
    made: dict[str, int] = {}  # name -> index of the digit that states its value first
    latest: dict[str, int] = {}
    needed: set[int] = set()
    later: set[int] = set()
    distances = []
    units = [u.strip() for u in UNIT.findall(" " + sample.answers[0])]
    line, in_check = "", False
    for i, unit in enumerate(units):
        if not unit.isdigit():
            if i == 0 or units[i - 2 : i] == ["done", "."]:
                line = unit
                needed.add(i)
            in_check = unit == "Check" or (in_check and unit != ".")
            continue
        name = units[i - 1]
        if name == line:
            made.setdefault(name, i)
        elif not in_check and name != line:
            needed.update((i - 1, i) if "=" in units[i - 4 : i] or units[i - 2] == "+" else ())
            if name in made:
                needed.update((made[name] - 1, made[name]))
                later.update((made[name] - 1, made[name]))
                distances.append(i - latest[name])
        latest[name] = i
    return Needs(len(units), len(needed), len(later), tuple(distances))
