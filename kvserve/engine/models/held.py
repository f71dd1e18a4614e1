"""Which matrices of a decoder are held as the checkpoint's levels, and how their inputs lie.

A matrix is held so if there is a product for levels, and if all weights that it is made of have one
form; else it is widened as it is read, and the start-up table says why.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.models.checkpoint import Blocks, Checkpoint
from kvserve.engine.models.families import ExpertSpec
from kvserve.engine.models.fp4 import Fp4
from kvserve.engine.models.level_products import can_multiply_fp8, select_level_product
from kvserve.engine.models.linear import Hold, Holding
from kvserve.engine.models.plain_storage import Plain, Storage, Transposed, check_finite
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.storage import GGUF_FORMS, GgufLevels, StoredLevels
from kvserve.engine.models.weights import ALL_EXPERTS, BY_INPUTS, Target, matrix_sources
from kvserve.kernels.layer.weight_levels import BLOCK, LevelForm
from kvserve.log import ConfigError

_LEAST = 4
"""Inputs that a group has at least, and a multiple of it: kernels take so many at once."""
_PART = 32
"""Inputs in the groups of a rank that has some of each of the checkpoint's groups."""


def storage_of(checkpoint: Checkpoint, spec: ModelSpec, weight: str) -> Storage:
    """How ``weight`` is stored: a quantised checkpoint keeps some weights plain, so the tensors it
    has decide."""
    if isinstance(checkpoint, Blocks) and weight in checkpoint.names:
        is_matrix = len(checkpoint.shape(weight)) == 2
        known = is_matrix and checkpoint.kind(weight) in GGUF_FORMS
        return GgufLevels(checkpoint) if known else Plain()
    quantized = spec.quantization
    form = None if quantized is None else quantized.form_of(checkpoint, weight)
    if form is not None:
        return form
    return Transposed() if weight.endswith(ALL_EXPERTS) and spec.delta is None else Plain()


def hold_levels(
    spec: ModelSpec,
    checkpoint: Checkpoint | None,
    dtype: torch.dtype,
    device: str,
    group: RankGroup,
) -> Holding:
    """For this rank; without a checkpoint, as one with this ``quantization_config`` would be."""
    product, reason = select_level_product(dtype, device)
    matrices, widened = {}, Counter[str]()
    for matrix, sources in matrix_sources(spec).items():
        if checkpoint is None:
            found = _hold_random(spec, matrix, sources, group)
        else:
            found = _hold(spec, matrix, sources, checkpoint, group)
        if isinstance(found, Hold) and not product:
            found = reason
        if isinstance(found, Hold):
            matrices[matrix] = _rounding(found, spec, dtype, device)
        elif found:
            widened[found] += 1
    return Holding(matrices, widened)


def _hold(
    spec: ModelSpec, matrix: str, sources: list[str], checkpoint: Checkpoint, group: RankGroup
) -> Hold | str:
    """Or why not; nothing if it is plain, or not there."""
    storages = [storage_of(checkpoint, spec, name) for name in sources]
    parts = (x.parts(name) for x, name in zip(storages, sources, strict=True))
    if not all(checkpoint.names.issuperset(each) for each in parts):
        return ""
    levels = [x for x in storages if isinstance(x, StoredLevels)]
    if not levels:
        return "there is no product for FP4" if isinstance(storages[0], Fp4) else ""
    if len(levels) < len(sources) or len({type(x) for x in levels}) > 1:
        return "its parts have several forms"
    # Of one form of quantization_config; to read scales' types again would take long.
    alike = 1 if all(x is levels[0] for x in levels) else len(levels)
    pairs = list(zip(levels, sources, strict=True))
    if len({x.form(checkpoint, name) for x, name in pairs[:alike]}) > 1:
        return "its parts have several forms"
    form, width = levels[0].form(checkpoint, sources[0]), levels[0].shape(checkpoint, sources[0])[1]
    columns = slice(0, width)
    if matrix.endswith(BY_INPUTS):  # this rank's
        size = width // group.size
        columns = slice(group.rank * size, (group.rank + 1) * size)
    groups = [x.groups(checkpoint, name)[columns] for x, name in pairs]
    experts = _experts_of(spec, matrix)
    each = len(sources) if experts is None else len(sources) // experts.count
    of_experts = [groups[i : i + each] for i in range(0, len(groups), each)]
    if any(not torch.equal(one, parts[0]) for parts in of_experts for one in parts):
        return "its parts have their inputs in several orders"
    firsts = [parts[0] for parts in of_experts]
    return _arranged(form, firsts, of_experts=experts is not None, table=matrix == "embedding")


