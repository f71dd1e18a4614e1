"""Every attention backend gives the same numbers and tokens; which is taken, and why."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.attention.paged import PagedAttention
from kvserve.engine.attention.select import Needs, select_backend
from kvserve.engine.attention.torch_sdpa import TorchAttention
from kvserve.kernels import build
from kvserve.kernels.attend.paged_attention_cpu import paged_attention_cpu
from kvserve.kernels.store.entries import AnyLevels
from kvserve.log import ConfigError
from tests.engine.test_parity import PROMPTS, generate
from tests.kernels.paged_case import SCALE, Case, Shape, make
from tests.thinning import slow

NEEDS = Needs("cpu", torch.float32, head_dim=16, block_size=16, scale=0.25)


class StoredCase:
    """A cache of one layer, in layer group ``group``."""

    def __init__(self, case: Case, group: int) -> None:
        self._found = case.keys.nan_to_num(), case.values.nan_to_num(), group

    def rest_keys_values(self, layer: int) -> tuple[AnyLevels, AnyLevels]:
        raise AssertionError("there is no rest")

    def newest_keys_values(self, layer: int) -> tuple[Tensor, Tensor, int]:
        raise AssertionError("its entries are all as they were computed")

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor, int]:
        return self._found

    logs_shares = False
    rotate_and_store = None

    def turn(self, x: Tensor) -> Tensor:
        raise AssertionError("layers do that")

    def store(self, layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        raise AssertionError("attention stores nothing")

    def log(self, layer: int, batch: ForwardBatch, q: Tensor, shares: Tensor | None) -> None:
        raise AssertionError("attention logs nothing")


def forward_batch(case: Case, block_size: int) -> ForwardBatch:
    """The batch that such a call belongs to; what attention does not read is left empty."""
    rows, starts, last = case.rows, case.starts, case.last
    ends = [int(x.max()) for x in last.amax(dim=(0, 1)).tensor_split(starts[1:-1])]
    columns = np.array(ends) // block_size + 1
    empty = torch.empty(0)
    arrays = rows.numpy(), starts.numpy(), columns
    return ForwardBatch(empty, empty, empty, None, last, case.tables, *arrays)


@pytest.mark.compiler
@pytest.mark.parametrize(("groups", "tables"), [(1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize(
    "lengths",
    [[1, 1, 1, 1, 1], [1, 1, 1, 40, 3], [1, 17, 16, 1, 1], [7, 7, 7, 7, 7]],
    ids=["decode", "mixed", "chunks", "equal chunks"],
)
def test_backends_agree(lengths: list[int], groups: int, tables: int) -> None:
    shape = Shape(heads=8, groups=groups, tables=tables)
    case = make(shape, [10, 17, 96, 60, 7], lengths)
    batch = forward_batch(case, shape.block)
    reference = TorchAttention(SCALE, shape.block, torch.float32).plan(batch)
    paged = PagedAttention(paged_attention_cpu, SCALE, shape.block, all_starts=True)
    found = paged.plan(batch)
    for group in range(groups):
        cache = StoredCase(case, group)
        expected = reference(0, case.query, cache)
        torch.testing.assert_close(found(0, case.query, cache), expected, atol=1e-5, rtol=1e-5)
        assert expected.isfinite().all()


@pytest.mark.compiler
@pytest.mark.parametrize("layout", [*slow("model", "layer"), "head"])
def test_recomputed_queries_keep_the_same_entries(llama_dir: Path, layout: str) -> None:
    """Observation passes, whose tokens see their rows up to entries of their own."""
    policy = {
        **{"name": "kara", "window": 20, "buffer": 4, "ratio": 0.35, "period": 5},
        **{"query_source": "recompute", "query_stride": 2, "query_reduce": "heads"},
    }
    found = [
        generate(llama_dir, policy, attention_backend=name, kv_layout=layout)
        for name in ("cpu", "torch")
    ]
    assert found[0][1] == found[1][1]
    assert found[0][0].stats().compactions_total > len(PROMPTS)


# ---- which is taken -----------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No library was ever built, and builds stay here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    build.load_library.cache_clear()
    return tmp_path


def use_compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose only ``g++`` is this script; ``""`` for none."""
    monkeypatch.setenv("PATH", str(folder))
    if script:
        (folder / "g++").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "g++").chmod(stat.S_IRWXU)


FAILS = 'echo "In file included from a.h" >&2; echo "a.cpp:3: error: boom" >&2; exit 1'
BROKEN = [
    ("", "no g++ found"),
    (FAILS, r"g++ failed: a.cpp:3: error: boom"),
    ("exit 0", "the build does not load"),
]


@pytest.mark.parametrize(("compiler", "why"), BROKEN)
def test_without_a_build_auto_takes_torch_and_says_why(
    compiler: str,
    why: str,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    use_compiler(empty_cache, compiler, monkeypatch)
    choice = select_backend("auto", NEEDS)
    assert isinstance(choice.backend, TorchAttention)
    assert "not cpu: " in choice.reason and why in choice.reason
    (line,) = caplog.messages
    assert why in line and "\n" not in line
    with pytest.raises(ConfigError, match="--attention-backend cpu: ") as caught:
        select_backend("cpu", NEEDS)
    assert why in str(caught.value)
    assert not list(empty_cache.glob("cache/kvserve/*"))


def test_a_compiler_that_fails_is_run_once(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = empty_cache / "runs"
    use_compiler(empty_cache, f"echo once >> {runs}; {FAILS}", monkeypatch)
    for _ in range(3):
        with pytest.raises(build.BuildError, match="boom"):
            build.load_library("linear")
    assert runs.read_text() == "once\n"


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        (Needs("cpu", torch.float16, 16, 16, 0.25), "dtype float16 is not float32 or bfloat16"),
        (Needs("cpu", torch.float32, 12, 16, 0.25), "head_dim 12 is not a multiple of 8 up to 512"),
    ],
)
def test_what_the_compiled_backend_does_not_do(needs: Needs, why: str) -> None:
    choice = select_backend("auto", needs)
    assert choice.name == "torch" and f"not cpu: {why}" in choice.reason
    with pytest.raises(ConfigError, match=why):
        select_backend("cpu", needs)
    assert select_backend("torch", needs).reason == "gathered blocks and torch's SDPA"
