"""Decoders some of whose layers keep a state: transformers' modules of Mamba 2, of the delta rule
and of short convolutions, over states of ours (``engine/cache/state_rows.py``).

Such a module knows rows of one length alone, and no chunks of several rows one after the other. So
it is called once for each length among a step's chunks: for all decoding rows at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn

from kvserve.engine.attention.base import BatchAttention, ForwardBatch, LayerCache
from kvserve.engine.device.transfer import to_device
from kvserve.engine.models.borrowed import Borrowed, refused
from kvserve.engine.models.spec import ModelSpec
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.state_group import LayerState

_WITH_STATES = {"linear_attention", "conv", "hybrid"}


class LayerStates(NamedTuple):
    """One layer's states of n rows: tails ``[n, channels, columns]``, recurrent ``[n, ...]``."""

    tail: Tensor
    recurrent: Tensor | None

    def of(self, rows: slice | Tensor) -> LayerStates:
        """Those of ``rows``: views of a slice, copies of others."""
        return LayerStates(
            self.tail[rows], None if self.recurrent is None else self.recurrent[rows]
        )

    def put(self, rows: Tensor, states: LayerStates) -> None:
        """Write ``states`` of ``rows [n]`` back."""
        self.tail[rows] = states.tail
        if self.recurrent is not None and states.recurrent is not None:
            self.recurrent[rows] = states.recurrent

    # ---- what a module asks of transformers' cache ---------------------------------------------
    # In a step it writes into what the first two return, and calls at most the last one.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.tail

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **_: Any) -> Tensor:
        whole = torch.cat([self.tail, conv_states], dim=-1)
        self.tail.copy_(whole[..., whole.shape[-1] - self.tail.shape[-1] :])
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **_: Any) -> Tensor:
        assert self.recurrent is not None
        return self.recurrent.copy_(recurrent_states)


@dataclass(frozen=True)
class Call:
    """Chunks of one ``length`` of a forward: the places of their ``tokens``, and their ``rows``."""

    length: int
    tokens: slice | Tensor
    rows: slice | Tensor


def calls_of(batch: ForwardBatch) -> list[Call]:
    """The calls that a layer with states takes for ``batch``: one for each length of its chunks."""
    lengths, device = np.diff(batch.starts), batch.positions.device
    calls = []
    for length in np.unique(lengths).tolist():
        at = np.flatnonzero(lengths == length)
        tokens = (batch.starts[at][:, None] + np.arange(length)).reshape(-1)
        calls.append(Call(length, *(_places(x, device) for x in (tokens, batch.rows[at]))))
    return calls


def _places(at: IntArray, device: torch.device) -> slice | Tensor:
    """``at``, as a slice if one follows the other."""
    if (np.diff(at) == 1).all():
        return slice(int(at[0]), int(at[-1]) + 1)
    return to_device(at.astype(np.int64), str(device))


class Recurrent(Borrowed):
    """A decoder of transformers' modules some of which keep states."""

    def __init__(self, spec: ModelSpec, causal: Any, dtype: torch.dtype, device: str) -> None:
        super().__init__(spec, causal, dtype, device)
        self.states: WeakKeyDictionary[Any, Mapping[int, LayerStates]] = WeakKeyDictionary()
        """Of each cache that the layers run over."""
        self._now: tuple[Mapping[int, LayerStates], list[Call]] | None = None
        for module in modules_with_states(causal):
            module.forward = partial(_run_module, ref(module))

    def forward(
        self,
        input_ids: Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        attention: BatchAttention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        self._now = self.states[cache], calls_of(batch)
        try:
            return super().forward(input_ids, batch, cache, attention, wanted)
        finally:
            self._now = None

    def run_module(self, module: Any, hidden: Tensor) -> Tensor:
        """What ``module`` makes of ``hidden [1, T, H]``, with its states; zeros in a trial."""
        if self._now is None:
            return torch.zeros_like(hidden)
        layers, calls = self._now
        states, out = layers[module.layer_idx], torch.empty_like(hidden)
        for call in calls:
            own = states.of(call.rows)
            given = hidden[0, call.tokens].view(-1, call.length, hidden.shape[-1])
            made = _call(module, given, own)
            if not isinstance(call.rows, slice):
                states.put(call.rows, own)
            if len(calls) == 1:
                return made.view(hidden.shape)
            out[0, call.tokens] = made.view(-1, hidden.shape[-1])
        return out


def modules_with_states(causal: nn.Module) -> Iterator[Any]:
    """The modules that keep states: those with a convolution of their own."""
    for module in causal.modules():
        if hasattr(module, "layer_idx") and any(
            isinstance(part, nn.Conv1d) for part in module.children()
        ):
            yield module


def _run_module(module: Any, *args: Tensor, **kwargs: Any) -> Tensor:
    """Stands in for the ``forward`` of a module with states. All that is passed on beside hidden
    states is of the whole forward: masks, which are none, and positions, which it does not use."""
    own = module()
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return own.kvserve_model().run_module(own, hidden)


def _call(module: Any, hidden: Tensor, cache: Any) -> Tensor:
    """transformers' own ``forward``: [n, length, H] -> [n, length, H]."""
    kind = type(module)
    names = inspect.signature(kind.forward).parameters
    name = "cache_params" if "cache_params" in names else "past_key_values"
    out: Tensor = kind.forward(module, hidden_states=hidden, **{name: cache})
    return out


# ---- before anything is loaded -----------------------------------------------------------------


class _Probe:
    """Notes what a module would keep."""

    def __init__(self) -> None:
        self.tail: tuple[int, int] | None = None
        self.recurrent: tuple[int, ...] | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        self.tail = conv_states.shape[1], conv_kernel_size - 1
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **_: Any) -> Tensor:
        self.recurrent = tuple(recurrent_states.shape[1:])
        return recurrent_states


def states_of(config: Any, architecture: str) -> tuple[LayerState, ...]:
    """What the layers of a model keep of a row: asked of its modules, without numbers.
    ``ConfigError`` if they are not known to keep it as ours do."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        found = []
        for module in modules_with_states(causal):
            probe = _Probe()
            _call(module, torch.empty(1, 2, config.hidden_size), probe)
            if probe.tail is None:
                raise refused(architecture, f"layer {module.layer_idx} keeps no state as others do")
            found.append(LayerState(module.layer_idx, probe.tail, probe.recurrent))
    kinds = config.layer_types
    if [each.layer for each in found] != [
        i for i, kind in enumerate(kinds) if kind in _WITH_STATES
    ]:
        raise refused(architecture, "its layers keep other states than layer_types says")
    return tuple(found)
