"""Quantised weights: what config.json says about them, and how they are dequantised.

Weights are dequantised as they are read and held in the model's dtype: they have the checkpoint's
accuracy, not its size. FP8 weights are held as stored if the machine multiplies FP8 (``fp8.py``)
and the checkpoint wants activations rounded token by token. The KV cache is not quantised by this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvserve.engine.models.checkpoint import Checkpoint
from kvserve.engine.models.expert_storage import Mxfp4
from kvserve.engine.models.fp8 import FP8
from kvserve.engine.models.storage import Piece, Region, Storage, rows_per_piece
from kvserve.log import ConfigError

_READ = "kvserve reads compressed-tensors (FP8), awq (4 bits, version gemm) and mxfp4 (gpt-oss)"
# Column j of eight shares an int32 with its neighbours, at these bits.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


class Quantization(Storage, Protocol):
    """A way to store weights in few bits."""

    @property
    def method(self) -> str:
        """As ``quant_method`` names it."""
        ...

    @property
    def not_applied(self) -> str:
        """What else the checkpoint asks for that kvserve does not do, for the start-up table."""
        ...

    def is_unused(self, name: str) -> bool:
        """Whether the tensor is only for what is not applied."""
        ...


def parse_quantization(raw: Mapping[str, Any], where: str) -> Quantization:
    """From ``quantization_config``; ``ConfigError`` names what is not read."""
    method = raw.get("quant_method")
    if method == "compressed-tensors":
        return _parse_fp8(raw, where)
    if method == "awq":
        return _parse_awq(raw, where)
    if method == "mxfp4":
        return Mxfp4()
    raise ConfigError(f"--model: {where} is quantised by {method!r}; {_READ}")


# ---- FP8 ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp8:
    """e4m3 numbers times a float scale per tensor or per output channel.

    ``by_token``: the checkpoint wants activations rounded to FP8 at scales found at run time.
    """

    not_applied: str
    by_token: bool
    method: str = "compressed-tensors"

    def parts(self, name: str) -> tuple[str, ...]:
        return (name, f"{name}_scale")

    def is_unused(self, name: str) -> bool:
        return name.endswith((".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale"))

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        return checkpoint.shape(name)

    def pieces(self, checkpoint: Checkpoint, name: str, region: Region) -> Iterator[Piece]:
        scales = _fp8_scales(checkpoint, f"{name}_scale", checkpoint.shape(name)[0])
        for (part, *_), values in Fp8Values().pieces(checkpoint, name, region):
            yield (part,), values.float() * scales[part]


class Fp8Values:
    """FP8 weights as they are stored, without their scales."""

    def parts(self, name: str) -> tuple[str, ...]:
        return (name,)

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        return checkpoint.shape(name)

    def pieces(self, checkpoint: Checkpoint, name: str, region: Region) -> Iterator[Piece]:
        size = rows_per_piece(checkpoint.shape(name)[1:])
        for part, values in checkpoint.pieces(name, size, region):
            if values.dtype is not FP8:
                raise ConfigError(
                    f"--model: {name} in {checkpoint.file(name)} is {str(values.dtype)[6:]} beside "
                    "a scale; it should be float8_e4m3fn"
                )
            yield (part,), values


class Fp8Scales:
    """The scales of FP8 weights, one per output."""

    def parts(self, name: str) -> tuple[str, ...]:
        return (name,)

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        return (checkpoint.shape(name.removesuffix("_scale"))[0], 1)

    def pieces(self, checkpoint: Checkpoint, name: str, region: Region) -> Iterator[Piece]:
        rows = self.shape(checkpoint, name)[0]
        yield region, _fp8_scales(checkpoint, name, rows)[region]


def _fp8_scales(checkpoint: Checkpoint, name: str, rows: int) -> Tensor:
    """[rows, 1], from one per tensor or per output channel."""
    scales = checkpoint.tensor(name).float()
    if scales.numel() not in (1, rows):
        raise ConfigError(
            f"--model: {name} in {checkpoint.file(name)} has shape {tuple(scales.shape)}; kvserve "
            "reads one scale per tensor or per output channel"
        )
    return scales.view(-1, 1).expand(rows, 1)


def _parse_fp8(raw: Mapping[str, Any], where: str) -> Fp8:
    def refuse(what: str) -> ConfigError:
        return ConfigError(f"--model: {where} is quantised by compressed-tensors {what}; {_READ}")

    form = raw.get("format")
    if form not in ("float-quantized", "naive-quantized"):
        raise refuse(f"in format {form!r}")
    for extra in ("sparsity_config", "transform_config"):
        if raw.get(extra):
            raise refuse(f"with {extra}")
    groups = raw.get("config_groups") or {}
    if not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise refuse("without config_groups")
    for group in groups.values():
        weights = group.get("weights") or {}
        kind = f"{weights.get('type')}{weights.get('num_bits')}"
        if kind != "float8" or not weights.get("symmetric", True):
            raise refuse(f"as {kind} weights")
        if weights.get("strategy") not in ("tensor", "channel"):
            raise refuse(f"with one scale per {weights.get('strategy')}")
    inputs = [group.get("input_activations") or {} for group in groups.values()]
    by_token = all(each.get("dynamic") is True for each in inputs)
    not_applied = []
    if any(inputs):
        not_applied.append("the quantisation of activations")
    if raw.get("kv_cache_scheme"):
        not_applied.append("the quantised KV cache")
    return Fp8(" and ".join(not_applied), by_token)


# ---- AWQ ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Awq:
    """4-bit numbers, eight in an int32, with a zero point and a scale per group of inputs.

    For a weight [out, in] there are qweight [in, out / 8], qzeros [groups, out / 8] and
    scales [groups, out] (arXiv 2306.00978, as AutoAWQ packs them for its GEMM kernels).
    """

    method: str = "awq"
    not_applied: str = ""

    def parts(self, name: str) -> tuple[str, ...]:
        module = name.removesuffix(".weight")
        return (f"{module}.qweight", f"{module}.qzeros", f"{module}.scales")

    def is_unused(self, name: str) -> bool:
        return False

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        rows, packed = checkpoint.shape(self.parts(name)[0])
        return (8 * packed, rows)

    def pieces(self, checkpoint: Checkpoint, name: str, region: Region) -> Iterator[Piece]:
        packed, zeros_name, scales_name = self.parts(name)
        outputs, inputs = self.shape(checkpoint, name)
        zeros = _unpack(checkpoint.tensor(zeros_name))
        scales = checkpoint.tensor(scales_name).float()
        if zeros.shape != scales.shape or scales.shape[1] != outputs or inputs % len(scales):
            raise ConfigError(
                f"--model: {zeros_name} and {scales_name} in {checkpoint.file(packed)} have shapes "
                f"{tuple(zeros.shape)} (unpacked) and {tuple(scales.shape)} for a weight of "
                f"{(outputs, inputs)}; fetch it again"
            )
        wanted, columns = region
        if wanted.start % 8 or wanted.stop % 8:
            raise ConfigError(
                f"--tensor-parallel-size: {packed} packs eight outputs together, and a rank would "
                f"need those from {wanted.start} to {wanted.stop}"
            )
        size = inputs // len(scales)
        rows = rows_per_piece((size, outputs)) * size
        words = slice(wanted.start // 8, wanted.stop // 8)
        for part, values in checkpoint.pieces(packed, rows, (columns, words)):
            group = torch.arange(part.start, part.stop) // size
            weights = (_unpack(values) - zeros[group, wanted]) * scales[group, wanted]
            yield (wanted, part), weights.T


def _unpack(packed: Tensor) -> Tensor:
    """int32 [rows, columns / 8] -> [rows, columns], each 0 to 15."""
    return (packed[..., None] >> torch.tensor(_AWQ_SHIFTS)).bitwise_and(15).flatten(1)


def _parse_awq(raw: Mapping[str, Any], where: str) -> Awq:
    wanted = {"bits": 4, "version": "gemm", "zero_point": True}
    for name, value in wanted.items():
        given = raw.get(name, value)
        if (given.lower() if isinstance(given, str) else given) != value:
            raise ConfigError(f"--model: {where} is quantised by awq with {name} {given}; {_READ}")
    return Awq()
