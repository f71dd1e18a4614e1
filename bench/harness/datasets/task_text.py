"""The text of the shipped tasks: word lists, filler grammar and one builder per task.

Builders take the sizes as arguments: `tasks.py` calls them with the fixed sizes, and the training
script of the tiny model with random ones. Every word here is one token of that model's tokenizer,
so `count_units` gives exact token counts without loading it.
"""

import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = words(
    "Adam Alice Amber Anna Ben Bella Boris Bruno Carl Carol Clara Cyrus Daisy David Diana Dora "
    "Edgar Ella Emma Erik Fiona Frank Freya George Grace Greta Hanna Harry Helen Henry Igor Irene "
    "Isaac Ivan Jack Jane Jonas Julia Karen Kevin Klara Laura Leo Linda Lucas Maria Martin Mila "
    "Nadia Nora Oliver Oscar Paula Peter Quinn Rachel Robert Sarah Simon Teresa Thomas Victor "
    "Xavier Yara"
)
ADJECTIVES = words("big quiet red small tall green dark bright cold warm heavy soft")
NOUNS = words(
    "boat river mill garden tower horse lamp bridge road stone window table bird cloud farm clock"
)
VERBS = words("crosses follows covers enters meets watches leaves faces")
PREPOSITIONS = words("near behind above under beside past")
TASK_WORDS = words(
    "The the A a It is secret number of What Remember remember List all names to Let Find answer "
    "sum passes stays below ten so we keep it drop done Report"
)
WORDS = (*NAMES, *ADJECTIVES, *NOUNS, *VERBS, *PREPOSITIONS, *TASK_WORDS)

UNIT = re.compile(r" ?[A-Za-z]+|[^A-Za-z]")
FILLER_LENGTHS = (6, 7, 11)
DIGITS = "0123456789"


@dataclass(frozen=True)
class Sample:
    """One conversation: user turns, the whole expected answers, and what decides exact match."""

    task: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    finals: tuple[str, ...]


def count_units(text: str) -> int:
    """Number of tokens of `text` after a space, which the chat template puts before it."""
    return len(UNIT.findall(" " + text))


def draw_names(
    rng: random.Random, count: int, held_out: bool, names: Sequence[str] = NAMES
) -> list[str]:
    """Distinct names in random order; held-out orders never occur in training documents.

    One in eight ordered pairs of first two names is reserved for held-out samples.
    """
    while True:
        picks = rng.sample(range(len(names)), count)
        if ((3 * picks[0] + picks[1]) % 8 == 0) == held_out:
            return [names[i] for i in picks]


def _reachable(units: int) -> bool:
    return units in (0, 6, 7, 11, 12, 13, 14) or units >= 17


def filler_sentence(rng: random.Random, units: int) -> str:
    adjective, noun, verb = rng.choice(ADJECTIVES), rng.choice(NOUNS), rng.choice(VERBS)
    if units == 6:
        return f" {rng.choice(NAMES)} {verb} the {adjective} {noun}."
    if units == 7 and rng.random() < 0.5:
        return f" It is {adjective} {rng.choice(PREPOSITIONS)} the {noun}."
    if units == 7:
        return f" A {noun} {verb} a {adjective} {rng.choice(NOUNS)}."
    place = f"{rng.choice(PREPOSITIONS)} the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    return f" The {adjective} {noun} {verb} the {rng.choice(NOUNS)} {place}."


def hide(rng: random.Random, sentences: list[str], units: int) -> str:
    """A text of exactly `units` tokens: the sentences, in order, among filler."""
    filler = filler_sentences(rng, sentences, units)
    slots = [True] * len(sentences) + [False] * len(filler)
    rng.shuffle(slots)
    kept, rest = iter(sentences), iter(filler)
    return "".join(next(kept) if slot else next(rest) for slot in slots).lstrip()


def filler_sentences(rng: random.Random, sentences: list[str], units: int) -> list[str]:
    """Sentences that make up `units` tokens together with the given ones."""
    left = units - sum(len(UNIT.findall(s)) for s in sentences)
    filler = []
    while left > 0:
        fitting = [n for n in FILLER_LENGTHS if n <= left and _reachable(left - n)]
        if not fitting:
            raise ValueError(f"{units} tokens cannot hold these sentences")
        filler.append(filler_sentence(rng, rng.choice(fitting)))
        left -= count_units(filler[-1].lstrip())
    return filler


