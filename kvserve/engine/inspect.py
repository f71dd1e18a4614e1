"""Which positions a policy keeps: one prompt, a given continuation, and every move followed.

The continuation is forced upon the sampler; all else is the engine as it always runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.compressor import MovePlan
from kvserve.engine.llm import LLM
from kvserve.log import RequestError
from kvserve.sampling_params import SamplingParams
from kvserve.scheduler.block_pool import IntArray
from kvserve.scheduler.output import CompactionTask

_MORE_TOKENS = 2
"""Tokens after the last given one: events due at its end run in the step that feeds the first."""


@dataclass(frozen=True)
class Event:
    """What was held after one event: positions ``held [L, Hkv, n]`` of the ``seen`` tokens."""

    seen: int
    before: int
    held: IntArray


@dataclass(frozen=True)
class Inspection:
    """Positions held once all of ``input_ids`` is in and every event due by then has run."""

    input_ids: IntArray
    held: IntArray
    events: list[Event]

    def arrays(self) -> dict[str, IntArray]:
        """Sorted positions by layer and KV head, at the end and after each event, by name."""
        layers, heads, count = self.held.shape
        found = {
            "input_ids": self.input_ids,
            "counts": np.full((layers, heads), count, np.int32),
            "event_len": np.array([event.seen for event in self.events], np.int32),
            **_by_lane("kept", self.held),
        }
        for number, event in enumerate(self.events):
            found |= _by_lane(f"ev{number}", event.held)
        return found


class KeptPositions:
    """Follows a single sequence; its ``on_moves`` is for ``Compressor.on_moves``."""

    def __init__(self, layers: int, heads: int) -> None:
        self.events: list[Event] = []
        self._held: IntArray = np.zeros((layers, heads, 0), np.int32)
        self._seen = 0

    def on_moves(self, task: CompactionTask, plan: MovePlan) -> None:
        start, before = int(task.copy_start[0]), int(task.old_lens[0])
        held = self.held_at(self._seen + before - self._held.shape[2])
        moved = np.take_along_axis(held, plan.src.cpu().numpy(), axis=2)
        self._held = np.concatenate([held[..., :start], moved], axis=2)
        self.events.append(Event(self._seen, before, self._held))

    def held_at(self, seen: int) -> IntArray:
        """Positions held once ``seen`` tokens are in, if no event has come since the last one."""
        new = np.arange(self._seen, seen, dtype=np.int32)
        lanes = np.broadcast_to(new, (*self._held.shape[:2], len(new)))
        self._held, self._seen = np.concatenate([self._held, lanes], axis=2), seen
        return self._held


def inspect(llm: LLM, prompt: Sequence[int], continuation: Sequence[int] = ()) -> Inspection:
    """Feed ``prompt`` and then ``continuation`` as if it had been sampled.

    Raises ``RequestError`` if they do not fit the context or the pool.
    """
    runner, total = llm.engine.core.runner, len(prompt) + len(continuation)
    _check(llm, continuation, total)
    layout = runner.cache.layout
    kept = KeptPositions(layout.num_layers, layout.num_kv_heads)
    given = torch.tensor([*continuation, 0, 0], device=runner.batch.device)

    def force(positions: Tensor) -> Tensor:
        return given[positions - len(prompt)]

    count = len(continuation) + _MORE_TOKENS
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    runner.force, runner.compressor.on_moves = force, kept.on_moves
    try:
        (output,) = llm.generate([list(prompt)], params, use_tqdm=False)
    finally:
        runner.force = runner.compressor.on_moves = None
    if len(output.outputs[0].token_ids) < count:
        raise RequestError("the KV pool cannot hold these tokens; raise --num-gpu-blocks-override")
    ids = np.array([*prompt, *continuation], np.int32)
    return Inspection(ids, kept.held_at(total), kept.events)


def _check(llm: LLM, continuation: Sequence[int], total: int) -> None:
    info = llm.engine.core.info
    if total + _MORE_TOKENS > info.max_model_len:
        raise RequestError(
            f"prompt and continuation have {total} tokens; the context of {info.max_model_len} "
            f"leaves room for {info.max_model_len - _MORE_TOKENS} to inspect"
        )
    if any(not 0 <= token < info.vocab_size for token in continuation):
        raise RequestError(f"the continuation holds a token id outside [0, {info.vocab_size})")


def _by_lane(prefix: str, held: IntArray) -> dict[str, IntArray]:
    return {
        f"{prefix}_L{layer}_H{head}": np.sort(positions)
        for layer, heads in enumerate(held)
        for head, positions in enumerate(heads)
    }
