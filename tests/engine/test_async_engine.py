"""The engine behind an event loop, in a thread and in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio

from kvserve import AsyncEngine, EngineConfig, SamplingParams
from kvserve.engine.core.core_process import ProcessClient
from kvserve.engine.sampling.grammar import GrammarCompiler, Matcher
from kvserve.log import ConfigError, EngineDeadError, RequestError
from kvserve.sampling_params import StructuredOutput
from tests.checkpoints import write_checkpoint, write_tokenizer
from tests.waiting import WAIT, until

Mode = Literal["thread", "process"]


LONG = 30_000
"""Tokens of an answer that nobody waits for: it must not end by itself before it is ended."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": 259, "max_position_embeddings": 2**15}
    return write_tokenizer(write_checkpoint("llama", tmp_path_factory.mktemp("model"), **sizes))


def config_of(model: Path) -> EngineConfig:
    return EngineConfig.from_flat(model=str(model), dtype="float32", num_gpu_blocks_override=2000)


@pytest_asyncio.fixture(params=["thread", "process"])
async def engine(request: pytest.FixtureRequest, directory: Path) -> AsyncIterator[AsyncEngine]:
    started = AsyncEngine(config_of(directory), mode=request.param)
    await started.start()
    yield started
    await started.shutdown()


async def collect(engine: AsyncEngine, name: str, **params: object) -> tuple[list[int], object]:
    settings = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, **params}
    lengths = []
    async for output in engine.generate("hello", SamplingParams(**settings), name):  # type: ignore[arg-type]
        lengths.append(len(output.outputs[0].token_ids))
    return lengths, output


async def test_it_says_what_it_does_while_it_starts(engine: AsyncEngine) -> None:
    assert engine.stage == "preparing the cache and the first steps", "the last one"


async def all_free(engine: AsyncEngine) -> None:
    await until(lambda: engine.stats.kv_cache_usage == 0.0 and not engine.stats.num_running)


async def test_streams_errors_disconnects_and_stats(engine: AsyncEngine) -> None:
    kara = {"name": "kara", "window": 16, "buffer": 4, "chunk_budget": 0, "period": 4}
    results = await asyncio.gather(
        collect(engine, "a"), collect(engine, "b", n=2), collect(engine, "c", kv_policy=kara)
    )
    for lengths, output in results:
        assert lengths == sorted(lengths) and lengths[-1] == 30
        assert output.finished  # type: ignore[attr-defined]
    first, second, third = (output for _, output in results)
    assert first.outputs[0].text == second.outputs[1].text  # type: ignore[attr-defined]
    assert third.kv_cache_details.compactions > 0  # type: ignore[attr-defined]

    with pytest.raises(RequestError) as refused:
        await collect(engine, "d", kv_policy="kora")
    assert refused.value.param == "kv_policy.name"
    with pytest.raises(RequestError) as refused:
        await collect(engine, "e", max_tokens=2**15)
    assert refused.value.code == "context_length_exceeded"

    stream = engine.generate("x", SamplingParams(max_tokens=LONG, ignore_eos=True), "f")
    await anext(stream)
    await stream.aclose()
    await all_free(engine)

    doomed = engine.generate("x", SamplingParams(max_tokens=LONG, ignore_eos=True), "g")
    await anext(doomed)
    await engine.abort("g")
    with pytest.raises(RequestError, match="aborted"):
        async for _ in doomed:
            pass
    await all_free(engine)
    assert engine.stats.generation_tokens_total >= 30 * 4
    assert engine.stats.compactions_total > 0
    assert engine.dead_error is None


async def test_a_dead_engine_process_fails_its_requests(directory: Path) -> None:
    engine = AsyncEngine(config_of(directory))
    await engine.start()
    stream = engine.generate("x", SamplingParams(max_tokens=LONG, ignore_eos=True), "a")
    await anext(stream)
    client = engine._client
    assert isinstance(client, ProcessClient) and client._process.pid is not None
    os.kill(client._process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    assert engine.dead_error is not None
    with pytest.raises(EngineDeadError):
        await collect(engine, "b")
    await engine.shutdown()


@pytest.mark.parametrize("mode", ["thread", "process"])
async def test_a_model_that_cannot_load_is_one_clear_error(mode: Mode) -> None:
    engine = AsyncEngine(EngineConfig.from_flat(model="/no/such/place"), mode=mode)
    with pytest.raises(ConfigError, match="/no/such/place"):
        await engine.start()
    await engine.shutdown()


async def test_a_slow_grammar_stalls_nobody(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_now, may_go = GrammarCompiler.compile, threading.Event()

    def compile_slowly(self: GrammarCompiler, wanted: StructuredOutput) -> Matcher:
        assert may_go.wait(WAIT)
        return compile_now(self, wanted)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    engine = AsyncEngine(config_of(directory), mode="thread")
    await engine.start()

    def ask(name: str, spec: dict[str, object]) -> asyncio.Task[tuple[list[int], object]]:
        return asyncio.create_task(
            collect(engine, name, structured_outputs=spec, ignore_eos=False, n=2)
        )

    try:
        slow, wrong = ask("slow", {"choice": ["yes"]}), ask("wrong", {"regex": "("})
        gone = ask("gone", {"choice": ["no"]})
        await until(lambda: len(engine._queues) == 3)
        gone.cancel()
        lengths, _ = await collect(engine, "free")
        assert lengths[-1] == 30 and not slow.done()
        may_go.set()
        _, output = await slow
        assert [choice.text for choice in output.outputs] == ["yes", "yes"]  # type: ignore[attr-defined]
        with pytest.raises(RequestError) as refused:
            await wrong
        assert refused.value.code == "invalid_grammar"
        assert (await collect(engine, "after"))[0][-1] == 30
        await all_free(engine)
    finally:
        may_go.set()
        await engine.shutdown()
