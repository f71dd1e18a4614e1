"""Quantised weights: what config.json says about them, and by what it has which weight is stored.

A checkpoint may store its weights in several forms, and some of them plain: the tensors that it has
decide. The KV cache is not quantised by this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvserve.engine.models.checkpoint import Checkpoint
from kvserve.engine.models.fp4 import Fp4, Mxfp4
from kvserve.engine.models.packed import Packed
from kvserve.log import ConfigError, shown

_READ = (
    "kvserve reads awq (4 bits, version gemm), gptq (4 and 8 bits), auto-round in these forms, "
    "compressed-tensors (float-quantized, pack-quantized, int-quantized, nvfp4-pack-quantized, "
    "mxfp4-pack-quantized, mixed-precision), fp8 (e4m3), modelopt (FP8, NVFP4) and mxfp4 (gpt-oss)"
)
# At which bits of an int32 its numbers are.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
_SHIFTS = {4: tuple(range(0, 32, 4)), 8: tuple(range(0, 32, 8))}
_UNUSED = tuple(
    f".{name}"
    for name in (
        *("input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "input_global_scale"),
        *("weight_zero_point", "activation_scale"),
    )
)
"""How names end of tensors that weights do not need: scales of activations and of the KV cache, and
zeros of symmetric weights."""

_FP4 = {
    "nvfp4-pack-quantized": Fp4(16, "weight_packed", "weight_global_scale", divides=True),
    "mxfp4-pack-quantized": Fp4(32, "weight_packed"),
}
_COMPRESSED = {
    "float8": ("float-quantized", "naive-quantized"),
    "int4": ("pack-quantized",),
    "int8": ("pack-quantized", "int-quantized", "naive-quantized"),
    "float4": tuple(_FP4),
}
"""Formats of compressed-tensors by the kind of their weights."""
_USUAL = {"float8": "float-quantized", "int4": "pack-quantized", "int8": "pack-quantized"}
"""Those of groups that name none."""

Form = Packed | Fp4 | Mxfp4


@dataclass(frozen=True)
class Quantization:
    """``forms`` in which weights are stored; ``activations`` and ``kv_cache``: whether they are to
    be quantised, too."""

    method: str
    forms: tuple[Form, ...]
    activations: bool = False
    kv_cache: bool = False
    unused: tuple[str, ...] = ()

    @property
    def packed(self) -> Packed | None:
        """The form that most are in, if it can be held."""
        return self.forms[0] if isinstance(self.forms[0], Packed) else None

    @property
    def rounds(self) -> bool:
        """Whether activations of FP8 weights are to be rounded token by token."""
        return all(form.by_token for form in self.forms if isinstance(form, Packed) and form.e4m3)

    def form_of(self, checkpoint: Checkpoint, weight: str) -> Form | None:
        """That of one weight; ``None`` if it is plain, or not there. Where some of its tensors are
        missing, one that needs them."""
        names = checkpoint.names
        whole = [form for form in self.forms if names.issuperset(form.parts(weight))]
        if len(whole) > 1:
            whole = [form for form in whole if form.fits(checkpoint, weight)] or whole
        parts = ((form, form.parts(weight)[0]) for form in self.forms)
        part = (form for form, first in parts if first != weight and first in names)
        return whole[0] if whole else next(part, None)

    def is_unused(self, name: str) -> bool:
        return name.endswith(self.unused)


def parse_quantization(raw: Mapping[str, Any], where: str) -> Quantization:
    """From ``quantization_config``; ``ConfigError`` names what is not read."""
    method = raw.get("quant_method")
    if method not in PARSERS:
        raise _refused(where, repr(method))
    return PARSERS[method](raw, where)


def _refused(where: str, what: str) -> ConfigError:
    return ConfigError(f"--model: {where} is quantised by {what}; {_READ}")


def _each_once(forms: Iterable[Form]) -> tuple[Form, ...]:
    return tuple(dict.fromkeys(forms))


def _parse_awq(raw: Mapping[str, Any], where: str) -> Quantization:
    """For a weight [out, in] there are qweight [in, out / 8], qzeros [groups, out / 8] and scales
    [groups, out] (arXiv 2306.00978, as AutoAWQ packs them for its GEMM kernels)."""
    for name, wanted in {"bits": 4, "version": "gemm", "zero_point": True}.items():
        given = raw.get(name, wanted)
        if (given.lower() if isinstance(given, str) else given) != wanted:
            raise _refused(where, f"awq with {name} {given}")
    group = _group(raw.get("group_size", raw.get("q_group_size", 128)), where)
    how: dict[str, Any] = {"turned": True, "packed": "outputs", "shifts": _AWQ_SHIFTS}
    form = Packed(4, group, "qweight", "scales", "qzeros", symmetric=False, **how)
    return Quantization("awq", (form,))


def _parse_gptq(raw: Mapping[str, Any], where: str) -> Quantization:
    """For a weight [out, in] there are qweight [in / n, out], qzeros [groups, out / n], of n in an
    int32, scales [groups, out] and g_idx [in] (arXiv 2210.17323, as AutoGPTQ and GPTQModel pack
    them). Zeros are stored less 1, but in ``gptq_v2``. ``dynamic``: modules by patterns, skipped
    (``-:``) or with settings of their own."""
    version, dynamic = raw.get("checkpoint_format", "gptq"), raw.get("dynamic") or {}
    if version not in ("gptq", "gptq_v2"):
        raise _refused(where, f"gptq with checkpoint_format {version}")
    own = [given for name, given in dynamic.items() if not name.startswith("-:")]
    return Quantization(
        "gptq", _gptq_forms([{**raw, **given} for given in [{}, *own]], where, version)
    )


def _gptq_forms(kinds: list[dict[str, Any]], where: str, version: str) -> tuple[Form, ...]:
    """Those of weights with their order, and without one where inputs are in their own. If some are
    not symmetric, zeros are read of all."""
    forms: list[Form] = []
    symmetric = all(raw.get("sym", True) for raw in kinds)
    for raw in kinds:
        bits, group = raw.get("bits"), _group(raw.get("group_size", 128), where)
        if bits not in _SHIFTS:
            raise _refused(where, f"{raw['quant_method']} with bits {bits}")
        how: dict[str, Any] = {"turned": True, "packed": "inputs", "shifts": _SHIFTS[bits]}
        how |= {"symmetric": symmetric, "zeros_from": int(version == "gptq")}
        for order in ("g_idx",) if raw.get("desc_act") else ("g_idx", ""):
            forms.append(Packed(bits, group, "qweight", "scales", "qzeros", order, **how))
    return _each_once(forms)


def _parse_auto_round(raw: Mapping[str, Any], where: str) -> Quantization:
    """Tensors of GPTQ or AWQ, by ``packing_format``; ``extra_config`` has modules with settings of
    their own (https://github.com/intel/auto-round)."""
    packing = raw.get("packing_format")
    versions = {"auto_round:auto_gptq": "gptq", "auto_round": "gptq_v2"}
    versions["auto_round:gptqmodel"] = "gptq_v2"
    if (kind := raw.get("data_type", "int")) != "int" or raw.get("act_bits", 16) not in (16, 32):
        raise _refused(
            where, f"auto-round as {kind} with activations in {raw.get('act_bits')} bits"
        )
    own = [given for given in (raw.get("extra_config") or {}).values() if isinstance(given, dict)]
    levels = [{**raw, **given} for given in own if given.get("bits", 4) < 16]
    if packing == "auto_round:auto_awq":
        forms = _each_once(_parse_awq(each, where).forms[0] for each in [raw, *levels])
    elif packing in versions:
        forms = _gptq_forms([dict(raw), *levels], where, versions[packing])
    else:
        raise _refused(where, f"auto-round with packing_format {packing}")
    return Quantization("auto-round", forms)


def _parse_modelopt(raw: Mapping[str, Any], where: str) -> Quantization:
    """NVIDIA's ModelOpt: FP8, or FP4 with e4m3 scales, which are multiplied by one of the weight
    (https://github.com/NVIDIA/Model-Optimizer)."""
    known: dict[str, Form] = {
        "FP8": Packed(8, 0, "weight", "weight_scale", e4m3=True),
        "FP8_PER_CHANNEL_PER_TOKEN": Packed(
            8, 0, "weight", "weight_scale", e4m3=True, by_token=True
        ),
        **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), Fp4(16, "weight", "weight_scale_2")),
    }
    named = [raw.get("quant_algo")]
    if named == ["MIXED_PRECISION"]:
        layers = raw.get("quantized_layers") or {}
        named = [layer.get("quant_algo") for layer in layers.values()]
    if unread := [name for name in named if name not in known] or not named:
        raise _refused(where, f"modelopt with quant_algo {unread}")
    caches = bool(raw.get("kv_cache_scheme") or raw.get("kv_cache_quant_algo"))
    forms = _each_once(known[str(name)] for name in named)
    return Quantization("modelopt", forms, set(named) != {"W4A16_NVFP4"}, caches, _UNUSED)


