"""What is decided of layers with windows whose heads are others than those of the layers that see
all tokens, and of entries that are held as computed beside those in few bits."""

from __future__ import annotations

from dataclasses import replace

from kvserve.engine.cache.entry_store import block_bytes
from kvserve.engine.messages import Row
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.policies.base import Policy
from kvserve.engine.runner.plan import EnginePlan
from kvserve.entry_format import EntryFormat, entry_format
from kvserve.log import ConfigError
from kvserve.scheduler.blocks.cache_group import GroupSpec
from kvserve.scheduler.blocks.window_group import FirstSpec, NewestSpec
from kvserve.scheduler.layout import KVLayout, WindowShape


def with_windows(layout: KVLayout, form: EntryFormat, spec: ModelSpec) -> KVLayout:
    """``layout`` that says how layers with windows lie in its blocks: so that a token takes the
    fewest. Heads are shared out over several tables where a block does not hold all of a layer's.

    ``ConfigError`` if a block does not hold one head, or if entries are in few bits.
    """
    assert spec.window_heads is not None
    num_heads, dim = spec.window_heads
    if (reason := windows_refusal(spec, form)) is not None:
        raise ConfigError(f"--kv-cache-dtype {form.name}: {reason}")
    room, count, found = block_bytes(layout, form), len(spec.windowed), []
    for rows in range(1, num_heads + 1):
        layer = form.block_bytes(layout.block_size, dim, 1, num_heads // rows)
        if num_heads % rows == 0 and layer <= room:
            layers = min(count, room // layer)
            found.append((-(-count // layers) * rows, rows, layers))
    if not found:
        raise ConfigError(
            f"--kv-layout {layout.granularity.value}: a block holds no head of {dim} dimensions, "
            "as the model's layers with windows have; use model"
        )
    _, rows, layers = min(found)
    return replace(layout, windows=WindowShape(layers, rows, num_heads // rows, dim))


def windows_refusal(spec: ModelSpec, form: EntryFormat) -> str | None:
    """Why layers with windows whose heads are others cannot hold entries in this form."""
    if spec.window_heads is None:
        return None
    num_heads, dim = spec.window_heads
    if (reason := form.refusal(dim)) is not None:
        return f"{reason}; auto holds heads of any size"
    if form.few:
        return (
            f"the model's layers with windows have other heads ({num_heads} of {dim}) than the "
            f"others ({spec.num_kv_heads} of {spec.head_dim}); use auto, int8, fp8 or k8v4"
        )
    return None


def shape_rows(plan: EnginePlan) -> list[Row]:
    """The start-up table's rows on layers of two shapes, and on those that share entries."""
    spec, layout, rows = plan.spec, plan.layout, list[Row]()
    if spec.window_heads is not None and layout.windows is not None:
        own, (heads, dim) = layout.windows, spec.window_heads
        state = f"{heads} of {dim}, the others' {layout.num_kv_heads} of {layout.head_dim}"
        part = "" if own.rows == 1 else f", with {own.heads_per_block} of their heads"
        why = f"a block holds {own.layers_per_block} of these layers{part}, or "
        rows.append(("kv heads in windows", state, f"{why}{layout.layers_per_block} of the others"))
    if spec.sharing:
        state = f"{spec.sharing} layers read those of {spec.num_layers} others"
        rows.append(("shared entries", state, "policies go by the layers that hold them"))
    return rows


def token_bytes(plan: EnginePlan) -> tuple[float, float]:
    """Bytes of a token in all layers, of two shapes; and if entries were held as computed."""
    spec, found = plan.spec, []
    assert spec.window_heads is not None
    heads, dim = spec.window_heads
    for form in (plan.form, entry_format("auto", plan.dtype.itemsize)):
        full = len(spec.layers.full) * spec.num_kv_heads * form.entry_bytes(spec.head_dim)
        found.append(float(full + len(spec.windowed) * heads * form.entry_bytes(dim)))
    return found[0], found[1]


def newest_of(form: EntryFormat, policy: Policy) -> int:
    """How many of a row's newest entries are as they were computed: half as many beside a rest, to
    whose bits they would give more."""
    return form.newest // (2 if policy.demands.rest_bits else 1)


def exact_specs(
    spec: ModelSpec, form: EntryFormat, layout: KVLayout, itemsize: int, chunk: int, policy: Policy
) -> tuple[GroupSpec, GroupSpec]:
    """The groups of entries as they were computed; none of them are for later turns beside a rest,
    from which these do not go on."""
    size, lanes = layout.block_size, (layout.layers_per_block, layout.heads_per_block)
    tokens = form.newest_tokens(size, layout.head_dim, itemsize, *lanes)
    if not tokens:
        raise ConfigError(
            f"--block-size: a block of {size} tokens in {form.name} cannot hold one as computed"
        )
    window = -(-newest_of(form, policy) // size) * size
    later = 0 if policy.demands.rest_bits else 16
    newest = NewestSpec(tokens, len(spec.layers.windowed), window, chunk, later)
    return newest, FirstSpec(tokens)
