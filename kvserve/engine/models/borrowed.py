"""Decoders whose layers are transformers' own modules: any whose attention can be handed over.

transformers calls the function registered as ``kvserve`` with each layer's rotated queries, keys
and values; it stores them and attends as our own layers do. Norms, projections, experts and the
head stay theirs, so that they are right, and slower than ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from kvserve.engine.attention.base import BatchAttention, ForwardBatch, LayerCache
from kvserve.engine.device.distributed import ALONE
from kvserve.engine.models.borrowed_spec import attending_layers, places_of, refused, text_config
from kvserve.engine.models.checkpoint import open_checkpoint
from kvserve.engine.models.feed_forward import empty
from kvserve.engine.models.linear import Holding
from kvserve.engine.models.operators import select_operators
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Transformer, attend
from kvserve.engine.models.wrapper import open_text_part
from kvserve.log import ConfigError

NAME = "kvserve"


@dataclass
class Step:
    """What the layers of one forward are given, nothing in a trial; ``layers``, by transformers'
    numbers, have attended."""

    layers: list[int]
    given: tuple[ForwardBatch, LayerCache, BatchAttention] | None = None


class Borrowed(Transformer):
    """A decoder of transformers' modules, on one rank."""

    def __init__(self, spec: ModelSpec, causal: Any, dtype: torch.dtype, device: str) -> None:
        nn.Module.__init__(self)
        self.spec = self.part = spec
        self.entry_table: Any = None
        self.holding, self.group = Holding(), ALONE
        self.operators = replace(
            select_operators(dtype, device),
            name="torch",
            reason="transformers' modules have theirs",
        )
        self.scale = spec.head_dim**-0.5
        self.sinks: dict[int, Tensor] = {}
        self.norm = empty(spec.hidden_size)
        self.causal = causal
        self._base: Any = causal.base_model
        self._step: Step | None = None
        self.places = places_of(causal.config)
        """By transformers' number of a layer, ours of the one whose keys and values it reads."""
        self.shared = {*self.places} - {*attending_layers(causal.config)}
        """Layers that read those of an earlier one, and have none."""
        for module in causal.modules():
            if hasattr(module, "layer_idx"):
                module.kvserve_model = ref(self)

    @property
    def sinks_of_full_layers(self) -> Tensor | None:
        if not self.sinks:
            return None
        return torch.stack([self.sinks[layer] for layer in self.spec.layers.full])

    def forward(
        self,
        input_ids: Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        attention: BatchAttention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """As ``Transformer.forward``."""
        hidden = self._run(input_ids, batch.positions, Step([], (batch, cache, attention)))
        return hidden if wanted is None else hidden[wanted]

    def tabulate(self, max_len: int) -> None:
        """The modules compute their own."""

    def try_out(self) -> None:
        """``ConfigError`` if a layer does not attend as ours do; two tokens, no cache."""
        device, step = self._base.device, Step([])
        self._run(torch.arange(2, device=device), torch.arange(2, device=device), step)
        if step.layers != [*self.places]:
            missing = sorted({*self.places} - {*step.layers})
            why = f"layers {missing} do not hand attention over"
            raise refused(
                self.spec.architecture, why if missing else "its layers attend more than once"
            )

    def _run(self, input_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        self._step = step
        try:
            answer = self._base(
                input_ids=input_ids[None], position_ids=positions[None], use_cache=False
            )
        finally:
            self._step = None
        hidden: Tensor = answer.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [S, hidden] -> float32 [S, vocab], by the head and whatever scales it there."""
        name = self.causal.base_model_prefix
        layers = getattr(self.causal, name)
        setattr(self.causal, name, _Given(hidden[None], layers))
        try:
            logits: Tensor = self.causal(inputs_embeds=hidden[None], use_cache=False).logits
        finally:
            setattr(self.causal, name, layers)
        return logits[0].float()


class _Given(nn.Module):
    """Stands in for the layers while the head computes logits, and may look up what they have."""

    def __init__(self, hidden: Tensor, layers: Any) -> None:
        super().__init__()
        self.hidden, self._layers = hidden, (layers,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layers"][0], name)

    @property
    def decoder(self) -> _Given:
        """OPT's head calls it by this name."""
        return self

    def forward(self, *_: Any, **__: Any) -> _Answer:
        return _Answer(self.hidden)


class _Answer:
    """Hidden states, as any of transformers' outputs has them; of all else there is none."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def load_borrowed(
    directory: Path,
    overrides: Mapping[str, Any],
    spec: ModelSpec,
    dtype: torch.dtype,
    device: str,
    *,
    random: bool,
) -> Borrowed:
    """The decoder with its weights, read by transformers; ``random``: drawn by it."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    AttentionInterface.register(NAME, _attend)
    config = text_config(directory, overrides)
    kind = spec.decoder or Borrowed
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": NAME}
    try:
        with torch.device("meta"):  # before any weight is read
            trial = kind(spec, AutoModelForCausalLM.from_config(config, **how), dtype, "meta")
            with suppress(NotImplementedError, RuntimeError):  # experts may look at numbers
                trial.try_out()
    except ConfigError:
        raise
    except Exception as error:  # what the model's class raises
        why = f"its layers do not run by themselves ({type(error).__name__}: {error})"
        raise refused(spec.architecture, why.replace("\n", " ")) from None
    if random:
        causal = AutoModelForCausalLM.from_config(config, **how)
    else:
        with ExitStack() as opened:
            named = spec.wrapper
            files: Any = open_text_part(directory, named) if named else open_checkpoint(directory)
            stored = files.slices(opened)
            try:
                theirs: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
                causal, found = theirs.from_pretrained(
                    None, config=config, state_dict=stored, output_loading_info=True, **how
                )
            except (OSError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"--model: transformers cannot read the checkpoint in {directory}: {error}"
                ) from None
        if missing := sorted(found["missing_keys"]):  # it has drawn these
            raise ConfigError(
                f"--model: the checkpoint in {directory} has no tensor {missing[0]} "
                f"({len(missing)} missing) of {type(causal).__name__}"
            )
        if unknown := sorted(found["unexpected_keys"]):
            raise ConfigError(
                f"--model: the checkpoint in {directory} has a tensor {unknown[0]} ({len(unknown)} "
                f"such) that {type(causal).__name__} does not; the config names another model"
            )
    causal.requires_grad_(False)
    model: Borrowed = kind(spec, causal.to(device).eval(), dtype, device)
    model.try_out()
    return model


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for each layer: [1, heads, T, D] -> [1, T, Hq, D].
    ``ConfigError`` names what of the ``options`` our attention does not do."""
    model: Borrowed = module.kvserve_model()
    number = module.layer_idx
    layer, spec, sinks = model.places[number], model.spec, options.get("s_aux")
    windowed = layer in spec.windowed and options.get("sliding_window") == spec.window
    for name, known in (
        ("softcap", options.get("softcap") == spec.soft_cap),
        ("s_aux", spec.sinks),
        ("sliding_window", windowed),
        ("sinks", False),
        ("position_bias", False),
    ):
        if options.get(name) is not None and not known:
            raise refused(spec.architecture, f"{type(module).__name__} passes {name}")
    heads = spec.num_kv_heads, spec.head_dim
    if layer in spec.windowed:
        heads = spec.window_heads or heads
    values, missing = value.shape[-1], heads[1] - value.shape[-1]
    if (key.shape[1], key.shape[3]) != heads or missing < 0:
        shapes = f"{list(key.shape)} and values {list(value.shape)}"
        raise refused(spec.architecture, f"{type(module).__name__} passes keys {shapes}")
    if getattr(module, "is_causal", True) is False:
        raise refused(spec.architecture, f"{type(module).__name__} sees later tokens, too")
    if attention_mask is not None:  # of ours transformers makes none
        raise refused(spec.architecture, f"{type(module).__name__} makes a mask of its own")
    step = model._step
    assert step is not None
    step.layers.append(number)
    if sinks is not None and layer not in model.sinks:
        model.sinks[layer] = sinks.detach().float().contiguous()
    if step.given is None:
        return torch.zeros_like(query)[..., :values].transpose(1, 2), None
    batch, cache, attention = step.given
    value = nn.functional.pad(value, (0, missing)) if missing else value
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    if scaling is not None and scaling != model.scale:
        q = q * (scaling / model.scale)
    if number in model.shared:  # no event observes what it asks
        attended = cache.turn(attention(layer, cache.turn(q), cache, None, model.sinks.get(layer)))
        return attended[None, ..., :values], None
    cache.store(layer, batch, k, v)
    attended = attend(layer, q, batch, cache, attention, model.sinks.get(layer))
    return attended[None, ..., :values], None
