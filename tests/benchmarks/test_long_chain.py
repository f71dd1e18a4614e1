"""The long chain: right answers, redundant traces, look-backs of every length."""

import random
import re

import pytest

from kvserve.benchmarks.datasets.long_chain import ALL_NAMES, REMARKS, long_chain
from kvserve.benchmarks.datasets.task_text import UNIT, Sample, count_units
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


def test_names_stand_for_one_thing_each() -> None:
    for sample in make_samples("long-chain-4000", 10, seed=5):
        given, lines, _ = program_of(sample)
        names = [*given, *(UNIT.findall(line)[0] for line in lines)]
        assert len(set(names)) == len(names) == 98 and set(names) <= set(ALL_NAMES)


def every_need(task: str, count: int = 60) -> list[Needs]:
    return [needs(sample) for sample in make_samples(task, count, seed=6)]


@pytest.mark.parametrize("task", SIZES)
def test_less_than_a_quarter_of_a_trace_is_needed_again(task: str) -> None:
    for each in every_need(task):
        assert each.kept < each.needed
        assert 0.1 < len(each.needed) / each.tokens < 0.25
        assert 0.02 < len(each.kept) / each.tokens < 0.06


def test_needed_tokens_are_enough_to_answer() -> None:
    """Who has the prompt and sees nothing of the trace but what is needed works out the rest."""
    for sample in make_samples("long-chain-2000", 20, seed=7):
        values, lines, asked = program_of(sample)
        units = [unit.strip() for unit in UNIT.findall(" " + sample.answers[0])]
        need = needs(sample)
        seen = {units[i - 1]: int(units[i]) for i in need.kept if units[i].isdigit()}
        for line in lines:
            if match := SUM.match(line):
                name, *operands = match.groups()
                total = sum(values[n] if n in values else seen[n] for n in operands) % 10
                assert seen.get(name, total) == total
        assert f"{asked}{seen[asked]}" == sample.finals[0]


def sums_of(sample: Sample) -> dict[str, tuple[str, str]]:
    """Operands of every sum by the sum's name, in the program's order."""
    matches = [match for line in program_of(sample)[1] if (match := SUM.match(line))]
    return {match[1]: (match[2], match[3]) for match in matches}


def test_some_values_do_not_bear_on_the_answer() -> None:
    for sample in make_samples("long-chain-4000", 10, seed=8):
        sums, bearing = sums_of(sample), {program_of(sample)[2]}
        for name in reversed(sums):
            if name in bearing:
                bearing.update(sums[name])
        dead = [name for name in sums if name not in bearing]
        assert 0.05 < len(dead) / len(sums) < 0.4


@pytest.mark.parametrize("task", SIZES)
def test_a_line_is_told_by_its_names(task: str) -> None:
    for sample in make_samples(task, 20, seed=9):
        leads = [operands[0] for operands in sums_of(sample).values()]
        assert len(set(leads)) == len(leads)
        recaps = [
            match.groups()[1:] for line in program_of(sample)[1] if (match := RECAP.match(line))
        ]
        recalled = [name for recap in recaps for name in recap]
        assert len(set(recalled)) == len(recalled)


@pytest.mark.parametrize("task", SIZES)
def test_a_window_of_recent_tokens_misses_values(task: str) -> None:
    """A quarter of the trace, kept as its latest tokens, lacks four values of a sample and more."""
    beyond = [sum(d > each.tokens / 4 for d in each.distances) for each in every_need(task)]
    assert sum(beyond) / len(beyond) > 4
    assert sum(count > 0 for count in beyond) / len(beyond) > 0.9


def test_look_backs_have_every_length() -> None:
    distances = sorted(d for each in every_need("long-chain-4000") for d in each.distances)
    shares = {
        limit: sum(d > limit for d in distances) / len(distances) for limit in (64, 256, 1000, 2000)
    }
    assert shares[64] > 0.45 and shares[256] > 0.3 and shares[1000] > 0.02 and shares[2000] > 0.002
    assert sum(d < 40 for d in distances) / len(distances) > 0.3


def test_held_out_orders_are_kept_from_training() -> None:
    def order(sample: Sample) -> bool:
        first, second, *_ = (ALL_NAMES.index(name) for name in program_of(sample)[0])
        return (3 * first + second) % 8 == 0

    rng = random.Random(0)
    assert all(order(long_chain(rng, 4, held_out=True)) for _ in range(50))
    assert not any(order(long_chain(rng, 4, held_out=False)) for _ in range(50))