def read_levels(storage: StoredLevels, checkpoint: Checkpoint, weight: str, target: Target) -> None:
    """Read a weight's levels to where they belong."""
    assert not isinstance(target.tensor, Tensor)
    form, file = target.tensor.form, checkpoint.file(storage.parts(weight)[0])
    rows, columns = target.region
    groups = storage.groups(checkpoint, weight)[columns]
    for piece in storage.levels(checkpoint, weight, rows, columns):
        if piece.scales.dtype is not form.scales and form.scales is not torch.float32:
            raise ConfigError(
                f"--model: scales of {weight} in {file} are {str(piece.scales.dtype)[6:]}, others "
                f"of its matrix {str(form.scales)[6:]}"
            )
        for values in (piece.scales, piece.offsets, piece.levels if form.e4m3 else None):
            if values is not None:
                check_finite(values.to(form.scales), weight, file)
        target.write_levels(piece, groups)


def _experts_of(spec: ModelSpec, matrix: str) -> ExpertSpec | None:
    layer, _, name = matrix.removeprefix("layers.").partition(".")
    of_experts = name.startswith("mlp.") and not name.startswith("mlp.shared.")
    return spec.experts_of(int(layer)) if of_experts else None


def _hold_random(spec: ModelSpec, matrix: str, sources: list[str], group: RankGroup) -> Hold | str:
    quantized = None if spec.quantization is None else spec.quantization.packed
    if quantized is None or not matrix.startswith("layers."):
        return ""
    if sources[0].endswith(ALL_EXPERTS):  # of which Packed has no form
        return ""
    form, part = quantized.form(None, matrix), spec.part(group.size)
    experts = _experts_of(part, matrix)
    inner = part.intermediate_size if experts is None else experts.intermediate_size
    mixed = part.num_heads * part.head_dim
    if int(matrix.split(".")[1]) in {state.layer for state in part.states}:
        mixed = part.delta.values
    width = {"out": mixed, "down": inner}
    count = width.get(matrix.rpartition(".")[2], spec.hidden_size)
    groups = torch.arange(count) // (form.group or count)
    return _arranged(form, [groups], of_experts=False)


def _arranged(
    form: LevelForm, groups: list[Tensor], *, of_experts: bool, table: bool = False
) -> Hold | str:
    """``groups`` of each expert's inputs, or of all: in order they are left so, else each group's
    inputs are brought together, and filled up with none to whole groups."""
    orders, count = None, len(groups[0])
    in_order = all(bool((own.diff() >= 0).all()) for own in groups)
    # How many inputs in turn have one group.
    runs: list[list[int]] = [
        (own if in_order else own.sort().values).unique_consecutive(return_counts=True)[1].tolist()
        for own in groups
    ]
    if in_order and all(own == runs[0] for own in runs):
        held = gcd(*runs[0][:-1]) or count
    else:
        whole = all({*own[:-1], form.group} == {form.group} >= {own[-1]} for own in runs)
        held = form.group if whole else min(form.group, _PART)
        orders = [_together(own, held) for own in groups]
        count = max(len(order) for order in orders)
    inputs = -(-count // BLOCK) * BLOCK if form.bits == 4 else -(-count // 2) * 2
    if held >= count:
        held = inputs
    if held % (_LEAST if form.bits == 4 else 2):
        return f"kernels have no groups of {held} inputs"
    form = replace(form, group=held)
    if table and (orders is not None or inputs != count):
        return "rows of an embedding are looked up in whole blocks"
    if orders is None:
        return Hold(form, inputs)
    order = torch.full((len(orders), inputs), -1, dtype=torch.int32)
    for filled, own in zip(order, orders, strict=True):
        filled[: len(own)] = own
    return Hold(form, inputs, order if of_experts else order[0])


def _together(groups: Tensor, size: int) -> Tensor:
    """int32: the inputs of each group, in order, and -1 up to a multiple of ``size``."""
    parts = []
    for group in groups.unique().tolist():
        own = (groups == group).nonzero()[:, 0].int()
        parts += [own, own.new_full((-len(own) % size,), -1)]
    return torch.cat(parts)


def _rounding(hold: Hold, spec: ModelSpec, dtype: torch.dtype, device: str) -> Hold:
    """FP8 weights whose checkpoint wants it, where FP8 is multiplied, are so with x in FP8."""
    quantized, form = spec.quantization, hold.form
    if not form.e4m3 or quantized is None or not quantized.rounds:
        return hold
    fits = can_multiply_fp8(dtype, device, hold.inputs) and form.group == hold.inputs
    return replace(hold, form=replace(form, rounds=True)) if fits else hold
