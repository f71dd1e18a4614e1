"""The engine for servers: requests are async iterators, the core runs elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from kvserve.config import EngineConfig, ModelConfig, config_of
from kvserve.engine.core.core_loop import (
    Abort,
    Command,
    MakeOffers,
    ResetPrefixCache,
    ThreadClient,
    WatchPool,
)
from kvserve.engine.frontend.batch import Prompt, read_params, read_prompt, refuse_others
from kvserve.engine.frontend.output_processor import OutputProcessor
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.engine.messages import EngineInfo, PolicyOffer, StepOutputs
from kvserve.log import ConfigError, EngineDeadError, RequestError
from kvserve.outputs import RequestOutput, SaysWhatIsAbsent
from kvserve.sampling_params import SamplingParams
from kvserve.stats import EngineStats, PoolView

if TYPE_CHECKING:
    from kvserve.engine.core.core_process import ProcessClient


class AsyncEngine(SaysWhatIsAbsent):
    """An engine for an event loop: the server's own, and one for programs that stream; vLLM's name
    for it is ``AsyncLLM``.

    ``model``, ``policy`` and ``settings`` are those of ``LLM``; a whole ``EngineConfig`` stands in
    for them. The model loads with the first ``generate``, or by ``await start()``, or on entering
    ``async with``, whose end is ``await shutdown()``. With ``mode="process"`` the engine has a
    process of its own and this interpreter is free for the event loop; ``"thread"`` is for tests
    and notebooks.

    Example: ``async for output in engine.generate("Hello", SamplingParams(), "my-id"): ...``, with
    ``engine = AsyncLLM("kvserve/tiny")``.
    """

    def __init__(
        self,
        model: str | EngineConfig,
        *,
        mode: Literal["process", "thread"] = "process",
        policy: str | Mapping[str, Any] = "none",
        **settings: Any,
    ) -> None:
        if mode not in ("process", "thread"):
            raise ConfigError(f"mode must be 'process' or 'thread', got {mode!r}")
        if not isinstance(model, EngineConfig):
            model = config_of(model, policy=policy, **settings)
        elif settings or policy != "none":
            given = ", ".join(settings) or "policy"
            raise ConfigError(f"{given}: give it to the EngineConfig, which has all settings")
        self.config = model
        self.tokenizer: Tokenizer | None = None
        self.dead_error: BaseException | None = None
        self.stats = EngineStats()
        self.pool: PoolView | None = None
        """The newest view while ``watch_pool`` is on."""
        self._mode = mode
        self._loading: ThreadClient | ProcessClient | None = None
        self._client: ThreadClient | ProcessClient | None = None
        self._starting: asyncio.Task[None] | None = None
        self._starters = 0
        self._info: EngineInfo | None = None
        self._offers: asyncio.Future[list[PolicyOffer]] | None = None
        self._processor = OutputProcessor(None, [])
        self._answers: dict[str, _Answer] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> AsyncEngine:
        """An engine of ``AsyncEngineArgs(...)``, as in vLLM; ``AsyncLLM(...)`` does the same."""
        return cls(engine_args)

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    async def start(self) -> None:
        """Load the model; raises ``ConfigError`` with one line if that cannot work. Callers share
        one start, and it ends with the last one that waits for it."""
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        starting = self._starting
        if starting.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError("the engine runs in another event loop, the one that started it")
        if not starting.done():
            self._starters += 1
            try:
                await asyncio.wait((starting,))
            finally:
                self._starters -= 1
                if not self._starters:
                    await _cancel(starting)
        if starting.cancelled():
            raise EngineDeadError("the engine was shut down")
        starting.result()

    async def _start(self) -> None:
        client: ThreadClient | ProcessClient
        if self._mode == "process":
            from kvserve.engine.core.core_process import ProcessClient

            client = ProcessClient(self.config)
        else:
            client = ThreadClient(self.config)
        self._loading = client
        # Both at once: errors of the tokenizer show before the model is loaded.
        core = asyncio.create_task(client.start(self._on_outputs, self._on_death))
        texts = asyncio.create_task(asyncio.to_thread(_tokenizer_of, self.config.model))
        texts.add_done_callback(lambda task: task.cancelled() or task.exception())  # one is told
        try:
            done, _ = await asyncio.wait((texts, core), return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            tokenizer, info = texts.result(), core.result()
        except BaseException:
            self._starting = None
            texts.cancel()
            await _cancel(core)
            if not core.cancelled() and core.exception() is None:
                await client.stop()
            raise
        self._client, self.tokenizer, self._info = client, tokenizer, info
        self._processor = OutputProcessor(tokenizer, info.eos_token_ids)

    @property
    def info(self) -> EngineInfo:
        """What the engine resolved at its start."""
        if self._info is None:
            raise RuntimeError("the engine has not been started")
        return self._info

    @property
    def stage(self) -> str:
        """What the engine does while it starts."""
        return "loading torch" if self._loading is None else self._loading.stage

    @property
    def suspended(self) -> bool:
        """Whether the engine's process is there and does not run, as after SIGSTOP."""
        return self._client is not None and self.dead_error is None and self._client.suspended

    @property
    def stats_by_engine(self) -> dict[str, EngineStats]:
        return {"0": self.stats}

    async def get_tokenizer(self) -> Any:
        """The tokenizer of transformers. Raises ``ConfigError`` under ``skip_tokenizer_init``."""
        await self.start()
        if self.tokenizer is None:
            raise ConfigError("get_tokenizer needs a tokenizer; drop skip_tokenizer_init")
        return self.tokenizer.hf

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int | None = None,
        **other: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's growing output after steps that changed it, the finished one at last.

        A caller that takes its time gets what came meanwhile as one output. Prompts are those of
        ``LLM.generate``; ``sampling_params=None`` takes the checkpoint's defaults. Raises
        ``RequestError`` if the request is refused or fails, ``EngineDeadError`` if the engine is
        gone. Closing the iterator ends the request and frees its blocks.
        """
        refuse_others(self.generate, other)
        await self.start()
        if request_id in self._answers:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        read = read_prompt(prompt, "prompt")
        (params,) = read_params(sampling_params, [read], priority, self.info.default_sampling)
        answer = self._answers[request_id] = _Answer()
        try:
            _, branches = self._processor.add(request_id, read.prompt, params, read.text)
            self._send(branches)
            last = False
            while not last:
                output, last = await answer.take()
                yield output
        finally:
            del self._answers[request_id]
            self._end(request_id)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator raises ``RequestError`` with code ``aborted``."""
        if request_id in self._answers:
            self._end(request_id)
            error = RequestError("the request was aborted", code="aborted")
            self._answers[request_id].put(error)

    def reset_prefix_cache(self) -> None:
        """Forget cached blocks; requests sent later find none of them."""
        self._send(ResetPrefixCache())

    def watch_pool(self, on: bool) -> None:
        """Start or stop views of the pool (``pool``), which come several times a second."""
        self.pool = None
        self._send(WatchPool(on))

    async def offers(self) -> list[PolicyOffer]:
        """What requests may choose as ``kv_policy``, which the core works out once."""
        await self.start()
        if self._offers is None:
            self._offers = asyncio.get_running_loop().create_future()
            self._send(MakeOffers())
        return await asyncio.shield(self._offers)

    async def shutdown(self) -> None:
        """End everything that still runs, and the core. The engine cannot be started again."""
        for request_id in list(self._answers):
            await self.abort(request_id)
        self._on_death(self.dead_error or EngineDeadError("the engine was shut down"))
        if self._starting is not None:
            await _cancel(self._starting)
        client, self._client = self._client, None
        if client is not None:
            await client.stop()

    def _send(self, command: Command) -> None:
        if self._client is not None and self.dead_error is None:
            self._client.send(command)

    def _end(self, request_id: str) -> None:
        unfinished = self._processor.remove(request_id)
        if unfinished:
            self._send(Abort(unfinished))

    def _on_outputs(self, outputs: StepOutputs) -> None:
        if outputs.stats is not None:
            self.stats = outputs.stats
        if outputs.pool is not None:
            self.pool, self.stats = outputs.pool, outputs.pool.stats
        if outputs.offers is not None and self._offers and not self._offers.done():
            self._offers.set_result(outputs.offers)
        changed, abort, errors = self._processor.process(outputs)
        for request_id, error in errors.items():  # first: of what failed no output is the last
            self._put(request_id, error)
        for output in changed:
            self._put(output.request_id, output)
        if abort:
            self._send(Abort(abort))

    def _put(self, request_id: str, event: RequestOutput | Exception) -> None:
        if request_id in self._answers:
            self._answers[request_id].put(event)

    def _on_death(self, error: BaseException) -> None:
        self.dead_error = error
        if self._offers is not None and not self._offers.done():
            self._offers.set_exception(EngineDeadError(str(error)))
        for answer in self._answers.values():
            answer.put(EngineDeadError(str(error)))


class _Answer:
    """What a request's caller has not seen: its newest output, or the error that ended it.

    All outputs are one object, which grows while the caller looks at it. Only whether it had ended
    when it was taken says whether the caller has seen its end.
    """

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._newest: RequestOutput | Exception
        self._ended = False

    def put(self, event: RequestOutput | Exception) -> None:
        """Nothing comes behind a finished output or an error."""
        if not self._ended:
            self._newest = event
            self._ended = isinstance(event, Exception) or event.finished
            self._news.set()

    async def take(self) -> tuple[RequestOutput, bool]:
        """The next output, and whether it is the last one; raises the error."""
        await self._news.wait()
        self._news.clear()
        if isinstance(self._newest, Exception):
            raise self._newest
        return self._newest, self._ended


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Returns once it has ended, if it had not."""
    if task.cancel():
        await asyncio.wait((task,))


def _tokenizer_of(config: ModelConfig) -> Tokenizer | None:
    """In a thread, while the engine's process starts: transformers loads torch."""
    from kvserve.engine.frontend.llm_engine import load_tokenizer

    return load_tokenizer(config)
