"""Steps that are prepared before the one in front of them is collected: the same answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvserve import LLM, SamplingParams
from kvserve.engine.core import request_policies
from kvserve.engine.policies.registry import policy_class
from kvserve.engine.runner.launched_step import LaunchedStep
from kvserve.engine.sampling.grammar import SequenceGrammar
from kvserve.outputs import RequestOutput
from kvserve.sampling_params import StructuredOutput
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.messages.output import SchedulerOutput
from tests.checkpoints import random_prompts
from tests.engine.guesses import SPECULATIVE, Oracle
from tests.engine.policies.cases import UNEVEN_CASES
from tests.engine.runner.test_cuda_graph import (
    EVEN,
    KARA,
    PROMPTS,
    SIZES,
    generate,
    make_llm,
    make_plain,
)
from tests.engine.test_pressure import watch
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import thinned

pytestmark = pytest.mark.compiler  # rows are equal to the last bit in every batch


def follow(llm: LLM) -> list[int]:
    """How many steps were in flight as each was launched."""
    collected: list[int] = []
    depth: list[int] = []
    runner, core = llm.engine.core.runner, llm.engine.core
    launch, take_in = runner.launch, core._take_in

    def launched(output: SchedulerOutput) -> LaunchedStep:
        depth.append(len(depth) - len(collected))
        return launch(output)

    def taken(*args: Any) -> Any:
        collected.append(1)
        return take_in(*args)

    runner.launch = launched  # type: ignore[method-assign]
    core._take_in = taken  # type: ignore[method-assign, assignment]
    return depth


@thinned({"layout": ["head", "model", "layer"], "sizes": [(), SIZES]})
def test_every_policy_generates_what_a_plain_loop_does(
    llama_dir: Path, layout: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All policies of the layout at once; with events, and counts that come a step late."""
    uneven = [
        spec
        for spec in UNEVEN_CASES.values()
        if policy_class(spec["name"]).granularity.fits(Granularity(layout))
    ]
    policies = [*EVEN, *uneven * (layout != "model")]
    if sizes:
        policies = policies[::4]
    monkeypatch.setattr(request_policies, "REMEMBERED", len(policies) + 1)
    prompts = random_prompts([37] * len(policies), seed=3)
    settings: dict[str, Any] = {"kv_layout": layout, "max_num_batched_tokens": 512}
    default = {"name": "snapkv", "budget": 64}
    plain = make_plain(llama_dir, default, **settings)
    overlapped = make_llm(
        llama_dir,
        default,
        **settings,
        async_scheduling=True,
        cudagraph_capture_sizes=sizes,
        enforce_eager=not sizes,
    )
    depth = follow(overlapped)
    for part in (slice(0, None, 2), slice(1, None, 2)):  # only so many policies at once
        args = prompts[part], policies[part]
        assert generate(overlapped, *args) == generate(plain, *args)
    assert depth.count(1) > 0.9 * len(depth)
    stats, expected = overlapped.stats(), plain.stats()
    assert stats.compactions_total == expected.compactions_total > len(policies)
    assert stats.blocks_released_total == expected.blocks_released_total > 0
    assert stats.generation_tokens_total == expected.generation_tokens_total
    assert stats.iteration_tokens_total == expected.iteration_tokens_total, "computed in vain"
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


@thinned(
    {
        "policy": [
            KARA,
            {**KARA, "query_source": "recompute"},
            {"name": "h2o", "budget": 24},
            {"name": "adakv", "budget": 8, "window": 4},
            pytest.param(
                {"name": "spindlekv", "flush_every": 16, "ratio": 0.5, "raw_fallback": False},
                marks=pytest.mark.compiler,
            ),
        ],
        "swap_space": [0, 1 / 2048],
    }
)
def test_freed_blocks_are_not_read_again(llama_dir: Path, policy: Any, swap_space: float) -> None:
    """A tiny pool whose free blocks are spoilt at once, with sequences that make way while a token
    of theirs is unknown: the tokens of an ample one."""
    coded = policy["name"] == "spindlekv"
    size = 16 if coded else 4
    ample = make_plain(llama_dir, policy, block_size=size)
    tight = make_llm(
        llama_dir,
        policy,
        block_size=size,
        num_gpu_blocks_override=56 * (1 if policy["name"] in ("kara", "h2o") else 4),
        max_num_batched_tokens=64,
        max_num_seqs=8,
        swap_space=swap_space,
        async_scheduling=True,
    )
    watch(tight)
    scheduler = tight.engine.core.scheduler
    preempt_now_and_then(scheduler, np.random.default_rng(1), 0.1)
    policies = [policy] * len(PROMPTS)
    assert generate(tight, PROMPTS, policies) == generate(ample, PROMPTS, policies)
    stats = tight.stats()
    assert stats.preemptions_total > 0 and stats.early_compactions_total == 0
    assert coded or bool(stats.swaps_total) == bool(swap_space)
    scheduler.check_integrity()
    assert scheduler.blocks.headroom == scheduler.pool.capacity


def run(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)


