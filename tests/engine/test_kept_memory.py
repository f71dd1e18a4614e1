"""An idle engine gives back what malloc has kept."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvserve.engine.core import core_loop
from kvserve.engine.core.core_loop import Command, ResetPrefixCache, Stop, run_core
from kvserve.engine.core.engine_core import EngineCore
from kvserve.engine.device import pages
from kvserve.engine.device.pages import KeptMemory
from kvserve.engine.messages import StepOutputs

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


def test_the_loop_does_so_once_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[list[Command]] = [[ResetPrefixCache()], [], [ResetPrefixCache()], [Stop()]]
    given_back: list[int] = []

    class Kept:
        def give_back(self) -> None:
            given_back.append(len(turns))

    class Channel:
        def receive(self, block: bool) -> Iterable[Command]:
            assert block
            return turns.pop(0)

        def send(self, outputs: StepOutputs) -> None:
            pass

    def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr(core_loop, "KeptMemory", Kept)
    core = SimpleNamespace(
        check=nothing,
        has_work=False,
        stats=nothing,
        reset_prefix_cache=nothing,
        grammars=SimpleNamespace(tidy=nothing),
    )
    run_core(cast(EngineCore, core), Channel())
    assert given_back == [2]
