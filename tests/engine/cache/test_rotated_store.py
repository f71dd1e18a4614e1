"""A cache that rotates keys as it stores them: an engine's tokens stay the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.engine.attention.select import Choice, Needs, select_backend
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.log_form import LogForm
from kvserve.engine.runner import plan
from kvserve.entry_format import entry_format
from kvserve.kernels.storage import TORCH
from kvserve.kernels.store.store_kv_triton import rotate_and_store_torch
from kvserve.scheduler.layout import KVLayout
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.models.decoding import make, tokens
from tests.meta_device import KARA


def tokens_of(model: Path, **settings: Any) -> list[list[int]]:
    return tokens(make(model, block_size=8, **settings), random_prompts([5, 33]), 24)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama", {"policy": KARA, "kv_layout": "head"}),
        pytest.param(
            "llama",
            {"policy": KARA, "cudagraph_capture_sizes": (2,)},
            marks=pytest.mark.compiler,  # recorded steps need the compiled product
        ),
        ("gemma2", {}),  # windows, scaled queries
    ],
)
def test_tokens(
    model: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(model, tmp_path)
    expected = tokens_of(folder, **settings)
    stored: list[int] = []

    def store(kv_cache: Tensor, layer: int, *entries: Tensor) -> Tensor:
        stored.append(layer)
        return rotate_and_store_torch(kv_cache, layer, *entries)

    def choose(wanted: str, needs: Needs) -> Choice:
        choice = select_backend(wanted, needs)
        return replace(choice, storage=choice.storage._replace(store_rotated=store))

    monkeypatch.setattr(plan, "select_backend", choose)
    assert tokens_of(folder, **settings) == expected
    assert stored


def test_others_take_rotated_keys() -> None:
    """Groups that write something of every token, and levels."""
    made = KVLayout(2, 2, 16, 4), 3, LogForm(2), torch.float32, "cpu"
    kernels = TORCH._replace(store_rotated=rotate_and_store_torch)
    cache = KVCache(*made, kernels=kernels)
    assert cache.rotate_and_store is not None
    cache.writers.append(Deaf())
    assert cache.rotate_and_store is None
    levels = entry_format("int8", 4)
    assert KVCache(*made, form=levels, kernels=kernels).rotate_and_store is None


class Deaf:
    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        pass
