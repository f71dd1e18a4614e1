"""docs/scaling.md is what bench/scaling.py says, and that agrees with sums done by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import scaling
from kvserve.engine.models.spec import parse_spec


def test_the_page_is_up_to_date() -> None:
    page = Path(scaling.__file__).parents[1] / "docs" / "scaling.md"
    assert page.read_text() == scaling.page(), "run: python bench/scaling.py > docs/scaling.md"


def test_sums_done_by_hand() -> None:
    spec = parse_spec(scaling.SHAPES["Llama 3.1 8B"], "")
    one, four = scaling.Rank(spec, 1), scaling.Rank(spec, 4)
    # 32 layers of 4096 x (4096 + 1024 + 1024 + 4096 + 3 * 14336), and two matrices of 128256.
    weights = 2 * 4096 * (32 * (10240 + 43008) + 2 * 128256)
    assert one.weights_bytes == weights and four.weights_bytes == weights / 4
    assert one.cache(1) == 2 * 2 * 32 * 8 * 128 / 4e12 == 4 * four.cache(1)
    link = scaling.Link("", 1e9, 1e-3)
    # 65 all-reduces of 3 tokens and the logits of one: 2 * 3/4 and 3/4 of their bytes.
    seconds = (65 * 1.5 * 3 * 4096 * 2 + 0.75 * 128256 * 2) / 1e9 + 67e-3
    assert four.calls(3, 1, link) == pytest.approx(seconds)
    assert one.calls(3, 1, link) == 0.0
