"""Quantised weights: what config.json says about them, and how they are read.

All of these forms but MXFP4 are levels and scales, which are held as they are stored where there is
a product for them (``held.py``), and else widened as they are read. The KV cache is not quantised
by this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvserve.engine.models.checkpoint import Checkpoint
from kvserve.engine.models.storage import LevelPiece, Mxfp4, StoredLevels, level_rows
from kvserve.kernels.weight_levels import LevelForm
from kvserve.log import ConfigError

_READ = (
    "kvserve reads awq (4 bits, version gemm), gptq (4 and 8 bits), compressed-tensors "
    "(float-quantized, pack-quantized, int-quantized) and mxfp4 (gpt-oss)"
)
# At which bits of an int32 its numbers are.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
_SHIFTS = {4: tuple(range(0, 32, 4)), 8: tuple(range(0, 32, 8))}
_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def parse_quantization(raw: Mapping[str, Any], where: str) -> Quantization:
    """From ``quantization_config``; ``ConfigError`` names what is not read."""
    method = raw.get("quant_method")
    parse = {"compressed-tensors": _parse_compressed, "awq": _parse_awq, "gptq": _parse_gptq}
    if method in parse:
        return parse[method](raw, where)
    if method == "mxfp4":
        return Mxfp4()
    raise _refused(where, repr(method))


def _refused(where: str, what: str) -> ConfigError:
    return ConfigError(f"--model: {where} is quantised by {what}; {_READ}")


# ---- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed(StoredLevels):
    """Levels of ``bits``, in groups of ``group`` inputs (0: of all), in tensors whose names end as
    ``levels``, ``scales``, ``zeros`` and ``order`` (the group of each input).

    ``turned``: they are [inputs, outputs] and [groups, outputs], else the other way round.
    ``shifts``: where each of the numbers is that share an int32: along ``packed``, ``"inputs"`` or
    ``"outputs"``; zeros share it along outputs. Zeros count ``zeros_from``; without them, that of
    unsigned levels is in their middle. ``by_token``: the checkpoint wants activations rounded, at
    scales found at run time.
    """

    method: str
    bits: int
    group: int
    levels_at: str
    scales_at: str
    zeros_at: str = ""
    order_at: str = ""
    shape_at: str = ""
    symmetric: bool = True
    turned: bool = False
    packed: str = ""
    shifts: tuple[int, ...] = ()
    zeros_from: int = 0
    e4m3: bool = False
    by_token: bool = False
    activations: bool = False
    kv_cache: bool = False
    unused: tuple[str, ...] = ()

    def parts(self, name: str) -> tuple[str, ...]:
        """The first is that of the levels."""
        ends = self.levels_at, self.scales_at, self.zeros_at, self.order_at, self.shape_at
        return tuple(name.removesuffix("weight") + end for end in ends if end)

    def is_unused(self, name: str) -> bool:
        return name.endswith(self.unused)

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        if self.shape_at:
            outputs, inputs = checkpoint.tensor(self._name(name, self.shape_at)).tolist()
            return outputs, inputs
        inputs, outputs = checkpoint.shape(self.parts(name)[0])[:: 1 if self.turned else -1]
        each = len(self.shifts) or 1
        if self.packed == "inputs":
            return outputs, inputs * each
        return outputs * (each if self.packed else 1), inputs

    def form(self, checkpoint: Checkpoint | None, name: str) -> LevelForm:
        """Without a checkpoint, as most of this kind are, and for no certain width."""
        scales, group = torch.float32 if self.e4m3 else torch.float16, self.group
        if checkpoint is not None:
            found = checkpoint.tensor(self._name(name, self.scales_at)).dtype
            scales = found if found in _TYPES and not self.e4m3 else torch.float32
            group = group or self.shape(checkpoint, name)[1]
        rounds = self.by_token and not self.e4m3
        lowest = -8 if self.bits == 4 else 0
        offsets = "" if self.symmetric else "zero"
        return LevelForm(self.bits, group, scales, lowest, offsets, self.e4m3, rounds)

    def groups(self, checkpoint: Checkpoint, name: str) -> Tensor:
        if not self.order_at:
            return super().groups(checkpoint, name)
        return checkpoint.tensor(self._name(name, self.order_at)).long()

    def levels(
        self, checkpoint: Checkpoint, name: str, rows: slice, columns: slice
    ) -> Iterator[LevelPiece]:
        scales, offsets = self._scales(checkpoint, name)
        for part in level_rows(rows, columns.stop - columns.start):
            levels = self._levels(checkpoint, name, part, columns)
            yield LevelPiece(part, levels, scales[part], None if offsets is None else offsets[part])

    def _name(self, name: str, end: str) -> str:
        return name.removesuffix("weight") + end

    def _scales(self, checkpoint: Checkpoint, name: str) -> tuple[Tensor, Tensor | None]:
        """[outputs, groups] both."""
        where = self._name(name, self.scales_at)
        outputs, inputs = self.shape(checkpoint, name)
        count = -(-inputs // (self.group or inputs))
        scales = self._by_output(checkpoint.tensor(where))
        if scales.numel() == 1:
            scales = scales.view(1, 1).expand(outputs, count)
        if scales.numel() == outputs and count == 1:
            scales = scales.reshape(outputs, 1)
        zeros = None
        if self.zeros_at:
            stored = checkpoint.tensor(self._name(name, self.zeros_at))
            zeros = self._by_output(_unpacked(stored, int(self.turned), self.shifts))[:outputs]
        if scales.shape != (outputs, count) or (zeros is not None and zeros.shape != scales.shape):
            raise ConfigError(
                f"--model: {where} in {checkpoint.file(where)} has shape "
                f"{tuple(checkpoint.shape(where))} for a weight of {(outputs, inputs)} in groups "
                f"of {self.group or inputs}, or its zeros do not fit; fetch it again"
            )
        if zeros is None:
            return scales, None
        offsets = zeros.int() + self.zeros_from - 2 ** (self.bits - 1)
        if not self.symmetric:
            return scales, offsets.float()
        if offsets.any():
            raise ConfigError(
                f"--model: {self._name(name, self.zeros_at)} in {checkpoint.file(where)} has other "
                "zeros than config.json's symmetric levels have; set sym to false there"
            )
        return scales, None

    def _by_output(self, stored: Tensor) -> Tensor:
        return stored.T if self.turned and stored.dim() == 2 else stored

    def _levels(self, checkpoint: Checkpoint, name: str, rows: slice, columns: slice) -> Tensor:
        """[rows, columns], bytes."""
        stored, each = self.parts(name)[0], len(self.shifts) or 1
        wanted = {"outputs": rows, "inputs": columns}
        ways = ("inputs", "outputs") if self.turned else ("outputs", "inputs")
        words = {
            way: slice(part.start // each, -(-part.stop // each)) if way == self.packed else part
            for way, part in wanted.items()
        }
        region = tuple(words[way] for way in ways)
        ((_, values),) = checkpoint.pieces(stored, region[0].stop - region[0].start, region)
        if self.packed:
            values = _unpacked(values, ways.index(self.packed), self.shifts)
            first = wanted[self.packed].start - words[self.packed].start * each
            size = wanted[self.packed].stop - wanted[self.packed].start
            values = values.narrow(ways.index(self.packed), first, size)
            if self.bits == 8:
                values = (values ^ 128).view(torch.int8)
        elif values.dtype is not (torch.float8_e4m3fn if self.e4m3 else torch.int8):
            raise ConfigError(
                f"--model: {stored} in {checkpoint.file(stored)} is {str(values.dtype)[6:]} beside "
                f"a scale; it should be {'float8_e4m3fn' if self.e4m3 else 'int8'}"
            )
        return (values.T if self.turned else values).contiguous()


def _unpacked(words: Tensor, dim: int, shifts: tuple[int, ...]) -> Tensor:
    """int32 [a, b] -> uint8, with as many numbers as ``shifts`` for each word along ``dim``."""
    mask = 2 ** (32 // len(shifts)) - 1
    each = [(words >> shift).bitwise_and_(mask).to(torch.uint8) for shift in shifts]
    return torch.stack(each, dim + 1).flatten(dim, dim + 1)


Quantization = Packed | Mxfp4
"""How a checkpoint's weights are stored in few bits."""


