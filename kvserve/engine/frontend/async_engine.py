"""The engine for servers: requests are async iterators, the core runs elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Literal

from kvserve.config import EngineConfig, ModelConfig
from kvserve.engine.core.core_loop import (
    Abort,
    MakeOffers,
    ResetPrefixCache,
    ThreadClient,
    WatchPool,
)
from kvserve.engine.frontend.output_processor import OutputProcessor
from kvserve.engine.frontend.task_classifier import TaskResolver
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.engine.messages import EngineInfo, PolicyOffer, StepOutputs
from kvserve.log import EngineDeadError, RequestError
from kvserve.outputs import RequestOutput
from kvserve.sampling_params import SamplingParams
from kvserve.stats import EngineStats, PoolView

if TYPE_CHECKING:
    from kvserve.engine.core.core_process import ProcessClient

_Event = RequestOutput | Exception


class AsyncEngine:
    """An engine for an event loop: the server's own, and one for programs that stream.

    ``await start()``, then ``generate`` as often as you like, at last ``await shutdown()``. With
    ``mode="process"`` the engine has a process of its own and this interpreter is free for the
    event loop; ``"thread"`` is for tests and notebooks.

    Example: ``async for output in engine.generate("Hello", SamplingParams(), "my-id"): ...``, with
    ``engine = AsyncEngine(EngineConfig.from_flat(model="kvserve/tiny"))``.
    """

    def __init__(
        self, config: EngineConfig, *, mode: Literal["process", "thread"] = "process"
    ) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.dead_error: BaseException | None = None
        self.stats = EngineStats()
        self.pool: PoolView | None = None
        """The newest view while ``watch_pool`` is on."""
        self._client: ThreadClient | ProcessClient
        if mode == "process":
            from kvserve.engine.core.core_process import ProcessClient

            self._client = ProcessClient(config)
        else:
            self._client = ThreadClient(config)
        self._info: EngineInfo | None = None
        self._offers: asyncio.Future[list[PolicyOffer]] | None = None
        self._tasks = TaskResolver(config.compression)
        self._processor = OutputProcessor(None, [], self._tasks)
        self._queues: dict[str, asyncio.Queue[_Event]] = {}

    async def start(self) -> None:
        """Load the model; raises ``ConfigError`` with one line if that cannot work."""
        # Both at once: errors of the tokenizer show before the model is loaded.
        core = asyncio.ensure_future(self._client.start(self._on_outputs, self._on_death))
        texts = asyncio.ensure_future(asyncio.to_thread(_tokenizer_of, self.config.model))
        try:
            done, _ = await asyncio.wait((texts, core), return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            self.tokenizer, self._info = texts.result(), core.result()
        except BaseException:
            core.cancel()
            await asyncio.wait((core,))
            if not core.cancelled() and core.exception() is None:
                await self._client.stop()
            raise
        self._processor = OutputProcessor(self.tokenizer, self._info.eos_token_ids, self._tasks)

    @property
    def info(self) -> EngineInfo:
        """What the engine resolved at its start."""
        if self._info is None:
            raise RuntimeError("the engine has not been started")
        return self._info

    @property
    def stage(self) -> str:
        """What the engine does while it starts."""
        return self._client.stage

    @property
    def suspended(self) -> bool:
        """Whether the engine's process is there and does not run, as after SIGSTOP."""
        return self.dead_error is None and self._client.suspended

    @property
    def stats_by_engine(self) -> dict[str, EngineStats]:
        return {"0": self.stats}

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's growing output after every step that changed it.

        Raises ``RequestError`` if the request is refused, ``EngineDeadError`` if the engine is
        gone. Closing the iterator ends the request and frees its blocks.
        """
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))
        if request_id in self._queues:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        events: asyncio.Queue[_Event] = asyncio.Queue()
        self._queues[request_id] = events
        try:
            output, branches = self._processor.add(request_id, prompt, params)
            self._client.send(branches)
            while not output.finished:
                event = await events.get()
                # Only the newest output is yielded; nothing comes behind an error.
                while not (isinstance(event, Exception) or events.empty()):
                    event = events.get_nowait()
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self._queues.pop(request_id, None)
            self._end(request_id)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator raises ``RequestError`` with code ``aborted``."""
        if request_id in self._queues:
            self._end(request_id)
            error = RequestError("the request was aborted", code="aborted")
            self._queues[request_id].put_nowait(error)

    def reset_prefix_cache(self) -> None:
        """Forget cached blocks; requests sent later find none of them."""
        self._client.send(ResetPrefixCache())

    def watch_pool(self, on: bool) -> None:
        """Start or stop views of the pool (``pool``), which come several times a second."""
        self.pool = None
        if self.dead_error is None:
            self._client.send(WatchPool(on))

    async def offers(self) -> list[PolicyOffer]:
        """What requests may choose as ``kv_policy``, which the core works out once."""
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))
        if self._offers is None:
            self._offers = asyncio.get_running_loop().create_future()
            self._client.send(MakeOffers())
        return await asyncio.shield(self._offers)

    async def shutdown(self) -> None:
        """End everything that still runs, and the core."""
        for request_id in list(self._queues):
            await self.abort(request_id)
        await self._client.stop()

    def _end(self, request_id: str) -> None:
        unfinished = self._processor.remove(request_id)
        if unfinished and self.dead_error is None:
            self._client.send(Abort(unfinished))

    def _on_outputs(self, outputs: StepOutputs) -> None:
        if outputs.stats is not None:
            self.stats = outputs.stats
        if outputs.pool is not None:
            self.pool, self.stats = outputs.pool, outputs.pool.stats
        if outputs.offers is not None and self._offers is not None:
            self._offers.set_result(outputs.offers)
        changed, abort, errors = self._processor.process(outputs)
        news: list[tuple[str, _Event]] = [*errors.items()]
        news += [(output.request_id, output) for output in changed]
        for request_id, event in news:
            if request_id in self._queues:
                self._queues[request_id].put_nowait(event)
        if abort:
            self._client.send(Abort(abort))

    def _on_death(self, error: BaseException) -> None:
        self.dead_error = error
        if self._offers is not None and not self._offers.done():
            self._offers.set_exception(EngineDeadError(str(error)))
        for events in self._queues.values():
            events.put_nowait(EngineDeadError(str(error)))


def _tokenizer_of(config: ModelConfig) -> Tokenizer | None:
    """In a thread, while the engine's process starts: transformers loads torch."""
    from kvserve.engine.frontend.llm_engine import load_tokenizer

    return load_tokenizer(config)
