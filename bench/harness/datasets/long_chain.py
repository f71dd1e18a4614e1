"""The long chain: a trace of thousands of tokens, as redundant as reasoning.

Every line of the program has six tokens and becomes one paragraph of the trace. The paragraph of a
sum states the operands and the result, says whether the sum passed ten, checks the result a second
time and ends in a remark. The paragraph of a recap restates three earlier sums. Names are assigned
once.

One sum in five is a dead end: the answer does not depend on it. Every other sum adds the result of
the last sum that is not a dead end to an older value. The older value is drawn by how long ago it
was last mentioned, so look-backs reach from a few tokens to most of the trace. No value is the
first operand of two sums or stands in two recaps, so the names at the beginning of a line identify
it.
"""

import random
import re
from dataclasses import dataclass

from bench.harness.datasets.task_text import NAMES, Sample, draw_names, words

MORE_NAMES = words(
    "Agnes Albert Alma Arthur Astrid Axel Basil Bertha Cecil Celia Conrad Dario Della Dennis Edith "
    "Elias Elsa Felix Flora Gavin Gilda Gustav Hazel Hector Hugo Ida Ines Iris Jasper Joel Judith "
    "Kira Lars Lena Liam Lydia Magnus Marta Max Naomi Nils Olga Otto Pablo Petra Ralph Rosa Ruth"
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


@dataclass(frozen=True)
class Line:
    """One line of the program: a sum of two operands, or a recap of three names."""

    name: str
    operands: tuple[str, ...]

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
    given: int = 2,
    terse: bool = False,
) -> Sample:
    """A program of `lines` lines over `given` values, worked out paragraph by paragraph.

    `terse`: paragraphs state operands and results, or what is recalled, and nothing else.
    """
    drawn = draw_names(rng, lines + given, held_out, names)
    values = {name: rng.randrange(10) for name in drawn[:given]}
    stated = [f"{name}{value};" for name, value in values.items()]
    program = draw_program(rng, drawn[:given], drawn[given:])
    trace = [paragraph(line, values, terse) for line in program]
    final = program[-1].name
    turn = f"Explain {' '.join(stated)} {' '.join(line.text() for line in program)} Find {final}"
    answer = f"{' '.join(trace)} answer {final}{values[final]}"
    return Sample(task, (turn,), (answer,), (f"{final}{values[final]}",))


def draw_program(rng: random.Random, given: list[str], names: list[str]) -> list[Line]:
    """One line for each name; the last is a sum whose value is asked for.

    A value is the first operand of at most one sum and stands in at most one recap, so its names
    identify a line. The first operand of a dead end is the result of an earlier dead end, if one is
    left.
    """
    unled: list[str] = list(given)  # least recently mentioned first
    unrecalled: list[str] = []
    dead: list[str] = []
    head, program = given[-1], []
    for i, name in enumerate(names, start=1):
        last = i == len(names)
        if not last and len(unrecalled) > RECAP_SIZE and rng.random() < RECAP_SHARE:
            recalled = tuple(rng.sample(unrecalled, RECAP_SIZE))
            program.append(Line(name, recalled))
            unrecalled = [n for n in unrecalled if n not in recalled]
            _mention(unled, recalled)
            continue
        ends = not last and len(unled) > 2 and rng.random() < DEAD_SHARE
        other = dead.pop() if ends and dead else _draw_old(rng, [n for n in unled if n != head])
        unled = [n for n in unled if n != other]
        _mention(unled, (head,))
        program.append(Line(name, (other, head)))
        if ends:
            dead.append(name)
            continue
        unled.append(name)
        unrecalled.append(name)
        head = name
    return program


def _draw_old(rng: random.Random, names: list[str]) -> str:
    """Half the draws take any name, the others one of the least recently mentioned third."""
    if rng.random() < 0.5:
        return rng.choice(names)
    return names[rng.randrange((len(names) + 2) // 3)]


def _mention(mentioned: list[str], names: tuple[str, ...]) -> None:
    for name in names:
        if name in mentioned:
            mentioned.remove(name)
            mentioned.append(name)


def paragraph(line: Line, values: dict[str, int], terse: bool = False) -> str:
    """What the trace says about one line; a sum adds its result to `values`."""
    stated = [f"{name}{values[name]}" for name in line.operands]
    remark = REMARKS[values[line.operands[-1]]]
    if not line.is_sum:
        recalled = f"{line.name}: {' '.join(stated)};"
        return recalled if terse else f"{recalled} {remark} {line.name} is done."
    total = sum(values[name] for name in line.operands)
    result = f"{line.name}{total % 10}"
    values[line.name] = total % 10
    if terse:
        return f"{line.name}= {stated[0]}+ {stated[1]}, {result};"
    carry = "passes ten so we drop the ten" if total > 9 else "stays below ten so we keep it"
    return (
        f"{line.name}= {stated[0]}+ {stated[1]}, {result}; the sum {carry}. "
        f"Check {result}= {stated[0]}+ {stated[1]}. {remark} {line.name} is done."
    )
