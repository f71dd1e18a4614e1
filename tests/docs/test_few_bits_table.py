"""docs/kv-cache-dtype.md's table of entries in few bits against the results that it names."""

from __future__ import annotations

import json

import pytest

from tests.docs.pages import ROOT

RESULTS = ROOT / "bench/results"
PARTS = [
    ("2026-11-28-fidelity-2.5bit-*.json", {"2.5bit": "none"}),
    ("2026-11-28-fidelity-few-bits-others.json", {"k4v4": "none", "2bit": "none"}),
    ("2026-11-28-fidelity-rest-*.json", {"3bit": "none", "a rest": "keydiff"}),
]
TEXTS = ("docs", "code", "gsm")  # the last has more letters in some files


@pytest.mark.parametrize(("files", "forms"), PARTS)
def test_its_numbers_are_those_of_the_files(files: str, forms: dict[str, str]) -> None:
    page = (ROOT / "docs/kv-cache-dtype.md").read_text().partition("## Measured")[2]
    results = [json.loads(file.read_text()) for file in RESULTS.glob(files)]
    rows = {
        (row["text"].removesuffix("8k"), row["policy_args"]["name"], row["kv_cache_dtype"]): row
        for result in results
        for row in result["rows"]
    }
    asked = results[0]["settings"]["facts"]
    for form, policy in forms.items():
        (line,) = (
            line for line in page.splitlines() if line.startswith((f"| `{form}` |", f"| [{form}]"))
        )
        _, size, *kls, facts = (cell.strip() for cell in line.strip("|").split("|"))
        held = "3bit" if policy == "keydiff" else form
        of = [rows[text, policy, held] for text in TEXTS]
        assert float(size) == pytest.approx(of[0]["of_full"], abs=5e-4)
        for kl, row in zip(kls, of, strict=True):
            mean, _, error = kl.partition(" ± ")
            assert float(mean) == round(row["kl"], 3)
            assert not error or float(error) == round(row["kl_error"], 4)
        found, full = (
            sum(round(row["facts"] * asked * row["n"]) for row in each)
            for each in (of, [rows[text, "none", "auto"] for text in TEXTS])
        )
        assert facts == f"{found} of {full}"
