"""Conversations that go on from what their last turn held: the tokens of one long sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve import LLM, SamplingParams
from kvserve.engine.core import request_policies
from kvserve.engine.policies.registry import make_policy, policy_class
from kvserve.engine.runner.model_runner import ModelRunner
from kvserve.engine.runner.policy_fit import continuation_refusal
from kvserve.engine.sampling.sampler import SampledTokens
from kvserve.log import ConfigError, RequestError
from kvserve.outputs import KVCacheDetails
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.continuations import Continuations
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.triggers.trigger import RowState
from tests.checkpoints import random_prompts, read_spec, write_checkpoint
from tests.engine.guesses import SPECULATIVE, Oracle
from tests.engine.models.decoding import row_of
from tests.engine.policies.cases import CASES, UNEVEN_CASES
from tests.engine.runner.test_cuda_graph import KARA, SIZES, make_llm, make_plain
from tests.engine.test_pressure import watch
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import slow, thinned

TURNS = (37, 23, 5, 31)
"""New tokens in each turn's prompt."""
ANSWERS = (30, 21, 26, 24)
LEAVING = [
    {"name": "kara", "window": 16, "buffer": 4, "ratio": 0.25, "period": 4, "query_dtype": "model"},
    {"name": "streaming_llm", "budget": 24, "period": 4, "remainder": "mean"},
]
"""These leave remainders, which the next turn begins with."""
STRIDED = {"name": "kara", "window": 24, "buffer": 6, "ratio": 0.3, "period": 4, "query_stride": 3}
STRIDED |= {"query_dtype": "model", "remainder": "off"}
SPECS = [
    *(case.spec for case in CASES if case.policy != "long_entries"),
    *UNEVEN_CASES.values(),
    *LEAVING,
    STRIDED,
    STRIDED | {"protect_turns": True},
]
DEFAULT = {"name": "snapkv", "budget": 64}
"""All heads' queries are logged, so that requests may choose any of the cases."""


def continuing(directory: Path, layout: str) -> list[dict[str, Any]]:
    """Policies of a layout whose conversations go on, and to which a later prompt means what
    generated text does."""
    spec, found = read_spec(directory), []
    known, computed, held, first = (np.array([n]) for n in (37, 80, 60, 70))
    rows = RowState(known, computed, held, first)
    for each in SPECS:
        policy = make_policy(each).for_model(spec.num_layers, 4)
        fits = policy.granularity.fits(Granularity(layout))
        if fits and each["name"] != "none" and continuation_refusal(policy, spec) is None:
            prompt, start = policy.event_trigger.next_turn(rows, np.array([120]))
            if prompt[0] == 37 and start[0] == 70:
                found.append(each)
    return found


PROMPT = random_prompts([37], seed=7)[0]


@dataclass
class Talk:
    """A conversation: what was said, where answers begin, and what the cache did in each turn."""

    policy: dict[str, Any]
    seed: int
    tokens: list[int] = field(default_factory=list)
    answers: list[tuple[int, list[int]]] = field(default_factory=list)
    details: list[KVCacheDetails] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    def prompt(self, turn: int) -> list[int]:
        return [*self.tokens, *random_prompts([TURNS[turn]], seed=self.seed + 100 * turn)[0]]


def params(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **more)


def talk(llm: LLM, policies: list[dict[str, Any]], turns: int = len(TURNS)) -> list[Talk]:
    """Conversations under all ``policies`` at once."""
    talks = [Talk(policy, 1 + i) for i, policy in enumerate(policies)]
    for turn in range(turns):
        prompts = [each.prompt(turn) for each in talks]
        settings = [params(ANSWERS[turn] + i % 3, kv_policy=p) for i, p in enumerate(policies)]
        for each, output in zip(
            talks, llm.generate(prompts, settings, use_tqdm=False), strict=True
        ):
            said = output.outputs[0].token_ids
            each.answers.append((len(output.prompt_token_ids), list(said)))
            each.tokens = [*output.prompt_token_ids, *said]
            each.details.append(output.kv_cache_details)
            each.cached.append(output.num_cached_tokens)
    return talks


def force(llm: LLM, known: list[int]) -> dict[int, int]:
    """Let the only sequence go on with ``known`` tokens; what it would have said, by position."""
    runner, said = llm.engine.core.runner, dict[int, int]()
    tokens = torch.tensor([*known, 0])

    def sample(output: Any, step: Any, logits: Tensor, rows: Any, positions: Tensor) -> Any:
        found = ModelRunner._sample(runner, output, step, logits, rows, positions)
        said.update(zip(positions.tolist(), found.token_ids.tolist(), strict=True))
        return SampledTokens(tokens[positions.clamp(max=len(known))])

    runner._sample = sample  # type: ignore[method-assign]
    return said


