"""The shipped tasks are fixed, deterministic, held out of training and exactly gradable."""

import random
from typing import Any

import pytest

from kvserve.benchmarks.datasets import task_text
from kvserve.benchmarks.datasets.tasks import TASKS, Sample, default_tasks, grade, make_samples
from kvserve.engine.models.hub import SHIPPED_MODELS, find_model


@pytest.fixture(scope="module", params=sorted(SHIPPED_MODELS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(find_model(request.param))


@pytest.mark.parametrize("task", TASKS)
def test_samples_depend_on_index_and_seed_only(task: str) -> None:
    samples = make_samples(task, 3, seed=5)
    assert samples[:2] == make_samples(task, 2, seed=5)
    assert len(set(samples)) == 3
    assert samples[0] != make_samples(task, 1, seed=6)[0]


@pytest.mark.parametrize("task", TASKS)
def test_expected_answers_grade_as_exact(task: str) -> None:
    for sample in make_samples(task, 5, seed=0):
        assert sample.task == task
        assert len(sample.turns) == len(sample.answers) == len(sample.finals)
        result = grade(sample, [f" {answer}\n" for answer in sample.answers])
        assert result.exact and result.score == 1.0
        assert not grade(sample, []).exact
        assert grade(sample, []).score == 0.0


def test_unknown_task_is_named() -> None:
    with pytest.raises(ValueError, match="needle-7"):
        make_samples("needle-7", 1, seed=0)


@pytest.mark.parametrize("units", [512, 1024, 2048])
def test_needles_fill_the_context_exactly(units: int) -> None:
    for sample in make_samples(f"needle-{units}", 5, seed=2):
        text, question = sample.turns[0].rsplit(" What ", 1)
        assert task_text.count_units(text) == units
        assert text.count("The secret number of") == 8
        assert len(sample.turns) == 4
        for turn, answer in zip((question, *sample.turns[1:]), sample.answers, strict=True):
            name = turn.rstrip("?").split()[-1]
            assert f"The secret number of {name} is {answer}." in text


def test_held_out_name_orders_never_occur_in_training() -> None:
    def order(sample: Sample) -> bool:
        first, second = (task_text.NAMES.index(p[:-2]) for p in sample.turns[0].split("; ")[:2])
        return (3 * first + second) % 8 == 0

    rng = random.Random(0)
    assert all(order(task_text.recall(rng, 4, 2, held_out=True)) for _ in range(50))
    assert not any(order(task_text.recall(rng, 4, 2, held_out=False)) for _ in range(50))


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
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(find_model(model))
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
