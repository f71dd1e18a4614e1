"""Evaluates a classifier on the prompts written by hand, which no training sees.

    python -m bench.task_classifier.evaluate [WEIGHTS]

prints its figures and the prompts that it gets wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from bench.task_classifier.figures import Figures
from bench.task_classifier.samples import Sample
from kvserve.engine.frontend.task_classifier import SHIPPED, HashedClassifier

HERE = Path(__file__).parent


def handwritten() -> list[Sample]:
    """The prompts of ``handwritten.jsonl`` with their texts filled in, of up to 4,000 words."""
    texts: dict[str, str] = yaml.safe_load(
        (HERE / "handwritten_texts.yaml").read_text(encoding="utf-8")
    )
    whole = list(texts.values())
    texts["archive"], texts["archive2"] = "\n".join(whole), "\n".join(reversed(whole))
    made = []
    for line in (HERE / "handwritten.jsonl").read_text(encoding="utf-8").splitlines():
        given = json.loads(line)
        prompt: str = given["prompt"]
        for name, text in texts.items():
            prompt = prompt.replace(f"{{{name}}}", text)
        made.append(Sample(f"{given['set']} set", -1, prompt, given["task"] == "localization"))
    return made


def evaluate(classifier: HashedClassifier, made: Sequence[Sample]) -> Figures:
    predicted = np.array([classifier.task(sample.prompt) == "localization" for sample in made])
    return Figures.of(predicted, np.array([sample.localization for sample in made]))


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED
    classifier = HashedClassifier.load(path)
    made = handwritten()
    for name in dict.fromkeys(sample.kind for sample in made):
        mine = [sample for sample in made if sample.kind == name]
        sys.stdout.write(f"written by hand, {name}: {evaluate(classifier, mine)}\n")
    for sample in made:
        if (classifier.logit(sample.prompt) >= 0) != sample.localization:
            task = "locating" if sample.localization else "aggregating"
            text = " ".join(sample.prompt.split())
            sys.stdout.write(f"  {task}, taken for the other: {text[:90]} ... {text[-90:]}\n")


if __name__ == "__main__":
    main()