def _parse_fp8(raw: Mapping[str, Any], where: str) -> Quantization:
    """A scale for each block of outputs and inputs, as DeepSeek and Qwen publish their models
    (arXiv 2412.19437, 3.3), or one of the weight: e4m3 numbers are multiplied by it, although it
    is called ``weight_scale_inv``. vLLM's own of that name have ``weight_scale``. What
    ``modules_to_not_convert`` names is plain, as its tensors say."""
    scheme, blocks = raw.get("activation_scheme", "dynamic"), raw.get("weight_block_size")
    known = {"fmt": (None, "e4m3", "float8_e4m3fn"), "expert_dtype": (None, "fp8")}
    known["activation_scheme"] = ("dynamic", "static")
    for name, values in known.items():
        if (given := raw.get(name, values[0])) not in values:
            raise _refused(where, f"fp8 with {name} {given!r}")
    outputs, inputs = _block(blocks, where, "fp8") if blocks is not None else (1, 0)
    by_token = scheme == "dynamic" and not inputs
    how: dict[str, Any] = {"e4m3": True, "by_token": by_token, "rows": outputs}
    names = ("weight_scale_inv", "weight_scale")
    forms = tuple(Packed(8, inputs, "weight", name, **how) for name in names)
    return Quantization("fp8", forms, activations=True, unused=_UNUSED)


