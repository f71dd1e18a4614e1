"""How many kernels a captured decoding step launches: one row's step is bound by their number."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvserve.engine.runner.cuda_graph import DecodeGraphs
from kvserve.kernels.attention import paged_attention_triton
from kvserve.kernels.dispatch import Kernel
from tests.meta_device import KARA, small_engine

pytestmark = pytest.mark.device
VIEWS = {
    *("view", "slice", "select", "transpose", "expand", "unsqueeze", "squeeze", "split", "unbind"),
    *("t", "permute", "as_strided", "detach", "alias", "unfold", "_unsafe_view", "flatten"),
    *("empty", "new_empty", "empty_like", "empty_strided", "split_with_sizes", "reshape"),
    *("_reshape_alias", "new_empty_strided"),
}
PER_LAYER = {"linear": 4, "_rms_norm": 2, "attend": 1, "_silu_and_mul": 1}
NUMBERS = {"_rotate_and_store": 1}
LEVELS = {"_rotate": 1, "_store_levels": 1}
AROUND = 5


class Launches(TorchDispatchMode):
    """Counts torch's operators, but for views of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (name := func.overloadpacket.__name__) not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("logs", [False, True], ids=["plain", "logged"])
@pytest.mark.parametrize(("form", "split"), [("auto", True), ("auto", False), ("int8", True)])
def test_launches_of_a_graph(
    form: str, split: bool, logs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each layer, and before the first; one is behind the last. Rows are ``split`` as long as
    they are too few for the device; one launch more adds their parts up."""
    if not split:
        monkeypatch.setattr(paged_attention_triton, "num_processors", lambda device: 1)
    llm = small_engine(tmp_path, KARA, cudagraph_capture_sizes=(6,), kv_cache_dtype=form)
    runner = llm.engine.core.runner
    assert isinstance(runner.graphs, DecodeGraphs)
    step = runner.graphs._steps[6, logs].step
    launches = Launches()
    parts: list[int] = []

    def launch(kernel: Kernel, grid: Any, *args: Any, **options: Any) -> None:
        launches.counts[kernel.source.__name__] += 1
        if kernel.source.__name__ == "attend":
            parts.append(grid[2])

    monkeypatch.setattr(Kernel, "launch", launch)
    with torch.inference_mode():
        step.forward()  # as before a capture
        parts.clear()
        launches.counts.clear()
        with launches:
            step.forward()
    assert parts and all((each > 1) == split for each in parts)
    layer = PER_LAYER | (NUMBERS if form == "auto" else LEVELS)
    layer |= {"_store_int4": 1} if logs else {}
    layer |= {"merge": 1} if split else {}
    layers = Counter({name: len(runner.model.layers) * n for name, n in layer.items()})
    assert layers <= launches.counts
    assert sum(layer.values()) == 9 + (form != "auto") + logs + split
    assert (launches.counts - layers).total() <= AROUND, launches.counts - layers
