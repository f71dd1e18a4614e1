"""The query log: what it holds, and what one-byte numbers cost and save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve import SamplingParams
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.log_form import LogForm
from kvserve.engine.core.start_up_table import log_row
from kvserve.entry_format import entry_format
from kvserve.scheduler.layout import KVLayout
from tests.checkpoints import random_prompts
from tests.engine.models.decoding import make

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4)


def test_how_many_tokens_a_block_logs() -> None:
    auto, int8 = entry_format("auto", 4), entry_format("int8", 4)
    for log, form, tokens in (
        (LogForm(2), auto, 8),  # a group's mean: half of a token's keys and values
        (LogForm(2, "fp8"), auto, 32),  # in one byte instead of four
        (LogForm(8), auto, 2),
        (LogForm(2), int8, 2),  # 160 bytes a layer: 32 are left over
        (LogForm(8, "int4"), auto, 8),  # 512 bytes a layer, and 4 + 4 a vector
        (LogForm(6, "int4"), auto, 10),  # some bytes are left over
        (LogForm(8, "int4"), int8, 2),
        (LogForm(3), auto, 5),  # 512 bytes a layer: 32 are left over
        (LogForm(3, "fp8"), auto, 21),
        (LogForm(5), auto, 3),
    ):
        assert log.block_tokens(LAYOUT, form, 4) == tokens
        assert log.least_block(LAYOUT, form, 4) <= 4
    for log, form, least in (
        (LogForm(32), auto, 8),  # 1024 bytes a token, of entries 128
        (LogForm(128, "int4"), auto, 8),
        (LogForm(8), int8, 7),  # 256, of entries 40
    ):
        assert log.block_tokens(LAYOUT, form, 4) == 0
        assert log.least_block(LAYOUT, form, 4) == least


@pytest.mark.parametrize(
    ("form", "refused"),
    [
        (LogForm(8, "int4"), ""),
        (LogForm(8), "; requests for kara are refused unless they log in this form"),
        (LogForm(8, "fp8"), "; requests for kara are refused unless they log in this form"),
    ],
)
def test_the_start_up_table_names_whom_the_log_turns_away(form: LogForm, refused: str) -> None:
    """As docs/compatibility.md has it: the number of heads and the type of the numbers count."""
    assert log_row(form, "cuda")[2] == "--policy.query_reduce, --policy.query_dtype" + refused
    means = log_row(LogForm(2, "model", "group_mean"), "cpu")[2]
    assert "requests for " in means and all(name in means for name in ("kara", "snapkv", "rkv"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_entries_come_back_within_their_precision(dtype: torch.dtype) -> None:
    cache = KVCache(LAYOUT, 5, LogForm(2, "fp8"), dtype, "cpu")
    log = cache.query_log
    assert isinstance(log.blocks, Tensor) and log.blocks.numel() == cache.kv.nbytes
    query = torch.randn(1000, 8, dtype=dtype) * 3
    query[0] = 1e4  # beyond e4m3: held at its largest number, not NaN
    tokens = log.block_tokens * 4
    slots = (torch.arange(1000) % tokens + log.block_tokens)[None]
    parts = []
    for part in query.view(-1, 2, 8).split(tokens):
        log.store(1, slots[:, : len(part)], part, None)
        found = log.read(slots[:, None, : len(part)].expand(1, 2, -1), torch.tensor([1]))
        parts.append(found[0].float().transpose(0, 1).flatten(0, 1))
    back = torch.cat(parts)
    torch.testing.assert_close(back[1:], query[1:].float(), rtol=2**-4, atol=2**-9)
    assert (back[0] == 448).all()


def test_an_fp8_log_takes_a_quarter_of_the_blocks(llama_dir: Path) -> None:
    peaks, tokens = {}, {}
    for dtype in ("model", "fp8"):
        policy = {"name": "kara", "window": 100, "buffer": 4, "ratio": 0.5, "period": 20}
        policy |= {"query_dtype": dtype, "query_reduce": "group_mean"}
        llm = make(llama_dir, policy=policy)
        params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
        (output,) = llm.generate(random_prompts([4]), params, use_tqdm=False)
        assert output.kv_cache_details.compactions == 1
        peaks[dtype] = output.kv_cache_details.peak_blocks
        tokens[dtype] = output.outputs[0].token_ids
    # At the event, beside 7 blocks of keys and values: 104 positions in blocks of 32, or of 128.
    assert peaks == {"model": 7 + 4, "fp8": 7 + 1}
    assert tokens["model"][:100] == tokens["fp8"][:100]


def test_a_strided_log_takes_fewer_blocks(llama_dir: Path) -> None:
    """Of 21 queries a block. At the event positions 4 to 103 are logged, in columns 0 to 4; of
    every fourth query, numbers 1 to 25, in columns 0 and 1. At the end those from 100 on are left:
    columns 4 and 5, or the number 25 in column 1."""
    taken = {}
    for stride in (1, 4):
        policy = {"name": "kara", "window": 100, "buffer": 4, "ratio": 0.5, "period": 20}
        llm = make(llama_dir, policy={**policy, "query_stride": stride}, block_size=8)
        core = llm.engine.core
        assert core.scheduler.blocks.queries.block_tokens == 21
        params = SamplingParams(temperature=0.0, max_tokens=108, ignore_eos=True)
        (output,) = llm.generate(random_prompts([4]), params, use_tqdm=False)
        details, block = output.kv_cache_details, core.runner.cache.kv[0].nbytes
        assert details.compactions == 1
        taken[stride] = details.peak_blocks, details.log_bytes / block
    assert taken == {1: (13 + 5, 2), 4: (13 + 2, 1)}


def test_summed_scores_need_the_queries_of_a_few_tokens(llama_dir: Path) -> None:
    """Of blocks of 21 queries: at the event those of positions 84 to 103 in one column, at the end
    those from 104 on in two; beside them a float32 for each of a window's entries."""
    policy = {"name": "kara", "window": 100, "buffer": 20, "ratio": 0.5, "score_every": 20}
    llm = make(llama_dir, policy=policy, block_size=8)
    core, params = llm.engine.core, SamplingParams(temperature=0.0, max_tokens=108, ignore_eos=True)
    (output,) = llm.generate(random_prompts([4]), params, use_tqdm=False)
    details, block = output.kv_cache_details, core.runner.cache.kv[0].nbytes
    layout = core.runner.cache.layout
    assert details.compactions == 1 and details.peak_blocks == 13 + 1
    sums = 4 * 100 * layout.num_layers * layout.num_kv_heads
    assert details.log_bytes == 2 * block + sums


def test_the_start_up_table_says_when_a_log_weighs_what_events_free(llama_dir: Path) -> None:
    """Of 96 older tokens of a window 29 stay, so 67 go, in 4.2 blocks; 128 are logged, in 3.1
    blocks of 42 tokens or, of fewer bits, in 12.8 of 10. The fourth event is at 128 + 3 x 96."""
    kara = {"name": "kara", "window": 128, "buffer": 32}

    def row(**settings: Any) -> str:
        summary = make(llama_dir, **{"policy": kara, **settings}).engine.core.described().summary
        return next(why for name, _, why in summary if name == "query log")

    assert "times what its event frees" not in row(block_size=16)
    strided = row(kv_cache_dtype="k8v4", block_size=16, policy={**kara, "query_stride": 4})
    assert "times what its event frees" not in strided
    said = row(kv_cache_dtype="k8v4", block_size=16)
    assert "3.1 times what its event frees" in said and "from token 416 of its answer on" in said
