"""Decoding steps as CUDA graphs: padded to a few sizes, over buffers that never move.

A graph holds one forward of the first rows, one token of each or a chunk: it reads the rows'
tensors, fills the buffers of its batch in place, and logs queries to the slots in them. Events,
swaps and table updates run before it and change what the tensors hold, never where they are.
Without a GPU the captured function is simply called, so that the same steps run there.

A graph stores addresses, and keeps alive only the memory that it allocated itself. A ``PaddedStep``
therefore holds the buffers that the graph was given.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from weakref import WeakMethod

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.device.transfer import to_device
from kvserve.engine.messages import Row
from kvserve.engine.runner.padded_step import BOTH_KINDS, PaddedStep, StepParts
from kvserve.scheduler.arrays import IntArray, ragged_arange

LARGEST = 512
"""Tokens of a captured step."""


class DecodeGraphs:
    """A graph for each of ``sizes`` and each kind of step. ``decode`` replays one; ``chunks``, one
    of those in which each row has up to ``longest`` tokens."""

    def __init__(
        self, parts: StepParts, sizes: Sequence[int], longest: int = 1, most_rows: int = LARGEST
    ) -> None:
        """Steps of more than ``most_rows`` rows have no chunks."""
        self.replays = self.chunk_replays = 0
        self._sizes, self._longest, self._device = sizes, longest, parts.rows.device
        self._count = torch.zeros((), dtype=torch.int64, device=self._device)
        self._pool = torch.cuda.graph_pool_handle() if self._device == "cuda" else None
        most = LARGEST // longest if longest > 1 and parts.attention.replays_chunks else 0
        self.chunk_sizes = [size for size in sizes if size <= most]
        del self.chunk_sizes[bisect_left(self.chunk_sizes, most_rows) + 1 :]
        # The largest first: the others fit into its memory.
        self._chunks = {
            (size, logs_queries): self._capture(
                parts.chunks(np.arange(size + 1) * longest, logs_queries, self._count)
            )
            for size in reversed(self.chunk_sizes)
            for logs_queries in BOTH_KINDS
        }
        self._steps = {
            (size, logs_queries): self._capture(parts.step(size, logs_queries, self._count))
            for size in reversed(sizes)
            for logs_queries in BOTH_KINDS
        }

    def row(self, reason: str) -> Row:
        """The start-up table's row; ``reason`` is that of ``EnginePlan.graph_sizes``."""
        chunks, most = len(self.chunk_sizes), f"decodes of up to {self._sizes[-1]}"
        beside = f"; with guesses {chunks}" if chunks else ""
        return "cuda graphs", f"{most}, {len(self._sizes)} sizes{beside}", reason

    def decode(self, num_decoding: int, logs_queries: bool = False) -> Tensor | None:
        """One token of each of the first rows: hidden states [num_decoding, hidden], which the next
        call overwrites; ``None`` if there is no graph for so many rows."""
        if not 0 < num_decoding <= self._sizes[-1]:
            return None
        self.replays += 1
        size = next(size for size in self._sizes if size >= num_decoding)
        self._count.fill_(num_decoding)
        return self._steps[size, logs_queries].run()[:num_decoding]

    def chunks(
        self, lengths: IntArray, token_ids: IntArray, logs_queries: bool = False
    ) -> Tensor | None:
        """Chunks of ``lengths [n]`` of the first rows: hidden states [T, hidden] of ``token_ids
        [T]``; ``None`` if there is no graph for them."""
        n, sizes = len(lengths), self.chunk_sizes
        if not sizes or n > sizes[-1] or int(lengths.max()) > self._longest:
            return None
        self.chunk_replays += 1
        size = next(size for size in sizes if size >= n)
        captured = self._chunks[size, logs_queries]
        chunks, ids = captured.step.chunks, captured.step.token_ids
        assert chunks is not None and ids is not None
        # Shorter chunks are padded to the longest.
        first = np.repeat(np.arange(n) * self._longest, lengths)
        places = to_device(first + ragged_arange(lengths), self._device)
        chunks.lengths[:n] = to_device(lengths, self._device)
        ids[places] = to_device(token_ids, self._device)
        self._count.fill_(n)
        return captured.run()[places]

    @torch.inference_mode()
    def _capture(self, step: PaddedStep) -> CapturedStep:
        """``step`` as a graph that returns its one output. No row decodes meanwhile."""
        if self._pool is None:
            return CapturedStep(step, _as_call(step))
        # Run once before the capture, so that libraries initialise and kernels are compiled; on a
        # side stream, as torch requires.
        stream = _capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step.forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's, pinned memory's) may call CUDA during the capture.
        mode = "thread_local"
        graphs, pool = torch.cuda.graph, self._pool
        with nothing_is_freed(), graphs(graph, pool=pool, stream=stream, capture_error_mode=mode):
            hidden = step.forward()

        def replay() -> Tensor:
            graph.replay()
            return hidden

        return CapturedStep(step, replay)


@contextmanager
def nothing_is_freed() -> Iterator[None]:
    """Python frees no garbage meanwhile: an older engine's graphs and pinned buffers would end the
    capture in whose middle they are given back."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class CapturedStep:
    """``run`` replays ``step`` as captured. A graph does not keep ``step`` alive: this object
    does."""

    step: PaddedStep
    run: Callable[[], Tensor]


def _as_call(step: PaddedStep) -> Callable[[], Tensor]:
    """Without a GPU: calls ``step``, which something else has to keep alive, as with a graph."""
    known = WeakMethod(step.forward)

    def run() -> Tensor:
        forward = known()
        assert forward is not None, "what a graph reads has been given back"
        return forward()

    return run


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all graphs of a process: cuBLAS takes a workspace per stream (32 MiB on Hopper)."""
    return torch.cuda.Stream()
