"""Clients' grammars are compiled in turn."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, cast

from kvserve.engine.core.core_loop import GrammarQueue
from kvserve.engine.messages import NewSequence
from kvserve.engine.sampling.grammar import GrammarCompiler
from kvserve.sampling_params import StructuredOutput
from tests.waiting import WAIT


class NotingCompiler:
    """Notes the order; the first grammar waits until all are queued."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.queued = threading.Event()

    def compile(self, wanted: StructuredOutput) -> Any:
        assert self.queued.wait(WAIT)
        self.order.append(wanted.value)
        return object()


def test_one_client_with_many_makes_others_wait_for_one() -> None:
    compiler = NotingCompiler()
    queue = GrammarQueue(cast(GrammarCompiler, compiler))
    sent = [(f"a{i}", "a") for i in range(50)] + [("b0", "b"), ("c0", "c"), ("b1", "b")]
    new = NewSequence(0, "r", [1], 1, [], 1.0, 1.0, 0, 0.0, None, 0, 0, None, None)
    for seq_id, (value, client) in enumerate(sent):
        queue.add(replace(new, seq_id=seq_id, client=client), StructuredOutput("regex", value))
    queue.drop([1])  # who leaves costs nothing
    compiler.queued.set()
    while queue:
        queue.take(1.0)
    queue.close()
    assert len(compiler.order) == len(sent) - 1 and "a1" not in compiler.order
    assert max(compiler.order.index(value) for value in ("b0", "c0")) <= 3
    assert compiler.order.index("b1") <= 6
