"""WindowKV's question to a prompt: does it locate an answer, or aggregate (arXiv 2503.17922)?

Runs where text is known, before a request reaches the engine, and fills in the policy's
``task="auto"``. The paper's classifier is a fine-tuned BERT whose weights are not public: give a
checkpoint of one. Otherwise a small one that ships with the package decides, by hashed words alone.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvserve.config import CompressionConfig
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.log import ConfigError, logger

LOCALIZATION, AGGREGATION = "localization", "aggregation"
NUM_BUCKETS = 2**15
SHIPPED = Path(__file__).parents[2] / "data" / "windowkv_classifier" / "weights.npz"
_END = 256
_END_CHARS = 32 * _END
_OUTER = 8
_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")


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
    """Names the task of every request that runs under WindowKV and leaves it open."""

    def __init__(self, config: CompressionConfig, tokenizer: Tokenizer | None) -> None:
        self._server_policy = {"name": config.policy, **config.policy_args}
        self._checkpoint = config.task_classifier
        self._tokenizer = tokenizer
        if self._checkpoint:
            _ = self._classifier  # what is wrong with it shows at the start

    def resolve(
        self, spec: str | Mapping[str, Any] | None, prompt: str | None, token_ids: list[int]
    ) -> str | Mapping[str, Any] | None:
        """A request's ``kv_policy``; ``None``, the server's policy, stays so if nothing is open."""
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


class HashedClassifier:
    """Logistic regression on hashed words and pairs of words: ``weights int8 [NUM_BUCKETS]``."""

    def __init__(self, weights: NDArray[np.int8], scale: float, bias: float) -> None:
        self._weights = weights
        self._scale = scale
        self._bias = bias

    @classmethod
    def load(cls, path: Path) -> HashedClassifier:
        with np.load(path, allow_pickle=False) as saved:
            return cls(saved["weights"], float(saved["scale"]), float(saved["bias"]))

    def task(self, prompt: str) -> str:
        return LOCALIZATION if self.logit(prompt) >= 0 else AGGREGATION

    def logit(self, prompt: str) -> float:
        """Log odds of localization."""
        buckets, values = features(prompt)
        return self._scale * float(self._weights[buckets] @ values) + self._bias


def features(prompt: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Buckets of the words and pairs of words at a prompt's ends, and their values (norm 1).

    The first and the last 256 words, in lower case and with all numbers alike; they are looked for
    in the 8192 characters at either end. Instructions stand outermost, so that a word counts less
    the further inside it is, and a bucket's value is the logarithm of what its words count. Labels
    ("Answer:") that come again and again, as in solved examples, have buckets of their own.
    """
    if len(prompt) > 2 * _END_CHARS:
        head, tail = _words(prompt[:_END_CHARS]), _words(prompt[-_END_CHARS:])
    else:
        words = _words(prompt)
        head, tail = words[: len(words) // 2], words[len(words) // 2 :]
    counts: defaultdict[int, float] = defaultdict(float)
    labels: Counter[str] = Counter()
    for words, step in ((head[:_END], 1), (tail[-_END:], -1)):
        pairs = list(map(" ".join, pairwise(words)))
        for grams in (words, pairs):
            for place, gram in enumerate(grams[::step]):
                counts[_bucket(gram)] += _OUTER / max(place, _OUTER)
        labels.update(pair for pair in pairs if pair.endswith(" :"))
    for label, times in labels.items():
        if times > 2:
            counts[_bucket(f"{label} again")] += 2
    values = np.log1p(np.array(list(counts.values())))
    values /= max(float(np.linalg.norm(values)), 1e-6)
    return np.array(list(counts), np.int64), values.astype(np.float32)


def _bucket(gram: str) -> int:
    return zlib.crc32(gram.encode(errors="replace")) % NUM_BUCKETS


def _words(text: str) -> list[str]:
    return ["0" if word.isdigit() else word for word in _WORD.findall(text.lower())]


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
