"""An idle engine gives back what malloc has kept."""

from __future__ import annotations

import pytest

from kvserve.engine.device import pages
from kvserve.engine.device.pages import KeptMemory

MIB = 2**20


def test_it_trims_what_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held, trims = 300, 0

    def trim() -> None:
        nonlocal held, trims
        held, trims = held - 50, trims + 1

    monkeypatch.setattr(pages, "resident_bytes", lambda: held * MIB)
    monkeypatch.setattr(pages, "trim_memory", trim)
    kept = KeptMemory()
    seen = []
    for now in (360, 365, 370, 378, 250, 310, 320):
        held = now
        kept.give_back()
        seen.append(trims)
    assert seen == [0, 1, 1, 1, 1, 1, 2]  # 365 became 315; 320 is far above 250
