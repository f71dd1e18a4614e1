"""``kvserve bench serve``: an open-loop client for a running server, kvserve or another.

The first request of a conversation is sent at its scheduled time, whether or not earlier requests
have been answered; only ``--max-concurrency`` holds it back. Options, figures, JSON keys and the
printed block are vLLM's. Figures of the KV cache, which only a kvserve server gives, stand below.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.datasets.datasets import (
    add_dataset_arguments,
    check_dataset,
    dataset_options,
    read_dataset,
)
from bench.harness.datasets.workload import Workload, random_prompts
from bench.harness.measuring.measure import accuracy
from bench.harness.measuring.serving_client import ENDPOINTS, Answer, ServerGone, ServingClient
from bench.harness.measuring.serving_metrics import (
    GOODPUT_METRICS,
    TITLES,
    Result,
    per_request,
    report_block,
    summary,
)
from bench.harness.reports.report import Report, measure_and_publish
from bench.harness.setup.options import NAMED, add_report_arguments, file_name, number
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.engine.models.hub import find_model
from kvserve.fields import setting, settings_of
from kvserve.flags import add_flag
from kvserve.folders import install
from kvserve.log import ConfigError
from kvserve.progress import progress

_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class ServingFlags:
    """The server, the traffic and the report; datasets and figures have flags of their own."""

    backend: str = setting(
        "openai",
        "completions (openai; vllm is the same) or chat (openai-chat)",
        choices=tuple(ENDPOINTS),
    )
    base_url: str | None = setting(None, "the server (default: http://HOST:PORT)")
    host: str = setting("127.0.0.1", "the server's machine, without --base-url")
    port: int = setting(8000, "its port", least=1)
    endpoint: str | None = setting(None, "path of the route (default: that of --backend)")
    model: str | None = setting(None, "served name of the model (default: the server's first)")
    tokenizer: str | None = setting(None, "tokenizer directory or hub id (default: --model)")
    api_key: str | None = setting(None, "key to send (default: OPENAI_API_KEY of the environment)")
    temperature: float = setting(0.0, "0 is greedy", least=0)
    extra_body: Mapping[str, Any] = setting(
        {}, 'further fields of every request, as in \'{"kv_policy": "none"}\''
    )
    ready_check_timeout_sec: float = setting(60.0, "seconds to wait for the server", least=0)
    request_rate: float = setting(
        float("inf"), "requests per second; inf sends all at once", above=0
    )
    burstiness: float = setting(
        1.0, "1: Poisson arrivals; below: burstier; above: more even", above=0
    )
    max_concurrency: int | None = setting(
        None, "most requests at once; further ones wait at the client", least=1
    )
    ramp_up_strategy: str | None = setting(
        None,
        "how the rate goes from --ramp-up-start-rps to --ramp-up-end-rps",
        choices=("linear", "exponential"),
    )
    ramp_up_start_rps: float | None = setting(None, "requests per second", above=0)
    ramp_up_end_rps: float | None = setting(None, "requests per second", above=0)
    seed: int = setting(0, "seed of prompts and arrivals", least=0)
    num_warmups: int = setting(0, "random requests sent first, not counted", least=0)
    label: str | None = setting(None, "written into --save-result")
    result_dir: str | None = setting(
        None, "where --save-result without a name writes (default: here)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the server, the traffic, the figures and the report."""
    for item in settings_of(ServingFlags):
        add_flag(item, parser, default=item.default)
    add_dataset_arguments(parser, timed=True)
    pairs: dict[str, Any] = {"nargs": "+", "default": []}
    words = "some of {} (default: ttft,tpot,itl)".format(",".join(TITLES))
    default = ["ttft", "tpot", "itl"]
    parser.add_argument(
        "--percentile-metrics", type=_metrics, default=default, metavar="LIST", help=words
    )
    words = "percentiles of those metrics (default: 99)"
    parser.add_argument(
        "--metric-percentiles", type=_percentiles, default=[99.0], metavar="LIST", help=words
    )
    words = "limits that a request must keep to count as good: {}".format(
        ", ".join(GOODPUT_METRICS)
    )
    parser.add_argument("--goodput", type=_limit, metavar="METRIC:MS", help=words, **pairs)
    add_report_arguments(parser, named=True)
    words = "into --save-result, write every request's lengths, times, text and error"
    parser.add_argument("--save-detailed", action="store_true", help=words)
    words = "written into --save-result"
    parser.add_argument("--metadata", type=_pair, metavar="KEY=VALUE", help=words, **pairs)
    words = "its name there (default: BACKEND-RATEqps-MODEL-TIME.json)"
    parser.add_argument("--result-filename", type=file_name(".json"), metavar="NAME", help=words)
    parser.set_defaults(fail=parser.error, api_key=os.environ.get("OPENAI_API_KEY"))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in GOODPUT_METRICS:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(GOODPUT_METRICS)}")
    return name, number(0)(limit)


