"""Guessed tokens, verified several at a time: the answers, draws and figures of an engine without.

Kept sets are compared where the policies are (``test_guesses_do_not_matter`` of the matrices).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvserve import LLM, SamplingParams
from kvserve.log import ConfigError
from kvserve.outputs import RequestOutput, SpeculationDetails
from kvserve.sampling_params import StructuredOutput
from kvserve.scheduler.messages.output import SchedulerOutput
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.guesses import LOOKUP, SPECULATIVE, Oracle, always_guess
from tests.engine.models.decoding import row_of
from tests.engine.runner.test_cuda_graph import KARA, PROMPTS, generate, make_llm, make_plain, run
from tests.engine.test_pressure import before_steps, watch
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import thinned


def guessing(
    directory: Path, policy: Any, plain: list[list[int]], right: float = 0.8, **settings: Any
) -> tuple[LLM, Oracle]:
    """An engine that knows what each sequence has said without guesses."""
    llm = make_llm(directory, policy, speculative_config=SPECULATIVE, **settings)
    return llm, Oracle(llm, plain.__getitem__, right)


def answers(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def same(one: RequestOutput, other: RequestOutput) -> None:
    for choice, expected in zip(one.outputs, other.outputs, strict=True):
        assert choice.token_ids == expected.token_ids
        assert choice.finish_reason == expected.finish_reason
        assert choice.stop_reason == expected.stop_reason
        found, known = choice.logprobs or [], expected.logprobs or []
        for mine, its in zip(found, known, strict=True):
            assert {i: entry.rank for i, entry in mine.items()} == {
                i: entry.rank for i, entry in its.items()
            }
            assert [entry.logprob for entry in mine.values()] == pytest.approx(
                [entry.logprob for entry in its.values()], abs=1e-4
            )
    assert one.kv_cache_details.logical_tokens == other.kv_cache_details.logical_tokens
    assert one.kv_cache_details.held_entries == other.kv_cache_details.held_entries


@pytest.mark.parametrize(
    "guesses", [True, pytest.param(False, marks=pytest.mark.compiler)], ids=["guesses", "overlap"]
)
def test_draws_rules_and_stops(llama_dir: Path, guesses: bool) -> None:
    """Each position is drawn, ruled and stopped as it would be by itself: the same seed says the
    same, with the same log-probabilities. Where steps overlap, to the last bit: nobody gets the
    token computed in vain, and penalties count what was sampled."""
    params = [
        SamplingParams(max_tokens=60, seed=1, temperature=1.0, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=60, seed=2, top_p=0.9, ignore_eos=True, logit_bias={7: 4.0}),
        SamplingParams(max_tokens=60, seed=3, stop_token_ids=[*range(20)], min_tokens=12),
        SamplingParams(max_tokens=60, seed=4, allowed_token_ids=[*range(30, 60)], min_p=0.01),
        SamplingParams(max_tokens=60, seed=5, top_k=20, stop_token_ids=[*range(60)], n=2),
        SamplingParams(max_tokens=60, seed=6, frequency_penalty=0.5, ignore_eos=True, logprobs=0),
        SamplingParams(max_tokens=60, seed=7, repetition_penalty=1.2),
        SamplingParams(max_tokens=1, temperature=0.0),
    ]
    plain = run(make_plain(llama_dir, KARA), params)
    if guesses:
        llm, oracle = guessing(llama_dir, KARA, answers(plain))
    else:
        llm = make_llm(llama_dir, KARA, async_scheduling=True, max_num_seqs=4)
    found = run(llm, params)
    for one, other in zip(found, plain, strict=True):
        if guesses:
            same(one, other)
        else:
            assert one.outputs == other.outputs and one.prompt_logprobs == other.prompt_logprobs
    assert {c.finish_reason for output in found for c in output.outputs} == {"stop", "length"}
    if guesses:
        assert oracle.guessed > oracle.confirmed > 80
        refused = [output.speculation and output.speculation.refused for output in found]
        assert refused == [None] * 5 + ["frequency_penalty", "repetition_penalty", None]


@pytest.mark.parametrize("size", [8_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_draws_follow_the_distribution(llama_dir: Path, size: int) -> None:
    """Chi-square over tokens that the lookup has often guessed: eight words, one distribution."""
    llm = make_llm(llama_dir, "none", speculative_config={**LOOKUP, "prompt_lookup_min": 1})
    always_guess(llm)
    weights = torch.arange(1, 9) / 36
    logits = torch.full((128,), -torch.inf)
    logits[20:28] = weights.log()
    llm.engine.core.runner.model.logits = (  # type: ignore[method-assign]
        lambda hidden: logits.repeat(len(hidden), 1)
    )
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=500, ignore_eos=True)
        for i in range(size // 500)
    ]
    outputs = llm.generate([[20, 21, 22]] * len(params), params, use_tqdm=False)
    drawn = np.concatenate(answers(outputs))
    assert len(drawn) == size and llm.stats().accepted_tokens_total > size / 20
    expected = weights.numpy() * size
    square = (((np.bincount(drawn)[20:] - expected) ** 2) / expected).sum()
    assert square < 18.48, "p < .01 with seven degrees of freedom"


@pytest.mark.slow
def test_a_grammar_beside_guesses() -> None:
    """The shipped model: who follows a grammar guesses nothing, and the others go on guessing."""
    wanted = StructuredOutput("regex", "[a-f]{2,6}=[0-9]{1,3}")
    params = [
        SamplingParams(max_tokens=40, seed=7, structured_outputs=wanted),
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop=["zzz"]),
    ]
    guesses = LLM("kvserve/tiny", speculative_config={**LOOKUP, "prompt_lookup_min": 1})
    always_guess(guesses)
    plain, found = (
        llm.generate(["a a", "b " * 9], params, use_tqdm=False)
        for llm in (LLM("kvserve/tiny"), guesses)
    )
    for one, other in zip(found, plain, strict=True):
        same(one, other)
        assert one.outputs[0].text == other.outputs[0].text
    assert found[0].speculation == SpeculationDetails(0, 0, wanted.field)
    assert found[1].speculation is not None and found[1].speculation.drafted_tokens > 0
    assert plain[0].speculation is None


def test_a_stop_string_in_the_middle_of_a_chunk() -> None:
    """What was confirmed behind it is nobody's text."""
    prompts = ["one two three four five six " * 8]
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    (whole,) = LLM("kvserve/tiny").generate(prompts, params, use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, stop=[stop])
    plain, found = (
        LLM("kvserve/tiny", speculative_config=config).generate(prompts, params, use_tqdm=False)
        for config in ({}, {**LOOKUP, "prompt_lookup_min": 1})
    )
    assert found[0].outputs[0].text == plain[0].outputs[0].text == text[: text.index(stop)]
    assert found[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_who_does_not_want_it(llama_dir: Path) -> None:
    """By request: the same answer, no guesses; figures count those who do."""
    wanted = [True, False, True]
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, speculation=each)
        for each in wanted
    ]
    plain = run(make_plain(llama_dir, "none"), params)
    llm, oracle = guessing(llama_dir, "none", answers(plain), 1.0)
    found = run(llm, params)
    assert answers(found) == answers(plain)
    details = [output.speculation for output in found]
    assert details[1] == SpeculationDetails(0, 0, "speculation")
    drafted = [each.drafted_tokens for each in details if each is not None]
    stats = llm.stats()
    assert sum(drafted) == stats.draft_tokens_total == stats.accepted_tokens_total > 20
    assert 0 < stats.drafts_total < stats.draft_tokens_total
    assert stats.generation_tokens_total == 90
    assert oracle.confirmed == stats.accepted_tokens_total


