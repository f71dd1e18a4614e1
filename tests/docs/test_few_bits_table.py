"""docs/kv-cache-dtype.md's table of entries in few bits against the results that it names."""

from __future__ import annotations

import json

import pytest

from tests.docs.pages import ROOT

RESULTS = ROOT / "bench/results"
PARTS = [
    ("2026-11-28-fidelity-few-bits.json", ["3bit", "2.5bit"]),
    ("2026-11-28-fidelity-few-bits-others.json", ["k4v4", "2bit"]),
]
TEXTS = ("docs", "code", "gsm")


@pytest.mark.parametrize(("file", "forms"), PARTS)
def test_its_numbers_are_those_of_the_files(file: str, forms: list[str]) -> None:
    page = (ROOT / "docs/kv-cache-dtype.md").read_text().partition("## Measured")[2]
    result = json.loads((RESULTS / file).read_text())
    rows = {(row["text"], row["kv_cache_dtype"]): row for row in result["rows"]}
    asked = result["settings"]["facts"]
    for form in forms:
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{form}` |"))
        _, size, *kls, facts = (cell.strip() for cell in line.strip("|").split("|"))
        of = [rows[text, form] for text in TEXTS]
        if form != "3bit":  # the page says in which blocks it was
            assert float(size) == pytest.approx(of[0]["of_full"], abs=5e-4)
        for kl, row in zip(kls, of, strict=True):
            mean, _, error = kl.partition(" ± ")
            assert float(mean) == round(row["kl"], 3)
            assert not error or float(error) == round(row["kl_error"], 4)
        found, full = (
            sum(round(rows[text, held]["facts"] * asked * rows[text, held]["n"]) for text in TEXTS)
            for held in (form, "auto")
        )
        assert facts == f"{found} of {full}"
