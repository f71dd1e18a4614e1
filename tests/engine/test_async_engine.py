"""The engine behind an event loop, in a thread and in a process of its own."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio

import kvserve
from kvserve import AsyncEngine, AsyncEngineArgs, AsyncLLM, EngineConfig, SamplingParams
from kvserve.engine.core import core_process, engine_core
from kvserve.engine.core.core_process import ProcessClient
from kvserve.engine.frontend.output_processor import OutputProcessor
from kvserve.engine.sampling.grammar import GrammarCompiler, Matcher
from kvserve.log import ConfigError, EngineDeadError, RequestError
from kvserve.sampling_params import StructuredOutput
from kvserve.server.state.errors import as_api_error
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
    sizes: dict[str, Any] = {"num_gpu_blocks_override": 2000, "max_num_seqs": 2}
    return EngineConfig.from_flat(model=str(model), dtype="float32", **sizes)


shared = pytest.mark.asyncio(loop_scope="module")
"""Of tests that share an engine, which stays in its event loop."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["thread", "process"])
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
    def free() -> bool:
        stats = engine.stats
        return stats.kv_cache_usage == 0.0 and not (stats.num_running or stats.num_waiting)

    await until(free)


@shared
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


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@shared
@pytest.mark.parametrize("seconds", [0, 0.001, 0.05])
async def test_a_caller_that_takes_its_time_sees_the_end(
    engine: AsyncEngine, seconds: float
) -> None:
    seen = []
    async for output in engine.generate([5, 6], GREEDY, "a"):
        seen.append((len(output.outputs[0].token_ids), output.finished))
        await asyncio.sleep(seconds)
    assert seen[-1] == (12, True)


@shared
async def test_what_comes_while_the_caller_waits_is_one_output(engine: AsyncEngine) -> None:
    stream = engine.generate([5, 6], GREEDY, "a")
    output = await anext(stream)
    await until(lambda: output.finished)
    await engine.abort("a")  # too late, as a death of the engine would be
    assert [each is output for each in [each async for each in stream]] in ([], [True])
    assert len(output.outputs[0].token_ids) == 12 and output.outputs[0].finish_reason == "length"


