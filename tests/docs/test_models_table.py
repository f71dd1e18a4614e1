"""docs/models.md lists every architecture that loads, with what its tests compare.

``python -m tests.docs.test_models_table`` writes the table.
"""

from __future__ import annotations

from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvserve.engine.models.families import UNDIVIDED, VARIANTS
from tests.checkpoints import architecture_of
from tests.engine.models import test_borrowed, test_models

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- tests/docs/test_models_table.py writes this table -->\n", "\n<!-- end -->"
VARIED = {"": "plain", "window": "with a window", "scaled": "two scaled RoPEs", "yarn": "YaRN"}


def table() -> str:
    """Native families by architecture, then those on transformers' modules."""
    compared: dict[str, list[str]] = {name: [] for name in VARIANTS}
    for family in test_models.FAMILIES:
        kind, varied = test_models.kind_of(family)
        compared[architecture_of(kind)].append(VARIED[varied])
    lines = ["| architecture | form | ranks | compared |", "|---|---|---|---|"]
    for name, cases in compared.items():
        ranks = "one" if name in UNDIVIDED else "any"
        lines.append(f"| `{name}` | native | {ranks} | logits and tokens: {', '.join(cases)} |")
    for kind in sorted(test_borrowed.MODELS):
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        lines.append(f"| `{name}` | transformers | one | tokens |")
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    assert BEGIN + table() + END in PAGE.read_text(), "python -m tests.docs.test_models_table"


def test_every_native_family_is_compared() -> None:
    assert all(line.count("|") == 5 and ": |" not in line for line in table().splitlines()[2:])


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
