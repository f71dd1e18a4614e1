"""What goes wrong over one request ends that request; nobody else hears of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve import LLM, AsyncEngine, EngineConfig, SamplingParams
from kvserve.engine.core.engine_core import EngineCore
from kvserve.engine.frontend.output_processor import OutputProcessor
from kvserve.engine.policies import registry
from kvserve.engine.policies.base import argument
from kvserve.engine.policies.streaming_llm import StreamingLLM
from kvserve.engine.sampling.grammar import SequenceGrammar
from kvserve.log import RequestError
from kvserve.sampling_params import StructuredOutput
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.triggers.trigger import EvictionSpec, RowState, Trigger
from kvserve.server.state.errors import as_api_error
from tests.checkpoints import random_prompts
from tests.thinning import thinned

PROMPTS = random_prompts([30, 9, 44, 21, 17, 38], seed=5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
KARA = {"name": "kara", "window": 20, "buffer": 4, "ratio": 0.3, "chunk_budget": 2, "period": 1}
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
    """The trigger of another policy, until one of its methods is asked for the second time."""

    def __init__(self, trigger: Trigger, method: str) -> None:
        self._trigger, self._method, self._calls = trigger, method, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._trigger, name)
        if name != self._method:
            return found

        def fail_later(*args: Any) -> Any:
            self._calls += 1
            if self._calls > 2:
                raise OverflowError("Python integer 3000000000 out of bounds for int32")
            return found(*args)

        return fail_later


@dataclass(frozen=True)
class Faulty(StreamingLLM):
    """A plug-in with a bug."""

    name: ClassVar[str] = "faulty"
    fault: str = argument("score", "what fails")

    @property
    def event_trigger(self) -> Trigger:
        trigger = super().event_trigger
        if self.fault == "greedy":
            return cast(Trigger, Greedy(trigger))
        return cast(Trigger, FaultyTrigger(trigger, self.fault))

    def score(self, obs: Any) -> Tensor:
        if self.fault == "score":
            raise ZeroDivisionError("in the middle of an event")
        if self.fault == "memory":
            scratch = torch.empty(1)
            SCRATCH.append(weakref.ref(scratch))
            raise torch.OutOfMemoryError("for what this policy wants")
        return super().score(obs)


class Greedy:
    """Wants to keep more than there is: once an `IndexError: index 256` of the block table."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trigger, name)

    def plan(self, rows: RowState) -> EvictionSpec:
        plan = self._trigger.plan(rows)
        many: IntArray = np.full_like(plan.keep, 2**31 - 1)
        return EvictionSpec(**{**{f: getattr(plan, f) for f in plan.__slots__}, "keep": many})


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
    asked[2] = SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, kv_policy={**FAULTY, "fault": fault}
    )
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
    core = llm.engine.core
    owner, name = PLACES[place](core)
    works, calls = getattr(owner, name), 0

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (1 if place == "newcomers" else 20):
            raise RuntimeError("a bug of ours")
        return works(*args, **kwargs)

    setattr(owner, name, fail_once)
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert calls > 20 or place == "newcomers"
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].finish_reason == "length"
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
        asked[i] = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=7)
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
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
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
    layer, fails = llm.engine.core.runner.model.layers[0], True
    forward = layer.forward

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal fails
        fails, failed = False, fails
        if failed:
            raise RuntimeError("once")
        return forward(*args, **kwargs)

    layer.forward = fail_once
    for i, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(i), prompt, GREEDY)
    llm.engine.step()
    assert llm.engine.core._suspects
    for i in range(len(PROMPTS)):
        llm.engine.abort_request(str(i))
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    llm.engine.core.step()
    whole(llm.engine.core)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("stop_token_ids", {"stop_token_ids": [128], "min_tokens": 1}),
        ("logit_bias", {"logit_bias": {128: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [5, 128]}),
        ("thinking_end", {"thinking_end": 128, "thinking_token_budget": 3}),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused_by_name(
    llama_dir: Path, field: str, given: dict[str, Any]
) -> None:
    """All that index tensors of the device: one of them ended the server of others."""
    llm = LLM(str(llama_dir), **SETTINGS)
    vocabulary = llm.engine.core.info.vocab_size
    params = {
        name: _moved(value, vocabulary - 128) if name == field else value
        for name, value in given.items()
    }
    with pytest.raises(RequestError, match=rf"{field} holds a token id outside") as refused:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=4, **params), use_tqdm=False)
    assert refused.value.param == field


def _moved(ids: Any, by: int) -> Any:
    """128 becomes the first id that is not there."""
    if isinstance(ids, dict):
        return {token + by: value for token, value in ids.items()}
    return (
        ids + by
        if isinstance(ids, int)
        else [token + by if token == 128 else token for token in ids]
    )


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


class PanicException(BaseException):
    """As pyo3 names a Rust panic."""


@pytest.mark.parametrize("method", ["fill", "accept"])
@pytest.mark.parametrize("error", [ValueError("over its limits"), PanicException("panicked at")])
async def test_a_grammar_that_fails_on_the_way(
    monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException
) -> None:
    config = EngineConfig.from_flat(model="kvserve/tiny", max_num_seqs=8, max_model_len=256)
    engine = AsyncEngine(config, mode="thread")
    await engine.start()
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

    async def run(request_id: str, **params: Any) -> list[int]:
        settings = SamplingParams(temperature=0.0, max_tokens=30, **params)
        outputs = [each async for each in engine.generate([5, 6, 7], settings, request_id)]
        return outputs[-1].outputs[0].token_ids

    alone = await run("alone", ignore_eos=True)
    wanted = StructuredOutput("regex", "(a|b){100}")
    with pytest.raises(RequestError, match="grammar failed") as refused:
        await run("bad", structured_outputs=wanted)
    assert as_api_error(refused.value).status_code == 400
    assert "panicked" not in str(refused.value)
    assert await run("again", ignore_eos=True) == alone
    await engine.shutdown()


async def test_a_text_that_cannot_be_made_ends_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig.from_flat(model="kvserve/tiny", max_num_seqs=8, max_model_len=256)
    engine = AsyncEngine(config, mode="thread")
    await engine.start()
    take, broken = OutputProcessor._take, False

    def fail(self: OutputProcessor, branch: Any, *args: Any) -> None:
        if broken and branch.request.request_id == "bad":
            raise KeyError("detokenizer")
        take(self, branch, *args)

    monkeypatch.setattr(OutputProcessor, "_take", fail)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = [each async for each in engine.generate([5, 6, 7], params, "good")][-1]
    broken = True
    with pytest.raises(RequestError) as refused:
        async for _ in engine.generate([5, 6, 7], params, "bad"):
            pass
    assert as_api_error(refused.value).status_code == 500
    again = [each async for each in engine.generate([5, 6, 7], params, "good")][-1]
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids
    await engine.shutdown()


async def test_a_request_that_breaks_admission_ends_alone(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncEngine(EngineConfig.from_flat(model=str(llama_dir), **SETTINGS), mode="thread")
    await engine.start()
    add = EngineCore.add

    def fail(self: EngineCore, new: Any, matcher: Any = None) -> None:
        if new.min_tokens == 7:
            raise OverflowError("too large")
        add(self, new, matcher)

    monkeypatch.setattr(EngineCore, "add", fail)
    with pytest.raises(RequestError) as refused:
        params = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=7)
        async for _ in engine.generate(PROMPTS[0], params, "bad"):
            pass
    assert as_api_error(refused.value).status_code == 500
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = [each async for each in engine.generate(PROMPTS[0], params, "good")]
    assert len(outputs[-1].outputs[0].token_ids) == 8
    await engine.shutdown()
