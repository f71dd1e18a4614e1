"""The query log: what it holds, and what one-byte numbers cost and save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvserve import LLM, SamplingParams
from kvserve.engine.kv_cache import KVCache, log_block_tokens
from kvserve.scheduler.layout import KVLayout
from tests.checkpoints import random_prompts

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4)


def test_how_many_tokens_a_block_logs() -> None:
    assert log_block_tokens(LAYOUT, 2) == 8  # a group's mean: half a token's keys and values
    assert log_block_tokens(LAYOUT, 2, per_number=4) == 32  # in one byte instead of four
    assert log_block_tokens(LAYOUT, 8) == 2
    with pytest.raises(ValueError, match="whole queries of 32 heads"):
        log_block_tokens(LAYOUT, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_entries_come_back_within_their_precision(dtype: torch.dtype) -> None:
    cache = KVCache(LAYOUT, 5, 2, dtype, "cpu", fp8_log=True)
    assert cache.query_log.numel() == cache.kv.numel() * dtype.itemsize
    query = torch.randn(1000, 8, dtype=dtype) * 3
    query[0] = 1e4  # beyond e4m3: held at its largest number, not NaN
    stored = query.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    back = cache.logged(stored).float()
    torch.testing.assert_close(back[1:], query[1:].float(), rtol=2**-4, atol=2**-9)
    assert (back[0] == 448).all()


def test_an_fp8_log_takes_a_quarter_of_the_blocks(llama_dir: Path) -> None:
    peaks, tokens = {}, {}
    for dtype in ("model", "fp8"):
        fields = {"window": 100, "buffer": 4, "ratio": 0.5, "period": 20, "query_dtype": dtype}
        policy = {"name": "kara", **fields}
        llm = LLM(str(llama_dir), policy=policy, dtype="float32", skip_tokenizer_init=True)
        params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
        (output,) = llm.generate(random_prompts([4]), params, use_tqdm=False)
        assert output.kv_cache_details.compactions == 1
        peaks[dtype] = output.kv_cache_details.peak_blocks
        tokens[dtype] = output.outputs[0].token_ids
    # At the event, beside 7 blocks of keys and values: 104 positions in blocks of 32, or of 128.
    assert peaks == {"model": 7 + 4, "fp8": 7 + 1}
    assert tokens["model"][:100] == tokens["fp8"][:100]
