"""Build a decoder and read its weights, or draw them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kvserve.config import ModelConfig
from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.models.checkpoint import Blocks, Checkpoint, open_checkpoint
from kvserve.engine.models.linear import Holding, select_product
from kvserve.engine.models.plain_storage import Plain, Storage, Transposed, check_finite
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.models.weights import ALL_EXPERTS, has_own_head, is_unused, weight_targets
from kvserve.late import Late
from kvserve.log import ConfigError
from kvserve.progress import progress

_load_borrowed = Late("engine.models.borrowed:load_borrowed")
fill_randomly = Late("engine.models.random_weights:fill_randomly")
_named = Late("engine.models.mismatch:named")
_open_text_part = Late("engine.models.wrapper:open_text_part")
_hold_levels = Late("engine.models.held:hold_levels")
_read_levels = Late("engine.models.held:read_levels")
_storage_of = Late("engine.models.held:storage_of")


def load_model(
    directory: Path,
    config: ModelConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: str,
    group: RankGroup = ALONE,
) -> Transformer:
    """This rank's part of the decoder with its weights (random for ``load_format="dummy"``)."""
    if spec.borrowed:
        random = config.load_format == "dummy"
        of_theirs = directory, config.hf_overrides, spec, dtype, device
        return cast(Transformer, _load_borrowed(*of_theirs, random=random))
    if spec.experts is not None and device == "cuda" and dtype is not torch.bfloat16:
        raise ConfigError(
            f"--dtype {str(dtype)[6:]}: products of experts are in bfloat16 on a GPU; use bfloat16"
        )
    checkpoint = None
    if config.load_format != "dummy" and not spec.wrapper:
        checkpoint = open_checkpoint(directory)
    elif config.load_format != "dummy":
        checkpoint = cast(Checkpoint, _open_text_part(directory, spec.wrapper))
    if checkpoint is not None and spec.tied_embeddings and has_own_head(checkpoint, spec):
        spec = replace(spec, tied_embeddings=False)
    if checkpoint is not None and spec.delta is not None:
        spec = spec.delta.as_stored(spec, checkpoint)
    holding = Holding()
    if _has_levels(spec, checkpoint):
        holding = _hold_levels(spec, checkpoint, dtype, device, group)
    kind = decoder_of(spec)
    stored: dict[str, Storage] = {}
    if checkpoint is not None:
        with torch.device("meta"):  # before matrices of any size are made
            trial = kind(spec, dtype, "meta", group, Holding())
        stored = _match(trial, checkpoint)
    with _default_dtype(dtype), torch.device(device):
        model = cast(Transformer, kind(spec, dtype, device, group, holding))
    if checkpoint is None:
        fill_randomly(model, config.seed + group.rank)
    else:
        _read_weights(model, checkpoint, stored, config.model)
    model.pack(select_product(dtype, device)[0])
    return model.eval()


def decoder_of(spec: ModelSpec) -> Callable[..., Any]:
    """The class of a model whose layers are our own."""
    return spec.decoder or Transformer


def _has_levels(spec: ModelSpec, checkpoint: Checkpoint | None) -> bool:
    """Whether some weights may be stored as levels."""
    return spec.quantization is not None or isinstance(checkpoint, Blocks)


def _plain_storage_of(checkpoint: Checkpoint, spec: ModelSpec, weight: str) -> Storage:
    """How a weight is stored that is no levels."""
    return Transposed() if weight.endswith(ALL_EXPERTS) and spec.delta is None else Plain()


def _match(model: Transformer, checkpoint: Checkpoint) -> dict[str, Storage]:
    """How each weight is stored. ``ConfigError`` if the names or the shapes are of another model.

    ``model`` may hold no numbers.
    """
    targets = weight_targets(model)
    find = _storage_of if _has_levels(model.spec, checkpoint) else _plain_storage_of
    stored: dict[str, Storage] = {name: find(checkpoint, model.spec, name) for name, _ in targets}
    _check_names(model, checkpoint, stored)
    for weight, target in targets:
        shape = stored[weight].shape(checkpoint, weight)
        if shape != target.shape:
            file = checkpoint.file(stored[weight].parts(weight)[0])
            raise ConfigError(
                f"--model: {weight} in {file} has shape {shape}, the config says "
                f"{target.shape}{_named(model.spec, shape, target.shape)}; they are not of one "
                "model"
            )
    return stored


def _read_weights(
    model: Transformer, checkpoint: Checkpoint, stored: dict[str, Storage], name: str
) -> None:
    others = model.group.rank != 0
    bar = progress(weight_targets(model), desc=f"Loading {name}", unit="tensor", hidden=others)
    for weight, target in bar:
        storage, file = stored[weight], checkpoint.file(stored[weight].parts(weight)[0])
        if not isinstance(target.tensor, Tensor):
            _read_levels(storage, checkpoint, weight, target)
            continue
        for place, values in storage.pieces(checkpoint, weight, target.region):
            values = values.to(target.tensor.dtype)
            check_finite(values, weight, file)
            target.write(place, values)


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


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
