"""Decode throughput of the layouts, with equally many held entries in all of them.

    python bench/layouts.py --threads 1 --save-result bench/results/DATE-layouts.json

The same prompts are cut to the same budget: evenly, by layer, and by KV head. Engines take turns of
a few decode steps, so that other load slows all of them alike. The time of a turn is its median
step; a ratio is the median over turns.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from kvserve import LLM, SamplingParams
from kvserve.benchmarks.reports.report import Column, Report, measure_and_publish
from kvserve.benchmarks.setup.options import add_report_arguments, at_least

WINDOW = 32
STRETCH = 4
"""Steps per turn: caches are warm again after the first of them."""
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("model", {"name": "snapkv"}),
    ("layer", {"name": "snapkv"}),
    ("layer", {"name": "pyramidkv", "exact_total": True}),
    ("head", {"name": "snapkv"}),
    ("head", {"name": "adakv", "exact_total": True}),
)
COLUMNS = (
    Column("batch", "batch", "d"),
    Column("layout", "layout", left=True),
    Column("policy", "policy", left=True),
    Column("entries per sequence", "entries", ",d"),
    Column("shortest row", "shortest", ",d"),
    Column("longest row", "longest", ",d"),
    Column("tok/s", "tok_s", ",.0f"),
    Column("vs model", "vs_model", ".2f"),
)


def submit(llm: LLM, batch: int, prompt: int, output: int) -> None:
    """``batch`` requests of random tokens, greedy, of exactly these lengths."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(batch):
        ids = rng.integers(3, llm.engine.core.info.vocab_size, prompt).tolist()
        llm.engine.add_request(str(i), ids, params)


def step_seconds(llm: LLM, batch: int) -> float:
    """Seconds of one step in which each of ``batch`` sequences gets a token."""
    started = time.perf_counter()
    outputs = llm.engine.step()
    seconds = time.perf_counter() - started
    assert len(outputs) == batch, "a step is meant to give every sequence one token"
    return seconds


def stretch_seconds(llm: LLM, batch: int, steps: int = STRETCH) -> float:
    """Seconds of the median step of one turn."""
    return float(np.median([step_seconds(llm, batch) for _ in range(steps)]))


def drain(llm: LLM) -> None:
    """Step until all requests have finished."""
    while llm.engine.has_unfinished_requests:
        llm.engine.step()


def start(args: argparse.Namespace, layout: str, policy: dict[str, Any]) -> LLM:
    return LLM(
        args.model,
        policy={**policy, "budget": args.budget, "window": WINDOW},
        kv_layout=layout,
        dtype=args.dtype,
        skip_tokenizer_init=True,
        kv_cache_memory=2**29,
        max_num_batched_tokens=2**16,
        enable_prefix_caching=False,
    )


def cut_prompts(llm: LLM, batch: int, prompt: int, output: int) -> dict[str, int]:
    """Run ``batch`` prompts until all are cut; returns what each sequence holds."""
    engine = llm.engine
    before = engine.stats().compactions_total
    submit(llm, batch, prompt, output)
    while engine.stats().compactions_total < before + batch:
        engine.step()
    layout = engine.core.scheduler.layout
    held = engine.core.scheduler.blocks.kv_lens[:, :batch]
    entries = held.sum(axis=(0, 2)) * layout.layers_per_block * layout.heads_per_block
    assert (entries == entries[0]).all(), "sequences hold different numbers of entries"
    found = {"entries": entries[0], "shortest": held.min(), "longest": held.max()}
    return {name: int(count) for name, count in found.items()}


class Comparison:
    """The runs of one command."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rows: list[dict[str, Any]] = []

    def measure(self) -> None:
        args = self._args
        llms = [start(args, *case) for case in CASES]
        for batch in tqdm(args.batches, disable=True if args.disable_tqdm else None, unit="batch"):
            held = [cut_prompts(llm, batch, args.prompt_len, args.output_len + 8) for llm in llms]
            assert len({facts["entries"] for facts in held}) == 1, f"not equal: {held}"
            turns = range(args.output_len // STRETCH)
            seconds = np.array([[stretch_seconds(llm, batch) for llm in llms] for _ in turns])
            for llm in llms:
                drain(llm)
            for (layout, policy), facts, taken in zip(CASES, held, seconds.T, strict=True):
                speed = {
                    "tok_s": float(np.median(batch / taken)),
                    "vs_model": float(np.median(seconds[:, 0] / taken)),
                }
                names = {"batch": batch, "layout": layout, "policy": policy["name"]}
                self._rows.append(names | facts | speed)

    def report(self) -> Report:
        args = self._args
        about = [
            f"{args.model}: prompts of {args.prompt_len} tokens cut to {args.budget} on average, "
            f"then {args.output_len} steps in turns of {STRETCH}"
        ]
        names = ("model", "dtype", "budget", "prompt_len", "output_len", "threads")
        settings = {name: getattr(args, name) for name in names}
        return Report(
            "layouts", about, COLUMNS, self._rows, settings, program="python bench/layouts.py"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="decode throughput of the layouts")
    add_report_arguments(parser)
    parser.add_argument("--model", default="kvserve/tiny", help="default: kvserve/tiny")
    count = at_least(1)
    words = "sequences that decode (default: 1 16 64)"
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 16, 64], help=words)
    words = "entries kept per layer and KV head, on average (default: 256)"
    parser.add_argument("--budget", type=at_least(WINDOW + 1), default=256, metavar="N", help=words)
    words = "tokens of every prompt (default: 1024)"
    parser.add_argument("--prompt-len", type=count, default=1024, metavar="N", help=words)
    words = "timed steps (default: 128)"
    parser.add_argument("--output-len", type=count, default=128, metavar="N", help=words)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=count, default=1, help="default: 1")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # the engine keeps this number
    return measure_and_publish(Comparison(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