def test_two_ranks_confirm_the_same(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path, vocab_size=129)
    policies = [KARA, {**KARA, "ratio": 0.5}, KARA]
    plain = generate(make_plain(directory, KARA), PROMPTS[:3], policies)
    llm, oracle = guessing(directory, KARA, plain, tensor_parallel_size=2)
    try:
        assert generate(llm, PROMPTS[:3], policies) == plain
    finally:
        llm.close()
    assert oracle.guessed > oracle.confirmed > 20


@pytest.mark.compiler
@thinned({"kind": ["llama", "gemma3"], "sizes": [(), (2, 3, 8)], "layout": ["model", "head"]})
def test_chunks_are_captured_too(
    kind: str, sizes: tuple[int, ...], layout: str, tmp_path: Path
) -> None:
    """Chunks of any lengths, in any number of rows, with queries logged and without; rows are
    preempted between them."""
    directory = write_checkpoint(kind, tmp_path)
    how: dict[str, Any] = {"kv_layout": layout}
    params = [SamplingParams(temperature=0.0, max_tokens=60 + i, ignore_eos=True) for i in range(8)]
    plain = run(make_plain(directory, KARA, **how), params)
    how["cudagraph_capture_sizes"] = sizes
    llm, _ = guessing(directory, KARA, answers(plain), **how)
    watch(llm)
    preempt_now_and_then(llm.engine.core.scheduler, np.random.default_rng(0), 0.05)
    batch, steps = llm.engine.core.runner.batch, list[SchedulerOutput]()
    build = batch.build

    def noted(output: SchedulerOutput) -> Any:
        steps.append(output)
        return build(output)

    batch.build = noted  # type: ignore[method-assign]
    found = run(llm, params)
    for one, other in zip(found, plain, strict=True):
        same(one, other)
    graphs = llm.engine.core.runner.graphs
    # Lengths are random, so most shapes do not come again, as a tape needs.
    assert graphs is not None and graphs.chunk_replays > (10 if sizes else 0)
    assert all(len(output.prefill.rows) for output in steps), "only prompts are computed without"


