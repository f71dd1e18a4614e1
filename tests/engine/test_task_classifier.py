"""WindowKV's task: who decides it, and the checkpoint that does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from kvserve import LLM, SamplingParams
from kvserve.engine.frontend.task_classifier import CheckpointClassifier
from kvserve.log import ConfigError, RequestError

POLICY = {"name": "windowkv", "budget": 40}


class Always:
    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.seen: list[str] = []

    def task(self, prompt: str) -> str:
        self.seen.append(prompt)
        return self.answer


def test_without_a_classifier_a_task_is_named() -> None:
    with pytest.raises(ConfigError, match="task auto needs --task-classifier"):
        LLM("kvserve/tiny", policy={**POLICY, "task": "auto"})
    llm = LLM("kvserve/tiny", policy=POLICY)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    llm.generate(["some words " * 30], params)
    assert {p.task for p in llm.engine.core.runner.policies.values()} == {"localization"}  # type: ignore[attr-defined]
    named = replace(params, kv_policy={**POLICY, "task": "auto"})
    with pytest.raises(RequestError, match="name the task: localization or aggregation"):
        llm.generate(["some words " * 30], named)


@pytest.mark.parametrize("allowed", ["all", "none"])
def test_an_engine_asks_about_requests_that_leave_it_open(allowed: str, checkpoint: Path) -> None:
    """Text, or ids that the tokenizer can read; what a request names always wins."""
    policy = {**POLICY, "task": "auto"}
    flags = {"allow_request_policy": allowed, "task_classifier": str(checkpoint)}
    llm = LLM("kvserve/tiny", policy=policy, **flags)
    classifier = Always("aggregation")
    llm.engine._outputs._tasks()._classifier = classifier  # type: ignore[assignment]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    assert llm.engine.tokenizer is not None
    ids = llm.engine.tokenizer.encode("some words " * 30)
    prompts: list[Any] = ["some words " * 30, ids]
    details = [out.kv_cache_details for out in llm.generate(prompts, params)]
    assert all(one is not None and one.compactions == 1 for one in details)
    assert len(classifier.seen) == 2 and "some words" in classifier.seen[1]
    _, *asked = llm.engine.core.runner.policies.values()  # behind the server's own
    assert {p.task for p in asked} == {"aggregation"}  # type: ignore[attr-defined]
    if allowed == "all":
        named = replace(params, kv_policy={**POLICY, "task": "localization"})
        llm.generate(["some words " * 30], named)
        assert len(classifier.seen) == 2


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


def test_a_checkpoint_decides_and_sees_both_ends(checkpoint: Path) -> None:
    """511 tokens go in whole, of 512 and more the first and the last 256."""
    classifier = CheckpointClassifier(str(checkpoint))
    assert classifier.task("sum word word") == "aggregation"
    assert classifier.task("find word word") == "localization"  # equal logits: label 0
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
        LLM("kvserve/tiny", task_classifier=str(tmp_path / "nothing"))
    three = write_checkpoint(tmp_path / "three", num_labels=3)
    with pytest.raises(ConfigError, match="has 3 labels and needs two"):
        CheckpointClassifier(str(three))