def _block(sizes: Any, where: str, of: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale."""
    whole = isinstance(sizes, list | tuple) and all(type(size) is int for size in sizes)
    if not whole or len(sizes) != 2 or min(sizes) < 1:
        raise _refused(where, f"{of} with blocks of {shown(sizes)}")
    outputs, inputs = sizes
    return outputs, inputs


def _group(size: Any, where: str) -> int:
    """0 for all inputs."""
    if not isinstance(size, int) or size < -1:
        raise _refused(where, f"groups of {size!r}")
    return max(size, 0)


def _parse_compressed(raw: Mapping[str, Any], where: str) -> Quantization:
    """vLLM's: groups of modules, each in a form of its own."""
    for extra in ("sparsity_config", "transform_config"):
        if raw.get(extra):
            raise _refused(where, f"compressed-tensors with {extra}")
    groups = raw.get("config_groups") or {}
    if not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise _refused(where, "compressed-tensors without config_groups")
    forms = _each_once(_compressed_form(group, raw, where) for group in groups.values())
    activations = any(group.get("input_activations") for group in groups.values())
    caches = bool(raw.get("kv_cache_scheme"))
    return Quantization("compressed-tensors", forms, activations, caches, _UNUSED)


def _compressed_form(group: Mapping[str, Any], raw: Mapping[str, Any], where: str) -> Form:
    def refuse(what: str) -> ConfigError:
        return _refused(where, f"compressed-tensors {what}")

    weights, activations = group.get("weights") or {}, group.get("input_activations") or {}
    kind = f"{weights.get('type')}{weights.get('num_bits')}"
    form, mixed = raw.get("format"), raw.get("format") == "mixed-precision"
    if mixed:
        form = group.get("format") or _USUAL.get(kind)
    if form not in {form for forms in _COMPRESSED.values() for form in forms}:
        raise refuse(f"in format {form!r}")
    symmetric, strategy = weights.get("symmetric", True), weights.get("strategy")
    packs, dynamic = form == "pack-quantized", activations.get("dynamic") is True
    if form not in _COMPRESSED.get(kind, ()) or (not symmetric and not packs):
        raise refuse(f"as {kind} weights" if symmetric else f"as asymmetric {kind} weights")
    if form in _FP4:
        return _FP4[form]
    if kind == "float8" and strategy == "block":
        rows, size = _block(weights.get("block_structure"), where, "compressed-tensors")
        return Packed(8, size, "weight", "weight_scale", e4m3=True, rows=rows)
    if strategy not in ("tensor", "channel", *(["group"] * packs)):
        raise refuse(f"with one scale per {strategy}")
    if kind == "float8":
        return Packed(8, 0, "weight", "weight_scale", e4m3=True, by_token=dynamic)
    if activations and (not dynamic or packs or activations.get("strategy") != "token"):
        raise refuse(f"with activations in {activations.get('num_bits')} bits, not token by token")
    if not packs:
        return Packed(8, 0, "weight", "weight_scale", by_token=dynamic)
    bits = weights["num_bits"]
    size = _group(weights.get("group_size") or -1, where) if strategy == "group" else 0
    how: dict[str, Any] = {
        "packed": "inputs",
        "shifts": _SHIFTS[bits],
        "symmetric": bool(symmetric),
    }
    how["shape_at"] = "weight_shape"
    if not symmetric:
        how["zeros_at"] = "weight_zero_point"
    if weights.get("actorder") in (True, "group"):
        how["order_at"] = "weight_g_idx"
    return Packed(bits, size, "weight_packed", "weight_scale", **how)


PARSERS: dict[Any, Callable[[Mapping[str, Any], str], Quantization]] = {
    "auto-round": _parse_auto_round,
    "awq": _parse_awq,
    "compressed-tensors": _parse_compressed,
    "fp8": _parse_fp8,
    "gptq": _parse_gptq,
    "modelopt": _parse_modelopt,
    "mxfp4": lambda raw, where: Quantization("mxfp4", (Mxfp4(),)),
}
"""By ``quant_method``; ``--quantization`` has these names (``config.QUANTIZATIONS``)."""
