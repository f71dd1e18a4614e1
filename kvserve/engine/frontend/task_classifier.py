"""Decides WindowKV's ``task="auto"`` (arXiv 2503.17922): locate an answer, or aggregate?

The paper asks a fine-tuned BERT whose weights are not public. ``--task-classifier`` names a
checkpoint of such a classifier; without one, auto is refused. It runs before a request reaches the
engine, where its text is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvserve.config import CompressionConfig
from kvserve.log import ConfigError, RequestError, logger

LOCALIZATION, AGGREGATION = "localization", "aggregation"
_END = 256
_REFUSED = (
    "windowkv's task auto needs --task-classifier, a checkpoint that tells a prompt's task; "
    f"name the task: {LOCALIZATION} or {AGGREGATION}"
)


class TaskResolver:
    """Decides the task of requests that run under WindowKV and leave it to the server."""

    def __init__(self, config: CompressionConfig) -> None:
        own = config.policy_args
        is_open = _is_open(config.policy, own.get("task"))
        self._open = {"name": config.policy, **own} if is_open else None
        """The server's policy, if it leaves the task open."""
        checkpoint = config.task_classifier
        self._classifier = None if checkpoint is None else CheckpointClassifier(checkpoint)
        if self._classifier is None and self._open is not None:
            raise ConfigError(f"--policy.task: {_REFUSED}")

    def resolve(
        self, spec: str | Mapping[str, Any] | None, text: Callable[[], str | None]
    ) -> str | Mapping[str, Any] | None:
        """A request's ``kv_policy`` with its task; ``spec`` itself if no task is open. ``text``
        gives the prompt's, which is asked for only then."""
        asked = self._open if spec is None else spec
        if (
            asked is None
            or isinstance(asked, str)
            or not _is_open(asked.get("name"), asked.get("task"))
        ):
            return spec
        if self._classifier is None:
            raise RequestError(f"kv_policy.task: {_REFUSED}", param="kv_policy.task")
        prompt = text()
        task = LOCALIZATION if prompt is None else self._classifier.task(prompt)
        logger.info("windowkv: task %s", task)
        return {**asked, "task": task}


def _is_open(policy: object, task: object) -> bool:
    return policy == "windowkv" and task == "auto"


class CheckpointClassifier:
    """A sequence classifier with two labels, 0 for localization, as the paper trains one.

    A prompt of 512 tokens or more is cut to its first and last 256, special tokens among them.
    Raises ``ConfigError`` if the checkpoint cannot be used.
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
        """``localization`` or ``aggregation``."""
        import torch

        ids = self._tokenizer(prompt, verbose=False)["input_ids"]
        if len(ids) >= 2 * _END:
            ids = ids[:_END] + ids[-_END:]
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([ids])).logits[0]
        return LOCALIZATION if logits[0] >= logits[1] else AGGREGATION