def test_draws_rules_and_stops(llama_dir: Path) -> None:
    """Nobody gets the token computed in vain; what was sampled is counted by penalties."""
    params = [
        SamplingParams(max_tokens=30, seed=1, temperature=1.0, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=30, seed=2, top_p=0.9, frequency_penalty=0.5, ignore_eos=True),
        SamplingParams(max_tokens=30, seed=3, stop_token_ids=list(range(30)), min_tokens=4),
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=30, seed=5, n=2, stop_token_ids=list(range(50))),
    ]
    plain, overlapped = (
        run(make_llm(llama_dir, KARA, async_scheduling=on, max_num_seqs=4), params)
        for on in (False, True)
    )
    for one, other in zip(plain, overlapped, strict=True):
        assert one.outputs == other.outputs and one.prompt_logprobs == other.prompt_logprobs
    reasons = {choice.finish_reason for output in overlapped for choice in output.outputs}
    assert reasons == {"stop", "length"}


def test_a_grammar_is_told_of_each_token_in_time() -> None:
    """The shipped model: a mask of one step is made of the tokens of the one in front of it."""
    wanted = StructuredOutput("regex", "[a-f]{2,6}=[0-9]{1,3}")
    params = SamplingParams(max_tokens=60, seed=7, structured_outputs=wanted)
    plain, overlapped = (
        LLM("kvserve/tiny", async_scheduling=on).generate(["a", "b", "c"], params, use_tqdm=False)
        for on in (False, True)
    )
    for one, other in zip(plain, overlapped, strict=True):
        assert one.outputs == other.outputs
        assert re.fullmatch(wanted.value, other.outputs[0].text)


def test_nothing_is_asked_of_a_grammar_that_has_ended() -> None:
    """The token computed in vain behind a stop token means nothing to it."""

    class Once:
        ended = False

        def fill(self, mask: Any) -> None:
            assert not self.ended

        def accept(self, token_id: int) -> bool:
            assert not self.ended
            self.ended = token_id == 2
            return True

    once: Any = Once()
    grammar = SequenceGrammar(once, (None, None), [2])
    for token in (5, 2, 7):
        grammar.fill(np.zeros(1, np.int32))
        grammar.accept(token)


def test_who_outgrows_the_pool_gets_the_token_in_flight(llama_dir: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    plain, overlapped = (
        run(make_llm(llama_dir, "none", async_scheduling=on, num_gpu_blocks_override=14), [params])
        for on in (False, True)
    )
    assert overlapped[0].outputs == plain[0].outputs
    assert len(plain[0].prompt_token_ids) + len(plain[0].outputs[0].token_ids) == 14 * 4 + 1


def test_an_abort_between_steps(llama_dir: Path) -> None:
    """Its blocks are free at once, its token in flight is nobody's, and the others go on."""
    llm = make_llm(llama_dir, KARA, async_scheduling=True)
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.add_request(str(i), prompt, params)
    for _ in range(5):
        engine.step()
    free = llm.stats().blocks_free
    engine.abort_request("1")
    assert llm.stats().blocks_free > free
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert set(ended) == {"0", "2"}
    expected = run(make_plain(llama_dir, KARA), [params] * 3)
    for i in (0, 2):
        assert ended[str(i)].outputs == expected[i].outputs


@thinned({"layout": ["model", "head"], "sizes": [(), SIZES]})
def test_steps_overlap_while_nothing_is_guessed(
    llama_dir: Path, sizes: tuple[int, ...], layout: str
) -> None:
    """Guesses come now and then, behind known tokens; events and preemptions in either case."""
    policies = [KARA, "none", {"name": "h2o", "budget": 24}, KARA]
    if layout == "head":
        policies[1:3] = {"name": "adakv", "budget": 8, "window": 4}, {"name": "h2o", "budget": 24}
    policies, settings = policies * 2, {"kv_layout": layout, "max_num_batched_tokens": 128}
    plain = generate(make_plain(llama_dir, KARA, **settings), PROMPTS, policies)
    settings |= {"cudagraph_capture_sizes": sizes, "enforce_eager": not sizes}
    settings |= {"async_scheduling": True, "speculative_config": SPECULATIVE}
    llm = make_llm(llama_dir, KARA, **settings)
    oracle, core = Oracle(llm, plain.__getitem__, 0.7), llm.engine.core
    rng = np.random.default_rng(0)
    assert core.scheduler.speculation is not None
    enough = lambda rows: 2.0 * (rng.random() < 0.6)  # noqa: E731
    core.scheduler.speculation.enough = enough  # type: ignore[method-assign]
    preempt_now_and_then(core.scheduler, rng, 0.05)
    watch(llm)
    depth = follow(llm)
    assert generate(llm, PROMPTS, policies) == plain
    assert depth.count(1) > 10 and depth.count(0) > 20
    assert oracle.guessed > oracle.confirmed > 40
    core.scheduler.check_integrity()


@pytest.mark.parametrize("on", [None, True, False])
def test_the_startup_table_says_whether_steps_overlap(llama_dir: Path, on: bool | None) -> None:
    summary = make_llm(llama_dir, "none", async_scheduling=on).engine.core.info.summary
    (row,) = [row for row in summary if row[0] == "overlapped steps"]
    assert row[1] == ("on" if on else "off") and "--async-scheduling" in row[2]
