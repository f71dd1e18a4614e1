"""Rows held as codes, on the real engine: exact where nothing merges, bounded where it does."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve import LLM, SamplingParams
from kvserve.engine.attention import select
from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.compression import coder
from kvserve.engine.frontend.inspect import inspect
from kvserve.engine.policies.spindlekv import SpindleKV
from kvserve.kernels.build import BuildError
from kvserve.kernels.score.codebook import Cover, extend
from kvserve.kernels.store.coded_entries import Codes, Slots, read_codes
from kvserve.log import ConfigError, RequestError
from kvserve.outputs import KVCacheDetails
from kvserve.scheduler.messages.sequence import Sequence
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.policies.uneven.test_uneven_engine import (
    BLOCK,
    PROMPT,
    TOKENS,
    alone,
    make_llm,
)
from tests.scheduler.traffic import preempt_now_and_then

pytestmark = pytest.mark.compiler

SPINDLE = {"name": "spindlekv", "window": 4, "flush_every": 8}
NOTHING_MERGES = {**SPINDLE, "ratio": 1, "theta_k": 0.9999, "theta_v": 0.9999}
MUCH_MERGES = {**SPINDLE, "ratio": 0.6, "theta_k": 0.6, "theta_v": 0.5}


def generate(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[KVCacheDetails]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    return tokens, [output.kv_cache_details for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unmerged_tokens_give_the_logits_of_the_full_cache(
    dtype: str, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors are stored as they were and turned by nothing: not one bit differs."""

    def nobody(*args: Tensor) -> Cover:
        *streams, theta, numbers_from = args
        return extend(*streams, theta + 1, numbers_from)  # type: ignore[arg-type,call-arg]

    monkeypatch.setattr(coder, "extend", nobody)
    settings = {"attention_backend": "cpu", "kv_layout": "head", "dtype": dtype}
    _, _, exact = alone(make_llm(llama_dir, "none", **settings))
    policy = {**NOTHING_MERGES, "raw_fallback": False}
    llm = make_llm(llama_dir, policy, **settings)
    _, _, got = alone(llm)
    assert len(got) == TOKENS and torch.equal(got, exact)
    _, (details,) = generate(llm, [PROMPT])
    assert details.coded_entries > 0 and details.codebook_entries == 2 * details.coded_entries
    assert details.compactions == 1 + (TOKENS - 1) // 8


