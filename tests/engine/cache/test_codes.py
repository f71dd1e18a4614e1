"""Rows held as codes, on the real engine: exact where nothing merges, bounded where it does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve import LLM, SamplingParams
from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.attention.coded_rows import CodedRows
from kvserve.engine.cache.code_store import CodeStore
from kvserve.engine.compression import coder
from kvserve.engine.frontend.inspect import Event, inspect
from kvserve.engine.policies.spindlekv import SpindleKV, writes_codes
from kvserve.kernels.coded_entries import Codes, Slots, read_codes
from kvserve.kernels.scores.codebook import Cover, extend
from kvserve.log import ConfigError, RequestError
from kvserve.outputs import KVCacheDetails
from kvserve.scheduler.messages.sequence import Sequence
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.dense_reference import dense_pass, load_dense
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import slow

BLOCK = 4
(PROMPT,) = random_prompts([70], seed=8)
MATES = random_prompts([3, 22, 55, 4, 41, 90], seed=9)
TOKENS = 40
SPINDLE = {"name": "spindlekv", "window": 4, "flush_every": 8}
NOTHING_MERGES = {**SPINDLE, "ratio": 1, "theta_k": 0.9999, "theta_v": 0.9999}
REPEAT = {**SPINDLE, "gqa": "repeat"}
MUCH_MERGES = {**SPINDLE, "ratio": 0.6, "theta_k": 0.6, "theta_v": 0.5}


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def make_llm(directory: Path, policy: Any, **settings: Any) -> LLM:
    settings = {"block_size": BLOCK, "max_num_seqs": 16, "dtype": "float32", **settings}
    return LLM(str(directory), policy=policy, skip_tokenizer_init=True, **settings)


def generate(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[KVCacheDetails]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    return tokens, [output.kv_cache_details for output in outputs]


def logits_of(llm: LLM) -> list[Tensor]:
    """The logits of every token that a request alone samples."""
    model, seen = llm.engine.core.runner.model, list[Tensor]()
    original = model.logits

    def record(hidden: Tensor) -> Tensor:
        seen.append(original(hidden))
        return seen[-1]

    model.logits = record  # type: ignore[method-assign]
    generate(llm, [PROMPT])
    return seen


@pytest.mark.parametrize(
    ("backend", "codes"), [("cpu", "direct"), ("cpu", "rebuild"), ("torch", "auto")]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unmerged_tokens_give_the_logits_of_the_full_cache(
    backend: str, codes: str, dtype: str, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors are stored as they were and turned by nothing: not one bit differs."""

    def nobody(*args: Tensor, weights: Tensor | None) -> Cover:
        *streams, theta, numbers_from = args
        return extend(*streams, theta + 1, numbers_from)  # type: ignore[arg-type,call-arg]

    monkeypatch.setattr(coder, "extend", nobody)
    settings = {"attention_backend": backend, "kv_layout": "head", "dtype": dtype}
    exact = logits_of(make_llm(llama_dir, "none", **settings))
    policy = {**NOTHING_MERGES, "raw_fallback": False}
    llm = make_llm(llama_dir, policy, **settings, code_attention=codes)
    got = logits_of(llm)
    assert len(got) == len(exact) == TOKENS
    assert all(torch.equal(a, b) for a, b in zip(got, exact, strict=True))
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


