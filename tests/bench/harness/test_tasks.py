"""The shipped tasks are fixed, deterministic, held out of training and exactly gradable."""

import hashlib
import random
import re
from typing import Any

import pytest

from bench.harness.datasets import task_text
from bench.harness.datasets.long_chain import ALL_NAMES, REMARKS, long_chain
from bench.harness.datasets.task_text import Sample
from bench.harness.datasets.tasks import TASKS, default_tasks, grade, make_samples
from kvserve.engine.models.hub import SHIPPED_MODELS, find_model

SAMPLES = {
    "needle-512": "91e779e33165f341",
    "needle-1024": "42b53e6042a53b06",
    "needle-2048": "24dcb25cd1b2e123",
    "needle-1024-again": "940747e4e141d571",
    "chain": "750af02144d137a1",
    "redundant-chain": "b2d3702c844239c1",
    "long-chain-1000": "eaf0ccba0c2f80af",
    "long-chain-2000": "5707df82d1c9294d",
    "long-chain-4000": "a624722d30f72f53",
    "terse-chain": "7c637fad27b81308",
    "recall": "2358e8de3c08947c",
}
"""Digests of five samples of each."""


@pytest.fixture(scope="module", params=sorted(SHIPPED_MODELS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(find_model(request.param))


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_those_of_earlier_results(task: str) -> None:
    """Results are compared over time, and the shipped models are trained for these texts."""
    samples = make_samples(task, 5, seed=0)
    assert hashlib.sha256(repr(samples).encode()).hexdigest()[:16] == SAMPLES[task]
    assert make_samples(task, 2, seed=0) == samples[:2]
    assert len({*samples, *make_samples(task, 5, seed=1)}) == 10


@pytest.mark.parametrize("task", TASKS)
def test_expected_answers_grade_as_exact(task: str) -> None:
    for sample in make_samples(task, 5, seed=0):
        assert sample.task == task
        assert len(sample.turns) == len(sample.answers) == len(sample.finals)
        result = grade(sample, [f" {answer}\n" for answer in sample.answers])
        assert result.exact and result.score == 1.0
        assert not grade(sample, []).exact
        assert grade(sample, []).score == 0.0


def test_held_out_name_orders_never_occur_in_training() -> None:
    """Neither under recall, which gives names first, nor under the long chain."""

    def held_out(sample: Sample, names: tuple[str, ...]) -> bool:
        words = sample.turns[0].removeprefix("Explain ").split("; ")[:2]
        first, second = (names.index(word.rstrip("0123456789")) for word in words)
        return (3 * first + second) % 8 == 0

    rng = random.Random(0)
    for out in (True, False):
        for _ in range(50):
            assert held_out(task_text.recall(rng, 4, 2, held_out=out), task_text.NAMES) == out
            assert held_out(long_chain(rng, 4, held_out=out), ALL_NAMES) == out


def test_grade_counts_up_to_the_first_error_of_each_turn() -> None:
    sample = Sample("needle-512", ("a", "b"), ("1234", "5678"), ("1234", "5678"))
    result = grade(sample, ["1294", "5678"])
    assert not result.exact
    assert result.score == 6 / 8


def test_chain_is_exact_when_the_final_answer_is() -> None:
    sample = Sample("chain", ("q",), ("Bo= Al1+ Cy2, Bo3; answer Bo3",), ("Bo3",))
    assert grade(sample, ["Bo= Al1+ Cy9, Bo3; answer Bo3"]).exact
    assert not grade(sample, ["Bo= Al1+ Cy2, Bo3;"]).exact
    assert not grade(sample, ["Bo= Al1+ Cy2, Bo3; answer Bo3 Bo"]).exact


@pytest.mark.parametrize("model", sorted(SHIPPED_MODELS))
def test_units_are_tokens_of_the_shipped_model(model: str) -> None:
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(find_model(model))
    for sample in (s for task in default_tasks(model) for s in make_samples(task, 2, seed=0)):
        for text in (*sample.turns, *sample.answers):
            assert task_text.count_units(text) == len(tokenizer.encode(f" {text}"))


def test_a_fed_back_answer_keeps_its_tokens(tokenizer: Any) -> None:
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    generated = [*tokenizer.encode(" 4759"), tokenizer.eos_token_id]
    answer = {"role": "assistant", "content": tokenizer.decode(generated, skip_special_tokens=True)}
    history = tokenizer.apply_chat_template([*question, answer], return_dict=False)
    assert history == prompt + generated


@pytest.mark.parametrize(
    "text", ["Grüße\n\n\t 你好 🎉", "def f(x):\r\n    return x**2 ", "\x00\x7f é"]
)
def test_any_text_round_trips(text: str, tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


# ---- the long chain ---------------------------------------------------------------------------

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


@pytest.mark.parametrize("task", [name for name in TASKS if name.startswith(("long", "terse"))])
def test_traces_follow_from_their_prompts(task: str) -> None:
    for sample in make_samples(task, 10, seed=3):
        assert sample.answers[0] == work_out(sample, terse=task == "terse-chain")
        assert sample.finals[0] == sample.answers[0].rpartition("answer ")[2]
        assert program_of(sample)[2] == sample.finals[0][:-1]
