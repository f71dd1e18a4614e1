"""WindowKV's task: who decides it, the classifier that ships, and one from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from bench.task_classifier.evaluate import evaluate, handwritten
from bench.task_classifier.figures import Figures, wilson
from bench.task_classifier.requests import AGGREGATING, LOCATING, REGISTERS, SLOTS, TEXTS
from bench.task_classifier.samples import Sample, samples
from bench.task_classifier.templates import KINDS
from bench.task_classifier.train import FOLDS, Data, shares, train
from kvserve import LLM, SamplingParams
from kvserve.engine.frontend.prompt_segments import END, segments, shape
from kvserve.engine.frontend.task_classifier import (
    SHIPPED,
    CheckpointClassifier,
    HashedClassifier,
    load_classifier,
    resolve_task,
)
from kvserve.log import ConfigError

# ---- who decides --------------------------------------------------------------------------------


class Always:
    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.seen: list[str] = []

    def task(self, prompt: str) -> str:
        self.seen.append(prompt)
        return self.answer


def test_the_classifier_decides_what_is_left_open() -> None:
    classifier = Always("aggregation")
    spec = {"name": "windowkv", "budget": 64}
    expected = {**spec, "task": "aggregation"}
    assert resolve_task(spec, "text", classifier) == expected
    assert resolve_task({**spec, "task": "auto"}, "text", classifier) == expected
    assert resolve_task("windowkv", "text", classifier) == {
        "name": "windowkv",
        "task": "aggregation",
    }
    assert classifier.seen == ["text"] * 3 and "task" not in spec


def test_without_text_or_classifier_the_default_decides() -> None:
    spec = {"name": "windowkv", "budget": 64}
    never = Always("aggregation")
    assert resolve_task(spec, None, never) == {**spec, "task": "localization"}
    assert resolve_task(spec, None, never, "aggregation") == {**spec, "task": "aggregation"}
    assert resolve_task(spec, "text", None) == {**spec, "task": "localization"}
    assert not never.seen


def test_a_named_task_wins_and_other_policies_are_left_alone() -> None:
    never = Always("aggregation")
    for spec in ({"name": "windowkv", "task": "localization"}, {"name": "snapkv"}, "none", {}):
        assert resolve_task(spec, "text", never) == spec
    assert not never.seen


@pytest.mark.parametrize("allowed", ["all", "none"])
def test_an_engine_asks_about_requests_that_leave_it_open(allowed: str) -> None:
    """Text, or ids that the tokenizer can read; what a request names always wins."""
    policy = {"name": "windowkv", "budget": 40}
    llm = LLM("kvserve/tiny", policy=policy, allow_request_policy=allowed)
    llm.engine._outputs._tasks._classifier = classifier = Always("aggregation")
    params = SamplingParams(temperature=0.0, max_tokens=4)
    assert llm.engine.tokenizer is not None
    ids = llm.engine.tokenizer.encode("some words " * 30)
    prompts: list[Any] = ["some words " * 30, ids]
    details = [out.kv_cache_details for out in llm.generate(prompts, params)]
    assert all(one is not None and one.compactions == 1 for one in details)
    assert len(classifier.seen) == 2 and "some words" in classifier.seen[1]
    assert {p.task for p in llm.engine.core.runner.policies.values()} == {"aggregation"}  # type: ignore[attr-defined]
    if allowed == "all":
        named = replace(params, kv_policy={**policy, "task": "localization"})
        llm.generate(["some words " * 30], named)
        assert len(classifier.seen) == 2


def test_a_missing_checkpoint_shows_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--task-classifier"):
        LLM("kvserve/tiny", task_classifier=str(tmp_path / "none"))


# ---- the one that ships -------------------------------------------------------------------------


def test_families_are_in_one_fold_each_and_labels_in_all() -> None:
    made = samples(4, 0, FOLDS)
    families: dict[str, set[int]] = {}
    for sample in made:
        if "(" in sample.kind:
            families.setdefault(sample.kind, set()).add(sample.fold)
    assert len(families) == len(LOCATING) + len(AGGREGATING) > 60
    assert all(len(folds) == 1 for folds in families.values())
    for label in (True, False):
        assert {one.fold for one in made if one.localization is label} == set(range(FOLDS))
    assert len(KINDS) == 16 and sum(kind.localization for kind in KINDS.values()) == 6


def test_samples_know_which_part_is_text() -> None:
    sample = Sample.of("kind", 0, "Why?\n\n\x01It rained.\x02\n\nSay.", localization=True)
    assert sample.prompt == "Why?\n\nIt rained.\n\nSay."
    assert [sample.is_text(s.start, s.end) for s in segments(sample.prompt)] == [False, True, False]


def test_the_shipped_weights_are_as_good_as_said() -> None:
    """What `python -m bench.task_classifier.evaluate` prints, and the model card says."""
    assert SHIPPED.stat().st_size < 2**20
    card = SHIPPED.with_name("MODEL_CARD.md").read_text()
    shipped, made = HashedClassifier.load(SHIPPED), handwritten()
    assert len(made) >= 120 and max(len(sample.prompt.split()) for sample in made) > 4000
    for name in {sample.kind for sample in made}:
        figures = evaluate(shipped, [sample for sample in made if sample.kind == name])
        assert figures.accuracy >= 0.927 and figures.recall >= 0.88
        assert f"{name}: {figures}" in card


def test_nothing_written_by_hand_is_trained_on() -> None:
    grammar = [*LOCATING.values(), *AGGREGATING.values(), *SLOTS.values(), *REGISTERS.values()]
    trained = [*TEXTS, *(line for lines in grammar for line in lines)]
    prompts = [sample.prompt for sample in handwritten()]
    for line in (line for line in trained if len(line) > 30):
        assert not any(line in prompt for prompt in prompts)


@pytest.mark.parametrize(
    ("prompt", "task"),
    [
        ("Answer the question.\n\nThe key is under the mat. Where is the key?", "localization"),
        ("Please write a summary of this report.\n\nSales rose.\n\nSummary:", "aggregation"),
        ("Complete this code.\n\nimport os\n\ndef main():\n    return", "aggregation"),
        ("The lamp blinks twice. It is E04, a jam.\n\nmeaning of E04?", "localization"),
        ("Rain. No rain. Rain again.\n\nGroup the recurring themes.", "aggregation"),
        ("Quote the sentence that mentions rain.\n\nIt rained. It stopped.", "localization"),
    ],
)
def test_short_prompts(prompt: str, task: str) -> None:
    assert load_classifier().task(prompt) == task


def test_training_is_deterministic() -> None:
    once, again, other = (train(2, seed, steps=8) for seed in (3, 3, 4))
    assert once.asks.dtype == once.locates.dtype == np.int8
    assert np.abs(once.asks).max() == np.abs(once.locates).max() == 127
    for name, values in vars(once).items():
        assert np.array_equal(values, getattr(again, name))
    assert not np.array_equal(once.keys, other.keys)


def test_the_classifier_asks_as_training_does() -> None:
    """Sentence by sentence, a prompt's logit is the one that the matrices give."""
    data = Data(samples(2, 5, FOLDS)[::9])
    classifier = data.train(np.ones(len(data.samples), bool), 10)
    weights = [np.zeros(len(data.keys)) for _ in range(2)]
    places = np.searchsorted(data.keys, classifier.keys)
    for of, levels, scale in zip(
        weights, (classifier.asks, classifier.locates), classifier.scales, strict=True
    ):
        of[places] = levels * scale
    share = shares(data.standings.times(weights[0]) + classifier.biases[0], data.owners)
    said = data.wordings.pooled(data.owners, share, len(data.samples)).times(weights[1])
    expected = said + data.shapes.times(weights[1]) + classifier.biases[1]
    logits = [classifier.logit(sample.prompt) for sample in data.samples]
    assert logits == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.slow
