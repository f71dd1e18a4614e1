"""Classifies prompts for WindowKV (arXiv 2503.17922): does a task locate an answer, or aggregate?

This runs before a request reaches the engine, where its text is known, and decides the policy's
``task="auto"``. The paper's classifier is a fine-tuned BERT whose weights are not public; a
checkpoint of one can be given. Without it a small classifier that ships with the package decides,
by hashed words alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvserve.config import CompressionConfig
from kvserve.engine.frontend.prompt_segments import DATA, hashes, segments, shape
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.log import ConfigError, logger

LOCALIZATION, AGGREGATION = "localization", "aggregation"
SHIPPED = DATA / "weights.npz"
_END = 256


class TaskClassifier(Protocol):
    """Tells a prompt's task by its text."""

    def task(self, prompt: str) -> str:
        """``localization`` or ``aggregation``."""
        ...


def resolve_task(
    spec: str | Mapping[str, Any],
    prompt: str | None,
    classifier: TaskClassifier | None,
    default: str = LOCALIZATION,
) -> str | Mapping[str, Any]:
    """A policy's spec with ``task`` decided, if it is WindowKV's and left to the server.

    A task that a request names always wins. ``default`` is for prompts without a text and for
    servers without a classifier.
    """
    fields = {"name": spec} if isinstance(spec, str) else dict(spec)
    if fields.get("name") != "windowkv" or fields.get("task", "auto") != "auto":
        return spec
    known = prompt is not None and classifier is not None
    fields["task"] = classifier.task(prompt) if known else default  # type: ignore[union-attr,arg-type]
    logger.info("windowkv: task %s (%s)", fields["task"], "classified" if known else "default")
    return fields


class TaskResolver:
    """Decides the task of requests that run under WindowKV and do not name one."""

    def __init__(self, config: CompressionConfig, tokenizer: Tokenizer | None) -> None:
        self._server_policy = {"name": config.policy, **config.policy_args}
        self._checkpoint = config.task_classifier
        self._tokenizer = tokenizer
        if self._checkpoint:
            _ = self._classifier  # loaded now, so that its errors show at start

    def resolve(
        self, spec: str | Mapping[str, Any] | None, prompt: str | None, token_ids: list[int]
    ) -> str | Mapping[str, Any] | None:
        """A request's ``kv_policy`` with its task; ``spec`` itself if no task is open."""
        asked = self._server_policy if spec is None else spec
        name = asked if isinstance(asked, str) else asked.get("name")
        if name != "windowkv":
            return spec
        if prompt is None and self._tokenizer is not None:
            prompt = self._tokenizer.decode(token_ids)
        resolved = resolve_task(asked, prompt, self._classifier)
        return spec if resolved is asked else resolved

    @cached_property
    def _classifier(self) -> TaskClassifier:
        return load_classifier(self._checkpoint)


def load_classifier(checkpoint: str | None = None) -> TaskClassifier:
    """The classifier of a Hugging Face directory, or the one that ships.

    Raises ``ConfigError`` if the checkpoint cannot be used.
    """
    return CheckpointClassifier(checkpoint) if checkpoint else HashedClassifier.load(SHIPPED)


# ---- the one that ships -------------------------------------------------------------------------


@dataclass(frozen=True)
class HashedClassifier:
    """Two logistic regressions on hashed words: is a sentence a request, and what does it ask for?

    ``keys: uint32 [F]`` are features in order; ``asks`` and ``locates``, ``int8 [F]``, weights.
    """

    keys: NDArray[np.uint32]
    asks: NDArray[np.int8]
    locates: NDArray[np.int8]
    scales: NDArray[np.float64]
    biases: NDArray[np.float64]

    @classmethod
    def load(cls, path: Path) -> HashedClassifier:
        with np.load(path, allow_pickle=False) as saved:
            return cls(**{name: saved[name] for name in cls.__dataclass_fields__})

    def task(self, prompt: str) -> str:
        return LOCALIZATION if self.logit(prompt) >= 0 else AGGREGATION

    def logit(self, prompt: str) -> float:
        """Log odds of localization: those of its sentences' words plus those of its outward shape.

        Sentences count by their mean, each weighted by its odds of being the request.
        """
        said, asks = [], []
        for segment in segments(prompt):
            wording = hashes(segment.wording())
            said.append(self._sum(self.locates, 1, wording))
            asks.append(self._sum(self.asks, 0, [*wording, *hashes(segment.standing())]))
        weights = np.exp(np.array(asks) + self.biases[0])
        build = self._sum(self.locates, 1, hashes(shape(prompt)))
        total = float(weights @ np.array(said)) / (1 + float(weights.sum()))
        return total + build + float(self.biases[1])

    def _sum(self, weights: NDArray[np.int8], which: int, features: list[int]) -> float:
        """The sum of a sentence's weights, divided by the root of its number of features."""
        if not features or not len(self.keys):
            return 0.0
        wanted = np.array(features, np.uint32)
        places = np.searchsorted(self.keys, wanted).clip(max=len(self.keys) - 1)
        found = weights[places[self.keys[places] == wanted]].sum(dtype=np.int64)
        return float(self.scales[which]) * float(found) / math.sqrt(len(features))


# ---- a checkpoint -------------------------------------------------------------------------------


class CheckpointClassifier:
    """A sequence classifier with two labels, 0 for localization, as the paper trains one.

    A prompt of 512 tokens or more is cut to its first and last 256, special tokens among them.
    """

    def __init__(self, checkpoint: str) -> None:
        try:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
            self._model: Any = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--task-classifier: cannot load {checkpoint}: {error}") from None
        labels = self._model.config.num_labels
        if labels != 2:
            raise ConfigError(
                f"--task-classifier: {checkpoint} has {labels} labels and needs two, "
                "0 for localization and 1 for aggregation"
            )

    def task(self, prompt: str) -> str:
        import torch

        ids = self._tokenizer(prompt, verbose=False)["input_ids"]
        if len(ids) >= 2 * _END:
            ids = ids[:_END] + ids[-_END:]
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([ids])).logits[0]
        return LOCALIZATION if logits[0] >= logits[1] else AGGREGATION