@pytest.mark.parametrize(
    ("codes", "dtype"),
    [
        ("direct", "bfloat16"),
        pytest.param("direct", "float32", marks=pytest.mark.slow),
        pytest.param("rebuild", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_every_request_of_a_random_run_keeps_its_bound(
    codes: str, dtype: str, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that forwards read as codes, or rebuild, is within the request's bound of what was
    stored there."""
    rng = np.random.default_rng(7)
    llm = make_llm(
        *(llama_dir, MUCH_MERGES),
        dtype=dtype,
        code_attention=codes,
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
    store, rebuild, owners = cache.store, CodeStore.rebuild, list[Sequence]()

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
        assert writes_codes(policy)
        for kind, theta in zip(error, (policy.theta_k, policy.theta_v), strict=True):
            assert (kind <= math.sqrt(2 * (1 - theta)) + 0.01).all(), policy

    def check(self: CodeStore, layer: int, coded: CodedRows) -> None:
        rebuild(self, layer, coded)
        tables = coded.tables
        codes = self.codes(tables.coded[layer], tables.code_slots[layer], tables.vectors[layer])
        for (row, head), count in np.ndenumerate(tables.coded[layer].numpy()):
            at = torch.arange(count)
            block = tables.kv[layer, row, head, at // BLOCK].long() * 2 * BLOCK + at % BLOCK
            got = self.vectors[torch.stack([block, block + BLOCK])]
            compare(layer, owners[row], head, slots_of(codes, row, head), got)

    monkeypatch.setattr(cache, "store", remember)
    monkeypatch.setattr(CodeStore, "rebuild", check)
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
    assert core.scheduler.num_preemptions and len(errors) == len(prompts)
    merged = [torch.cat(found, dim=-1) > 0.05 for found in errors.values()]
    assert all(each.numel() > 500 for each in merged)
    assert torch.cat(merged, dim=-1).float().mean() > 0.05, "hardly anything merged"


@pytest.mark.parametrize("gqa", ["mean", *slow("repeat")])
def test_a_tiny_pool_gives_the_tokens_of_an_ample_one(gqa: str, llama_dir: Path) -> None:
    """Alone or beside others, in chunks, from the prefix cache, computed again: the same."""
    policy = {**MUCH_MERGES, "raw_fallback": False, "gqa": gqa}
    alone = [generate(make_llm(llama_dir, policy), [prompt])[0][0] for prompt in [PROMPT, *MATES]]
    for settings in (
        {},
        {"max_num_batched_tokens": 17, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 300},
        {"num_gpu_blocks_override": 400, "max_num_batched_tokens": 30},
    ):
        llm = make_llm(llama_dir, policy, **settings)
        scheduler = llm.engine.core.scheduler
        if "num_gpu_blocks_override" in settings:
            preempt_now_and_then(scheduler, np.random.default_rng(1), 0.05)
        tokens, details = generate(llm, [PROMPT, *MATES, PROMPT])
        assert tokens == [*alone, alone[0]], settings
        assert all(kv.coded_entries for kv in details if kv.logical_tokens > 48)
        assert bool(scheduler.num_preemptions) == ("num_gpu_blocks_override" in settings)
        assert scheduler.blocks.headroom == scheduler.pool.capacity
        scheduler.check_integrity()


def test_reading_codes_gives_the_tokens_of_rebuilding_them(llama_dir: Path) -> None:
    """Chunks, decodes and events of many rows; without the scratch, in fewer bytes."""
    policy = {**MUCH_MERGES, "raw_fallback": False}
    settings = {"max_num_batched_tokens": 30, "enable_prefix_caching": False}
    (direct, read), (rebuilt, scratch) = (
        generate(make_llm(llama_dir, policy, **settings, code_attention=codes), [PROMPT, *MATES])
        for codes in ("auto", "rebuild")
    )
    assert direct == rebuilt
    for without, kv in zip(read, scratch, strict=True):
        for name in ("coded_entries", "codebook_entries", "held_entries", "compactions"):
            assert getattr(without, name) == getattr(kv, name)
        assert (without.held_bytes < kv.held_bytes) == (kv.coded_entries > 0)
    assert sum(kv.compactions for kv in read) > 2 * len(read)


def test_query_heads_attend_to_what_they_chose(llama_dir: Path) -> None:
    """``gqa=repeat`` where nothing merges: transformers under a mask for each query head."""
    dense, window, ratio = load_dense(llama_dir), 8, 0.4
    before = dense_pass(dense, PROMPT, [])
    layers, heads, length, dim = before.queries.shape
    keys = before.keys.repeat_interleave(heads // before.keys.shape[1], dim=1)
    logits = before.queries[:, :, -window:] @ keys.transpose(-1, -2) * dim**-0.5
    unseen = torch.ones(window, length).triu(length - window + 1).bool()
    votes = logits.masked_fill(unseen, -torch.inf).softmax(dim=-1).mean(dim=2)
    budgets = SpindleKV(ratio=ratio, window=window).layer_budgets(layers, length)
    held = np.full((layers, heads, length), -1)
    for layer, head in np.ndindex(layers, heads):
        chosen = votes[layer, head, :-window].argsort(descending=True, stable=True)
        kept = [*sorted(chosen[: budgets[layer]].tolist()), *range(length - window, length)]
        held[layer, head, : len(kept)] = kept
    policy = {**REPEAT, "window": window, "ratio": ratio, "theta_k": 0.9999, "theta_v": 0.9999}
    llm = make_llm(llama_dir, policy)
    (tokens,), (details,) = generate(llm, [PROMPT])
    got = torch.cat(logits_of(llm))
    event = Event(seen=length, before=length, held=held)
    wanted = dense_pass(dense, [*PROMPT, *tokens], [event]).logits[length - 1 : -1]
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)
    assert details.coded_entries > 0
    (prompt_end, *_) = inspect(llm, PROMPT, [5]).events
    kv_heads = prompt_end.held.shape[1]
    together = held.reshape(layers, kv_heads, -1)
    assert (np.diff((prompt_end.held >= 0).sum(axis=-1)) != 0).any(), "all unions are as large"
    for layer, head in np.ndindex(layers, kv_heads):
        union = prompt_end.held[layer, head]
        assert union[union >= 0].tolist() == sorted({*together[layer, head].tolist()} - {-1})


def test_query_heads_that_keep_all_are_as_one(llama_dir: Path) -> None:
    """As many merges, whichever heads an entry counts for; beside a prompt within its window."""
    policy = {**MUCH_MERGES, "ratio": 1, "raw_fallback": False}
    mean, repeat = (
        generate(make_llm(llama_dir, {**policy, "gqa": gqa}), [PROMPT, *MATES])
        for gqa in ("mean", "repeat")
    )
    assert mean == repeat
    assert 0 < mean[1][0].codebook_entries < 2 * mean[1][0].coded_entries


@pytest.mark.parametrize("codes", ["direct", "rebuild"])
def test_bytes_reported_are_those_allocated(
    codes: str, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = {**MUCH_MERGES, "raw_fallback": False}
    llm = make_llm(llama_dir, policy, enable_prefix_caching=False, code_attention=codes)
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


@pytest.mark.parametrize(
    ("settings", "state", "why"),
    [
        ({}, "read", "by attention, without scratch"),
        ({"code_attention": "rebuild"}, "rebuilt", "each layer's before it attends"),
        ({"attention_backend": "torch"}, "rebuilt", "attention torch does not read codes"),
        ({"attention_backend": "torch,cpu"}, "rebuilt", "attention torch,cpu does not"),
    ],
)
def test_the_startup_table_says_how_codes_are_attended_to(
    settings: dict[str, Any], state: str, why: str, llama_dir: Path
) -> None:
    summary = make_llm(llama_dir, SPINDLE, **settings).engine.core.info.summary
    ((_, found, reason),) = [row for row in summary if row[0] == "codes"]
    assert found == state and reason.startswith(why) and "--code-attention" in reason


def test_raw_prompt_blocks_stay_shareable(llama_dir: Path) -> None:
    llm = make_llm(llama_dir, MUCH_MERGES)
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    (first,) = llm.generate([PROMPT], sampling, use_tqdm=False)
    (second,) = llm.generate([PROMPT], sampling, use_tqdm=False)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(PROMPT) - 4) // BLOCK * BLOCK
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert second.kv_cache_details == first.kv_cache_details


def test_codes_share_a_batch_with_other_policies(llama_dir: Path) -> None:
    policies: list[Any] = [MUCH_MERGES, "none", {"name": "adakv", "budget": 20, "window": 4}]
    params = [
        SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, kv_policy=policy)
        for policy in policies
    ]
    llm = make_llm(llama_dir, MUCH_MERGES, max_num_batched_tokens=50)
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    for policy, output in zip(policies, outputs, strict=True):
        alone = generate(make_llm(llama_dir, policy), [PROMPT])[0][0]
        assert output.outputs[0].token_ids == alone, policy


def test_inspect_says_what_codes_did(llama_dir: Path) -> None:
    llm = make_llm(llama_dir, {**MUCH_MERGES, "raw_fallback": False})
    found = inspect(llm, PROMPT, [5] * 20)
    (prompt_end, *_) = found.events
    assert prompt_end.seen == len(PROMPT) and len(found.events) == 1
    assert 0 < found.details.coded_entries < found.details.held_entries
    assert (found.held[..., :1] >= 0).all() and found.held.max() == len(PROMPT) + 19


def test_what_cannot_be_coded_is_refused(llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--policy.flush_every: .*multiple of the block size"):
        make_llm(llama_dir, {**SPINDLE, "flush_every": 6})
    with pytest.raises(ConfigError, match=r"--policy.window: .*at least the block size \(4\)"):
        make_llm(llama_dir, {**SPINDLE, "window": 3})
    with pytest.raises(ConfigError, match="--kv-layout layer"):
        make_llm(llama_dir, SPINDLE, kv_layout="layer")
    with pytest.raises(ConfigError, match="--code-attention direct: attention torch does not read"):
        make_llm(llama_dir, SPINDLE, attention_backend="torch", code_attention="direct")
    with pytest.raises(ConfigError, match=r"--policy.gqa: repeat hides .* --code-attention direct"):
        make_llm(llama_dir, REPEAT, code_attention="rebuild")
    llm = make_llm(llama_dir, SPINDLE, attention_backend="torch")
    with pytest.raises(RequestError, match="--attention-backend cpu or triton") as refused:
        llm.generate([PROMPT], SamplingParams(kv_policy=REPEAT), use_tqdm=False)
    assert refused.value.param == "kv_policy.gqa"
    with pytest.raises(ConfigError, match="--code-attention rebuild: policy none holds no codes"):
        make_llm(llama_dir, "none", code_attention="rebuild")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    dynamic = write_checkpoint("llama", tmp_path, rope_parameters=rope)
    with pytest.raises(ConfigError, match=r"--policy.codebook: .*dynamic NTK"):
        make_llm(dynamic, SPINDLE)
    llm = make_llm(llama_dir, "none", kv_layout="head")
    params = SamplingParams(kv_policy=SPINDLE)
    with pytest.raises(RequestError, match="start the server with --policy spindlekv"):
        llm.generate([PROMPT], params, use_tqdm=False)