@shared
@pytest.mark.parametrize("n", [1, 2])
async def test_an_error_that_comes_while_the_caller_waits_is_raised(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    take, failed = OutputProcessor._take, asyncio.Event()

    def fail(self: OutputProcessor, branch: Any, *args: Any) -> None:
        if len(branch.choice.token_ids) == 6:
            failed.set()
            raise KeyError("detokenizer")
        take(self, branch, *args)

    monkeypatch.setattr(OutputProcessor, "_take", fail)
    stream = engine.generate([5, 6], GREEDY.clone(n=n), "a")
    with pytest.raises(RequestError) as raised:
        await anext(stream)
        await asyncio.wait_for(failed.wait(), WAIT)
        async for _ in stream:
            pass
    error = raised.value
    assert (error.code, as_api_error(error).status_code) == ("internal_error", 500)
    await all_free(engine)
    monkeypatch.undo()
    *_, output = [each async for each in engine.generate([5, 6], GREEDY, "b")]
    assert output.finished


@shared
@pytest.mark.parametrize("state", ["waiting", "running", "unread", "closed", "dropped"])
async def test_a_caller_that_goes_leaves_nothing(engine: AsyncEngine, state: str) -> None:
    params = SamplingParams(max_tokens=LONG, ignore_eos=True)
    others = [engine.generate("x", params, f"other-{i}") for i in range(2)]
    for other in others[: 2 if state == "waiting" else 0]:
        await anext(other)
    stream = engine.generate("x", params, "a")
    if state in ("waiting", "running"):
        asking = asyncio.create_task(anext(stream))
        await until(lambda: "a" in engine._answers)
        if state == "waiting":
            await until(lambda: engine.stats.num_waiting > 0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    else:
        await anext(stream)
        if state == "closed":
            await stream.aclose()
        elif state == "unread":
            task = asyncio.create_task(stream.athrow(asyncio.CancelledError()))
            with pytest.raises(asyncio.CancelledError):
                await task
    del stream  # a stream that nobody has is closed by the event loop
    for other in others:
        await other.aclose()
    await until(lambda: not engine._answers)
    assert not (engine._processor._branches or engine._processor._by_request)
    await all_free(engine)
    assert (await collect(engine, "a"))[0][-1] == 30


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether every engine that was begun is gone, threads and processes."""
    cores, processes = [], list[subprocess.Popen[bytes]]()
    start = core_process.start_child

    class Core(engine_core.EngineCore):
        closed = False

        def __init__(self, config: EngineConfig, **more: Any) -> None:
            cores.append(self)
            super().__init__(config, **more)

        def close(self) -> None:
            super().close()
            self.closed = True

    def started(module: str) -> Any:
        process, pipe = start(module)
        processes.append(process)
        return process, pipe

    monkeypatch.setattr(engine_core, "EngineCore", Core)
    monkeypatch.setattr(core_process, "start_child", started)
    return lambda: (
        len(cores) + len(processes) > 0
        and all(core.closed for core in cores)
        and all(process.poll() is not None for process in processes)
    )


@pytest.mark.parametrize("mode", ["thread", "process"])
async def test_a_start_that_nobody_waits_for_leaves_nothing(
    directory: Path, mode: Mode, ended: Callable[[], bool]
) -> None:
    engine = AsyncEngine(config_of(directory), mode=mode)
    first, second = (asyncio.create_task(collect(engine, name)) for name in "ab")
    await until(lambda: engine._starters == 2)
    first.cancel()
    await asyncio.wait((first,))
    assert engine._starting is not None and not engine._starting.done()
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait((second,))
    assert engine._starting is None and not engine._answers
    assert ended()
    assert (await collect(engine, "a"))[0][-1] == 30
    await engine.shutdown()
    await engine.shutdown()
    assert ended()
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(engine, "a")


@pytest.mark.parametrize("mode", ["thread", "process"])
async def test_a_start_that_fails_leaves_nothing(
    directory: Path, mode: Mode, ended: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def fail(*_: Any) -> None:
        assert begun.wait(WAIT)
        raise ConfigError("--tokenizer: no")

    monkeypatch.setattr("kvserve.engine.frontend.llm_engine.load_tokenizer", fail)
    engine = AsyncEngine(config_of(directory), mode=mode)
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine._starters == 1)
    begun.set()
    with pytest.raises(ConfigError, match="--tokenizer"):
        await starting
    assert ended()


@pytest.mark.parametrize("mode", ["thread", "process"])
async def test_shutdown_ends_a_start(
    directory: Path, mode: Mode, ended: Callable[[], bool]
) -> None:
    engine = AsyncEngine(config_of(directory), mode=mode)
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine._starters == 1)
    await engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await starting
    assert ended()


SCRIPT = """\
import asyncio
from kvserve import AsyncLLM
async def main():
    engine = AsyncLLM("kvserve/tiny", mode="{mode}")
    async for output in engine.generate("a", None, "a"):
        pass
    print(output.finished)
asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_script_without_a_guard_or_an_end_runs(mode: Mode) -> None:
    """In a fresh interpreter, where nothing has imported transformers yet, and without a file."""
    command = [sys.executable, "-"]
    text = SCRIPT.format(mode=mode)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=WAIT)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


async def test_it_is_made_like_llm_and_like_vllms(directory: Path) -> None:
    assert AsyncLLM is AsyncEngine is kvserve.AsyncLLMEngine
    given: dict[str, Any] = {"policy": {"name": "kara", "window": 64}, "max_num_seqs": 2}
    made = AsyncLLM(str(directory), **given)
    assert made.config == AsyncLLM.from_engine_args(AsyncEngineArgs(str(directory), **given)).config
    assert made.config.compression.policy_args == {"window": 64}
    for wrong, said in [({"enable_lora": True}, "LoRA"), ({"mode": "fork"}, "mode must be")]:
        with pytest.raises(ConfigError, match=said):
            AsyncLLM(str(directory), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_num_seqs: give it to the EngineConfig"):
        AsyncLLM(made.config, max_num_seqs=3)
    with pytest.raises(AttributeError, match="embed is not supported: it generates text"):
        _ = made.embed  # type: ignore[attr-defined]


async def test_generate_takes_what_llm_takes(directory: Path) -> None:
    settings: dict[str, Any] = {"num_gpu_blocks_override": 100, "mode": "thread"}
    async with AsyncLLM(str(directory), **settings) as engine:
        ids = (await engine.get_tokenizer())("hello").input_ids
        answers = set()
        for name, prompt in enumerate(
            ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}]
        ):
            stream = engine.generate(prompt=prompt, sampling_params=GREEDY, request_id=str(name))
            (*_, output) = [each async for each in stream]
            answers.add(tuple(output.outputs[0].token_ids))
        assert len(answers) == 1
        assert (await anext(engine.generate("a", None, "b"))).prompt == "a"
        wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
            (3, GREEDY, {}, "prompt must be a text"),
            ("a", {"temperature": 0}, {}, "sampling_params must be"),
            ("a", GREEDY, {"lora_request": 1}, "lora_request is not supported: LoRA"),
            ("a", GREEDY, {"priority": 1}, "priority needs"),
            ("a", GREEDY, {"priorty": 1}, "unknown argument 'priorty'"),
        ]
        for prompt, params, more, said in wrong:
            with pytest.raises(RequestError, match=said):
                await anext(engine.generate(prompt, params, "c", **more))
        assert not engine._answers.keys() - {"b"}


