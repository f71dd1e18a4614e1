"""A step that finds no memory: its newest sequence ends with an error, the others as if nothing had
happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvserve import LLM, AsyncEngine, EngineConfig, SamplingParams
from kvserve.engine.core import engine_core
from kvserve.engine.runner.model_runner import ModelRunner
from kvserve.log import RequestError
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.step.recovery import start_over
from kvserve.server.state.errors import as_api_error
from tests.checkpoints import random_prompts
from tests.engine.test_pressure import POISON
from tests.thinning import thinned

PROMPTS = random_prompts([30, 9, 44, 21, 17, 38], seed=5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
KARA = {"name": "kara", "window": 20, "buffer": 4, "ratio": 0.3, "chunk_budget": 2, "period": 1}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
}


def fail_once(owner: Any, name: str, when: Callable[[], bool]) -> list[int]:
    """Let an operator find no memory at its first call for which ``when``; counts the times."""
    operator = getattr(owner, name)
    failed: list[int] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not failed and when():
            failed.append(1)
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        return operator(*args, **kwargs)

    setattr(owner, name, run)
    return failed


def follow(runner: ModelRunner) -> list[SchedulerOutput]:
    """The newest step is always the last."""
    steps: list[SchedulerOutput] = []
    launch = runner.launch

    def launched(output: SchedulerOutput) -> Any:
        steps.append(output)
        return launch(output)

    runner.launch = launched  # type: ignore[method-assign]
    return steps


Operator = Callable[[ModelRunner], Any]
PLACES: dict[str, tuple[Operator, str, Callable[[SchedulerOutput], bool]]] = {
    "a prompt": (lambda r: r.model.layers[0], "forward", lambda s: len(s.prefill.rows) > 1),
    "a decode": (lambda r: r.cache, "store", lambda s: s.num_decoding > 4),
    "an event": (lambda r: r.compressor, "_move", lambda s: bool(s.events.compactions)),
    "logits": (lambda r: r.model, "logits", lambda s: s.num_decoding > 4),
    "a swap": (lambda r: r.cache, "swap", lambda s: s.moves is not None and bool(s.moves.outs)),
}


@thinned(
    {
        "overlaps": [False, True],
        "place": list(PLACES),
        "policy": [KARA, {"name": "adakv", "budget": 8, "window": 4}, "none"],
    },
    together=2,
)
def test_the_newest_ends_and_the_others_go_on(
    llama_dir: Path, place: str, policy: Any, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if policy == "none" and place in ("an event", "a swap"):
        pytest.skip("none has no events, and swaps nothing")
    expected = LLM(str(llama_dir), policy=policy, **SETTINGS).generate(
        PROMPTS, GREEDY, use_tqdm=False
    )
    llm = LLM(str(llama_dir), policy=policy, async_scheduling=overlaps, **SETTINGS)
    core = llm.engine.core
    steps, (operator, name, when) = follow(core.runner), PLACES[place]
    if place == "a swap":
        preempt_in_step(llm, 45)
    failed = fail_once(operator(core.runner), name, lambda: when(steps[-1]))

    def spoil(*args: Any) -> Any:
        core.runner.cache.kv[1:] = POISON  # nothing of it may be relied on
        return start_over(*args)

    monkeypatch.setattr(engine_core, "start_over", spoil)
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert failed
    reasons = [output.outputs[0].finish_reason for output in found]
    assert reasons.count("error") == 1 and reasons.count("length") == 5
    for one, other in zip(found, expected, strict=True):
        known = one.outputs[0].token_ids
        assert known == other.outputs[0].token_ids[: len(known)]
        if one.outputs[0].finish_reason == "length":
            assert len(known) == 60
            assert one.kv_cache_details.compactions == other.kv_cache_details.compactions
    core.scheduler.check_integrity()
    assert core.scheduler.blocks.headroom == core.scheduler.pool.capacity


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
    config = EngineConfig.from_flat(model=str(llama_dir), **SETTINGS)
    engine = AsyncEngine(config, mode="thread")
    await engine.start()
    monkeypatch.setattr(ModelRunner, "launch", ModelRunner.launch)
    failed = fail_once(ModelRunner, "launch", lambda: True)

    async def run(request_id: str) -> int:
        params = SamplingParams(n=2, temperature=0.0, max_tokens=5, ignore_eos=True)
        outputs = [each async for each in engine.generate(PROMPTS[1], params, request_id)]
        return sum(len(choice.token_ids) for choice in outputs[-1].outputs)

    with pytest.raises(RequestError, match="ran out of memory in a step of 1") as refused:
        await run("first")
    assert refused.value.code == "out_of_memory" and failed
    assert as_api_error(refused.value).status_code == 503
    assert await run("second") == 10
    await engine.shutdown()
