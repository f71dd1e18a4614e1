"""Decode throughput with each CPU attention backend: the same requests, step by step in turns.

    python bench/cpu_attention.py --threads 1 --save-result bench/results/DATE-cpu-attention.json

Two engines decode by turns, some steps each, so that a busy machine troubles both alike; medians.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import product
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from kvserve import LLM, SamplingParams
from kvserve.benchmarks.options import add_report_arguments, at_least
from kvserve.benchmarks.report import Column, Report, measure_and_publish

BACKENDS = ("torch", "cpu")
STRETCH = 7  # steps between turns: after the first of them, caches are warm again
COLUMNS = (
    Column("layout", "layout", left=True),
    Column("dtype", "dtype", left=True),
    Column("batch", "batch", "d"),
    Column("context", "context", ",d"),
    Column("torch tok/s", "torch_tok_s", ",.0f"),
    Column("cpu tok/s", "cpu_tok_s", ",.0f"),
    Column("cpu / torch", "ratio", ".2f"),
    Column("torch prefill ms", "torch_prefill_ms", ".1f"),
    Column("cpu prefill ms", "cpu_prefill_ms", ".1f"),
)


def start(args: argparse.Namespace, backend: str, layout: str, dtype: str) -> LLM:
    return LLM(
        args.model,
        attention_backend=backend,
        kv_layout=layout,
        dtype=dtype,
        skip_tokenizer_init=True,
        kv_cache_memory=2**29,
        max_num_batched_tokens=2**16,
        enable_prefix_caching=False,
    )


def submit(llm: LLM, batch: int, prompt: int, output: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(batch):
        ids = rng.integers(3, llm.engine.core.info.vocab_size, prompt).tolist()
        llm.engine.add_request(str(i), ids, params)


def step_seconds(llm: LLM, batch: int) -> float:
    started = time.perf_counter()
    outputs = llm.engine.step()
    seconds = time.perf_counter() - started
    assert len(outputs) == batch, "a step is meant to give every sequence one token"
    return seconds


def measured(llms: dict[str, LLM], batch: int, context: int, output: int) -> dict[str, Any]:
    """Contexts of ``context`` tokens on average while ``output`` of them are decoded."""
    decode: dict[str, list[float]] = {name: [] for name in llms}
    for llm in llms.values():
        submit(llm, batch, context - output // 2, output)
    prefill = [step_seconds(llm, batch) for llm in llms.values()]
    for first in range(1, output, STRETCH):
        steps = range(first, min(first + STRETCH, output))
        for name, llm in llms.items():
            decode[name] += [step_seconds(llm, batch) for _ in steps]
    for llm in llms.values():
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
    medians = {name: float(np.median(seconds)) for name, seconds in decode.items()}
    return {
        "batch": batch,
        "context": context,
        **{f"{name}_tok_s": batch / seconds for name, seconds in medians.items()},
        "ratio": medians["torch"] / medians["cpu"],
        **{f"{n}_prefill_ms": 1e3 * s for n, s in zip(llms, prefill, strict=True)},
    }


class Comparison:
    """The runs of one command."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rows: list[dict[str, Any]] = []

    def measure(self) -> None:
        args = self._args
        engines = list(product(args.layouts, args.dtypes))
        cases = list(product(args.contexts, args.batches))
        silent = True if args.disable_tqdm else None
        with tqdm(total=len(engines) * len(cases), disable=silent, unit="case") as bar:
            for layout, dtype in engines:
                llms = {name: start(args, name, layout, dtype) for name in BACKENDS}
                for context, batch in cases:
                    facts = {"layout": layout, "dtype": dtype}
                    self._rows.append(facts | measured(llms, batch, context, args.output_len))
                    bar.update()

    def report(self) -> Report:
        args = self._args
        about = [f"{args.model}: median decode step over {args.output_len - 1}, and one prefill"]
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
    layouts, dtypes = ["model", "layer", "head"], ["float32", "bfloat16"]
    parser.add_argument("--layouts", nargs="+", choices=layouts, default=layouts)
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    words = "tokens decoded of each sequence (default: 64)"
    parser.add_argument("--output-len", type=count, default=64, metavar="N", help=words)
    parser.add_argument("--threads", type=count, default=1, help="default: 1")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # the engine takes them as given
    return measure_and_publish(Comparison(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