def test_training_gives_the_shipped_weights() -> None:
    trained, shipped = train(80, 0), HashedClassifier.load(SHIPPED)
    assert np.array_equal(trained.keys, shipped.keys)
    assert np.abs(trained.locates.astype(int) - shipped.locates).max() <= 1
    assert np.abs(trained.asks.astype(int) - shipped.asks).max() <= 1


def test_segments() -> None:
    prompt = "Hi! Who is it\uff1f\n\nA: one. Two\nB: three\n\n«Dis-moi !» 何ですか。ok"
    found = segments(prompt)
    assert [prompt[s.start : s.end] for s in found] == [
        *(
            "Hi!",
            "Who is it\uff1f",
            "A: one.",
            "Two",
            "B: three",
            "«Dis-moi !»",
            "何ですか。",
            "ok",
        ),
    ]
    assert found[1].text == "Who is it?"
    assert [(s.front, s.back) for s in found] == [(at, 7 - at) for at in range(8)]
    assert [s.front_block for s in found] == [2, 2, 0, 0, 0, 0, 0, 0]
    assert [s.back_block for s in found] == [0, 0, 0, 0, 0, 3, 3, 3]
    assert [s.begins for s in found][:5] == ["upper", "upper", "label", "upper", "label"]
    shipped = HashedClassifier.load(SHIPPED)
    for text in ("", " \n", "\ud800", "...", "?" * 9000):
        assert len(segments(text)) <= 1
        shipped.task(text)


