"""Flags of ``kvserve bench serve``; their names are those of vLLM's."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from kvserve.benchmarks.datasets.datasets import add_dataset_arguments
from kvserve.benchmarks.measuring.serving_client import ENDPOINTS
from kvserve.benchmarks.measuring.serving_metrics import GOODPUT_METRICS, TITLES
from kvserve.benchmarks.setup.options import add_report_arguments, at_least, file_name, number


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the server, the traffic, the figures and the report."""
    _add_server(parser)
    add_dataset_arguments(parser, timed=True)
    _add_arrivals(parser)
    _add_figures(parser)
    add_report_arguments(parser, named=True)
    words = "into --save-result, write every request's lengths, times, text and error"
    parser.add_argument("--save-detailed", action="store_true", help=words)
    parser.add_argument(
        "--metadata",
        nargs="+",
        type=_pair,
        action=_Mapping,
        default={},
        metavar="KEY=VALUE",
        help="written into --save-result",
    )
    parser.add_argument("--label", metavar="TEXT", help="written into --save-result")
    words = "where --save-result without a name writes (default: here)"
    parser.add_argument("--result-dir", type=Path, metavar="DIR", help=words)
    words = "its name there (default: BACKEND-RATEqps-MODEL-TIME.json)"
    parser.add_argument("--result-filename", type=file_name(".json"), metavar="NAME", help=words)
    parser.set_defaults(fail=parser.error)


def _add_server(parser: argparse.ArgumentParser) -> None:
    words = "completions (openai; vllm is the same) or chat (openai-chat)"
    parser.add_argument("--backend", choices=ENDPOINTS, default="openai", help=words)
    words = "the server (default: http://HOST:PORT)"
    parser.add_argument("--base-url", metavar="URL", help=words)
    words = "the server's machine, without --base-url (default: 127.0.0.1)"
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help=words)
    words = "its port (default: 8000)"
    parser.add_argument("--port", type=at_least(1), default=8000, metavar="N", help=words)
    parser.add_argument(
        "--endpoint", metavar="PATH", help="path of the route (default: that of --backend)"
    )
    parser.add_argument(
        "--model", metavar="M", help="served name of the model (default: the server's first)"
    )
    words = "tokenizer directory or hub id (default: --model)"
    parser.add_argument("--tokenizer", metavar="M", help=words)
    words = "key to send (default: OPENAI_API_KEY of the environment)"
    parser.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), metavar="KEY", help=words
    )
    parser.add_argument(
        "--temperature",
        type=number(0, closed=True),
        default=0.0,
        metavar="X",
        help="0 is greedy (default: 0)",
    )
    words = 'further fields of every request, as in \'{"kv_policy": "none"}\''
    parser.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help=words)
    words = "seconds to wait for the server (default: 60)"
    parser.add_argument(
        "--ready-check-timeout-sec", type=number(0, closed=True), default=60.0, help=words
    )


def _add_arrivals(parser: argparse.ArgumentParser) -> None:
    words = "requests per second; inf sends all at once (default: inf)"
    parser.add_argument(
        "--request-rate", type=number(0), default=float("inf"), metavar="X", help=words
    )
    words = "1: Poisson arrivals; below: burstier; above: more even (default: 1)"
    parser.add_argument("--burstiness", type=number(0), default=1.0, metavar="X", help=words)
    words = "most requests at once; further ones wait at the client"
    parser.add_argument("--max-concurrency", type=at_least(1), metavar="N", help=words)
    words = "how the rate goes from --ramp-up-start-rps to --ramp-up-end-rps"
    parser.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help=words)
    for end in ("start", "end"):
        parser.add_argument(
            f"--ramp-up-{end}-rps", type=number(0), metavar="X", help="requests per second"
        )
    parser.add_argument(
        "--seed",
        type=at_least(0),
        default=0,
        metavar="N",
        help="seed of prompts and arrivals (default: 0)",
    )
    words = "random requests sent first, not counted (default: 0)"
    parser.add_argument("--num-warmups", type=at_least(0), default=0, metavar="N", help=words)


def _add_figures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=["ttft", "tpot", "itl"],
        metavar="LIST",
        help=f"some of {','.join(TITLES)} (default: ttft,tpot,itl)",
    )
    parser.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        default=[99.0],
        metavar="LIST",
        help="percentiles of those metrics (default: 99)",
    )
    parser.add_argument(
        "--goodput",
        nargs="+",
        type=_limit,
        action=_Mapping,
        default={},
        metavar="METRIC:MS",
        help=f"limits that a request must keep to count as good: {', '.join(GOODPUT_METRICS)}",
    )


class _Mapping(argparse.Action):
    """Stores pairs as a dictionary."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, dict(values))


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


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
