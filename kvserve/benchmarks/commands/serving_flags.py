"""Flags of ``kvserve bench serve``; their names are those of vLLM's."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvserve.benchmarks.datasets.datasets import add_dataset_arguments
from kvserve.benchmarks.measuring.serving_client import ENDPOINTS
from kvserve.benchmarks.measuring.serving_metrics import GOODPUT_METRICS, TITLES
from kvserve.benchmarks.setup.options import add_report_arguments, file_name, number
from kvserve.fields import setting, settings_of


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
        item.add_to(parser, default=item.default)
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