def in_one(llm: LLM, each: Talk) -> KVCacheDetails:
    """All of a conversation forced through one sequence that says what its turns have said."""
    said, first = force(llm, each.tokens), TURNS[0]
    settings = params(len(each.tokens) - first, kv_policy=each.policy)
    [output] = llm.generate([each.tokens[:first]], settings, use_tqdm=False)
    for start, answer in each.answers:
        assert [said[start + i] for i in range(len(answer))] == answer, each.policy
    return output.kv_cache_details


def check_integrity(llm: LLM) -> None:
    scheduler = llm.engine.core.scheduler
    scheduler.check_integrity()
    assert scheduler.blocks.headroom == scheduler.pool.capacity


MODES: dict[str, dict[str, Any]] = {
    "plain": {"async_scheduling": False},
    "overlapped": {"async_scheduling": True, "cudagraph_capture_sizes": SIZES},
    "chunks": {"async_scheduling": True, "max_num_batched_tokens": 41, "max_num_seqs": 9},
}


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        *(
            pytest.param(layout, "overlapped", marks=pytest.mark.compiler)  # steps are recorded
            for layout in ("model", "layer", "head")
        ),
        pytest.param("model", "plain", marks=pytest.mark.slow),
        ("head", "chunks"),
    ],
)
def test_turns_are_one_sequence(
    llama_dir: Path, layout: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every policy to which a later prompt is more of the same; what it holds is the same, too."""
    policies = continuing(llama_dir, layout)
    if layout != "model":  # the others have been there
        policies = [
            p for p in policies if policy_class(p["name"]).granularity is not Granularity.MODEL
        ]
    if mode == "chunks":  # its prompts are not cut into any
        policies = [p for p in policies if p["name"] != "pyramidinfer"]
    assert len(policies) > (6 if layout == "model" else 0)
    monkeypatch.setattr(request_policies, "REMEMBERED", len(policies) + 1)
    settings: dict[str, Any] = {"kv_layout": layout, "max_num_seqs": 40}
    llm = make_llm(llama_dir, DEFAULT, **{**settings, **MODES[mode]}, continuations="on")
    talks = talk(llm, policies)
    plain = make_plain(llama_dir, DEFAULT, **settings)
    for each in talks:
        expected, got = in_one(plain, each), each.details[-1]
        assert (got.held_entries, got.compactions) == (expected.held_entries, expected.compactions)
        assert got.compactions > 0 and got.logical_tokens == expected.logical_tokens
        for i in range(1, len(TURNS)):
            start, _ = each.answers[i]
            assert each.cached[i] == each.details[i].resumed_tokens == start - TURNS[i] - 1
    stats = llm.stats()
    assert stats.resumed_total == 3 * len(policies)
    check_integrity(llm)


@pytest.mark.parametrize("dtype", [*slow("auto", "k8v4"), "k4v4"])
def test_logs_in_fewer_bits(llama_dir: Path, dtype: str) -> None:
    """Kara as it comes, whose queries are logged in 4 bits, over entries in fewer bits or not."""
    settings: dict[str, Any] = {"block_size": 16, "kv_cache_dtype": dtype}
    llm = make_llm(llama_dir, KARA, **settings, continuations="on", max_num_batched_tokens=41)
    [each] = talk(llm, [KARA])
    expected, got = in_one(make_plain(llama_dir, KARA, **settings), each), each.details[-1]
    assert (got.held_entries, got.compactions) == (expected.held_entries, expected.compactions)
    assert got.compactions > 3 and got.resumed_tokens


def test_turns_are_not_protected_where_none_goes_on(llama_dir: Path) -> None:
    protecting = {**KARA, "protect_turns": True}
    with pytest.raises(ConfigError, match=r"--policy\.protect_turns: .*--continuations on"):
        make_plain(llama_dir, protecting)
    llm = make_plain(llama_dir, KARA)
    with pytest.raises(RequestError, match="--continuations on") as refused:
        llm.generate([PROMPT], SamplingParams(kv_policy=protecting), use_tqdm=False)
    assert refused.value.param == "kv_policy.protect_turns"


@thinned(
    {
        "layout,policy": [
            ("model", KARA),
            ("model", {**KARA, "query_source": "recompute", "protect_turns": True}),
            ("model", {"name": "snapkv", "budget": 24, "window": 4}),
            ("model", LEAVING[0]),
            ("layer", UNEVEN_CASES["pyramidkv"]),
        ],
        "swap_space": [0, 1 / 512],
        "guesses": [False, True],
    }
)
def test_followers_that_make_way(
    llama_dir: Path, layout: str, policy: dict[str, Any], swap_space: float, guesses: bool
) -> None:
    """Rows that lose their blocks now and then, parked, or resumed and computed again;
    free blocks are spoilt at once. ``snapkv`` and ``pyramidkv`` cut each turn's prompt. What a turn
    leaves are confirmed tokens, though it may end in the middle of a chunk of guesses."""
    settings: dict[str, Any] = {"kv_layout": layout, "continuations": "on"}
    ample = make_plain(llama_dir, policy, **settings)
    expected = talk(ample, [policy] * 3, turns=3)
    assert all(each.details[-1].compactions > 1 for each in expected)
    settings |= {"speculative_config": SPECULATIVE} if guesses else {"async_scheduling": True}
    llm = make_llm(llama_dir, policy, **settings, swap_space=swap_space, max_num_seqs=8)
    watch(llm)
    chance = 0.2 if guesses else 0.08  # there are fewer steps
    preempt_now_and_then(llm.engine.core.scheduler, np.random.default_rng(1), chance)
    answers = [each.answers[turn][1] for turn in range(3) for each in expected]
    oracle = Oracle(llm, answers.__getitem__, 0.8) if guesses else None
    got = talk(llm, [policy] * 3, turns=3)
    for one, other in zip(got, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.details[-1].held_entries == other.details[-1].held_entries
    assert oracle is None or oracle.guessed > oracle.confirmed > 50
    stats = llm.stats()
    assert stats.preemptions_total > 3 and bool(stats.swaps_total) == bool(swap_space)
    assert stats.resumed_total == 6
    check_integrity(llm)


@pytest.mark.parametrize("layout", [*slow("model"), "layer"])
def test_a_conversation_that_was_dropped_begins_anew(llama_dir: Path, layout: str) -> None:
    """Each turn is then what it is without continuations."""
    policy = KARA if layout == "model" else UNEVEN_CASES["pyramidkv"]
    settings: dict[str, Any] = {"kv_layout": layout, "continuations": "on", "swap_space": 0}
    plain = make_plain(llama_dir, policy, **{**settings, "continuations": "off"})
    expected = talk(plain, [policy] * 3)
    llm = make_llm(llama_dir, policy, **settings, async_scheduling=True, max_num_seqs=8)
    watch(llm)
    turn, store = llm.generate, llm.engine.core.scheduler.blocks

    def generate(*args: Any, **more: Any) -> Any:
        assert store.continuations is not None
        while store.continuations.oldest is not None:
            store.continuations.evict_oldest(may_park=False)
        return turn(*args, **more)

    llm.generate = generate  # type: ignore[method-assign]
    got = talk(llm, [policy] * 3)
    assert [each.tokens for each in got] == [each.tokens for each in expected]
    assert not llm.stats().resumed_total
    assert dict(llm.stats().continuation_misses)["evicted"] == 9
    for one, other in zip(got, expected, strict=True):
        for a, b in zip(one.details, other.details, strict=True):
            assert (a.held_entries, a.compactions) == (b.held_entries, b.compactions)
    check_integrity(llm)


@pytest.mark.parametrize("layout", [*slow("model"), "head"])
def test_conversations_that_come_back_from_host_memory(llama_dir: Path, layout: str) -> None:
    """On a pool that cannot hold all of them; free blocks are spoilt at once."""
    settings: dict[str, Any] = {"kv_layout": layout, "continuations": "on"}
    ample = make_plain(llama_dir, KARA, **settings)
    expected = talk(ample, [KARA] * 3, turns=3)
    blocks = 45 * (1 if layout == "model" else ample.engine.core.scheduler.layout.groups)
    llm = make_llm(
        *(llama_dir, KARA), **settings, swap_space=1 / 64, num_gpu_blocks_override=blocks
    )
    watch(llm)
    got = talk(llm, [KARA] * 3, turns=3)
    assert [each.tokens for each in got] == [each.tokens for each in expected]
    stats = llm.stats()
    assert stats.resumed_total == 6 and stats.resumed_from_host_total > 1
    check_integrity(llm)


def test_a_later_prompt_is_cut_at_its_end(llama_dir: Path) -> None:
    """What ``snapkv`` holds of a conversation is what it would hold of all of it as one prompt."""
    for spec, held in (
        ({"name": "snapkv", "budget": 24, "window": 4}, lambda seen: 24),
        ({"name": "snapkv", "ratio": "2/5", "window": 4}, lambda seen: seen * 2 // 5),
        ({"name": "rkv", "budget": 24, "threshold": 200, "window": 4}, lambda seen: 24),
    ):
        llm = make_llm(llama_dir, spec, continuations="on")
        [each] = talk(llm, [spec])
        for turn, ((start, answer), details) in enumerate(
            zip(each.answers, each.details, strict=True)
        ):
            if TURNS[turn] >= 4 + 1:
                assert details.held_tokens == held(start) + len(answer) - 1, (spec, turn)


def test_who_shares_what(llama_dir: Path) -> None:
    """Salts, policies, refusals: by what a request says, and what is counted and told."""
    llm = make_llm(llama_dir, KARA, continuations="on")
    [first] = llm.generate([PROMPT], [params(30, cache_salt="a")], use_tqdm=False)
    asked = [*PROMPT, *first.outputs[0].token_ids, 5, 6, 7]

    def ask(**fields: Any) -> tuple[int, int]:
        [output] = llm.generate([asked], [params(4, **fields)], use_tqdm=False)
        return output.num_cached_tokens, output.kv_cache_details.resumed_tokens

    seen = len(asked) - 4
    assert ask() == (0, 0) and ask(cache_salt="b") == (0, 0)
    cached, resumed = ask(cache_salt="a", kv_resume=False)
    assert 0 < cached < len(PROMPT) and not resumed
    assert ask(cache_salt="a", kv_policy={**KARA, "window": 24})[1] == 0
    assert ask(cache_salt="a", kv_policy={"name": "h2o", "budget": 24})[1] == 0
    assert ask(cache_salt="a", kv_policy="none")[1] == 0
    assert ask(cache_salt="a") == (seen, seen)
    misses = {cause: n for cause, n in llm.stats().continuation_misses if n}
    assert misses == {"new": 3, "refused": 1, "policy": 1, "unsupported": 1}
    llm.engine.core.reset_prefix_cache()
    assert ask(cache_salt="a") == (0, 0) and llm.stats().continuations == 1
    for salt in ("", 3):
        with pytest.raises(RequestError, match="cache_salt"):
            params(4, cache_salt=salt)


def test_making_room_looks_at_no_other_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hundreds that leave the pool for host memory, and then that too. Each block that was freed
    looked at all of them: a step took 4 s at 2,500."""
    llm = LLM(
        "kvserve/tiny",
        num_gpu_blocks_override=200,
        max_num_batched_tokens=1024,
        continuations="on",
        swap_space=0.0002,
        policy={"name": "kara", "window": 64, "buffer": 8},
    )
    looks: list[int] = []
    named_blocks = Continuations.named_blocks

    def look(store: Continuations, *, hosted: bool = False) -> IntArray:
        looks.append(store.num_hosted)
        return named_blocks(store, hosted=hosted)

    monkeypatch.setattr(Continuations, "named_blocks", look)
    prompts = [[*[7] * 20, 3 + i % 60, 3 + i // 60] for i in range(300)]
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    llm.generate([[5] * 2500], SamplingParams(max_tokens=4), use_tqdm=False)
    stats = llm.stats()
    known = stats.continuations + stats.hosted_continuations
    assert stats.hosted_continuations > 0 and known < 300, "some are gone: host memory is full"
    assert looks == []


def test_off_keeps_nothing(llama_dir: Path) -> None:
    for continuations, kept in (("off", 0), ("on", 1)):
        llm = make_llm(llama_dir, KARA, continuations=continuations)
        params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
        llm.generate([[3, 4, 5] * 7], params, use_tqdm=False)
        assert len(llm.engine.core.scheduler.saved.store) == kept


def test_flags(llama_dir: Path) -> None:
    for settings, named in (
        ({"continuations": "maybe"}, "--continuations"),
        ({"continuation_memory": 2**20}, "--continuation-memory"),
        ({"continuations": "on", "continuation_memory": 0}, "--continuation-memory"),
    ):
        with pytest.raises(ConfigError, match=named):
            make_llm(llama_dir, KARA, **settings)
    llm = make_llm(llama_dir, "none", continuations="on", continuation_memory=2**20)
    _, state, why = row_of(llm, "continuations")
    assert state == "on" and "prefix cache" in why


@pytest.mark.slow
def test_two_ranks_go_on_as_one_does(tmp_path: Path) -> None:
    """Each rank copies blocks of its own heads, and a follower goes on in both."""
    directory = write_checkpoint("llama", tmp_path, vocab_size=129)
    policies = [KARA, {**KARA, "ratio": 0.5}]
    talks = []
    for ranks in (1, 2):
        llm = make_plain(directory, KARA, tensor_parallel_size=ranks, continuations="on")
        try:
            talks.append(talk(llm, policies, turns=3))
            assert llm.stats().resumed_total == 4
        finally:
            llm.close()
    for one, two in zip(*talks, strict=True):
        assert (two.answers, two.details) == (one.answers, one.details), one.policy
        assert all(details.resumed_tokens for details in two.details[1:])
