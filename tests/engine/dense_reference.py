"""What decoding over a compacted cache must equal: dense attention that sees the kept sets only.

Transformers' modules in float64, with attention that is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from kvserve.engine.frontend.inspect import Event
from kvserve.entry_format import EntryFormat
from kvserve.kernels.store.quantized_entries import quantize

_NAME = "written_in_a_test"
Vectors = tuple[Tensor, Tensor]
"""Keys and values of one layer, [Hkv, T, D]."""


@dataclass(frozen=True)
class DensePass:
    """logits [T, V]; queries [L, Hq, T, D] and keys [L, Hkv, T, D] after RoPE, values in the shape
    of keys, and sinks [L, Hq] if there are any, of the layers that see all tokens: float32. Queries
    are scaled, so that logits are products times D ** -.5.

    Keys and values are those that events see. ``exact`` are those of every layer as they were
    computed, in float64.
    """

    logits: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    sinks: Tensor | None
    exact: tuple[Vectors, ...]


def load_dense(directory: Path) -> PreTrainedModel:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    how: Any = {"dtype": torch.float64, **eager}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, **how)
    return model.eval()


def dense_pass(
    model: PreTrainedModel,
    tokens: list[int],
    events: Sequence[Event],
    *,
    pruned: bool = False,
    form: EntryFormat | None = None,
    held: Mapping[int, Vectors] | None = None,
    intact: int = 0,
) -> DensePass:
    """One dense pass of transformers; every query sees what its layer and head then held: what
    events say of KV heads, or of query heads. Keys and values are rounded to ``form``, if given,
    or are those that layers ``held``; except those that a query reads as they were computed.

    With ``pruned`` the first event happened between layers: its own tokens see its outcome too.
    """
    heads, count = model.config.num_attention_heads, len(tokens)
    attending, full = attending_layers(model), full_layers(model)
    places = _places(model, attending)
    rule = count, events, form, intact
    near = exact_entries(*rule, pruned=pruned)
    of_windows = exact_entries(*rule, pruned=pruned, first=False)
    found: list[tuple[Tensor, Vectors, Vectors]] = []
    sinks: list[Tensor] = []

    def visible(layer: int) -> Tensor:
        """Which entries each query sees, bool [Hq, T, T]."""
        seen = torch.ones(heads, count, count, dtype=torch.bool).tril()
        if layer not in full:
            return seen.triu(1 - model.config.sliding_window)
        for number, event in enumerate(events):
            # Later events overwrite the rows they share.
            first = 0 if pruned and number == 0 else event.seen
            for head in range(heads):
                of_layer = event.held[full.index(layer)]
                kept = torch.as_tensor(of_layer[head * len(of_layer) // heads]).long()
                seen[head, first:, : event.seen] = False
                seen[head, first:, kept[kept >= 0]] = True
        return seen.tril()

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **how: Any) -> Any:
        layer, exact = places[module.layer_idx], (k[0], v[0])
        keys, values = exact
        if held is not None:
            keys, values = (x.double() for x in held[layer])
        elif form is not None:
            assert not form.few, "what layers hold has to be given"
            keys = quantize(keys, form.key).widened().double()
            values = quantize(values, form.value).widened().double()
        rounded = keys, values
        if module.layer_idx in attending:
            scaled = q[0] * (how["scaling"] * q.shape[-1] ** 0.5)
            found.append((scaled, exact, rounded))
        keys, values = (
            torch.cat(pair, dim=1).repeat_interleave(heads // len(k[0]), dim=0)
            for pair in zip(rounded, exact, strict=True)
        )
        logits = q[0] @ keys.mT * how["scaling"]
        if how.get("softcap") is not None:
            logits = torch.tanh(logits / how["softcap"]) * how["softcap"]
        seen, own = visible(layer), near if layer in full else of_windows
        hidden = ~torch.cat([seen & ~own, seen & own], dim=-1)
        logits = logits.masked_fill(hidden, -torch.inf)
        if hasattr(module, "sinks"):
            sink = module.sinks.detach()
            if layer in full:
                sinks.append(sink)
            logits = torch.cat([logits, sink[:, None, None].expand(-1, count, 1)], dim=-1)
        shares = logits.softmax(dim=-1)[..., : 2 * count]
        return (shares @ values).transpose(0, 1)[None], None

    with attention(model, attend), torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    queries = torch.stack([found[layer][0] for layer in full]).float()
    keys, values = (torch.stack([found[layer][2][at] for layer in full]).float() for at in (0, 1))
    stacked = torch.stack(sinks).float() if sinks else None
    exact = tuple(each[1] for each in found)
    return DensePass(logits.float(), queries, keys, values, stacked, exact)


@contextmanager
def attention(model: PreTrainedModel, attend: Callable[..., Any]) -> Iterator[None]:
    """Let every layer of ``model`` attend with ``attend``, a function as transformers calls them;
    it gets no mask."""
    AttentionInterface.register(_NAME, attend)
    before, model.config._attn_implementation = model.config._attn_implementation, _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def attending_layers(model: PreTrainedModel) -> list[int]:
    """transformers' numbers of the layers that have keys and values; elsewhere here, as in the
    engine, layers are counted among these."""
    modes = getattr(model.config, "kv_sharing_modes", None) or []
    others = {layer for layer, mode in enumerate(modes) if mode == "reuse"}
    kinds = enumerate(_kinds(model))
    return [n for n, kind in kinds if kind != "linear_attention" and n not in others]


def _places(model: PreTrainedModel, attending: list[int]) -> dict[int, int]:
    """By transformers' number, ours of the layer whose keys and values each layer reads: the last
    of its kind that has some, so its own if it has."""
    kinds = _kinds(model)
    return {
        layer: max(at for at, n in enumerate(attending) if n <= layer and kinds[n] == kind)
        for layer, kind in enumerate(kinds)
        if kind != "linear_attention"
    }


def full_layers(model: PreTrainedModel) -> list[int]:
    """The layers that see all tokens."""
    kinds = _kinds(model)
    attending = enumerate(attending_layers(model))
    return [place for place, layer in attending if kinds[layer] == "full_attention"]


def _kinds(model: PreTrainedModel) -> list[str]:
    config = model.config
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


def exact_entries(
    length: int,
    events: Sequence[Event],
    form: EntryFormat | None,
    intact: int = 0,
    *,
    pruned: bool = False,
    first: bool = True,
) -> Tensor:
    """Which entries each token reads as they were computed, bool [T, T]: those from the last
    multiple of ``newest`` on, but none from before the last event that dropped any but the newest
    ``intact``; and the ``first``."""
    if form is None or not form.newest:
        return torch.zeros(length, length, dtype=torch.bool)
    at = torch.arange(length)
    begin = at // form.newest * form.newest
    for number, event in enumerate(events):
        if pruned and number == 0:
            begin[: event.seen] = length
        if (event.held >= 0).sum(-1).min() < event.before or (pruned and number == 0):
            begin[event.seen :] = begin[event.seen :].clamp(min=event.seen - intact)
    exact = (at >= begin[:, None]) & (at <= at[:, None])
    exact[:, 0] |= first
    return exact
