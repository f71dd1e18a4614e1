"""``reference/models.md``: every architecture that loads, with what its tests compare."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from docs.generate.markdown import table
from kvserve.engine.models.families import UNDIVIDED, VARIANTS
from tests.checkpoints import architecture_of
from tests.engine.models import test_borrowed, test_gemmas, test_models
from tests.engine.models.hybrids import FAMILIES, OURS

_INTRO = """\
# Architectures

Each is compared with transformers in float32, on random tiny checkpoints: four prompts of unequal
lengths and 64 greedy tokens, in chunks and whole. [Models](../models.md) says what else matters.
"""
_VARIED = {"": "plain", "window": "with a window", "scaled": "two scaled RoPEs", "yarn": "YaRN"}


def page() -> str:
    """Native families by architecture, then those on transformers' modules."""
    compared: dict[str, list[str]] = {name: [] for name in VARIANTS}
    for family in test_models.FAMILIES:
        kind, varied = test_models.kind_of(family)
        compared[architecture_of(kind)].append(_VARIED[varied])
    rows = [
        [
            f"`{name}`",
            "native",
            "one" if name in UNDIVIDED else "any",
            f"logits and tokens: {', '.join(cases)}",
        ]
        for name, cases in compared.items()
    ]
    for kind in sorted(test_borrowed.MODELS):
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        rows.append([f"`{name}`", "transformers", "one", "tokens"])
    for kind in sorted({kind for kind, _ in test_gemmas.KINDS.values()}):
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        rows.append([f"`{name}`", "transformers", "one", "logits and tokens"])
    for kind in sorted(FAMILIES):
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        form = "native on CPUs" if kind in OURS else "transformers"
        rows.append([f"`{name}`", f"{form}, with states", "one", "logits and tokens"])
    return _INTRO + "\n" + table(["architecture", "form", "ranks", "compared"], rows)