def test_only_the_ends_of_a_prompt_count() -> None:
    head, tail = "One here. " * 500, "Last there. " * 500
    short, long = (segments(head + middle + tail) for middle in ("", "Between. " * 9000))
    assert [s.text for s in short] == [s.text for s in long] and len(long) == 2 * END
    shipped = HashedClassifier.load(SHIPPED)
    assert shipped.logit(head + tail) == shipped.logit(head + "Between. " * 9000 + tail)


def test_repeated_labels_are_noticed() -> None:
    once, thrice = (
        set(shape("Question: a\nAnswer: b\n" * times + "Question: c\nAnswer:")) for times in (1, 3)
    )
    assert {"& again question:", "& again answer:", "& open again"} <= thrice - once


def test_intervals() -> None:
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson's, as often printed
    assert wilson(0, 0) == (0, 1)
    figures = Figures.of(np.array([1, 1, 0, 0], bool), np.array([1, 0, 0, 1], bool))
    assert (figures.accuracy, figures.precision, figures.recall, figures.f1) == (0.5,) * 4


# ---- a checkpoint -------------------------------------------------------------------------------


def write_checkpoint(directory: Path, num_labels: int = 2) -> Path:
    """A classifier without layers to speak of: label 1 where the first word is ``sum``."""
    words = {"[UNK]": 0, "[PAD]": 1, "find": 2, "sum": 3, "word": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(directory)
    config = BertConfig(
        vocab_size=5, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=8, max_position_embeddings=512,
    )  # fmt: skip
    config.num_labels = num_labels
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for norm in (m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)):
            norm.weight.fill_(1)
        model.bert.embeddings.word_embeddings.weight[3] = torch.tensor([1.0, -1.0] * 4)
        pooler: Any = model.bert.pooler
        pooler.dense.weight.copy_(torch.eye(8))
        model.classifier.weight[1] = torch.tensor([1.0, -1.0] * 4)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("classifier"))


def test_a_checkpoint_decides(checkpoint: Path) -> None:
    classifier = load_classifier(str(checkpoint))
    assert isinstance(classifier, CheckpointClassifier)
    assert classifier.task("sum word word") == "aggregation"
    assert classifier.task("find word word") == "localization"  # equal logits: label 0


def test_a_checkpoint_sees_both_ends(checkpoint: Path) -> None:
    """511 tokens go in whole, of 512 and more the first and the last 256."""
    classifier = CheckpointClassifier(str(checkpoint))
    seen: list[list[int]] = []
    forward = classifier._model.forward

    def record(input_ids: torch.Tensor) -> Any:
        seen.append(input_ids[0].tolist())
        return forward(input_ids=input_ids)

    classifier._model.forward = record
    classifier.task("find " * 511)
    classifier.task("find " * 256 + "word " * 1000 + "sum " * 256)
    assert seen == [[2] * 511, [2] * 256 + [3] * 256]


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--task-classifier: cannot load"):
        load_classifier(str(tmp_path / "nothing"))
    three = write_checkpoint(tmp_path / "three", num_labels=3)
    with pytest.raises(ConfigError, match="has 3 labels and needs two"):
        load_classifier(str(three))
