"""Decoders some of whose layers keep a state: transformers' modules of Mamba 2, of the delta rule
and of short convolutions, over states of ours (``engine/cache/state_rows.py``).

Such a module knows rows of one length alone, and no chunks of several rows one after the other. So
it is called once for each run of rows whose chunks are equally long: for all decoding rows at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn

from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.models.borrowed import Borrowed, Step
from kvserve.engine.models.borrowed_spec import refused
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.states import LayerStates
from kvserve.scheduler.layout import LayerState

_WITH_STATES = {"linear_attention", "conv", "hybrid"}


class ModuleStates(NamedTuple):
    """States of n rows as a module asks transformers' cache for them. In a step it writes into what
    the first two methods return, and calls at most the last one."""

    tail: Tensor
    recurrent: Tensor | None

    @classmethod
    def of(cls, states: LayerStates, rows: slice) -> ModuleStates:
        """Views of those of ``rows``."""
        return cls(*(None if x is None else x[rows] for x in states))  # type: ignore[arg-type]

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


class Call(NamedTuple):
    """A run of chunks of one ``length`` in a forward: their ``tokens``, and their ``rows``."""

    length: int
    tokens: slice
    rows: slice


def calls_of(batch: ForwardBatch) -> list[Call]:
    """The calls that a layer with states takes for ``batch``. Rows of a run follow one another, so
    that each call computes in views of their states."""
    starts, rows, lengths = batch.starts, batch.rows, np.diff(batch.starts)
    breaks = np.flatnonzero((np.diff(lengths) != 0) | (np.diff(rows) != 1)) + 1
    calls = []
    for first, end in pairwise([0, *breaks.tolist(), len(rows)]):
        row, tokens = int(rows[first]), slice(int(starts[first]), int(starts[end]))
        calls.append(Call(int(lengths[first]), tokens, slice(row, row + end - first)))
    return calls


class Recurrent(Borrowed):
    """A decoder of transformers' modules some of which keep states."""

    def __init__(self, spec: ModelSpec, causal: Any, dtype: torch.dtype, device: str) -> None:
        super().__init__(spec, causal, dtype, device)
        self.states: WeakKeyDictionary[Any, Mapping[int, LayerStates]] = WeakKeyDictionary()
        """Of each cache that the layers run over."""
        self._now: tuple[Mapping[int, LayerStates], list[Call]] | None = None
        for module in modules_with_states(causal):
            module.forward = partial(_run_module, ref(module))

    def _run(self, input_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        if step.given is not None:
            batch, over, _ = step.given
            self._now = self.states[over], calls_of(batch)
        try:
            return super()._run(input_ids, positions, step)
        finally:
            self._now = None

    def run_module(self, module: Any, hidden: Tensor) -> Tensor:
        """What ``module`` makes of ``hidden [1, T, H]``, with its states; zeros in a trial."""
        if self._now is None:
            return torch.zeros_like(hidden)
        layers, calls = self._now
        states, out = layers[module.layer_idx], torch.empty_like(hidden)
        for call in calls:
            given = hidden[0, call.tokens].view(-1, call.length, hidden.shape[-1])
            made = _call(module, given, ModuleStates.of(states, call.rows))
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


def _call(module: Any, hidden: Tensor, states: Any) -> Tensor:
    """transformers' own ``forward``: [n, length, H] -> [n, length, H]."""
    kind: Any = type(module)
    out: Tensor = kind.forward(module, hidden_states=hidden, **{_cache_name(kind): states})
    return out


@cache
def _cache_name(kind: type[Any]) -> str:
    """What ``forward`` calls its cache."""
    names = inspect.signature(kind.forward).parameters
    return "cache_params" if "cache_params" in names else "past_key_values"


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
