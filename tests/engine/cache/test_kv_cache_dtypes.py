"""Caches of levels under an engine: what they take, and what is refused.

What is computed over them, under every policy, is compared with a reference in
policies/test_conformance.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvserve import EngineConfig, SamplingParams
from kvserve.config import KV_CACHE_DTYPES
from kvserve.engine.runner import plan
from kvserve.entry_format import FORMATS
from kvserve.log import ConfigError
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.models.decoding import make, row_of

pytestmark = pytest.mark.usefixtures("few_newest")
DTYPES = [name for name in FORMATS if name != "k3v3"]  # as many bytes as k4v4 here
DIM = 16  # of both checkpoints' heads
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


make_llm = partial(make, max_num_seqs=4)


def test_as_many_bytes_hold_more_entries(qwen3_dir: Path) -> None:
    """Blocks, swap space, usage, stats and the start-up table count them alike."""
    blocks, held = {}, {}
    for dtype in ("auto", *DTYPES):
        llm = make_llm(
            qwen3_dir,
            kv_cache_dtype=dtype,
            block_size=16,
            kv_cache_memory=400_000,
            max_model_len=400,
            max_num_seqs=8,
            swap_space=1,
        )
        core = llm.engine.core
        cache, stats = core.runner.cache, core.stats()
        size = cache.kv[0].nbytes
        blocks[dtype] = stats.blocks_total
        assert cache.kv.nbytes <= 400_000 < cache.kv.nbytes + size
        assert stats.bytes_total == stats.blocks_total * size
        assert cache.host.nbytes // size - 1 == 2**30 // size
        (output,) = llm.generate(random_prompts([50]), PARAMS, use_tqdm=False)
        # Beside 73 tokens: those from the last multiple of 32 before the newest 33 on, as computed,
        # and a block with the first.
        tokens = size // (6 * 2 * DIM * 4) if FORMATS.get(dtype, FORMATS["int8"]).few else 0
        newest = 1 + -(-73 // tokens) - 32 // tokens if tokens else 0
        held[dtype] = output.kv_cache_details.held_bytes - newest * size
        assert held[dtype] == 5 * size
        assert f"{stats.blocks_total} blocks" in row_of(llm, "kv pool")[1]
        assert row_of(llm, "kv cache dtype")[1].split()[0] == dtype
    # 3 layers, 2 heads: keys and values of 16 numbers, beside scales and lows of 2 bytes each.
    assert held["auto"] == 80 * 6 * 2 * DIM * 4
    assert held["int8"] == held["fp8"] == 80 * 6 * 2 * (DIM + 2)
    assert held["k8v4"] == 80 * 6 * (DIM + 2 + DIM // 2 + 4)
    assert held["k4v4"] == 80 * 6 * 2 * (DIM // 2 + 1)
    assert held["k2v2"] == held["2bit"] == 80 * 6 * 2 * (DIM // 4 + 1)
    # Of 16 channels, 3 bits would take three strips of 4 bytes: layers have 2 or 4.
    assert held["3bit"] == 80 * 2 * (36 + 6)
    assert held["2.75bit"] == 80 * 2 * (32 + 6) and held["2.5bit"] == 80 * 2 * (28 + 6)
    assert blocks["auto"] < blocks["int8"] == blocks["fp8"] < blocks["k8v4"] < blocks["k4v4"]
    assert blocks["k4v4"] < blocks["3bit"] < blocks["2.75bit"] < blocks["2.5bit"] < blocks["2bit"]


# ---- refusals -----------------------------------------------------------------------------------


def test_an_unknown_name_is_refused() -> None:
    assert ("auto", *FORMATS) == KV_CACHE_DTYPES
    with pytest.raises(ConfigError, match="--kv-cache-dtype: 'int4' is not one of auto, int8"):
        EngineConfig.from_flat(kv_cache_dtype="int4")


@pytest.mark.parametrize(
    ("form", "settings", "dim", "why"),
    [
        ("k4v4", {"block_size": 24}, 16, "--block-size: 24 is no multiple of 16, as k4v4 needs"),
        ("3bit", {"policy": "pyramidinfer"}, 16, "pyramidinfer may drop a row's first entry"),
        ("int8", {}, 12, "--kv-cache-dtype int8: head_dim 12 is not a multiple of 8"),
        ("k8v4", {}, 24, "--kv-cache-dtype k8v4: head_dim 24 is not a multiple of 16"),
        ("k3v3", {}, 16, "head_dim 16 takes as many bytes in 3 bits as in 4 .k4v4.; auto holds"),
        ("3bit", {}, 24, "--kv-cache-dtype 3bit: head_dim 24 is not a multiple of 16"),
        ("int8", {"policy": "spindlekv"}, 16, "int8: spindlekv codes vectors as they"),
    ],
)
def test_what_does_not_fit_is_refused(
    form: str, settings: dict[str, Any], dim: int, why: str, tmp_path: Path
) -> None:
    directory = write_checkpoint("qwen3", tmp_path, head_dim=dim)
    with pytest.raises(ConfigError, match=why):
        make_llm(directory, kv_cache_dtype=form, **settings)


def test_fp8_needs_a_gpu_that_has_it(qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "device_of", lambda config: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8: needs a GPU of compute capabil"):
        make_llm(qwen3_dir, kv_cache_dtype="fp8")
