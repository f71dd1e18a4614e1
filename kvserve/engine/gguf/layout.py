"""Where llama.cpp's converter puts the rows of Qwen 3.5, Qwen3-Next and mixtures of experts.

It repeats key heads by tiling them, so in files of Qwen 3.5 value head j of key head g is number
``j Hk + g``; in checkpoints it is number ``g H / Hk + j``. Older files of Qwen3-Next have queries,
keys, values and gates of a key head side by side, as its checkpoints; all have the two numbers of
a head's rule so. (https://github.com/ggml-org/llama.cpp/blob/master/conversion/qwen.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kvserve.engine.gguf.reader import GgufFile

Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of the gated delta rule, of keys and of values; ``tiled``: as Qwen 3.5's files."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    tiled: bool

    @classmethod
    def of(cls, file: GgufFile, family: str) -> DeltaHeads:
        """``ConfigError`` for keys that are missing."""
        names = "group_count", "time_step_rank", "state_size", "inner_size"
        key_heads, heads, key_dim, inner = (
            file.value(f"{family}.ssm.{name}", int, 0) for name in names
        )
        if not key_heads or heads % key_heads or not heads or inner % heads:
            raise file.error(
                f"has {heads} value heads of {inner} numbers for {key_heads} key heads"
            )
        return cls(key_heads, heads, key_dim, inner // heads, tiled=family.startswith("qwen35"))

    def shape(self, part: str, stored: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a weight that is called ``part`` (``linear_attn.`` left out), in the file's tensor
        ``stored`` of this ``shape``."""
        if stored == "ssm_ba":
            return shape[0] // 2, *shape[1:]
        if stored == "ssm_in":
            gates = self.heads * self.value_dim
            return gates if part == "in_proj_z.weight" else shape[0] - gates, *shape[1:]
        return (shape[0], 1, *shape[1:]) if stored == "ssm_conv1d" else shape

    def rows(self, part: str, stored: str) -> Places | None:
        """Which of the tensor's rows are the weight's, in its order; ``None`` for all."""
        keys = self.key_heads * self.key_dim
        if stored == "ssm_in":
            return self._side_by_side(part)
        if stored == "ssm_ba":
            pairs = np.arange(2 * self.heads).reshape(self.key_heads, 2, -1)
            return pairs[:, int(part == "in_proj_a.weight")].flatten()
        if not self.tiled:
            return None
        if stored in ("attn_qkv", "ssm_conv1d"):
            return np.concatenate([np.arange(2 * keys), 2 * keys + self._values(self.value_dim)])
        if stored == "attn_gate":
            return self._values(self.value_dim)
        return self._values(1) if stored in ("ssm_alpha", "ssm_beta") else None

    def columns(self, part: str) -> Places | None:
        """As ``rows``, of the last dimension."""
        size = {"out_proj.weight": self.value_dim, "A_log": 1, "dt_bias": 1}.get(part)
        return self._values(size) if size is not None and self.tiled else None

    def _values(self, size: int) -> Places:
        """Where each number of the value heads is in the file, of ``size`` each."""
        tiled = np.arange(self.heads).reshape(-1, self.key_heads).T.flatten()
        return (tiled[:, None] * size + np.arange(size)).flatten()

    def _side_by_side(self, part: str) -> Places:
        of_values = self.heads // self.key_heads * self.value_dim
        width = 2 * self.key_dim + 2 * of_values
        groups = np.arange(self.key_heads * width).reshape(self.key_heads, width)
        ends = np.cumsum([self.key_dim, self.key_dim, of_values])
        q, k, v, z = np.split(groups, ends, axis=1)
        if part == "in_proj_z.weight":
            return z.flatten()
        return np.concatenate([q.flatten(), k.flatten(), v.flatten()])