# ---- config.json --------------------------------------------------------------------------------


def _parse_awq(raw: Mapping[str, Any], where: str) -> Packed:
    """For a weight [out, in] there are qweight [in, out / 8], qzeros [groups, out / 8] and scales
    [groups, out] (arXiv 2306.00978, as AutoAWQ packs them for its GEMM kernels)."""
    for name, wanted in {"bits": 4, "version": "gemm", "zero_point": True}.items():
        given = raw.get(name, wanted)
        if (given.lower() if isinstance(given, str) else given) != wanted:
            raise _refused(where, f"awq with {name} {given}")
    group = _group(raw.get("group_size", raw.get("q_group_size", 128)), where)
    how: dict[str, Any] = {"turned": True, "packed": "outputs", "shifts": _AWQ_SHIFTS}
    return Packed("awq", 4, group, "qweight", "scales", "qzeros", symmetric=False, **how)


def _parse_gptq(raw: Mapping[str, Any], where: str) -> Packed:
    """For a weight [out, in] there are qweight [in / n, out], qzeros [groups, out / n], of n in an
    int32, scales [groups, out] and g_idx [in] (arXiv 2210.17323, as AutoGPTQ and GPTQModel pack
    them). Zeros are stored less 1, but in ``gptq_v2``."""
    bits, version = raw.get("bits"), raw.get("checkpoint_format", "gptq")
    if bits not in _SHIFTS:
        raise _refused(where, f"gptq with bits {bits}")
    if version not in ("gptq", "gptq_v2"):
        raise _refused(where, f"gptq with checkpoint_format {version}")
    if raw.get("dynamic"):
        raise _refused(where, "gptq with dynamic, other bits for some modules")
    group = _group(raw.get("group_size", 128), where)
    how: dict[str, Any] = {"turned": True, "packed": "inputs", "shifts": _SHIFTS[bits]}
    how |= {"symmetric": bool(raw.get("sym", True)), "zeros_from": int(version == "gptq")}
    return Packed("gptq", bits, group, "qweight", "scales", "qzeros", "g_idx", **how)


