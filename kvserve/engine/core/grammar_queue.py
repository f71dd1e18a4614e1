"""Sequences whose grammar is being compiled, and in which order that happens."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

from kvserve.engine.messages import NewSequence
from kvserve.engine.sampling.grammar import GrammarCompiler, Matcher
from kvserve.sampling_params import StructuredOutput
from kvserve.turns import Turns


class GrammarQueue:
    """A thread compiles, so that no other sequence waits for a grammar.

    It takes one grammar of each client in turn: one that sends many makes the others wait for one.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._turns = Turns(1, "kvserve-grammar")
        self._queue: dict[int, tuple[NewSequence, Future[Matcher]]] = {}

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, new: NewSequence, wanted: StructuredOutput) -> None:
        compiled = self._turns.submit(new.client, partial(self._compiler.compile, wanted))
        self._queue[new.seq_id] = new, compiled

    def drop(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            if seq_id in self._queue:
                self._queue.pop(seq_id)[1].cancel()

    def take(self, timeout: float) -> list[tuple[NewSequence, Future[Matcher]]]:
        """Remove and return the sequences whose grammar is compiled or refused.

        Waits up to ``timeout`` seconds for one of the queued grammars.
        """
        if not self._queue:
            return []
        wait([future for _, future in self._queue.values()], timeout, FIRST_COMPLETED)
        done = [(new, future) for new, future in self._queue.values() if future.done()]
        self.drop([new.seq_id for new, _ in done])
        return done

    def close(self) -> None:
        """Compile no more; who waits gets no answer."""
        self._turns.close()
