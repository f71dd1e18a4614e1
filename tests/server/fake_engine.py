"""An engine without a model: it answers ``0 1 2 ...`` and remembers what was aborted.

Words in the prompt steer it: SAY[...] is what it says instead, SLOW steps slowly, STUCK never
answers, HALF says two tokens and then nothing, UNTIL[path] says two and goes on once there is such
a file, DIE kills the engine after two tokens, BUG raises something unforeseen. Tokens are
characters.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from kvserve.engine.core.request_policies import read_policy
from kvserve.engine.frontend.chat_template import Forms
from kvserve.engine.messages import EngineInfo, PolicyOffer
from kvserve.log import ConfigError, EngineDeadError, RequestError, too_long
from kvserve.outputs import (
    Compaction,
    CompletionOutput,
    KVCacheDetails,
    KVTraceEvent,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from kvserve.sampling_params import SamplingParams
from kvserve.stats import EngineStats, PoolView, RequestStats

BOS, EOS, END, TOOL_CALL, START, CALLS = 1, 2, 3, 4, 5, 6
_MARKS = {"</think>": END, "<tool_call>": TOOL_CALL, "<think>": START, "[TOOL_CALLS]": CALLS}


class FakeTokenizer:
    """Its template writes calls as Hermes does."""

    template = "fake"
    longest_token = 1
    added_tokens: ClassVar = {mark: (token, token == CALLS) for mark, token in _MARKS.items()}
    wanted = Forms()

    def describe(self) -> dict[str, Any]:
        return {"eos_token": chr(EOS), "chat_template": self.template}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        text.encode()  # refuses lone surrogates, as real tokenizers do
        for mark, token in _MARKS.items():
            text = text.replace(mark, chr(token))
        return [BOS] * add_special_tokens + [ord(char) for char in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = (i for i in ids if i not in (BOS, EOS) or not skip_special_tokens)
        marks = {token: mark for mark, token in _MARKS.items()}
        return "".join(marks.get(i, chr(i)) for i in shown)

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        ends = [0]
        for token in token_ids:
            ends.append(ends[-1] + len(self.token_text(token)))
        return ends

    def forms(self, chat_template: str | None = None) -> Forms:
        return self.wanted

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        if kwargs.get("refuse"):
            raise ValueError("no such conversation")
        formed = self.forms().apply(messages)
        self.seen = formed, kwargs
        self.template_seen = chat_template
        text = ""
        for message in formed:
            text += f"<{message['role']}>{message['content']}"
            for call in message.get("tool_calls", ()):
                text += f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
        return (
            text + "<assistant>" * add_generation_prompt + "</think>\n" * kwargs.get("close", False)
        )


@dataclass
class FakeEngine:
    max_model_len: int = 512
    policy_name: str = "none"
    start_delay: float = 0.0
    start_error: str | None = None
    tokenizer: FakeTokenizer | None = field(default_factory=FakeTokenizer)
    token_bytes: int = 64
    prefix_caching: bool = True
    default_sampling: dict[str, Any] = field(default_factory=dict)
    stats: EngineStats = field(
        default_factory=lambda: EngineStats(
            blocks_total=100, blocks_free=100, continuation_misses=(("new", 0),)
        )
    )
    dead_error: BaseException | None = None
    suspended: bool = False
    stage: str = "reading the weights"
    aborted: list[str] = field(default_factory=list)
    seen: list[tuple[list[int], SamplingParams, str]] = field(default_factory=list)
    stopped: bool = False

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model_path="fake",
            max_model_len=self.max_model_len,
            vocab_size=0x110000,
            eos_token_ids=[EOS],
            policy_name=self.policy_name,
            block_size=16,
            num_blocks=self.stats.blocks_total,
            default_sampling=self.default_sampling,
            summary=self.summary,
            token_bytes=self.token_bytes,
            prefix_caching=self.prefix_caching,
        )

    @property
    def stats_by_engine(self) -> dict[str, EngineStats]:
        return {"0": self.stats}

    resets: int = 0
    pool: PoolView | None = None
    watched: list[bool] = field(default_factory=list)

    def watch_pool(self, on: bool) -> None:
        self.watched.append(on)

    summary: list[tuple[str, str, str]] = field(
        default_factory=lambda: [("prefix cache", "off", "not built"), ("chunks", "on", "")]
    )

    async def offers(self) -> list[PolicyOffer]:
        return []

    async def start(self) -> None:
        await asyncio.sleep(self.start_delay)
        if self.start_error is not None:
            raise ConfigError(self.start_error)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def shutdown(self) -> None:
        self.stopped = True

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        assert not isinstance(prompt, str), "the server tokenizes"
        ids = list(prompt)
        self.seen.append((ids, params, request_id))
        self._refuse(ids, params)
        output = RequestOutput(request_id, None, ids, [])
        if params.prompt_logprobs is not None:
            scored = [{i: Logprob(-1.0, 1, chr(i))} for i in ids[1:]]
            output.prompt_logprobs = [None, *scored]
        output.outputs = [CompletionOutput(index) for index in range(params.n)]
        if params.kv_trace:
            for choice in output.outputs:
                choice.kv_trace = [KVTraceEvent("start", time.time(), 0, [[[]], [[]]])]
        output.metrics = RequestMetrics(time.time())
        self._count(request_id, ids, +1)
        try:
            async for _ in self._steps(output, params):
                yield output
        finally:
            self._count(request_id, ids, -1)
            if not output.finished:
                self.aborted.append(request_id)

    def _refuse(self, ids: list[int], params: SamplingParams) -> None:
        if self.dead_error is not None:
            raise EngineDeadError("out of memory")
        if len(ids) >= self.max_model_len:
            raise too_long(len(ids), self.max_model_len, "the fake context", "prompt")
        room = self.max_model_len - len(ids)
        if params.max_tokens is not None and params.max_tokens > room:
            said = f"max_tokens={params.max_tokens} does not fit; ask for at most {room}"
            raise too_long(len(ids) + params.max_tokens, self.max_model_len, said, "max_tokens")
        if params.kv_policy is not None:
            read_policy(params.kv_policy, self.max_model_len)
        if not all(0 <= token < 0x110000 for token in ids):  # as the engine's intake does
            raise RequestError("prompt holds a token id outside the vocabulary", param="prompt")

    async def _steps(self, output: RequestOutput, params: SamplingParams) -> AsyncIterator[None]:
        prompt = FakeTokenizer().decode(output.prompt_token_ids)
        limit = params.max_tokens or self.max_model_len - len(output.prompt_token_ids)
        said = re.search(r"SAY\[(.*)\]", prompt, re.DOTALL)
        script = None if said is None else said[1]
        go = re.search(r"UNTIL\[(.*)\]", prompt)
        limit = limit if script is None else min(limit, len(script))
        for step in range(limit):
            await asyncio.sleep(0.02 if "SLOW" in prompt else 0)
            if "STUCK" in prompt or ("HALF" in prompt and step == 2):
                await asyncio.sleep(3600)
            while step == 2 and go is not None and not Path(go[1]).exists():
                await asyncio.sleep(0.01)
            if "BUG" in prompt:
                raise KeyError("a secret of the server")
            if "DIE" in prompt and step == 2:
                self.dead_error = RuntimeError("out of memory")
                raise EngineDeadError("out of memory")
            for choice in output.outputs:
                if choice.kv_trace is not None and step % 8 == 7:
                    seen = len(output.prompt_token_ids) + step
                    dropped: list[list[list[int]]] = [[[seen - 4, seen - 2]], [[]]]
                    choice.kv_trace.append(KVTraceEvent("due", time.time(), seen, dropped, 1, 8))
                self._extend(choice, step, params, f"{step} " if script is None else script[step])
                if step == limit - 1:
                    choice.finish_reason = "length" if script is None else "stop"
            output.kv_cache_details = KVCacheDetails(
                policy=self._policy(params),
                logical_tokens=len(output.prompt_token_ids) + step + 1,
                held_tokens=len(output.prompt_token_ids),
                evicted_tokens=step + 1,
                compactions=(step + 1) // 8,
                blocks_released=(step + 1) // 16,
            )
            if step % 8 == 7:
                output.compactions.append(Compaction("due", time.time(), 8, step + 1))
            output.finished = step == limit - 1
            yield

    def _extend(
        self, choice: CompletionOutput, step: int, params: SamplingParams, text: str
    ) -> None:
        if params.logprobs is not None:
            choice.text_offsets = [*(choice.text_offsets or []), len(choice.text)]
        choice.text += text
        token = END if choice.text.endswith("</think>") else 100 + step
        choice.token_ids.append(token)
        if params.logprobs is not None:
            entry = {token: Logprob(-0.5, 1, text)}
            for rank in range(2, params.logprobs + 1):
                entry[5000 + rank] = Logprob(-float(rank), rank, f"alt{rank}")
            choice.logprobs = [*(choice.logprobs or []), entry]

    def _policy(self, params: SamplingParams) -> str:
        policy = params.kv_policy or self.policy_name
        return policy if isinstance(policy, str) else policy["name"]

    def _count(self, request_id: str, ids: list[int], sign: int) -> None:
        running = [item for item in self.stats.requests if item.request_id != request_id]
        if sign > 0:
            running.append(RequestStats(request_id, "none", len(ids), len(ids), 4, 0))
        self.stats = replace(
            self.stats,
            num_running=len(running),
            blocks_free=100 - 4 * len(running),
            prompt_tokens_total=self.stats.prompt_tokens_total + len(ids) * (sign > 0),
            requests=tuple(running),
        )