def test_a_step_that_fails_or_finds_no_memory(llama_dir: Path) -> None:
    """Guesses of a step that is given up are forgotten; the others begin anew."""
    plain = generate(make_plain(llama_dir, KARA), PROMPTS[:3], [KARA] * 3)
    llm, oracle = guessing(llama_dir, KARA, plain)
    core, launch, steps = llm.engine.core, llm.engine.core.runner.launch, [0]

    def failing(output: Any) -> Any:
        steps[0] += 1
        oracle.attach()
        if steps[0] in (9, 14):
            assert output.drafts is not None
            launch(output)
            raise torch.OutOfMemoryError if steps[0] == 9 else ValueError("a bug of ours")
        return launch(output)

    core.runner.launch = failing  # type: ignore[method-assign]
    params = [SamplingParams(temperature=0.0, max_tokens=40 + i, ignore_eos=True) for i in range(3)]
    outputs = run(llm, params)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    # A failure that does not come again ends nobody; of too little memory, the newest ends.
    assert reasons == ["length", "length", "error"] and oracle.guessed
    for output, tokens in zip(outputs[:2], plain, strict=False):
        assert output.outputs[0].token_ids[: len(tokens)] == tokens
    core.scheduler.check_integrity()


def test_guesses_leave_room_for_prompts(llama_dir: Path) -> None:
    """They take at most half of a step, and nobody waits for good."""
    plain = generate(make_plain(llama_dir, "none"), PROMPTS, ["none"] * 8)
    settings = {"max_num_batched_tokens": 12, "max_num_seqs": 6}
    llm, _ = guessing(llama_dir, "none", plain, 1.0, **settings)
    steps: list[SchedulerOutput] = []
    before_steps(llm, steps.append)
    assert generate(llm, PROMPTS, ["none"] * 8) == plain
    guessing_steps = [step for step in steps if step.drafts is not None]
    for step in guessing_steps:
        assert step.drafts and step.drafts.num_guessed <= (12 - step.num_decoding) // 2
    assert max(step.num_tokens for step in guessing_steps) == 12


def test_settings_are_named(llama_dir: Path) -> None:
    for given, named in (
        ({"method": "draft_model", "model": "x"}, "method: must be ngram, got 'draft_model'"),
        ({"method": "ngram", "model": "x"}, "model: is unknown"),
        ({"method": "ngram"}, "num_speculative_tokens: must be an integer of at least 1"),
        ({**SPECULATIVE, "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({**SPECULATIVE, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min: 4"),
        ({**SPECULATIVE, "prompt_lookup": 3}, "prompt_lookup: is unknown"),
    ):
        with pytest.raises(ConfigError, match=f"--speculative-config: {named}"):
            make_llm(llama_dir, "none", speculative_config=given)
    for given, state in (({}, "off"), (SPECULATIVE, "ngram, up to 5 tokens")):
        llm = make_llm(llama_dir, "none", speculative_config=given)
        assert row_of(llm, "speculation")[1] == state


def test_engine_wide_events_are_refused_guesses(llama_dir: Path) -> None:
    """Kara as in the paper counts the engine's steps, and guesses would change these."""
    policy = {**KARA, "preset": "paper", "period": 7, "remainder": "off"}
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    llm = make_llm(llama_dir, policy, speculative_config=SPECULATIVE)
    (output,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert output.speculation == SpeculationDetails(0, 0, "kv_policy")


def test_repeated_text_takes_fewer_steps(llama_dir: Path) -> None:
    """The lookup itself, from the first token on, though most of the prompt came in chunks."""
    text = random_prompts([90], seed=2)[0]
    given = torch.tensor([*text, *text[:80], 0, 0, 0, 0, 0, 0])
    llm = make_llm(llama_dir, KARA, speculative_config=LOOKUP, max_num_batched_tokens=40)
    always_guess(llm)  # what a guess costs depends on what else this machine does
    llm.engine.core.runner.force = given.__getitem__
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    (output,) = llm.generate([text], params, use_tqdm=False)
    assert output.outputs[0].token_ids == text[:80]
    assert output.speculation is not None and output.speculation.accepted_tokens > 50
    assert llm.engine.core.scheduler.totals.steps_total < 45