def test_a_codebook_that_would_cost_more_is_not_built(llama_dir: Path) -> None:
    llm = make_llm(llama_dir, NOTHING_MERGES)
    tokens, (details,) = generate(llm, [PROMPT])
    assert tokens == generate(make_llm(llama_dir, "none"), [PROMPT])[0]
    assert details.compactions == 0 and details.coded_entries == 0  # an event, and nothing done
    plain = make_llm(llama_dir, "none", kv_layout="head")
    assert generate(plain, [PROMPT])[1][0].held_bytes == details.held_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_request_of_a_random_run_keeps_its_bound(
    dtype: str, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that forwards read as codes is within the request's bound of what was stored there."""
    rng = np.random.default_rng(7)
    llm = make_llm(
        *(llama_dir, MUCH_MERGES),
        dtype=dtype,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        num_gpu_blocks_override=400,
        enable_prefix_caching=False,  # each request stores its own
        enforce_eager=True,  # so that ``remember`` sees all that is stored
    )
    core = llm.engine.core
    cache, rows = core.runner.cache, core.scheduler.rows
    preempt_now_and_then(core.scheduler, rng, 0.03)
    stored: dict[int, Tensor] = {}
    errors: dict[int, list[Tensor]] = {}
    store, owners = cache.store, list[Sequence]()

    def remember(layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        owners[:] = [rows.owner(row) for row in batch.rows]
        kinds = torch.stack([k, v]).float()
        for seq, first, end in zip(owners, batch.starts, batch.starts[1:], strict=False):
            shape = cache.layout.num_layers, 2, seq.max_len, *k.shape[1:]
            known = stored.setdefault(seq.seq_id, torch.zeros(shape))
            known[layer, :, batch.positions[first:end]] = kinds[:, first:end]
        store(layer, batch, k, v)
        for codes, row in ((batch.codes[layer], row) for row in batch.rows if batch.codes):
            for head, count in enumerate(codes.coded[row].tolist()):
                lane = torch.tensor(len(codes.coded[row]) * row + head)
                got = read_codes(codes, lane.expand(count), torch.arange(count))
                compare(layer, rows.owner(row), head, slots_of(codes, row, head), torch.stack(got))

    def slots_of(codes: Codes, row: int, head: int) -> Slots:
        """What is stored of a lane's coded entries."""
        at, per_block = torch.arange(int(codes.coded[row, head])), codes.slots.shape[1]
        block = codes.slot_tables[row, head, at // per_block].long()
        return Slots.unpacked(codes.slots[block, at % per_block])

    def compare(layer: int, seq: Sequence, head: int, slots: Slots, got: Tensor) -> None:
        """got: [2, N, D], what is attended to instead of what was stored."""
        was = stored[seq.seq_id][layer, :, slots.position, head]
        error = (got.float() - was).norm(dim=-1) / was.norm(dim=-1)
        errors.setdefault(seq.seq_id, []).append(error)
        policy = core.runner.policies[seq.policy_id]
        assert isinstance(policy, SpindleKV)
        for kind, theta in zip(error, (policy.theta_k, policy.theta_v), strict=True):
            assert (kind <= math.sqrt(2 * (1 - theta)) + 0.01).all(), policy

    monkeypatch.setattr(cache, "store", remember)
    prompts = random_prompts(rng.integers(20, 90, 10).tolist(), seed=3)
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=TOKENS,
            ignore_eos=True,
            kv_policy={
                **MUCH_MERGES,
                "raw_fallback": False,
                "ratio": float(rng.choice([0.4, 0.7, 1.0])),
                "theta_k": float(rng.choice([0.4, 0.7, 0.95])),
                "theta_v": float(rng.choice([0.3, 0.6, 0.9])),
            },
        )
        for _ in prompts
    ]
    llm.generate(prompts, params, use_tqdm=False)
    assert core.scheduler.totals.preemptions_total and len(errors) == len(prompts)
    merged = [torch.cat(found, dim=-1) > 0.05 for found in errors.values()]
    assert all(each.numel() > 500 for each in merged)
    assert torch.cat(merged, dim=-1).float().mean() > 0.05, "hardly anything merged"


def test_bytes_reported_are_those_allocated(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = {**MUCH_MERGES, "raw_fallback": False}
    llm = make_llm(llama_dir, policy, enable_prefix_caching=False)
    scheduler, allocated = llm.engine.core.scheduler, list[int]()
    empty_row, block = scheduler.departures._empty_row, llm.engine.core.runner.cache.kv[0]

    def watched(seq: Sequence) -> None:
        allocated.append(scheduler.pool.capacity - scheduler.pool.num_free)
        empty_row(seq)

    monkeypatch.setattr(scheduler.departures, "_empty_row", watched)
    _, (details,) = generate(llm, [PROMPT])
    assert details.coded_entries > 0
    held = details.held_bytes + details.log_bytes
    assert [held] == [blocks * block.numel() * 4 for blocks in allocated]


def test_raw_prompt_blocks_stay_shareable(llama_dir: Path) -> None:
    llm = make_llm(llama_dir, MUCH_MERGES)
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    (first,) = llm.generate([PROMPT], sampling, use_tqdm=False)
    (second,) = llm.generate([PROMPT], sampling, use_tqdm=False)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(PROMPT) - 4) // BLOCK * BLOCK
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert second.kv_cache_details == first.kv_cache_details


def test_inspect_says_what_codes_did(llama_dir: Path) -> None:
    llm = make_llm(llama_dir, {**MUCH_MERGES, "raw_fallback": False})
    found = inspect(llm, PROMPT, [5] * 20)
    (prompt_end, *_) = found.events
    assert prompt_end.seen == len(PROMPT) and len(found.events) == 1
    assert 0 < found.details.coded_entries < found.details.held_entries
    assert (found.held[..., :1] >= 0).all() and found.held.max() == len(PROMPT) + 19


def test_what_cannot_be_coded_is_refused(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--policy.flush_every: .*multiple of the block size"):
        make_llm(llama_dir, {**SPINDLE, "flush_every": 6})
    with pytest.raises(ConfigError, match=r"--policy.window: .*at least the block size \(4\)"):
        make_llm(llama_dir, {**SPINDLE, "window": 3})
    with pytest.raises(ConfigError, match="--kv-layout layer"):
        make_llm(llama_dir, SPINDLE, kv_layout="layer")
    for backend in ("torch", "torch,cpu"):
        with pytest.raises(ConfigError, match=r"--attention-backend torch: .* held as codes"):
            make_llm(llama_dir, SPINDLE, attention_backend=backend)

    def no_library(*_: str) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr(select, "load_library", no_library)
    with pytest.raises(ConfigError, match=r"--attention-backend auto: .*not torch: .*as codes"):
        make_llm(llama_dir, SPINDLE)
    monkeypatch.undo()
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    dynamic = write_checkpoint("llama", tmp_path, rope_parameters=rope)
    with pytest.raises(ConfigError, match=r"--policy.codebook: .*dynamic NTK"):
        make_llm(dynamic, SPINDLE)
    llm = make_llm(llama_dir, "none", kv_layout="head")
    params = SamplingParams(kv_policy=SPINDLE)
    with pytest.raises(RequestError, match="start the server with --policy spindlekv"):
        llm.generate([PROMPT], params, use_tqdm=False)