def test_an_engine_stays_in_its_event_loop(directory: Path) -> None:
    engine = AsyncEngine(config_of(directory), mode="thread")
    asyncio.run(engine.start())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(collect(engine, "a"))
    asyncio.run(engine.shutdown())


async def test_offers_are_made_once_and_end_with_the_engine(directory: Path) -> None:
    engine = AsyncEngine(config_of(directory), mode="thread")
    offers = await engine.offers()  # which starts it
    assert await engine.offers() is offers and "none" in {offer.name for offer in offers}
    other = AsyncEngine(config_of(directory), mode="thread")
    await other.start()
    waiting = asyncio.create_task(other.offers())
    await asyncio.sleep(0)
    for each in (other, engine):
        await each.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await each.offers()
    with pytest.raises(EngineDeadError, match="shut down"):
        await waiting


async def test_a_dead_engine_process_fails_its_requests(directory: Path) -> None:
    engine = AsyncEngine(config_of(directory))
    await engine.start()
    stream = engine.generate("x", SamplingParams(max_tokens=LONG, ignore_eos=True), "a")
    await anext(stream)
    client = engine._client
    assert isinstance(client, ProcessClient) and client._process.pid is not None
    os.kill(client._process.pid, signal.SIGKILL)
    await until(lambda: engine.dead_error is not None)
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
        await until(lambda: len(engine._answers) == 3)
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


async def test_an_engine_that_is_forgotten_leaves_the_next_ones_sockets_open() -> None:
    """libzmq gives a new socket the address of one that was closed."""
    for _ in range(8):  # sockets alone: no process that would have to start
        client = ProcessClient(EngineConfig.from_flat(model="kvserve/tiny"))
        client._open_sockets()
        client._close_sockets()
        newer = ProcessClient(client._config)
        newer._open_sockets()
        del client
        gc.collect()
        assert not (newer._outputs.closed or newer._commands.closed)
        newer._close_sockets()


_LOADED = """
import sys
from kvserve.config import config_of
from kvserve.engine.core.core_loop import serving_core
policy = {"name": sys.argv[1], **eval(sys.argv[2])}
config = config_of("kvserve/tiny", policy=policy, device="cpu", num_gpu_blocks_override=200)
core = serving_core(config, lambda stage: None)
event = "kernels.score.window_scores", "kernels.score.top_places"
event += ("scheduler.compression.handlers",)
print(*("kvserve." + name in sys.modules for name in event), core.stats().compactions_total)
core.close()
"""


@pytest.mark.parametrize(
    ("policy", "fields"), [("none", "{}"), ("kara", "{}"), ("kara", "{'score_every': 64}")]
)
def test_what_events_need_is_there_before_the_first_request(policy: str, fields: str) -> None:
    """Else the first event that evicts waits for it, and every request beside it; ``none`` has no
    events."""
    command = [sys.executable, "-c", _LOADED, policy, fields]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT)
    loaded = policy == "kara"
    assert done.stdout.split() == [str(loaded)] * 3 + ["0"]
