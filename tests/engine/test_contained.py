"""What goes wrong over one request ends that request; nobody else hears of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve import LLM, AsyncEngine, EngineConfig, SamplingParams
from kvserve.engine.core import containment
from kvserve.engine.core.engine_core import EngineCore
from kvserve.engine.policies import registry
from kvserve.engine.policies.base import argument
from kvserve.engine.policies.streaming_llm import StreamingLLM
from kvserve.engine.runner.model_runner import ModelRunner
from kvserve.engine.sampling.grammar import SequenceGrammar
from kvserve.log import RequestError
from kvserve.sampling_params import StructuredOutput
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.step.recovery import start_over
from kvserve.scheduler.triggers.trigger import EvictionSpec, RowState, Trigger
from kvserve.server.state.errors import as_api_error
from tests.checkpoints import random_prompts
from tests.engine.test_pressure import POISON, before_steps
from tests.thinning import thinned

PROMPTS = random_prompts([30, 9, 44, 21, 17, 38], seed=5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
KARA = {
    "name": "kara",
    "window": 20,
    "buffer": 4,
    "ratio": 0.3,
    "chunk_budget": 2,
    "max_chunk": 4,
    "period": 1,
}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
}


SCRATCH: list[weakref.ref[Tensor]] = []
"""What events had in their hands when they failed."""


class FaultyTrigger:
    """The trigger of another policy, until one of its methods is asked for the third time; or one
    that wants to keep more than there is: once an `IndexError: index 256` of the block table."""

    def __init__(self, trigger: Trigger, fault: str) -> None:
        self._trigger, self._fault, self._calls = trigger, fault, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._trigger, name)

        def fail_later(*args: Any) -> Any:
            self._calls += 1
            if self._calls > 2:
                raise OverflowError("Python integer 3000000000 out of bounds for int32")
            return found(*args)

        def keep_many(rows: RowState) -> EvictionSpec:
            plan: EvictionSpec = found(rows)
            return replace(plan, keep=np.full_like(plan.keep, 2**31 - 1))

        if self._fault == "greedy" and name == "plan":
            return keep_many
        return fail_later if name == self._fault else found


@dataclass(frozen=True)
class Faulty(StreamingLLM):
    """A plug-in with a bug."""

    name: ClassVar[str] = "faulty"
    fault: str = argument("score", "what fails")

    @property
    def event_trigger(self) -> Trigger:
        return cast(Trigger, FaultyTrigger(super().event_trigger, self.fault))

    def score(self, obs: Any) -> Tensor:
        if self.fault == "score":
            raise ZeroDivisionError("in the middle of an event")
        if self.fault == "memory":
            scratch = torch.empty(1)
            SCRATCH.append(weakref.ref(scratch))
            raise torch.OutOfMemoryError("for what this policy wants")
        return super().score(obs)


FAULTY: dict[str, Any] = {"name": "faulty", "budget": 16, "sinks": 2}


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("faulty", f"{__name__}:Faulty", "kvserve.policies")
    monkeypatch.setitem(registry._entries(), "faulty", entry)


@thinned(
    {
        "fault": ["score", "memory", "next_event", "plan", "log_from", "greedy"],
        "overlaps": [False, True],
        "policy": ["none", KARA],
    },
    together=2,
)
def test_a_policy_that_fails_ends_its_own_request(
    llama_dir: Path, plug_in: None, fault: str, overlaps: bool, policy: Any
) -> None:
    llm = LLM(str(llama_dir), policy=policy, async_scheduling=overlaps, **SETTINGS)
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    asked = [GREEDY] * len(PROMPTS)
    asked[2] = replace(GREEDY, kv_policy={**FAULTY, "fault": fault})
    found = llm.generate(PROMPTS, asked, use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in found]
    assert reasons == ["length", "length", "error", "length", "length", "length"]
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if i != 2:
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            assert one.kv_cache_details.compactions == other.kv_cache_details.compactions
    whole(llm.engine.core)


def test_what_a_failed_event_held_is_given_back_at_once(llama_dir: Path, plug_in: None) -> None:
    """Not when somebody collects cycles: the others need the memory now."""
    llm = LLM(str(llama_dir), **SETTINGS)
    faulty = SamplingParams(max_tokens=40, ignore_eos=True, kv_policy={**FAULTY, "fault": "memory"})
    SCRATCH.clear()
    gc.disable()
    try:
        (output,) = llm.generate(PROMPTS[:1], faulty, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        assert SCRATCH and all(scratch() is None for scratch in SCRATCH)
    finally:
        gc.enable()


def fail_once(
    owner: Any, name: str, error: Exception, when: Callable[[int], bool] = lambda call: True
) -> list[int]:
    """Let a method raise at its first call for whose number ``when``; its number, once it has."""
    works, failed, calls = getattr(owner, name), list[int](), 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if not failed and when(calls):
            failed.append(calls)
            raise error
        return works(*args, **kwargs)

    setattr(owner, name, run)
    return failed


def whole(core: EngineCore) -> None:
    """Nothing is left behind."""
    core.scheduler.check_integrity()
    assert core.scheduler.blocks.headroom == core.scheduler.pool.capacity
    assert not core._sequences


PLACES: dict[str, Callable[[EngineCore], tuple[Any, str]]] = {
    "the scheduler": lambda core: (core.scheduler, "_make_room"),
    "a forward": lambda core: (core.runner.model.layers[0], "forward"),
    "a played step": lambda core: (core.runner.graphs, "decode"),
    "the sampler": lambda core: (core.runner.batch.sampling, "sample"),
    "newcomers": lambda core: (core.runner.batch.sampling, "set_rows"),
}


@pytest.mark.parametrize(
    "place",
    [pytest.param(x, marks=[pytest.mark.compiler] * (x == "a played step")) for x in PLACES],
)
@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
def test_a_step_that_fails_once_costs_nobody_an_answer(
    llama_dir: Path, place: str, overlaps: bool
) -> None:
    how = {"async_scheduling": overlaps, "enforce_eager": place == "a forward"}
    llm = LLM(str(llama_dir), policy=KARA, **how, **SETTINGS)
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    core, call = llm.engine.core, 1 if place == "newcomers" else 20
    failed = fail_once(*PLACES[place](core), RuntimeError("a bug of ours"), lambda n: n == call)
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert failed and [output.outputs for output in found] == [each.outputs for each in expected]
    whole(core)


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("bad", [[3], [0], [1, 4]], ids=str)
def test_who_makes_every_step_fail_ends_alone(
    llama_dir: Path, overlaps: bool, bad: list[int]
) -> None:
    """Whoever else is in the step: found by halves, after few failures; more come meanwhile."""
    llm = LLM(str(llama_dir), policy=KARA, async_scheduling=overlaps, **SETTINGS)
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    core = llm.engine.core
    sampling = core.runner.batch.sampling
    sample, failures = sampling.sample, 0

    def fail_for_some(logits: Any, at: IntArray, *args: Any) -> Any:
        nonlocal failures
        if (sampling._host[at, 3] == 7).any():  # as an id beyond the vocabulary would do
            failures += 1
            raise IndexError("index 448 is out of bounds")
        return sample(logits, at, *args)

    sampling.sample = fail_for_some  # type: ignore[assignment, method-assign]
    asked = [GREEDY] * len(PROMPTS)
    for i in bad:
        asked[i] = replace(GREEDY, logprobs=7)
    found = llm.generate(PROMPTS, asked, use_tqdm=False)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one.outputs[0].finish_reason == "error") == (i in bad)
        assert i in bad or one.outputs[0].token_ids == other.outputs[0].token_ids
    assert failures <= 4 * len(bad)
    whole(core)


def test_what_fails_in_every_step_ends_its_requests(llama_dir: Path) -> None:
    """And not the engine: mended, it goes on."""
    llm = LLM(str(llama_dir), enforce_eager=True, **SETTINGS)
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    layer = llm.engine.core.runner.model.layers[0]
    forward = layer.forward

    def fail(*args: Any) -> Any:
        raise RuntimeError("broken for good")

    layer.forward = fail
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in found] == ["error"] * len(PROMPTS)
    layer.forward = forward
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs for output in found] == [each.outputs for each in expected]
    whole(llm.engine.core)


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_end_their_request(
    llama_dir: Path, overlaps: bool, drawn: bool, wrong: float
) -> None:
    llm = LLM(str(llama_dir), async_scheduling=overlaps, **SETTINGS)
    params = replace(GREEDY, temperature=1.0, top_k=5, seed=1) if drawn else GREEDY
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    core = llm.engine.core
    logits, rows = core.runner.model.logits, core.scheduler.rows

    def broken(hidden: Tensor) -> Tensor:
        found = logits(hidden)
        if len(found) == len(PROMPTS) and rows.num_tokens[2] > 50:
            found[2] = wrong
        return found

    core.runner.model.logits = broken  # type: ignore[method-assign]
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in found]
    assert reasons.count("error") == 1
    for one, other in zip(found, expected, strict=True):
        known = one.outputs[0].token_ids
        assert known == other.outputs[0].token_ids[: len(known)]
        assert len(known) == 40 or one.outputs[0].finish_reason == "error"
    whole(core)


def test_those_set_aside_can_be_aborted(llama_dir: Path) -> None:
    llm = LLM(str(llama_dir), enforce_eager=True, **SETTINGS)
    fail_once(llm.engine.core.runner.model.layers[0], "forward", RuntimeError("once"))
    for i, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(i), prompt, GREEDY)
    llm.engine.step()
    assert llm.engine.core._suspects.made
    for i in range(len(PROMPTS)):
        llm.engine.abort_request(str(i))
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    llm.engine.core.step()
    whole(llm.engine.core)


def test_no_memory_on_the_host_is_no_memory(llama_dir: Path) -> None:
    """torch says so by a RuntimeError on a CPU."""
    llm = LLM(str(llama_dir), enforce_eager=True, **SETTINGS)
    runner = llm.engine.core.runner
    forward, calls = runner.model.layers[0].forward, 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            torch.empty(2**62, dtype=torch.uint8)
        return forward(*args, **kwargs)

    runner.model.layers[0].forward = run
    outputs = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs].count("error") == 1


@asynccontextmanager
async def served(model: str, **settings: Any) -> AsyncIterator[Callable[..., Awaitable[list[int]]]]:
    """An engine in a thread: what runs a request, given its id and parameters; its tokens."""
    settings = {"max_num_seqs": 8, "max_model_len": 256, **settings}
    engine = AsyncEngine(EngineConfig.from_flat(model=model, **settings), mode="thread")
    await engine.start()

    async def run(request_id: str, **params: Any) -> list[int]:
        asked = SamplingParams(**{"temperature": 0.0, "max_tokens": 30, **params})
        outputs = [each async for each in engine.generate([5, 6, 7], asked, request_id)]
        return [token for choice in outputs[-1].outputs for token in choice.token_ids]

    yield run
    await engine.shutdown()


class PanicException(BaseException):
    """As pyo3 names a Rust panic."""


@pytest.mark.parametrize("method", ["fill", "accept"])
@pytest.mark.parametrize("error", [ValueError("over its limits"), PanicException("panicked at")])
async def test_a_grammar_that_fails_on_the_way(
    monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException
) -> None:
    started = SequenceGrammar.__init__

    def init(self: SequenceGrammar, matcher: Any, *args: Any) -> None:
        calls = 0
        works = getattr(matcher, method)

        def fail_later(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 3:
                raise error
            return works(*given)

        setattr(matcher, method, fail_later)
        started(self, matcher, *args)

    monkeypatch.setattr(SequenceGrammar, "__init__", init)

    async with served("kvserve/tiny") as run:
        alone = await run("alone", ignore_eos=True)
        wanted = StructuredOutput("regex", "(a|b){100}")
        with pytest.raises(RequestError, match="grammar failed") as refused:
            await run("bad", structured_outputs=wanted)
        assert as_api_error(refused.value).status_code == 400
        assert "panicked" not in str(refused.value)
        assert await run("again", ignore_eos=True) == alone


async def test_a_request_that_breaks_admission_ends_alone(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = EngineCore.add

    def fail(self: EngineCore, new: Any, matcher: Any = None) -> None:
        if new.min_tokens == 7:
            raise OverflowError("too large")
        add(self, new, matcher)

    monkeypatch.setattr(EngineCore, "add", fail)
    async with served(str(llama_dir), **SETTINGS) as run:
        with pytest.raises(RequestError) as refused:
            await run("bad", min_tokens=7)
        assert as_api_error(refused.value).status_code == 500
        assert len(await run("good", ignore_eos=True)) == 30


# ---- a step that finds no memory: its newest sequence ends with an error -------------------------

LONG = replace(GREEDY, max_tokens=60)
NO_MEMORY = torch.OutOfMemoryError("tried to allocate 2.00 GiB")


Operator = Callable[[ModelRunner], Any]
SCARCE: dict[str, tuple[Operator, str, Callable[[SchedulerOutput], bool]]] = {
    "a prompt": (lambda r: r.model.layers[0], "forward", lambda s: len(s.prefill.rows) > 1),
    "a decode": (lambda r: r.cache, "store", lambda s: s.num_decoding > 4),
    "an event": (lambda r: r.compressor, "_move", lambda s: bool(s.events.compactions)),
    "logits": (lambda r: r.model, "logits", lambda s: s.num_decoding > 4),
    "a swap": (lambda r: r.cache, "swap", lambda s: s.moves is not None and bool(s.moves.outs)),
}


@thinned(
    {
        "overlaps": [False, True],
        "place": list(SCARCE),
        "policy": [KARA, {"name": "adakv", "budget": 8, "window": 4}, "none"],
    },
    together=2,
)
def test_the_newest_ends_and_the_others_go_on(
    llama_dir: Path, place: str, policy: Any, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if policy == "none" and place in ("an event", "a swap"):
        pytest.skip("none has no events, and swaps nothing")
    plain = LLM(str(llama_dir), policy=policy, **SETTINGS)
    expected = plain.generate(PROMPTS, LONG, use_tqdm=False)
    llm = LLM(str(llama_dir), policy=policy, async_scheduling=overlaps, **SETTINGS)
    core = llm.engine.core
    operator, name, when = SCARCE[place]
    steps: list[SchedulerOutput] = []
    before_steps(llm, steps.append)
    if place == "a swap":
        preempt_in_step(llm, 45)
    failed = fail_once(operator(core.runner), name, NO_MEMORY, lambda _: when(steps[-1]))

    def spoil(*args: Any) -> Any:
        core.runner.cache.kv[1:] = POISON  # nothing of it may be relied on
        return start_over(*args)

    monkeypatch.setattr(containment, "start_over", spoil)
    found = llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert failed
    reasons = [output.outputs[0].finish_reason for output in found]
    assert reasons.count("error") == 1 and reasons.count("length") == 5
    for one, other in zip(found, expected, strict=True):
        known = one.outputs[0].token_ids
        assert known == other.outputs[0].token_ids[: len(known)]
        if one.outputs[0].finish_reason == "length":
            assert len(known) == 60
            assert one.kv_cache_details.compactions == other.kv_cache_details.compactions
    whole(core)


def preempt_in_step(llm: LLM, steps: int) -> None:
    """Make the newest sequence go to host memory in a step."""
    scheduler = llm.engine.core.scheduler
    promote = scheduler.rows.promote_ready

    def and_one() -> None:
        promote()
        if scheduler.totals.steps_total == steps:
            scheduler.departures.preempt()

    scheduler.rows.promote_ready = and_one  # type: ignore[method-assign]


async def test_its_client_is_told(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error of its own; the engine serves on."""
    monkeypatch.setattr(ModelRunner, "launch", ModelRunner.launch)
    failed = fail_once(ModelRunner, "launch", NO_MEMORY)
    params: dict[str, Any] = {"n": 2, "max_tokens": 5, "ignore_eos": True}
    async with served(str(llama_dir), **SETTINGS) as run:
        with pytest.raises(RequestError, match="ran out of memory in a step of") as refused:
            await run("first", **params)
        assert refused.value.code == "out_of_memory" and failed
        assert as_api_error(refused.value).status_code == 503
        assert len(await run("second", **params)) == 10
