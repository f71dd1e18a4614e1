"""The long chain: right answers, redundant traces, look-backs of every length."""

import random
import re

import pytest

from kvserve.benchmarks.datasets.long_chain import ALL_NAMES, REMARKS, long_chain
from kvserve.benchmarks.datasets.task_text import Sample, count_units
from kvserve.benchmarks.datasets.tasks import make_samples
from tests.benchmarks.trace_needs import Needs, needs

SIZES = {"long-chain-1000": 1000, "long-chain-2000": 2000, "long-chain-4000": 4000}
SUM = re.compile(r"(\w+)= (\w+)\+ (\w+)$")
RECAP = re.compile(r"(\w+): (\w+) (\w+) (\w+)$")


def program_of(sample: Sample) -> tuple[dict[str, int], list[str], str]:
    """Given values, lines and the name asked for."""
    *pieces, asked = sample.turns[0].removeprefix("Explain ").split("; ")
    given = {piece[:-1]: int(piece[-1]) for piece in pieces if piece[-1].isdigit()}
    return given, pieces[len(given) :], asked.removeprefix("Find ")


def work_out(sample: Sample, terse: bool = False) -> str:
    """The whole trace, from the prompt alone."""
    values, lines, asked = program_of(sample)
    trace = []
    for line in lines:
        if match := SUM.match(line):
            name, one, two = match.groups()
            total = values[one] + values[two]
            values[name] = total % 10
            stated = f"{one}{values[one]}+ {two}{values[two]}"
            carry = (
                "passes ten so we drop the ten" if total > 9 else "stays below ten so we keep it"
            )
            made = f"{name}{total % 10}"
            trace.append(f"{name}= {stated}, {made};")
            talk = f" the sum {carry}. Check {made}= {stated}."
        else:
            match = RECAP.match(line)
            assert match is not None, line
            name, *recalled = match.groups()
            two = recalled[-1]
            trace.append(f"{name}: {' '.join(f'{n}{values[n]}' for n in recalled)};")
            talk = ""
        if not terse:
            trace[-1] += f"{talk} {REMARKS[values[two]]} {name} is done."
    return f"{' '.join(trace)} answer {asked}{values[asked]}"


@pytest.mark.parametrize("task", [*SIZES, "terse-chain"])
def test_traces_follow_from_their_prompts(task: str) -> None:
    for sample in make_samples(task, 10, seed=3):
        assert sample.answers[0] == work_out(sample, terse=task == "terse-chain")
        assert sample.finals[0] == sample.answers[0].rpartition("answer ")[2]
        assert program_of(sample)[2] == sample.finals[0][:-1]


@pytest.mark.parametrize("task", SIZES)
def test_traces_have_their_length(task: str) -> None:
    lengths = [count_units(sample.answers[0]) for sample in make_samples(task, 50, seed=4)]
    assert sum(lengths) / 50 == pytest.approx(SIZES[task], rel=0.02)
    assert all(abs(length / SIZES[task] - 1) < 0.15 for length in lengths)


def every_need(task: str, count: int = 60) -> list[Needs]:
    return [needs(sample) for sample in make_samples(task, count, seed=6)]


@pytest.mark.parametrize("task", SIZES)
def test_less_than_a_quarter_of_a_trace_is_needed_again(task: str) -> None:
    for each in every_need(task):
        assert each.kept < each.needed
        assert 0.1 < len(each.needed) / each.tokens < 0.25
        assert 0.02 < len(each.kept) / each.tokens < 0.06


@pytest.mark.parametrize("task", SIZES)
def test_a_window_of_recent_tokens_misses_values(task: str) -> None:
    """A quarter of the trace, kept as its latest tokens, lacks four values of a sample and more."""
    beyond = [sum(d > each.tokens / 4 for d in each.distances) for each in every_need(task)]
    assert sum(beyond) / len(beyond) > 4
    assert sum(count > 0 for count in beyond) / len(beyond) > 0.9


def test_held_out_orders_are_kept_from_training() -> None:
    def order(sample: Sample) -> bool:
        first, second, *_ = (ALL_NAMES.index(name) for name in program_of(sample)[0])
        return (3 * first + second) % 8 == 0

    rng = random.Random(0)
    assert all(order(long_chain(rng, 4, held_out=True)) for _ in range(50))
    assert not any(order(long_chain(rng, 4, held_out=False)) for _ in range(50))
