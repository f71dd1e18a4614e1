"""Decode steps over caches of each --kv-cache-dtype, in turns.

    python -m bench.kv_cache_dtypes --save-result bench/results/DATE-kv-cache-dtypes.json

A step is what an engine runs for decoding sequences (the layers, the head and the greedy choice)
without the scheduler and without prompts. Caches hold random entries, as if contexts had been
computed. The caches take turns, so that other load slows all of them alike; a figure is that of the
median step.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import product
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from bench.harness.reports.report import Column, Report, measure_and_publish
from bench.harness.setup.checkpoint import SHAPES, Engines, MeasuredModel, opened_checkpoint
from bench.harness.setup.options import add_report_arguments, at_least
from bench.harness.setup.policy_spec import NO_COMPRESSION
from kvserve.config import KV_CACHE_DTYPES
from kvserve.entry_format import entry_format

CACHES = ("float32", "bfloat16", "int8", "k8v4")
_TURN_SECONDS = 0.3
_BLOCK = 16
COLUMNS = (
    Column("shape", "shape", left=True),
    Column("context", "context", ",d"),
    Column("batch", "batch", "d"),
    *(Column(f"{name} tok/s", f"{name}_tok_s", ",.0f") for name in (*CACHES, "fp8")),
    *(Column(f"{name} / bfloat16", f"{name}_ratio", ".2f") for name in ("int8", "k8v4", "fp8")),
)


def settings_of(cache: str) -> dict[str, str]:
    """Settings of a cache: entries as computed in a dtype, or levels under a bfloat16 model."""
    if cache in KV_CACHE_DTYPES:
        return {"dtype": "bfloat16", "kv_cache_dtype": cache}
    return {"dtype": cache, "kv_cache_dtype": "auto"}


class Decoder:
    """An engine whose first ``batch`` rows hold ``context`` entries, each step's own included."""

    def __init__(self, engines: Engines, cache: str, batch: int, context: int) -> None:
        columns = -(-context // _BLOCK)
        engine = engines.build(
            NO_COMPRESSION,
            **settings_of(cache),
            block_size=_BLOCK,
            num_gpu_blocks_override=batch * columns,
            max_num_seqs=batch,
            max_model_len=columns * _BLOCK,
            max_num_batched_tokens=2048,
            cudagraph_capture_sizes=(batch,),
            skip_tokenizer_init=True,
            swap_space=0,
        )
        self._runner, self._batch, self._context = engine.core.runner, batch, context
        names = torch.randperm(batch * columns) + 1
        tables = self._runner.batch.block_tables
        tables[:, :batch, 0, :columns] = names.view(batch, columns)
        self._fill()

    def _fill(self) -> None:
        """Make every block a copy of one that was stored in the usual way."""
        cache = self._runner.cache
        layout, slots = cache.layout, torch.arange(_BLOCK, 2 * _BLOCK)[None]
        for layer in range(layout.num_layers):
            new = torch.randn(2, _BLOCK, layout.num_kv_heads, layout.head_dim).to(cache.dtype)
            cache.entries.write(layer, slots, new[0], new[1])
        cache.kv[1:] = cache.kv[1:2].clone()

    @torch.inference_mode()
    def step(self) -> float:
        """Seconds of one step."""
        runner = self._runner
        runner.batch.kv_lens.fill_(self._context - 1)
        runner.batch.num_computed.fill_(self._context - 1)
        assert runner.graphs is not None
        start = time.perf_counter()
        hidden = runner.graphs.decode(self._batch, logs_queries=False)
        assert hidden is not None
        runner.model.logits(hidden).argmax(dim=-1)
        return time.perf_counter() - start


class Comparison:
    """The runs of one command."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rows: list[dict[str, Any]] = []
        self._left_out: list[str] = []

    def measure(self) -> None:
        args = self._args
        cases = list(product(args.contexts, args.batches))
        silent = True if args.disable_tqdm else None
        with tqdm(total=len(args.shapes) * len(cases), disable=silent, unit="case") as bar:
            for shape in args.shapes:
                given = argparse.Namespace(**vars(args), shape=shape)
                with opened_checkpoint(given) as checkpoint:
                    # Weights are shared by the engines of a dtype.
                    engines = {x: Engines(given, checkpoint) for x in ("float32", "bfloat16")}
                    for context, batch in cases:
                        self._case(checkpoint, engines, shape, context, batch)
                        bar.update()

    def _case(
        self,
        checkpoint: MeasuredModel,
        engines: dict[str, Engines],
        shape: str,
        context: int,
        batch: int,
    ) -> None:
        spec, caches = checkpoint.spec, self._args.caches
        forms = [settings_of(cache) for cache in caches]
        entry = sum(
            entry_format(x["kv_cache_dtype"], 4 if x["dtype"] == "float32" else 2).entry_bytes(
                spec.head_dim
            )
            for x in forms
        )
        size = entry * spec.num_layers * spec.num_kv_heads * batch * context
        if size > self._args.memory * 2**30:
            self._left_out.append(f"{shape}, {batch} x {context}: {size / 2**30:.0f} GiB")
            return
        decoders = {
            cache: Decoder(engines[settings_of(cache)["dtype"]], cache, batch, context)
            for cache in caches
        }
        seconds: dict[str, list[float]] = {cache: [] for cache in caches}
        steps = self._args.steps
        for turn in range(self._args.turns + 1):
            for cache, decoder in decoders.items():
                taken = [decoder.step() for _ in range(steps)]
                if turn:  # the first one warms up
                    seconds[cache] += taken
            if not turn:  # short steps scatter: make a turn last long enough
                steps = max(steps, int(_TURN_SECONDS / min(taken)))
        rates = {cache: batch / median(taken) for cache, taken in seconds.items()}
        row = {"shape": shape, "context": context, "batch": batch}
        row |= {f"{cache}_tok_s": rate for cache, rate in rates.items()}
        if "bfloat16" in rates:
            row |= {f"{cache}_ratio": rate / rates["bfloat16"] for cache, rate in rates.items()}
        self._rows.append(row)

    def report(self) -> Report:
        args = self._args
        about = [
            f"decoding steps without scheduler and prompts, {args.threads} thread(s), medians of "
            f"{args.turns} turns of {args.steps} steps or more ({_TURN_SECONDS} s); levels under a "
            "bfloat16 model"
        ]
        notes = [f"left out, for want of memory: {'; '.join(self._left_out)}"]
        names = ("shapes", "contexts", "batches", "caches", "turns", "steps", "threads", "memory")
        settings = {name: getattr(args, name) for name in names}
        program = "python -m bench.kv_cache_dtypes"
        said = notes if self._left_out else []
        return Report(
            "kv_cache_dtypes", about, COLUMNS, self._rows, settings, said, program=program
        )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="decode throughput by what the cache holds")
    add_report_arguments(parser)
    shapes, count = list(SHAPES), at_least(1)
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=shapes)
    for name, default, words in (
        ("batches", [1, 16, 64], "sequences that decode"),
        ("contexts", [512, 2048, 8192], "entries that each holds"),
    ):
        words += f" (default: {' '.join(map(str, default))})"
        parser.add_argument(f"--{name}", nargs="+", type=count, default=default, help=words)
    known = [*CACHES, "fp8"]
    parser.add_argument("--caches", nargs="+", choices=known, default=list(CACHES))
    parser.add_argument("--turns", type=count, default=3, help="counted ones (default: 3)")
    parser.add_argument("--steps", type=count, default=3, help="of a turn (default: 3)")
    parser.add_argument("--threads", type=count, default=1, help="default: 1")
    words = "GiB of all caches of a case together; larger cases are left out (default: 8)"
    parser.add_argument("--memory", type=count, default=8, help=words)
    parser.set_defaults(load_format="dummy", tokenizer=None, seed=0, model=None)
    return parser


def main() -> int:
    args = make_parser().parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # the engine keeps this number
    return measure_and_publish(Comparison(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
