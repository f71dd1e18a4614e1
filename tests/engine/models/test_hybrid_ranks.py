"""Two ranks of models whose layers keep states, each with the states of its own heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvserve import LLM
from kvserve.log import ConfigError
from tests.engine.gguf.test_hybrids import MATRICES, written
from tests.engine.guesses import SPECULATIVE, Oracle
from tests.engine.models.decoding import check_parity, make, row_of, tokens
from tests.engine.models.hybrids import OURS, expected, write_hybrid
from tests.engine.models.test_hybrids import (
    HISTORY,
    PROMPTS,
    leave_now_and_then,
    within,
)
from tests.engine.models.test_hybrids_quantized import logits_of, quantized
from tests.gguf_files import Kind, write_gguf
from tests.quantized_checkpoints import block_fp8, gptq
from tests.thinning import slow

KARA = {"name": "kara", "window": 16, "buffer": 4, "period": 1}
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "kv_layout": "layer"}


@contextmanager
def two_ranks(directory: Path, **settings: Any) -> Iterator[LLM]:
    llm = make(directory, **TWO, **settings)
    try:
        yield llm
    finally:
        llm.close()


@pytest.mark.compiler
@pytest.mark.parametrize(
    "kind",
    ["qwen3_5_moe_text", *slow("qwen3_5_text", "qwen3_next", "qwen3_next, experts everywhere")],
)
def test_two_ranks_answer_and_keep_as_one_does(kind: str, tmp_path: Path) -> None:
    """On a small pool, beside events; a request's states are counted on all ranks."""
    kind, _, everywhere = kind.partition(",")
    write_hybrid(kind, tmp_path, **({"mlp_only_layers": []} if everywhere else {}))
    wanted = expected(tmp_path, PROMPTS, 24)
    check_parity(tmp_path, PROMPTS, wanted, within(kind), max_num_seqs=5, **TWO).close()
    settings: dict[str, Any] = {"policy": KARA, "num_gpu_blocks_override": 30, "max_num_seqs": 6}
    one = make(tmp_path, kv_layout="layer", **settings)
    with two_ranks(tmp_path, **settings) as two:
        found = [(tokens(llm, PROMPTS, 60), llm.stats()) for llm in (one, two)]
        assert row_of(two, "states")[2].startswith("on each rank, beside the pool, for 6")
        details = [
            llm.generate(PROMPTS[4], use_tqdm=False)[0].kv_cache_details for llm in (one, two)
        ]
    assert found[0][0] == found[1][0]
    stats = found[1][1]
    assert stats.preemptions_total > 0 and stats.compactions_total > 0
    assert stats.kept_state_bytes == found[0][1].kept_state_bytes > 0
    assert details[0] == details[1] and details[1].state_bytes > 0


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("config", [block_fp8(), block_fp8(32, 48), gptq()])
@pytest.mark.parametrize("kind", sorted(OURS))
def test_ranks_hold_quantised_parts(kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    plain = logits_of(make(quantized(kind, tmp_path, config)))
    with two_ranks(tmp_path) as llm:
        assert row_of(llm, "weights")[2].startswith("as stored")
        torch.testing.assert_close(logits_of(llm), plain, atol=2e-3, rtol=0.0)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("kind", [None, Kind.Q4_1])
@pytest.mark.parametrize("family", ["qwen35", "qwen35moe", "qwen3next"])
def test_ranks_read_gguf(family: str, kind: Kind | None, tmp_path: Path) -> None:
    kinds = dict.fromkeys(MATRICES, kind) if kind is not None else {}
    file = write_gguf(written(family, tmp_path / "model"), tmp_path / "m.gguf", family, kinds)
    with two_ranks(file) as llm:
        torch.testing.assert_close(logits_of(llm), logits_of(make(file)), atol=1e-4, rtol=0.0)


@pytest.mark.slow
def test_guesses_are_taken_back_on_every_rank(tmp_path: Path) -> None:
    """Beside chunks, rows that leave, and prompts that begin with a kept state."""
    write_hybrid("qwen3_5_text", tmp_path)
    prompts = [*PROMPTS, HISTORY, HISTORY[:192] + PROMPTS[0]]
    wanted = tokens(make(tmp_path, max_num_seqs=1), prompts, 48)
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    with two_ranks(tmp_path, speculative_config=SPECULATIVE, **settings) as llm:
        oracle = Oracle(llm, wanted.__getitem__, 0.7)
        leave_now_and_then(llm, np.random.default_rng(2), 0.2)
        assert tokens(llm, prompts, 48) == wanted
        assert oracle.guessed > oracle.confirmed > 100 and llm.stats().swaps_total > 0


def test_heads_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    write_hybrid("qwen3_5_text", tmp_path, linear_num_key_heads=1)
    with pytest.raises(ConfigError, match="model's 1 key heads of layers with states"):
        make(tmp_path, **TWO)
