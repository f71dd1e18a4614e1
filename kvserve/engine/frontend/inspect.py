"""Finds which positions a policy keeps of a prompt and a given continuation, by following moves.

The sampler is made to return the continuation; the engine runs as always otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvserve.engine.compression.moves import LanePositions, MovePlan
from kvserve.engine.frontend.llm import LLM
from kvserve.log import RequestError
from kvserve.outputs import KVCacheDetails
from kvserve.sampling_params import SamplingParams
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.event import Events

_MORE_TOKENS = 2
"""Tokens sampled behind the continuation: events due at its end run as the first is computed."""


@dataclass(frozen=True)
class Event:
    """What was held after one event: positions ``held [L, Hkv, n]`` of the ``seen`` tokens.

    Shorter lanes are padded with -1; ``before`` is the length of the longest before the event.
    """

    seen: int
    before: int
    held: IntArray


@dataclass(frozen=True)
class Inspection:
    """Positions ``held [L, Hkv, n]`` (-1: none) after all tokens and all events that were due.

    ``remainder`` float32 [L, Hkv] is the logarithm of the weight of what stands for dropped ones.
    """

    input_ids: IntArray
    held: IntArray
    events: list[Event]
    details: KVCacheDetails
    remainder: NDArray[np.float32]

    def holders(self) -> IntArray:
        """KV heads of each layer that hold each position: [L, tokens]."""
        tokens = np.arange(len(self.input_ids))
        return np.asarray((self.held[..., None] == tokens).sum(axis=(1, 2)))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Sorted positions by layer and KV head, at the end and after each event, by name."""
        found: dict[str, NDArray[Any]] = {
            "input_ids": self.input_ids,
            "counts": (self.held >= 0).sum(axis=2, dtype=np.int32),
            "event_len": np.array([event.seen for event in self.events], np.int32),
            "remainder": self.remainder,
            **_by_lane("kept", self.held),
        }
        for number, event in enumerate(self.events):
            found |= _by_lane(f"ev{number}", event.held)
        return found


class KeptPositions:
    """Follows a single sequence; its ``on_moves`` is for ``Compressor.on_moves``."""

    def __init__(self, layers: int, heads: int) -> None:
        self.events: list[Event] = []
        self._held = LanePositions(layers, heads)

    def on_moves(self, task: Events, plan: MovePlan) -> None:
        """Follow the only event of ``task``."""
        start, before = int(plan.copy_start[0]), int(task.old_lens.max())
        self._held.see_longest(before)
        self._held.move(start, plan.src[0].cpu().numpy(), plan.counts[0].cpu().numpy())
        self.events.append(Event(self._held.seen, before, self._held.padded()))

    def held_at(self, seen: int) -> IntArray:
        """Positions held once ``seen`` tokens are in, if no event has come since the last one."""
        self._held.see(seen)
        return self._held.padded()


def inspect(llm: LLM, prompt: Sequence[int], continuation: Sequence[int] = ()) -> Inspection:
    """Feed ``prompt`` and then ``continuation`` as if it had been sampled.

    Raises ``RequestError`` if they do not fit the context or the pool.
    """
    runner, total = llm.engine.core.runner, len(prompt) + len(continuation)
    if runner.group.size > 1:
        raise RequestError("positions are followed on one rank only; use --tensor-parallel-size 1")
    info = llm.engine.core.info
    if total + _MORE_TOKENS > info.max_model_len:
        raise RequestError(
            f"prompt and continuation have {total} tokens; the context of {info.max_model_len} "
            f"leaves room for {info.max_model_len - _MORE_TOKENS} to inspect"
        )
    if any(not 0 <= token < info.vocab_size for token in continuation):
        raise RequestError(f"the continuation holds a token id outside [0, {info.vocab_size})")
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
    weights = np.full((layout.num_layers, layout.num_kv_heads), -np.inf, np.float32)
    remainders = runner.batch.remainders
    if remainders is not None and output.kv_cache_details.remainder_entries:
        weights = remainders.whole.bias[:, 0].cpu().numpy()  # its row is nobody's yet
    details = output.kv_cache_details
    return Inspection(ids, kept.held_at(total), kept.events, details, weights)


def _by_lane(prefix: str, held: IntArray) -> dict[str, IntArray]:
    return {
        f"{prefix}_L{layer}_H{head}": np.sort(positions[positions >= 0])
        for layer, heads in enumerate(held)
        for head, positions in enumerate(heads)
    }
