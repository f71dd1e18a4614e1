"""How queries are logged, and how many tokens a block has: decided of configs alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvserve.engine.cache.entry_store import block_bytes
from kvserve.engine.models.spec import ModelSpec
from kvserve.entry_format import ALIGNED, TILE, EntryFormat, int4_bytes
from kvserve.log import ConfigError
from kvserve.scheduler.layout import KVLayout

BLOCK_SIZES = {"cpu": 16, "cuda": 64}
"""Entries of a block; on a GPU a multiple of attention's tiles, which then read one block."""
LARGEST = 64
"""Of few bits, where smaller blocks would waste their ends (``_size_of``)."""


@dataclass(frozen=True)
class LogForm:
    """What a token logs: ``heads`` vectors, Hkv (means over GQA groups) or Hq.

    ``dtype``: ``model`` (the cache's), ``fp8`` (e4m3, a byte a number), or ``int4`` (4 bits a
    number; each vector has its scale and the share of its attention that newest entries got).
    """

    heads: int
    dtype: str = "model"
    reduction: str = "heads"
    """``heads``, or ``group_mean``: which of the two ``heads`` counts."""

    def block_tokens(self, layout: KVLayout, form: EntryFormat, itemsize: int) -> int:
        """Tokens whose queries one block holds, ``itemsize`` bytes a number as it is computed.

        What is left of a block is not used; 0 if a block is too small for one token's.
        """
        layer = block_bytes(layout, form) // layout.layers_per_block // ALIGNED * ALIGNED
        return layer * layout.rows // self._token_bytes(layout.head_dim, itemsize)

    def least_block(self, layout: KVLayout, form: EntryFormat, itemsize: int) -> int:
        """The block size from which on a block of such entries holds a token's queries."""
        entry = layout.num_kv_heads * form.mean_bytes(layout.head_dim, layout.layers_per_block)
        return math.ceil(self._token_bytes(layout.head_dim, itemsize) / entry)

    def _token_bytes(self, dim: int, itemsize: int) -> int:
        """Bytes of a token's queries in one layer."""
        vector = {"model": dim * itemsize, "fp8": dim, "int4": int4_bytes(dim)}[self.dtype]
        return self.heads * vector


def choose_log(
    asked: tuple[str | None, str],
    part: ModelSpec,
    form: EntryFormat,
    dtype: torch.dtype,
    device: str,
    block_size: int | None,
    *,
    has_fp8: bool,
    backend: str = "auto",
) -> tuple[LogForm, int]:
    """The log of an engine on ``part`` of a model, and the tokens of a block; the policies of
    requests share this log. ``asked``: ``query_reduction`` and ``logged_dtype`` of the server's.

    If the server's policy logs none, the form is Kara's, unless an attention backend is named that
    cannot log it, or a block is too small for it. A block that has no size yet is made to hold a
    token's queries.
    """
    reduction, logged = asked
    if logged == "auto":
        logged = "fp8" if has_fp8 and dtype is not torch.float32 else "model"
    elif logged == "fp8" and device == "cuda" and not has_fp8:
        raise ConfigError(
            "--policy.query_dtype: fp8 needs a GPU of compute capability 8.9 or newer; "
            "choose model or auto"
        )
    size = block_size or _size_of(form, device, part.head_dim, dtype.itemsize)
    layout = KVLayout(part.num_layers, part.num_kv_heads, part.head_dim, size)
    means = LogForm(part.num_kv_heads, logged, "group_mean")
    logs = [means if reduction == "group_mean" else LogForm(part.num_heads, logged)]
    if reduction is None:
        packages = {"flash-attn", "xformers"} & set(backend.split(","))
        logs = [means] if packages else [LogForm(part.num_heads, "int4"), means]
    unit = TILE if form.few else 1  # of which blocks are multiples
    least = [-(-log.least_block(layout, form, dtype.itemsize) // unit) * unit for log in logs]
    at = next((at for at, tokens in enumerate(least) if tokens <= size), -1)
    if least[at] > size and block_size is not None:
        raise ConfigError(
            f"--block-size: the queries that a token logs ({logs[at].heads} heads, "
            f"{logs[at].dtype}) are larger than a block of {size} tokens ({form.name}); take "
            f"{least[at]} or more, or leave it out"
        )
    return logs[at], -(-least[at] // size) * size


def _size_of(form: EntryFormat, device: str, dim: int, itemsize: int) -> int:
    """Entries of a block: in few bits so many that the newest, as computed, fill nine tenths."""
    size, entry = BLOCK_SIZES[device], 2 * dim * itemsize
    while form.few and size < LARGEST:
        if 10 * entry * form.newest_tokens(size, dim, itemsize) >= 9 * form.lane_bytes(size, dim):
            break
        size *= 2
    return size