def needles(
    rng: random.Random,
    units: int,
    count: int,
    questions: int,
    held_out: bool,
    task: str = "needle",
    digits: str = DIGITS,
    again: bool = False,
) -> Sample:
    """`count` secret numbers in a text of `units` tokens; the first question follows the text.

    With `again`, the same questions come once more in another order: earlier answers have them.
    """
    names = draw_names(rng, count, held_out)
    values = ["".join(rng.choices(digits, k=4)) for _ in names]
    text = hide(rng, secrets_of(names, values), units)
    asked = rng.sample(range(count), questions)
    if again:
        asked += rng.sample(asked, questions)
    turns = [f"What is the secret number of {names[i]}?" for i in asked]
    turns[0] = f"{text} {turns[0]}"
    answers = tuple(values[i] for i in asked)
    return Sample(task, tuple(turns), answers, answers)


def secrets_of(names: list[str], values: list[str]) -> list[str]:
    return [f" The secret number of {n} is {v}." for n, v in zip(names, values, strict=True)]


def recall(
    rng: random.Random, pairs: int, asked: int, held_out: bool, pool: Sequence[str] = NAMES
) -> Sample:
    """A list of names with two-digit values, asked back in another order."""
    names = draw_names(rng, pairs, held_out, pool)
    values = {name: f"{rng.randrange(100):02d}" for name in names}
    wanted = rng.sample(names, asked)
    listing = " ".join(f"{name}{values[name]};" for name in names)
    answer = " ".join(f"{name}{values[name]};" for name in wanted)
    return Sample("recall", (f"{listing} Find {' '.join(wanted)}",), (answer,), (answer,))


def chain(rng: random.Random, steps: int, held_out: bool, pool: Sequence[str] = NAMES) -> Sample:
    """Sums modulo 10: each step adds the last result to an earlier value, all names distinct."""
    names = draw_names(rng, steps + 2, held_out, pool)
    values = {name: rng.randrange(10) for name in names[:2]}
    program = [f"{name}{values[name]};" for name in names[:2]]
    trace = []
    for i in range(2, len(names)):
        name, before, other = names[i], names[i - 1], rng.choice(names[: i - 1])
        values[name] = (values[other] + values[before]) % 10
        program.append(f"{name}= {other}+ {before};")
        trace.append(
            f"{name}= {other}{values[other]}+ {before}{values[before]}, {name}{values[name]};"
        )
    return _computation("chain", program, trace, f"{names[-1]}{values[names[-1]]}")


def redundant_chain(
    rng: random.Random,
    registers: int,
    steps: int,
    report_after: Collection[int],
    held_out: bool,
    pool: Sequence[str] = NAMES,
) -> Sample:
    """Sums modulo 10 over a few re-assigned names, with labels, narration and state reports."""
    names = draw_names(rng, registers + steps, held_out, pool)
    state = {name: rng.randrange(10) for name in names[:registers]}
    program = [f"{name}{value};" for name, value in state.items()]
    trace = []
    before = names[registers - 1]
    for step, label in enumerate(names[registers:], start=1):
        other = rng.choice([name for name in state if name != before])
        target = rng.choice([name for name in state if name != before])
        total = state[other] + state[before]
        program.append(f"{label}: {target}= {other}+ {before};")
        sum_text = f"{other}{state[other]}+ {before}{state[before]}, {target}{total % 10};"
        remark = "passes ten so we drop the ten" if total > 9 else "stays below ten so we keep it"
        trace.append(f"{label}: {target}= {sum_text} the sum {remark}. {label} is done.")
        state[target] = total % 10
        before = target
        if step in report_after:
            program.append("Report;")
            trace.append("Report " + " ".join(f"{n}{v}" for n, v in state.items()) + ".")
    return _computation("redundant-chain", program, trace, f"{before}{state[before]}")


def _computation(task: str, program: list[str], trace: list[str], final: str) -> Sample:
    turn = f"Let {' '.join(program)} Find {final[:-1]}"
    answer = f"{' '.join(trace)} answer {final}"
    return Sample(task, (turn,), (answer,), (final,))
