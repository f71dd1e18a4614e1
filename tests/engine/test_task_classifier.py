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

from bench.task_classifier.samples import samples
from bench.task_classifier.templates import KINDS
from bench.task_classifier.train import evaluate, train
from kvserve import LLM, SamplingParams
from kvserve.engine.frontend.task_classifier import (
    SHIPPED,
    CheckpointClassifier,
    HashedClassifier,
    features,
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


def test_held_out_templates_are_held_out() -> None:
    assert len(KINDS) == 16 and sum(kind.localization for kind in KINDS.values()) == 6
    for kind in KINDS.values():
        assert len(kind.held_out) >= 3
        assert not set(kind.held_out) & {t for other in KINDS.values() for t in other.train}


def test_the_shipped_weights_are_as_good_as_said() -> None:
    """What training prints, and the model card says."""
    assert SHIPPED.stat().st_size < 2**20
    shipped = HashedClassifier.load(SHIPPED)
    figures = evaluate(shipped, samples(60, 1, held_out=True))
    assert figures.accuracy >= 0.927
    assert str(figures) in SHIPPED.with_name("MODEL_CARD.md").read_text()


@pytest.mark.parametrize(
    ("prompt", "task"),
    [
        ("Answer the question.\n\nThe key is under the mat. Where is the key?", "localization"),
        ("Please write a summary of this report.\n\nSales rose.\n\nSummary:", "aggregation"),
        ("Complete this code.\n\nimport os\n\ndef main():\n    return", "aggregation"),
    ],
)
def test_short_prompts(prompt: str, task: str) -> None:
    assert load_classifier().task(prompt) == task


def test_training_is_deterministic() -> None:
    once, again, other = (train(4, seed, steps=20) for seed in (3, 3, 4))
    assert once[0].dtype == np.int8 and np.abs(once[0]).max() == 127
    assert (once[0] == again[0]).all() and once[1:] == again[1:]
    assert (once[0] != other[0]).any()


@pytest.mark.slow
def test_training_gives_the_shipped_weights() -> None:
    weights, scale, bias = train(350, 0)
    with np.load(SHIPPED) as shipped:
        assert np.abs(weights.astype(int) - shipped["weights"]).max() <= 1
        assert (scale, bias) == pytest.approx((float(shipped["scale"]), float(shipped["bias"])))


def test_features() -> None:
    buckets, values = features("Where is it? Where?")
    assert len(buckets) == len(set(buckets.tolist())) == 8  # 4 words and 4 pairs
    assert np.linalg.norm(values) == pytest.approx(1)
    for text in ("", " \n", "\ud800"):
        assert len(features(text)[0]) <= 1
        HashedClassifier.load(SHIPPED).task(text)
    same = [features(f"Paragraph {number}: WORDS")[0] for number in (3, 47)]
    assert (same[0] == same[1]).all()


def test_only_the_ends_of_a_prompt_count() -> None:
    head, tail = "first " * 300, "last " * 300
    short, long = (features(head + middle + tail) for middle in ("", "between " * 9000))
    assert (short[0] == long[0]).all() and (short[1] == long[1]).all()
    other = features("word " + head + tail)
    assert len(other[0]) > len(short[0])


def test_repeated_labels_are_noticed() -> None:
    once, thrice = (features("Question: a Answer: b " * times)[0] for times in (1, 3))
    assert len(set(thrice.tolist()) - set(once.tolist())) >= 2


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