def _group(size: Any, where: str) -> int:
    """0 for all inputs."""
    if not isinstance(size, int) or size < -1:
        raise _refused(where, f"groups of {size!r}")
    return max(size, 0)


def _parse_compressed(raw: Mapping[str, Any], where: str) -> Packed:
    def refuse(what: str) -> ConfigError:
        return _refused(where, f"compressed-tensors {what}")

    form = raw.get("format")
    if form not in ("float-quantized", "naive-quantized", "pack-quantized", "int-quantized"):
        raise refuse(f"in format {form!r}")
    for extra in ("sparsity_config", "transform_config"):
        if raw.get(extra):
            raise refuse(f"with {extra}")
    groups = raw.get("config_groups") or {}
    if not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise refuse("without config_groups")
    first, *others = ((g.get("weights") or {}, g.get("input_activations")) for g in groups.values())
    weights, activations = first
    if any(other[0] != weights for other in others):
        raise refuse("with weights of several kinds")
    dynamic = all(
        (g.get("input_activations") or {}).get("dynamic") is True for g in groups.values()
    )
    kind = f"{weights.get('type')}{weights.get('num_bits')}"
    symmetric, strategy = weights.get("symmetric", True), weights.get("strategy")
    packs = form == "pack-quantized"
    known = {"float8": ("float-quantized", "naive-quantized"), "int4": ("pack-quantized",)}
    known["int8"] = ("pack-quantized", "int-quantized", "naive-quantized")
    if form not in known.get(kind, ()) or (not symmetric and not packs):
        raise refuse(f"as {kind} weights" if symmetric else f"as asymmetric {kind} weights")
    if strategy not in ("tensor", "channel", *(["group"] * packs)):
        raise refuse(f"with one scale per {strategy}")
    by_token = bool(activations) and dynamic
    scales = "input_scale", "output_scale", "k_scale", "v_scale", "q_scale"
    unused = tuple(f".{name}" for name in scales) + (".weight_zero_point",) * bool(symmetric)
    how: dict[str, Any] = {"by_token": by_token, "unused": unused, "activations": bool(activations)}
    how["kv_cache"] = bool(raw.get("kv_cache_scheme"))
    if kind == "float8":
        return Packed("compressed-tensors", 8, 0, "weight", "weight_scale", e4m3=True, **how)
    if activations and (not dynamic or packs or activations.get("strategy") != "token"):
        raise refuse(f"with activations in {activations.get('num_bits')} bits, not token by token")
    if not packs:
        return Packed("compressed-tensors", 8, 0, "weight", "weight_scale", **how)
    bits = weights["num_bits"]
    group = _group(weights.get("group_size") or -1, where) if strategy == "group" else 0
    how |= {"packed": "inputs", "shifts": _SHIFTS[bits], "symmetric": bool(symmetric)}
    how["shape_at"] = "weight_shape"
    if not symmetric:
        how["zeros_at"] = "weight_zero_point"
    if weights.get("actorder") in (True, "group"):
        how["order_at"] = "weight_g_idx"
    return Packed("compressed-tensors", bits, group, "weight_packed", "weight_scale", **how)