def _metrics(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in TITLES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(TITLES)}")
    return names


def _percentiles(text: str) -> list[float]:
    return [number(0, 100)(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    check_dataset(args)
    if importlib.util.find_spec("httpx") is None:
        args.fail(f"needs httpx: {install('bench')}")
    dataset = args.datasets[args.dataset]
    if args.backend == "openai-chat" and not dataset.text:
        args.fail(f"--backend openai-chat: --dataset {args.dataset} is token ids; take openai")
    if dataset.timed and (args.request_rate != float("inf") or args.ramp_up_strategy):
        args.fail(f"--request-rate: --dataset {args.dataset} says itself when its requests arrive")
    ramp = (args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    if any(ramp) and not all(ramp):
        args.fail("--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps: give all three")
    args.goodput, args.metadata = dict(args.goodput), dict(args.metadata)
    args.base_url = args.base_url or f"http://{args.host}:{args.port}"
    if args.save_result == NAMED:
        args.save_result = Path(args.result_dir or "") / (args.result_filename or _file_name(args))
    elif args.result_dir or args.result_filename:
        args.fail("--result-dir and --result-filename go with --save-result without a name")
    serving = Serving(args)
    status = measure_and_publish(serving, args)
    return status or int(serving.gone is not None)


def _file_name(args: argparse.Namespace) -> str:
    """The name that vLLM gives a result."""
    model = (args.model or "model").rstrip("/").rpartition("/")[2]
    at_once = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    now = time.strftime("%Y%m%d-%H%M%S")
    return f"{args.backend}-{args.request_rate}qps{at_once}-{model}-{now}.json"


class Serving:
    """One run against ``--base-url``. If the server goes away, the answers so far are kept."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.gone: str | None = None
        self._args = args
        self._model = args.model
        self._answers: list[Answer] = []
        self._said: list[list[Any]] = []
        self._samples: list[dict[str, Any]] = []
        self._unfinished = 0
        self._started = self._seconds = 0.0
        self._workload: Workload | None = None
        self._vocab_size = 0

    def measure(self) -> None:
        try:
            asyncio.run(self._run())
        except ServerGone as gone:
            self.gone = str(gone)

    def report(self) -> Report:
        args, result = self._args, {**self._head(), **self._result()}
        about = [f"{self._model} at {args.base_url}: {args.num_prompts} x {args.dataset}"]
        notes = []
        if self.gone is not None:
            about.append(
                f"the server stopped answering after {self._seconds:.1f} s ({self.gone}): "
                f"{result['completed']} requests had been answered, {result['failed']} failed and "
                f"{self._unfinished} were under way; no rate or latency is given"
            )
        else:
            about += report_block(result, args.percentile_metrics, args.metric_percentiles)
            if self._unfinished:
                notes.append(f"{self._unfinished} requests were under way and do not count")
        errors = sorted({answer.error for answer in self._answers if answer.error})
        notes += [f"failed: {error}" for error in errors[:5]]
        settings = {"seed": args.seed, **dataset_options(args)}
        findings = {**result, "unfinished": self._unfinished}
        complete = self.gone is None
        return Report("serve", about, (), (), settings, notes, findings, complete=complete)

    # ---- sending ------------------------------------------------------------------------------

    async def _run(self) -> None:
        import httpx

        args = self._args
        headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(
            base_url=args.base_url, headers=headers, limits=limits, timeout=None
        ) as http:
            client = ServingClient(http)
            await self._wait_until_ready(client)
            self._model = self._model or await _first_model(client)
            name = args.tokenizer or self._model
            tokenizer = Tokenizer(str(find_model(name, weights=False, flag="--tokenizer")))
            self._vocab_size = tokenizer.backend.get_vocab_size()
            self._workload = read_dataset(args, self._vocab_size, tokenizer)
            fields = {"model": self._model, "temperature": args.temperature, **args.extra_body}
            client = replace(client, fields=fields)
            await self._warm_up(client)
            chat, endpoint = args.backend == "openai-chat", args.endpoint or ENDPOINTS[args.backend]
            client = replace(client, endpoint=endpoint, chat=chat)
            poll = asyncio.create_task(self._poll(client))
            try:
                await self._send(client, self._workload)
            finally:
                poll.cancel()

    async def _send(self, client: ServingClient, workload: Workload) -> None:
        """Start every conversation at its time; ``ServerGone`` ends them all."""
        args, count = self._args, len(workload)
        ramp = args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps
        times = workload.arrivals or send_times(
            count, args.request_rate, args.burstiness, args.seed, ramp
        )
        self._said = [[] for _ in range(count)]
        room = asyncio.Semaphore(args.max_concurrency or count)
        self._started = time.perf_counter()
        with progress(total=count, unit="conversation", hidden=args.disable_tqdm) as bar:

            async def converse(index: int) -> None:
                late = time.perf_counter() - self._started
                await asyncio.sleep(max(0.0, times[index] - late))
                said = self._said[index]
                while (prompt := workload.prompt(index, said)) is not None:
                    body = client.body(prompt, workload, index, said)
                    await asyncio.sleep(workload.pause(index, len(said)))
                    async with room:
                        self._unfinished += 1
                        answer = await client.ask(body)
                        self._unfinished -= 1
                    answer.turn = len(said)
                    self._answers.append(answer)
                    if answer.error:
                        break
                    said.append(answer.token_ids if workload.by_ids else answer.text)
                bar.update()

            tasks = [asyncio.create_task(converse(index)) for index in range(count)]
            try:
                await asyncio.gather(*tasks)
            finally:
                self._seconds = time.perf_counter() - self._started
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_until_ready(self, client: ServingClient) -> None:
        deadline = time.monotonic() + self._args.ready_check_timeout_sec
        while True:
            try:
                return await client.check_alive()
            except ServerGone as gone:
                if time.monotonic() >= deadline:
                    url = self._args.base_url
                    raise ConfigError(f"--base-url: no server answers at {url} ({gone})") from None
            await asyncio.sleep(_POLL_SECONDS)

    async def _warm_up(self, client: ServingClient) -> None:
        """Send requests of random ids, one after the other, that do not count."""
        lengths = [(32, 16)] * self._args.num_warmups
        warmup = random_prompts(lengths, self._vocab_size, self._args.seed + 1)
        for index, prompt in enumerate(warmup.prompts):
            answer = await client.ask(client.body(prompt, warmup, index))
            if answer.error:
                raise ConfigError(f"--num-warmups: the server refused a request ({answer.error})")

    async def _poll(self, client: ServingClient) -> None:
        """Sample the cache of a kvserve server; other servers do not have this route."""
        while (stats := (await client.get("/v1/kv/stats"))[0]) is not None:
            self._samples.append(stats)
            await asyncio.sleep(_POLL_SECONDS)

    # ---- results ------------------------------------------------------------------------------

    def _head(self) -> Result:
        """The run's settings, under vLLM's keys."""
        args = self._args
        return {
            "backend": args.backend,
            "label": args.label,
            "model_id": self._model,
            "tokenizer_id": args.tokenizer or self._model,
            "num_prompts": args.num_prompts,
            "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
            "burstiness": args.burstiness,
            "max_concurrency": args.max_concurrency,
            **args.metadata,
        }

    def _result(self) -> Result:
        args = self._args
        if self.gone is not None or not self._seconds:
            failed = sum(bool(answer.error) for answer in self._answers)
            return {"completed": len(self._answers) - failed, "failed": failed}
        result = summary(
            self._answers,
            self._seconds,
            metrics=args.percentile_metrics,
            percentiles=args.metric_percentiles,
            goodput=args.goodput,
        )
        result |= kv_figures(self._answers, self._samples)
        if self._workload is not None and not result["failed"] and not self._unfinished:
            result |= accuracy(self._workload, self._said)
        if args.save_detailed:
            result |= per_request(self._answers, self._started)
        return result


def send_times(
    count: int,
    rate: float,
    burstiness: float,
    seed: int,
    ramp: tuple[str | None, float, float] = (None, 0, 0),
) -> list[float]:
    """Seconds from the start, one per request, whatever the answers.

    Gaps are gamma-distributed with shape ``burstiness`` (1: Poisson arrivals; below: bursts; above:
    more even). They are then scaled so that their sum is what the rate gives. ``ramp``: instead of
    a rate, ``linear`` or ``exponential``, and the rates of the first and the last request.
    """
    strategy, start, end = ramp
    if strategy is None and rate == float("inf"):
        return [0.0] * count
    part = np.arange(count) / max(1, count - 1)
    rates = np.full(count, rate)
    if strategy is not None:
        linear = strategy == "linear"
        rates = start + (end - start) * part if linear else start * (end / start) ** part
    means = 1.0 / rates
    times = np.cumsum(np.random.default_rng(seed).gamma(burstiness, means))
    return (times * (means.sum() / times[-1])).tolist()


def kv_figures(answers: Sequence[Answer], samples: Sequence[dict[str, Any]]) -> Result:
    """What a kvserve server reports on its cache: in each answer, and in samples during the run;
    of conversations also TTFT of later turns, prompt tokens computed, and turns resumed."""
    details = [answer.kv for answer in answers if answer.kv]
    result: Result = {}
    if later := [1000 * answer.ttft for answer in answers if answer.turn and not answer.error]:
        result |= {
            "turns": max(answer.turn for answer in answers) + 1,
            "prompt_tokens_computed": sum(answer.prompt_len - answer.cached for answer in answers),
            "resumed_turns": sum(bool(answer.kv.get("resumed_tokens")) for answer in answers),
            "median_follow_up_ttft_ms": float(np.median(later)),
            "p99_follow_up_ttft_ms": float(np.percentile(later, 99)),
        }
    if details:
        logical = sum(each["logical_tokens"] for each in details)
        result |= {
            "compactions": sum(each["compactions"] for each in details),
            "blocks_released": sum(each["blocks_released"] for each in details),
            "held_over_logical_at_end": sum(each["held_tokens"] for each in details) / logical,
        }
    busy = [sample for sample in samples if sample["tokens_logical"]]
    if busy:
        result |= {
            "mean_running": sum(sample["num_running"] for sample in busy) / len(busy),
            "peak_running": max(sample["num_running"] for sample in busy),
            "held_over_logical": sum(sample["tokens_held"] for sample in busy)
            / sum(sample["tokens_logical"] for sample in busy),
            "preemptions": samples[-1]["preemptions_total"] - samples[0]["preemptions_total"],
        }
    return result


async def _first_model(client: ServingClient) -> str:
    models, said = await client.get("/v1/models")
    if said in (401, 403):
        raise ConfigError(f"--api-key: the server answers HTTP {said}; it wants another key")
    if not models or not models.get("data"):
        raise ConfigError("--model: the server's /v1/models lists no model; name one")
    return str(models["data"][0]["id"])
