"""Decode throughput with each CPU attention backend and layout, on the same requests.

    python bench/cpu_attention.py --threads 1 --save-result bench/results/DATE-cpu-attention.json

Engines take turns of a few decode steps, so that other load slows all of them alike. The time of a
turn is its median step; a ratio is the median over turns.
"""

from __future__ import annotations

import argparse
import os
from itertools import product
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from kvserve import LLM
from kvserve.benchmarks.datasets.turns import (
    STRETCH,
    drain,
    median,
    step_seconds,
    stretch_seconds,
    submit,
)
from kvserve.benchmarks.reports.report import Column, Report, measure_and_publish
from kvserve.benchmarks.setup.options import add_report_arguments, at_least

BACKENDS = ("torch", "cpu")
LAYOUTS = ("model", "layer", "head")
COLUMNS = (
    Column("dtype", "dtype", left=True),
    Column("context", "context", ",d"),
    Column("batch", "batch", "d"),
    Column("layout", "layout", left=True),
    Column("torch tok/s", "torch_tok_s", ",.0f"),
    Column("cpu tok/s", "cpu_tok_s", ",.0f"),
    Column("cpu / torch", "ratio", ".2f"),
    Column("cpu / cpu, model", "vs_model", ".2f"),
    Column("torch prefill ms", "torch_prefill_ms", ".1f"),
    Column("cpu prefill ms", "cpu_prefill_ms", ".1f"),
)


Engine = tuple[str, str]  # layout, backend
Seconds = dict[Engine, tuple[float, np.ndarray]]  # of the prefill, and of a step in each turn


def start(model: str, layout: str, backend: str, dtype: str) -> LLM:
    return LLM(
        model,
        attention_backend=backend,
        kv_layout=layout,
        dtype=dtype,
        skip_tokenizer_init=True,
        kv_cache_memory=2**28,
        max_num_batched_tokens=2**16,
        enable_prefix_caching=False,
    )


def measured(llms: dict[Engine, LLM], batch: int, context: int, output: int) -> Seconds:
    """Seconds of the prefill and of decode steps, with contexts of ``context`` tokens on average
    while ``output`` of them are decoded."""
    decode: dict[Engine, list[float]] = {engine: [] for engine in llms}
    for llm in llms.values():
        submit(llm, batch, context - output // 2, output)
    prefill = {engine: step_seconds(llm, batch) for engine, llm in llms.items()}
    for first in range(1, output, STRETCH):
        steps = min(STRETCH, output - first)
        for engine, llm in llms.items():
            decode[engine].append(stretch_seconds(llm, batch, steps))
    for llm in llms.values():
        drain(llm)
    return {engine: (prefill[engine], np.array(decode[engine])) for engine in llms}


def row(seconds: Seconds, layout: str, batch: int) -> dict[str, Any]:
    """One layout's figures."""
    (torch_prefill, torch_step), (cpu_prefill, cpu_step) = (
        seconds[layout, name] for name in BACKENDS
    )
    return {
        "layout": layout,
        "torch_tok_s": median(batch / torch_step),
        "cpu_tok_s": median(batch / cpu_step),
        "ratio": median(torch_step / cpu_step),
        "vs_model": median(seconds["model", "cpu"][1] / cpu_step),
        "torch_prefill_ms": 1e3 * torch_prefill,
        "cpu_prefill_ms": 1e3 * cpu_prefill,
    }


class Comparison:
    """The runs of one command."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rows: list[dict[str, Any]] = []

    def measure(self) -> None:
        args = self._args
        cases = list(product(args.contexts, args.batches))
        silent = True if args.disable_tqdm else None
        with tqdm(total=len(args.dtypes) * len(cases), disable=silent, unit="case") as bar:
            for dtype in args.dtypes:
                engines = list(product(LAYOUTS, BACKENDS))
                llms = {engine: start(args.model, *engine, dtype) for engine in engines}
                for context, batch in cases:
                    facts = {"dtype": dtype, "context": context, "batch": batch}
                    seconds = measured(llms, batch, context, args.output_len)
                    self._rows += [facts | row(seconds, layout, batch) for layout in LAYOUTS]
                    bar.update()

    def report(self) -> Report:
        args = self._args
        about = [
            f"{args.model}: {args.output_len - 1} steps in turns of {STRETCH}, and one prefill"
        ]
        settings = {"model": args.model, "output_len": args.output_len}
        program = "python bench/cpu_attention.py"
        return Report("cpu_attention", about, COLUMNS, self._rows, settings, program=program)


def main() -> int:
    parser = argparse.ArgumentParser(description="decode throughput of the CPU backends")
    add_report_arguments(parser)
    parser.add_argument("--model", default="kvserve/tiny", help="default: kvserve/tiny")
    count = at_least(1)
    for name, default, words in (
        ("batches", [1, 16, 64], "sequences that decode"),
        ("contexts", [96, 512], "their mean length while they decode"),
    ):
        words += f" (default: {' '.join(map(str, default))})"
        parser.add_argument(f"--{name}", nargs="+", type=count, default=default, help=words)
    dtypes = ["float32", "bfloat16"]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    words = "tokens decoded of each sequence (default: 64)"
    parser.add_argument("--output-len", type=count, default=64, metavar="N", help=words)
    parser.add_argument("--threads", type=count, default=1, help="default: 1")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # the engine keeps this number
    return measure_and_publish(Comparison(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
