"""All matrix products of a forward pass over a model's layers: compiled, oneDNN's and torch's.

    python -m bench.cpu_products --save-result bench/results/DATE-cpu-products.json

The three take turns over the same weights, those of every layer, so that small models are read from
the CPU's caches and large ones from memory, as in an engine. A figure is that of the median turn.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kvserve.benchmarks.reports.report import Column, Report, measure_and_publish
from kvserve.benchmarks.setup.checkpoint import SHAPES
from kvserve.benchmarks.setup.options import add_report_arguments, at_least
from kvserve.engine.models.linear import Weight, linear, packed, select_product

PRODUCTS = ("compiled", "oneDNN", "torch")
COLUMNS = (
    Column("shape", "shape", left=True),
    Column("dtype", "dtype", left=True),
    Column("tokens", "tokens", ",d"),
    *(Column(f"{name} ms", f"{name}_ms", ",.2f") for name in PRODUCTS),
    Column("compiled GFLOP/s", "gflops", ",.0f"),
    Column("weights GB/s", "gb_s", ".1f"),
    Column("oneDNN / compiled", "vs_onednn", ".2f"),
    Column("torch / compiled", "vs_torch", ".2f"),
)


def matrices(shape: str, dtype: torch.dtype) -> list[nn.Parameter]:
    """A model's weights, layer after layer: qkv, out, gate and up, down."""
    spec = SHAPES[shape]
    hidden, inner, heads = (
        spec[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    qkv = hidden * (heads + 2 * spec["num_key_value_heads"]) // heads
    sizes = [(qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    return [
        nn.Parameter(torch.randn(size).to(dtype) / size[1] ** 0.5, requires_grad=False)
        for size in sizes * spec["num_hidden_layers"]
    ]


def copy(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.data.clone(), requires_grad=False)


class Products:
    """The runs of one command."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rows: list[dict[str, Any]] = []

    def measure(self) -> None:
        args = self._args
        cases = list(product(args.shapes, args.dtypes))
        silent = True if args.disable_tqdm else None
        with tqdm(total=len(cases) * len(args.tokens), unit="case", disable=silent) as bar:
            for shape, name in cases:
                dtype = getattr(torch, name)
                plain = matrices(shape, dtype)
                ways: dict[str, list[Weight]] = {"torch": [*plain]}
                for way in PRODUCTS[:2]:
                    ways[way] = [packed(copy(weight), way) for weight in plain]
                for tokens in args.tokens:
                    facts = {"shape": shape, "dtype": name, "tokens": tokens}
                    self._rows.append(facts | self._case(ways, plain, tokens, dtype))
                    bar.update()

    def _case(
        self,
        ways: dict[str, list[Weight]],
        plain: list[nn.Parameter],
        tokens: int,
        dtype: torch.dtype,
    ) -> dict[str, float]:
        inputs = {n: torch.randn(tokens, n).to(dtype) for n in {w.shape[1] for w in plain}}
        seconds = self._turns(ways, [inputs[weight.shape[1]] for weight in plain])
        numbers, best = sum(weight.numel() for weight in plain), seconds["compiled"]
        return {
            **{f"{way}_ms": 1e3 * seconds[way] for way in PRODUCTS},
            "gflops": 2e-9 * numbers * tokens / best,
            "gb_s": 1e-9 * numbers * dtype.itemsize / best,
            "vs_onednn": seconds["oneDNN"] / best,
            "vs_torch": seconds["torch"] / best,
        }

    def _turns(self, ways: dict[str, list[Weight]], xs: list[Tensor]) -> dict[str, float]:
        """Median seconds of all products, after a turn that does not count."""
        found: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(self._args.repeat + 1):
            for way, weights in ways.items():
                started = time.perf_counter()
                for x, weight in zip(xs, weights, strict=True):
                    linear(x, weight)
                if turn:
                    found[way].append(time.perf_counter() - started)
        return {way: sorted(times)[len(times) // 2] for way, times in found.items()}

    def report(self) -> Report:
        args = self._args
        about = [f"all products of a model's layers; medians of {args.repeat} turns"]
        settings = {"repeat": args.repeat, "threads": args.threads}
        program = "python -m bench.cpu_products"
        return Report("cpu_products", about, COLUMNS, self._rows, settings, program=program)


def main() -> int:
    parser = argparse.ArgumentParser(description="matrix products on a CPU")
    add_report_arguments(parser)
    count, dtypes = at_least(1), ["float32", "bfloat16"]
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["4m", "79m"])
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--tokens", nargs="+", type=count, default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--repeat", type=count, default=9, help="turns (default: 9)")
    parser.add_argument("--threads", type=count, default=1, help="default: 1")
    args = parser.parse_args()
    for dtype in args.dtypes:
        product_of, reason = select_product(getattr(torch, dtype), "cpu")
        if product_of != "compiled":
            parser.error(f"--dtypes {dtype}: {reason}")
    torch.set_num_threads(args.threads)
    return measure_and_publish(Products(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
