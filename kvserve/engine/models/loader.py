"""Build a decoder and read its weights, or draw them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from kvserve.config import ModelConfig
from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.models.checkpoint import Checkpoint, open_checkpoint
from kvserve.engine.models.expert_storage import Transposed
from kvserve.engine.models.fp8 import FP8, can_multiply
from kvserve.engine.models.linear import select_product
from kvserve.engine.models.quantization import Fp8, Fp8Scales, Fp8Values
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.storage import Plain, Storage
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.models.weights import TRANSPOSED, is_unused, weight_targets
from kvserve.log import ConfigError
from kvserve.progress import progress


def load_model(
    directory: Path,
    config: ModelConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: str,
    group: RankGroup = ALONE,
) -> Transformer:
    """This rank's part of the decoder with its weights (random for ``load_format="dummy"``)."""
    if spec.experts is not None and device == "cuda" and dtype is not torch.bfloat16:
        raise ConfigError(
            f"--dtype {str(dtype)[6:]}: products of experts are in bfloat16 on a GPU; use bfloat16"
        )
    checkpoint = None if config.load_format == "dummy" else open_checkpoint(directory)
    part = spec.part(group.size)
    heads, kv_heads = part.num_heads * part.head_dim, part.num_kv_heads * part.head_dim
    sizes = part.hidden_size, part.intermediate_size, heads, kv_heads
    fp8 = fp8_stored(spec, checkpoint) and can_multiply(dtype, device, *sizes)
    with _default_dtype(dtype), torch.device(device):
        model = Transformer(spec, dtype, device, group, fp8=fp8)
    if checkpoint is None:
        _fill_randomly(model, config.seed + group.rank)
    else:
        _read_weights(model, checkpoint, config.model)
    model.pack(select_product(dtype, device)[0])
    return model.eval()


def fp8_stored(spec: ModelSpec, checkpoint: Checkpoint | None) -> bool:
    """Whether all matrices of the layers are FP8, meant for activations rounded token by token."""
    if not isinstance(spec.quantization, Fp8) or not spec.quantization.by_token:
        return False
    if checkpoint is None:
        return True
    matrices = [
        name
        for name in checkpoint.names
        if name.startswith("model.layers.") and name.endswith(".weight") and "norm" not in name
    ]
    return all(f"{name}_scale" in checkpoint.names for name in matrices)


def _read_weights(model: Transformer, checkpoint: Checkpoint, name: str) -> None:
    targets = weight_targets(model)
    stored = {
        weight: _storage(checkpoint, model.spec, weight, target.tensor.dtype)
        for weight, target in targets.items()
    }
    _check_names(model, checkpoint, stored)
    others = model.group.rank != 0
    bar = progress(targets.items(), desc=f"Loading {name}", unit="tensor", hidden=others)
    for weight, target in bar:
        storage, file = stored[weight], checkpoint.file(stored[weight].parts(weight)[0])
        shape = storage.shape(checkpoint, weight)
        if shape != target.shape:
            raise ConfigError(
                f"--model: {weight} in {file} has shape {shape}, the config says "
                f"{target.shape}; they are not of one model"
            )
        for place, values in storage.pieces(checkpoint, weight, target.region):
            values = values.to(target.tensor.dtype)
            if not all(bound.isfinite() for bound in values.float().aminmax()):
                raise ConfigError(
                    f"--model: {weight} in {file} holds NaN or infinite values as "
                    f"{str(values.dtype)[6:]}; fetch it again, or choose another --dtype"
                )
            target.write(place, values)


def _storage(checkpoint: Checkpoint, spec: ModelSpec, weight: str, held: torch.dtype) -> Storage:
    """How ``weight`` is stored: a quantised checkpoint keeps some weights plain, so the tensors it
    has decide, and the type in which the model has the weight ``held``."""
    if held is FP8:
        return Fp8Values()
    if weight.endswith(".weight_scale"):
        return Fp8Scales()
    quantized = spec.quantization
    if quantized is not None and checkpoint.names.issuperset(quantized.parts(weight)):
        return quantized
    if weight.endswith(TRANSPOSED):
        return Transposed()
    return Plain()


def _check_names(model: Transformer, checkpoint: Checkpoint, stored: dict[str, Storage]) -> None:
    """``ConfigError`` if a tensor is missing, or if the model would not use one that is there."""
    wanted = {part for weight, storage in stored.items() for part in storage.parts(weight)}
    missing = sorted(wanted - checkpoint.names)
    if missing:
        raise ConfigError(
            f"--model: the checkpoint in {checkpoint.path} has no tensor {missing[0]} "
            f"({len(missing)} missing); fetch it again"
        )
    unknown = sorted(n for n in checkpoint.names - wanted if not is_unused(n, model))
    if unknown:
        raise ConfigError(
            f"--model: {checkpoint.file(unknown[0])} has a tensor {unknown[0]} ({len(unknown)} "
            f"such) that {model.spec.architecture} does not; the config names another model"
        )


def _fill_randomly(model: nn.Module, seed: int) -> None:
    """Small normal weights; norms are ones, so that activations stay in range."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif parameter.dtype is FP8:
            values = torch.empty_like(parameter, dtype=torch.float32)
            parameter.copy_(values.normal_(0.0, 1.0, generator=generator))
        elif name.endswith("_scales"):
            parameter.fill_(0.02)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
