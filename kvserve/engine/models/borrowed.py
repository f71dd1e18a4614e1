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
from kvserve.engine.models.checkpoint import SafetensorsFiles
from kvserve.engine.models.feed_forward import empty
from kvserve.engine.models.linear import Holding
from kvserve.engine.models.operators import select_operators
from kvserve.engine.models.spec import ModelSpec, RopeSpec
from kvserve.engine.models.transformer import Transformer, attend
from kvserve.engine.models.wrapper import open_text_part
from kvserve.late import Late
from kvserve.log import ConfigError

_states_of = Late("engine.models.recurrent:states_of")
_recurrent = Late("engine.models.recurrent:Recurrent")
NAME = "kvserve"
_FULL = {"full_attention", "attention"}
_WINDOWED = {"sliding_attention", "chunked_attention"}
_STATES = {"linear_attention", "conv", "moe", "mlp"}
"""Layers without keys and values, of models that keep states. Those that have both are hybrid."""
_KEEP_STATES = {
    *("bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "lfm3"),
    *("nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
}
"""Models (``model_type``) whose states were compared with transformers' own."""
_SINKS = {"GptOssForCausalLM"}
"""Architectures whose attention passes sinks (``s_aux``)."""


def borrowed_spec(
    directory: Path, overrides: Mapping[str, Any], architecture: str, wrapper: str = ""
) -> ModelSpec:
    """What config.json says of a decoder that transformers knows; ``ConfigError`` names what keeps
    it from running here."""
    try:
        config = text_config(directory, overrides)
        return replace(_spec(config, architecture), wrapper=wrapper)
    except ConfigError:
        raise
    except Exception as error:  # a config that no one here has thought of
        raise refused(architecture, f"its config.json is not understood ({error})") from None


def _spec(config: Any, architecture: str) -> ModelSpec:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kept = config.model_type in _KEEP_STATES
    # Those that keep states say that they cannot, and do: ``try_out`` looks.
    if causal is None or not (causal._supports_attention_backend or kept):
        raise refused(architecture, "transformers cannot hand its attention to another program")
    _check_layers(config, architecture)
    attending = _attending(config)
    if not attending:
        raise refused(architecture, "none of its layers has keys and values")
    window, windowed = _windows(config, attending)
    (kv_heads, head_dim), of_windows = _heads(config, attending, windowed, architecture)
    heads, latent = int(config.num_attention_heads), getattr(config, "kv_lora_rank", None)
    if latent:  # held as every head reads them: keys of two parts, values filled up
        kv_heads, head_dim = heads, int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    eos = getattr(config, "eos_token_id", None)
    dtype = getattr(config, "dtype", None)
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        raise refused(architecture, "it states no longest context (max_position_embeddings)")
    kinds = set(getattr(config, "layer_types", None) or ())
    if "chunked_attention" in kinds:  # up to a chunk's length it is full attention
        context = min(context, config.attention_chunk_size)
    return ModelSpec(
        architecture=architecture,
        num_layers=len(attending),
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=int(max(width) if isinstance(width, list) else width),
        vocab_size=config.vocab_size,
        rms_norm_eps=1e-6,
        rope=RopeSpec(1.0, "transformers", context),
        max_position=context,
        window=window,
        windowed=windowed,
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        dtype="float32" if dtype is None else str(dtype).removeprefix("torch."),
        sinks=architecture in _SINKS,
        soft_cap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        window_heads=of_windows,
        sharing=len(_places(config)) - len(attending),
        borrowed=True,
        states=_states_of(config, architecture) if kept else (),
    )


def knows(architecture: str) -> bool:
    """Whether transformers has a decoder of this name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return any(
        architecture in ((name,) if isinstance(name, str) else name) for name in NAMES.values()
    )


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
        self.places = _places(causal.config)
        """By transformers' number of a layer, ours of the one whose keys and values it reads."""
        self.shared = {*self.places} - {*_attending(causal.config)}
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
    kind = _recurrent if spec.states else Borrowed
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
            files = open_text_part(directory, spec.wrapper) if spec.wrapper else None
            stored = (files or SafetensorsFiles(directory)).slices(opened)
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


def text_config(directory: Path, overrides: Mapping[str, Any]) -> Any:
    """The decoder's; in a wrapper it has what is stated there for all parts."""
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(directory, local_files_only=True, **overrides)
    except Exception as error:  # what the config's class raises
        raise ConfigError(f"--model: transformers cannot read config.json: {error}") from None
    text = whole.get_text_config(decoder=True)
    if text is not whole:
        for name in ("eos_token_id", "dtype", "tie_word_embeddings"):
            if getattr(whole, name, None) is not None:
                setattr(text, name, getattr(whole, name))
        for name, value in overrides.items():
            if hasattr(text, name):
                setattr(text, name, value)
    return text


def _check_layers(config: Any, architecture: str) -> None:
    fields = "head_dim", "num_attention_heads", "num_key_value_heads"
    different = [name for name in fields if isinstance(config.to_dict().get(name), list)]
    by_layer = getattr(config, "per_layer_attributes", None) or set()
    if different := different or sorted(by_layer - {"head_dim", "num_key_value_heads"}):
        raise refused(architecture, f"its layers differ in {', '.join(different)}")
    kinds, known = getattr(config, "layer_types", None) or (), _FULL | _WINDOWED
    if config.model_type in _KEEP_STATES:
        known = known | _STATES | {"hybrid"}
    for index, kind in enumerate(kinds):
        if kind not in known:
            raise refused(architecture, f"layer {index} is {kind}, not keys and values alone")
    if getattr(config, "is_encoder_decoder", False):
        raise refused(architecture, "it has an encoder")
    if getattr(config, "kv_lora_rank", None) and config.model_type not in _KEEP_STATES:
        raise refused(architecture, "its layers have latent attention (MLA)")
    if getattr(config, "attention_logit_cap", None):
        raise refused(architecture, "its attention caps logits (attention_logit_cap)")
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    for part in parts:
        if part.get("rope_type") in ("dynamic", "longrope"):
            raise refused(
                architecture, f"RoPE of type {part['rope_type']} depends on a batch's lengths"
            )


def _attending(config: Any) -> list[int]:
    """transformers' numbers of the layers that have keys and values: ours count these alone."""
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(kinds)
    both = enumerate(zip(kinds, modes, strict=True))
    return [layer for layer, (kind, mode) in both if kind not in _STATES and mode != "reuse"]


def _places(config: Any) -> dict[int, int]:
    """By transformers' number of each layer that attends, ours of the one whose keys and values it
    reads: its own, or the last one of its kind that has any."""
    attending = _attending(config)
    places = {layer: place for place, layer in enumerate(attending)}
    for layer, mode in enumerate(getattr(config, "kv_sharing_modes", None) or ()):
        if mode == "reuse":
            kind = config.layer_types[layer]
            places[layer] = places[max(n for n in attending if config.layer_types[n] == kind)]
    return places


def _heads(
    config: Any, attending: list[int], windowed: frozenset[int], architecture: str
) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """KV heads and their size, and those of layers with windows where these are others."""

    def of(config: Any) -> tuple[int, int]:
        heads = int(config.num_attention_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return int(getattr(config, "num_key_value_heads", None) or heads), int(head_dim)

    if not getattr(config, "per_layer_attributes", None):
        return of(config), None
    kinds: tuple[set[tuple[int, int]], ...] = (set(), set())
    for place, layer in enumerate(attending):
        kinds[place in windowed].add(of(config.per_layer_config[layer]))
    if any(len(found) > 1 for found in kinds):
        raise refused(architecture, "its layers of one kind differ in their heads")
    (full,), (newest,) = kinds[0] or kinds[1], kinds[1] or kinds[0]
    return full, None if newest == full else newest


def _windows(config: Any, attending: list[int]) -> tuple[int | None, frozenset[int]]:
    """The window of the sliding layers and which these are, if it has any."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None, frozenset()
    kinds = [kinds[layer] if kinds else "sliding_attention" for layer in attending]
    windowed = frozenset(n for n, kind in enumerate(kinds) if kind == "sliding_attention")
    return (int(window), windowed) if windowed else (None, windowed)


def refused(architecture: str, why: str) -> ConfigError:
    return ConfigError(f"--model: kvserve cannot run {architecture}: {why}")
