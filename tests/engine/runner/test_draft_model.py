"""A second model that guesses: the answers are those of plain decoding, whatever it guesses.

Kept sets are compared by ``inspect`` and by what each answer holds; the scheduler's side, with
windows, swaps and turns at random, is in ``tests/scheduler/test_traffic.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvserve import LLM, SamplingParams
from kvserve.engine.frontend.inspect import inspect
from kvserve.engine.runner.cuda_graph import DecodeGraphs
from kvserve.engine.runner.launched_step import LaunchedStep
from kvserve.engine.runner.recorded_steps import RecordedSteps
from kvserve.log import ConfigError
from kvserve.outputs import RequestOutput, SpeculationDetails
from kvserve.scheduler.blocks.draft_group import DraftGroup
from kvserve.scheduler.messages.drafts import DraftChunks
from kvserve.scheduler.messages.output import SchedulerOutput
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.guesses import always_guess
from tests.engine.runner.test_cuda_graph import KARA, generate, make_llm, make_plain
from tests.engine.runner.test_speculation import answers, run, same
from tests.engine.test_pressure import watch
from tests.scheduler.traffic import preempt_now_and_then

PROMPTS = random_prompts([30, 9, 44, 21, 17, 38, 26, 12], seed=5)
SNAPKV = {"name": "snapkv", "budget": 14, "window": 4, "trigger": "threshold", "threshold": 30}
BOUND = {"name": "streaming_llm", "budget": 24, "sinks": 4}
H2O = {"name": "h2o", "budget": 24}


@pytest.fixture(scope="module")
def blurred_dir(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with noise in its weights: it is often right, and often wrong."""
    directory = tmp_path_factory.mktemp("blurred")
    tensors = load_file(llama_dir / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for tensor in tensors.values():
        tensor += 0.01 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text((llama_dir / "config.json").read_text())
    return directory


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two other layers with one wider KV head, which is hardly ever right."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return write_checkpoint("llama", tmp_path_factory.mktemp("small"), **shape, head_dim=40)


def drafting(
    directory: Path,
    draft: Path,
    policy: Any,
    tokens: int = 4,
    kv_policy: Any = None,
    **settings: Any,
) -> LLM:
    """An engine that guesses as often as it may, whether that pays or not; ``kv_policy``: of the
    draft model's cache."""
    config: dict[str, Any] = {
        **{"method": "draft_model", "model": str(draft)},
        "num_speculative_tokens": tokens,
    }
    if kv_policy is not None:
        config["kv_policy"] = kv_policy
    llm = make_llm(directory, policy, speculative_config=config, **settings)
    always_guess(llm)
    return llm


def counts(llm: LLM) -> tuple[int, int]:
    """Tokens that were guessed, and those of them that were right."""
    stats = llm.stats()
    return stats.draft_tokens_total, stats.accepted_tokens_total


def assert_nothing_is_left(llm: LLM) -> None:
    scheduler = llm.engine.core.scheduler
    scheduler.check_integrity()
    assert llm.stats().draft_bytes == 0
    assert scheduler.blocks.headroom == scheduler.pool.capacity


def kept(outputs: list[RequestOutput]) -> list[tuple[int, int, int]]:
    """What the policy has done to each answer's cache."""
    details = [output.kv_cache_details for output in outputs]
    return [(each.held_entries, each.compactions, each.blocks_released) for each in details]


@pytest.mark.parametrize("layout", ["model", "layer", "head"])
@pytest.mark.parametrize("policy", ["none", KARA, SNAPKV, H2O], ids=str)
def test_greedy_answers_and_kept_sets(
    llama_dir: Path, blurred_dir: Path, policy: Any, layout: str
) -> None:
    """Beside prompts in chunks, in every layout of the pool."""
    if layout != "model" and policy in (SNAPKV, H2O):
        pytest.skip("layouts change the draft's blocks, not what policies do")
    settings: dict[str, Any] = {
        "kv_layout": layout,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 8,
    }
    params = [SamplingParams(temperature=0.0, max_tokens=40 + i, ignore_eos=True) for i in range(8)]
    plain = run(make_plain(llama_dir, policy, **settings), params)
    llm = drafting(llama_dir, blurred_dir, policy, **settings)
    found = run(llm, params)
    for one, other in zip(found, plain, strict=True):
        same(one, other)
    assert kept(found) == kept(plain)
    guessed, right = counts(llm)
    assert guessed > right > (20 if policy != H2O else 0)
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_what_never_was_compressed_is_guessed_right(llama_dir: Path, kv_cache_dtype: str) -> None:
    """The model as its own draft model guesses all tokens, in few steps: its entries are right."""
    params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 3
    settings: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
    plain = make_plain(llama_dir, "none", **settings)
    expected = run(plain, params)
    llm = drafting(llama_dir, llama_dir, "none", **settings)
    found = run(llm, params)
    assert answers(found) == answers(expected)
    guessed, right = counts(llm)
    if kv_cache_dtype == "auto":
        assert guessed == right and llm.stats().steps_total < plain.stats().steps_total / 3
    assert right > 20
    draft = llm.engine.core.runner.draft
    assert draft is not None and isinstance(draft.steps, RecordedSteps)
    assert draft.steps.replays > 20 and draft.steps.chunk_replays > 1
    each = [output.kv_cache_details for output in found]
    assert all(details.draft_bytes > 0 for details in each)
    assert [details.held_bytes for details in each] == [
        output.kv_cache_details.held_bytes for output in expected
    ]


@pytest.mark.parametrize("kv_policy", [None, BOUND], ids=["whole", "bounded"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_its_steps_are_captured_too(kind: str, kv_policy: Any, tmp_path: Path) -> None:
    """Where forwards are padded it guesses as it does where they are not."""
    directory = write_checkpoint(kind, tmp_path)
    params = [SamplingParams(temperature=0.0, max_tokens=40 + i, ignore_eos=True) for i in range(8)]
    found = []
    for settings in ({"enforce_eager": True}, {"cudagraph_capture_sizes": (2, 8)}):
        llm = drafting(directory, directory, KARA, kv_policy=kv_policy, **settings)
        found.append((answers(run(llm, params)), counts(llm)))
    assert found[0] == found[1] and found[0][1][1] > 50
    draft = llm.engine.core.runner.draft
    assert draft is not None and isinstance(draft.steps, DecodeGraphs)
    assert min(draft.steps.replays, draft.steps.chunk_replays) > 5


def test_its_entries_are_those_of_confirmed_tokens(llama_dir: Path, blurred_dir: Path) -> None:
    """After each step, as a forward over the row's tokens alone would store them."""
    llm = drafting(llama_dir, blurred_dir, KARA)
    core = llm.engine.core
    group, draft = core.scheduler.blocks.find(DraftGroup), core.runner.draft
    assert group is not None and draft is not None
    launch, seen = core.runner.launch, []

    def checked(output: SchedulerOutput) -> LaunchedStep:
        rows = core.scheduler.rows
        if output.draft_chunks is not None:
            for row, start in zip(
                output.draft_chunks.rows, output.draft_chunks.starts, strict=True
            ):
                seen.append((int(row), int(start), rows.token_ids[row, :start].copy()))
        step = launch(output)
        for row, start, tokens in seen:
            found = entries(row, start)
            zero = np.zeros(1, np.int32)
            if start:
                length, none = np.array([start], np.int32), np.zeros(1, np.int32)
                once = DraftChunks(np.array([row], np.int32), zero, zero, length, tokens, none)
                draft._read(once, 1, plays=False)
                torch.testing.assert_close(entries(row, start), found, atol=1e-4, rtol=1e-4)
        seen.clear()
        return step

    def entries(row: int, count: int) -> torch.Tensor:
        """[count, layers, 2, heads, dim]"""
        at = np.arange(count)
        blocks = group.tables[0].blocks[0, row, 0][at // group.block_tokens]
        memory = draft.cache._entries.memory
        return memory[blocks, :, :, at % group.block_tokens].clone()

    core.runner.launch = checked  # type: ignore[method-assign]
    params = [SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)] * 3
    run(llm, params)
    assert 0 < counts(llm)[1] < counts(llm)[0]


def test_draws_rules_and_stops(llama_dir: Path, blurred_dir: Path) -> None:
    """The same seed says the same; it draws as the rows do, so it is often right there, too."""
    params = [
        SamplingParams(max_tokens=60, seed=1, temperature=1.0, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=60, seed=2, top_p=0.9, ignore_eos=True, logit_bias={7: 4.0}),
        SamplingParams(max_tokens=60, seed=3, stop_token_ids=[*range(20)], min_tokens=12),
        SamplingParams(max_tokens=60, seed=4, allowed_token_ids=[*range(30, 60)], min_p=0.01),
        SamplingParams(max_tokens=60, seed=5, top_k=20, stop_token_ids=[*range(60)], n=2),
        SamplingParams(max_tokens=60, seed=6, frequency_penalty=0.5, ignore_eos=True, logprobs=0),
        SamplingParams(max_tokens=60, seed=7, speculation=False),
        SamplingParams(max_tokens=3, temperature=0.0),
    ]
    plain = run(make_plain(llama_dir, KARA), params)
    llm = drafting(llama_dir, blurred_dir, KARA)
    found = run(llm, params)
    for one, other in zip(found, plain, strict=True):
        same(one, other)
    guessed, right = counts(llm)
    assert guessed > right > 20
    refused = [output.speculation and output.speculation.refused for output in found]
    assert refused == [None] * 5 + ["frequency_penalty", "speculation", None]
    assert found[5].speculation == SpeculationDetails(0, 0, "frequency_penalty")
    assert_nothing_is_left(llm)


def test_prefixes_do_not_bring_its_entries(llama_dir: Path) -> None:
    """A prompt that is found in the cache is read by the draft model alone."""
    prompt = random_prompts([61], seed=4)[0]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    (plain,) = make_plain(llama_dir, "none").generate([prompt], params, use_tqdm=False)
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    llm = drafting(llama_dir, llama_dir, "none", **settings)
    for turn in range(3):
        (found,) = llm.generate([prompt], params, use_tqdm=False)
        same(found, plain)
        assert (found.num_cached_tokens > 50) == (turn > 0)
    assert counts(llm)[0] == counts(llm)[1] > 40


@pytest.mark.parametrize("swap_space", [0, 1 / 2048])
@pytest.mark.parametrize("policy", ["none", {**KARA, "period": 1}], ids=["none", "kara"])
def test_a_tiny_pool(llama_dir: Path, blurred_dir: Path, policy: Any, swap_space: float) -> None:
    """Its entries make way for everybody; freed blocks are overwritten at once."""
    policies = [policy] * 8
    answers_of_plain = generate(make_plain(llama_dir, policy), PROMPTS, policies)
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": 56,
        "swap_space": swap_space,
        "max_num_seqs": 8,
    }
    llm = drafting(llama_dir, blurred_dir, policy, **settings)
    watch(llm)
    preempt_now_and_then(llm.engine.core.scheduler, np.random.default_rng(0), 0.05)
    assert generate(llm, PROMPTS, policies) == answers_of_plain
    stats = llm.stats()
    assert counts(llm)[0] > counts(llm)[1] > 0
    assert stats.preemptions_total > 0 and stats.early_compactions_total == 0
    assert bool(stats.swaps_total) == bool(swap_space and policy != "none")
    assert_nothing_is_left(llm)


def test_a_pool_that_one_sequence_fills(llama_dir: Path) -> None:
    """The draft model's entries never end an answer early, nor keep one from being admitted."""
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    (plain,) = make_plain(llama_dir, "none").generate([PROMPTS[0]], params, use_tqdm=False)
    llm = drafting(llama_dir, llama_dir, "none", num_gpu_blocks_override=29)
    found = llm.generate([PROMPTS[0], PROMPTS[1]], params, use_tqdm=False)
    same(found[0], plain)
    assert len(found[1].outputs[0].token_ids) == 80 and counts(llm)[1] > 5


@pytest.mark.parametrize("policy", ["none", {**KARA, "period": 1}], ids=["none", "kara"])
def test_later_turns(llama_dir: Path, blurred_dir: Path, policy: Any) -> None:
    """A continuation brings no entries of the draft model; answers are those without it."""
    settings: dict[str, Any] = {"continuations": "on", "max_num_seqs": 8}
    engines = [
        make_plain(llama_dir, policy, **settings),
        drafting(llama_dir, blurred_dir, policy, **settings),
    ]
    said = []
    for llm in engines:
        prompts, turns = PROMPTS[:4], []
        for turn in range(3):
            params = SamplingParams(temperature=0.0, max_tokens=30 + turn, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            turns.append((answers(outputs), kept(outputs)))
            prompts = [
                [*prompt, *answer, 5, 6, 7]
                for prompt, answer in zip(prompts, turns[-1][0], strict=True)
            ]
        said.append(turns)
    assert said[0] == said[1]
    resumed = [llm.stats().resumed_total for llm in engines]
    assert resumed[0] == resumed[1] and bool(resumed[0]) == (policy != "none")
    assert counts(engines[1])[1] > 20
    engines[1].engine.core.scheduler.check_integrity()


def test_aborts(llama_dir: Path, blurred_dir: Path) -> None:
    """Between any two steps; who stays says what it would have said."""
    plain = generate(make_plain(llama_dir, KARA), PROMPTS, [KARA] * 8)
    llm = drafting(llama_dir, blurred_dir, KARA)
    core, steps = llm.engine.core, [0]
    step = core.step

    def aborting() -> Any:
        steps[0] += 1
        outputs = step()
        if steps[0] in (6, 9):
            core.scheduler.finish(core._sequences.known([steps[0] - 5])[0], "abort")
        core.scheduler.check_integrity()
        return outputs

    core.step = aborting  # type: ignore[method-assign]
    params = [SamplingParams(temperature=0.0, max_tokens=40 + i, ignore_eos=True) for i in range(8)]
    for i in range(8):
        llm.engine.add_request(str(i), PROMPTS[i], params[i])
    found: dict[str, list[int]] = {}
    while core.has_work:
        for output in llm.engine.step():
            found[output.request_id] = output.outputs[0].token_ids
    for i in set(range(8)) - {1, 4}:
        assert found[str(i)] == plain[i]
    assert_nothing_is_left(llm)


def test_positions_that_were_kept(llama_dir: Path, blurred_dir: Path) -> None:
    prompt, more = PROMPTS[0], [9, 8, 7, 9, 8, 7] * 6
    plain = inspect(make_plain(llama_dir, KARA), prompt, more)
    llm = drafting(llama_dir, blurred_dir, KARA)
    found = inspect(llm, prompt, more)
    assert counts(llm)[0] > 20
    assert np.array_equal(plain.held, found.held)
    assert [event.seen for event in plain.events] == [event.seen for event in found.events]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_another_shape(llama_dir: Path, small_dir: Path, backend: str) -> None:
    """Blocks that its entries do not fill, with heads of another size; nothing is right."""
    plain = generate(make_plain(llama_dir, "none"), PROMPTS, ["none"] * 8)
    llm = drafting(llama_dir, small_dir, "none", attention_backend=backend)
    draft = llm.engine.core.runner.draft
    assert draft is not None and not draft.cache._entries.memory.is_contiguous()
    assert generate(llm, PROMPTS, ["none"] * 8) == plain
    guessed, right = counts(llm)
    assert right < guessed / 10 and guessed > 200
    assert_nothing_is_left(llm)


def test_it_stops_where_it_is_never_right(llama_dir: Path, small_dir: Path) -> None:
    """By the rule that lookups have; then it reads no prompts, and tries again but now and then."""
    config = {"method": "draft_model", "model": str(small_dir), "num_speculative_tokens": 4}
    llm = make_llm(llama_dir, "none", speculative_config=config)
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    for _ in range(2):
        llm.generate(PROMPTS[:4], params, use_tqdm=False)
    guessed, _ = counts(llm)
    assert 0 < guessed < 200
    launch, chunks = llm.engine.core.runner.launch, []

    def watched(output: SchedulerOutput) -> LaunchedStep:
        chunks.append(0 if output.draft_chunks is None else len(output.draft_chunks.token_ids))
        return launch(output)

    llm.engine.core.runner.launch = watched  # type: ignore[method-assign]
    llm.generate(PROMPTS[4:], params, use_tqdm=False)
    assert sum(chunks) < 4 * 300 / 8


def test_a_step_that_fails(llama_dir: Path, blurred_dir: Path) -> None:
    plain = generate(make_plain(llama_dir, KARA), PROMPTS[:3], [KARA] * 3)
    llm = drafting(llama_dir, blurred_dir, KARA)
    core, launch, steps = llm.engine.core, llm.engine.core.runner.launch, [0]

    def failing(output: Any) -> Any:
        steps[0] += 1
        if steps[0] in (9, 14):
            assert output.draft_chunks is not None
            launch(output)
            raise torch.OutOfMemoryError if steps[0] == 9 else ValueError("a bug of ours")
        return launch(output)

    core.runner.launch = failing  # type: ignore[method-assign]
    params = [SamplingParams(temperature=0.0, max_tokens=40 + i, ignore_eos=True) for i in range(3)]
    outputs = run(llm, params)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "error"]
    assert outputs[0].outputs[0].token_ids == plain[0]
    assert_nothing_is_left(llm)


def test_settings_are_named(llama_dir: Path, small_dir: Path, tmp_path: Path) -> None:
    base = {"method": "draft_model", "model": str(small_dir), "num_speculative_tokens": 3}
    others = write_checkpoint("llama", tmp_path / "words", vocab_size=129)
    short = write_checkpoint("llama", tmp_path / "short", max_position_embeddings=64)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"architectures": ["Nobody"]}))
    for given, named in (
        ({**base, "model": ""}, "model: must name a checkpoint"),
        ({**base, "prompt_lookup_max": 3}, "prompt_lookup_max: belongs to the method ngram"),
        ({**base, "mode": "x"}, "mode: is unknown; did you mean model"),
        ({**base, "model": str(others)}, "model: .* vocabulary of 129 tokens and --model has 128"),
        ({**base, "model": str(short)}, "model: .* context of 64 tokens"),
        ({**base, "model": str(tmp_path / "nowhere")}, "model: .*nowhere is neither"),
        ({**base, "model": str(broken)}, "model: .*Nobody"),
        ({**base, "num_speculative_tokens": 33}, "num_speculative_tokens"),
    ):
        with pytest.raises(ConfigError, match=f"^--speculative-config: {named}"):
            make_llm(llama_dir, "none", speculative_config=given)
    llm = make_llm(llama_dir, "none", speculative_config=base)
    (row,) = [row for row in llm.engine.core.info.summary if row[0] == "speculation"]
    assert row[1] == f"{small_dir}, up to 3 tokens" and "2 layers, 640 bytes a token" in row[2]
