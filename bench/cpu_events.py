"""How fast a CPU does the parts of a compression event, beside a plain copy of as many bytes.

    python -m bench.cpu_events --save-result bench/results/DATE-cpu-events.json

Rows of 2,048 entries in four layers lie in blocks in random order, in a pool larger than a CPU's
caches. Of each row in turn keys are gathered, a window of 128 queries from the 4-bit log scores
them, and half of its entries, another half of each lane, move to the front. A figure is the median
row's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from bench.cpu_attention import BLOCK, HEADS, pool_parser
from kvserve.benchmarks.reports.report import Column, Report, measure_and_publish
from kvserve.engine.device.pages import use_large_pages
from kvserve.kernels.cpu.move_kv import gather_keys, move_kv
from kvserve.kernels.int4_log import quantize
from kvserve.kernels.scores.window_scores import window_scores

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LENGTH, WINDOW, LAYERS = 2048, 128, 4
COLUMNS = (
    Column("heads", "heads", left=True),
    Column("dtype", "dtype", left=True),
    Column("part", "part", left=True),
    Column("ms", "ms", ".2f"),
    Column("GB/s", "gb_s", ".1f"),
    Column("copy GB/s", "copy_gb_s", ".1f"),
    Column("of a copy", "of_copy", ".2f"),
    Column("GFLOP/s", "gflop_s", ".0f"),
)


class Case:
    """A pool of rows, and what events do to them."""

    def __init__(self, heads: str, dtype: torch.dtype, mib: int) -> None:
        self.dim, self.group, self.kv_heads = HEADS[heads]
        row = LENGTH * LAYERS * 2 * self.kv_heads * self.dim * dtype.itemsize
        self.rows = rows = max(1, mib * 2**20 // row)
        blocks = rows * LENGTH // BLOCK
        shape = blocks + 1, LAYERS, 2, BLOCK, self.kv_heads, self.dim
        self.pool = torch.empty(shape, dtype=dtype)
        use_large_pages(self.pool.data_ptr(), self.pool.nbytes, written=False)
        self.pool.normal_()
        order = (torch.randperm(blocks) + 1).view(rows, -1, 1)
        lanes = LAYERS, self.kv_heads, LENGTH
        every = (order * BLOCK + torch.arange(BLOCK)).view(rows, 1, 1, LENGTH)
        self.slots = every.expand(rows, *lanes).contiguous()
        kept = torch.rand(lanes).topk(LENGTH // 2, dim=-1).indices.sort(dim=-1).values
        self.kept = torch.stack([slots.gather(-1, kept) for slots in self.slots])
        queries = torch.randn(LAYERS, self.kv_heads * self.group, WINDOW, self.dim)
        self.queries = quantize(queries, torch.zeros(queries.shape[:-1]))
        self.keys = gather_keys(self.pool, self.slots[0])
        self._copied = torch.empty_like(self.keys).view(-1)

    def parts(self) -> dict[str, tuple[Callable[[int], Any], float]]:
        """What each does to a row, and its multiplications and additions."""
        front = self.slots[..., : LENGTH // 2].contiguous()
        flops = 2.0 * self.dim * WINDOW * LENGTH * LAYERS * self.kv_heads * self.group
        return {
            "gather keys": (lambda row: gather_keys(self.pool, self.slots[row]), 0.0),
            "score a window": (
                lambda row: window_scores(self.queries, self.keys, self.dim**-0.5),
                flops,
            ),
            "move half": (lambda row: move_kv(self.pool, self.kept[row], front[row]), 0.0),
        }

    def copy(self, row: int) -> None:
        """Copy as many bytes from one place in memory as each part reads of a row."""
        numbers, count = self.pool.view(-1), self._copied.numel()
        first = (row * 2 + 1) * count % (numbers.numel() - count + 1)
        self._copied.copy_(numbers[first : first + count])

    def turn(self, run: Callable[[int], Any], row: int) -> tuple[float, float]:
        """Seconds of a part, and of the copy."""
        return seconds_of(lambda: run(row)), seconds_of(lambda: self.copy(row))


def seconds_of(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


class Events:
    """The runs of one command."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rows: list[dict[str, Any]] = []

    def measure(self) -> None:
        args = self._args
        cases = list(product(args.heads, args.dtypes))
        for heads, dtype in tqdm(cases, disable=True if args.disable_tqdm else None, unit="case"):
            torch.manual_seed(0)
            case = Case(heads, DTYPES[dtype], args.mib)
            for part, (run, flops) in case.parts().items():
                rows = [row for _ in range(args.repeat) for row in range(case.rows)]
                turns = [case.turn(run, row) for row in [0, *rows]][1:]
                own, copied = (median(each) for each in zip(*turns, strict=True))
                read = case.keys.nbytes
                figures = {
                    "ms": 1e3 * own,
                    "gb_s": 1e-9 * read / own,
                    "copy_gb_s": 1e-9 * read / copied,
                    "of_copy": median(copy / own for own, copy in turns),
                    "gflop_s": 1e-9 * flops / own if flops else None,
                }
                self._rows.append({"heads": heads, "dtype": dtype, "part": part, **figures})

    def report(self) -> Report:
        args = self._args
        about = [
            f"a row of {LENGTH:,} entries in {LAYERS} layers, {WINDOW} queries of each head; "
            "heads: dimension x queries of each KV head",
            f"pools of {args.mib} MiB in random order; medians of {args.repeat} turns of all rows",
        ]
        settings = {"repeat": args.repeat, "threads": args.threads, "mib": args.mib}
        program = "python -m bench.cpu_events"
        return Report("cpu_events", about, COLUMNS, self._rows, settings, program=program)


def make_parser() -> argparse.ArgumentParser:
    """Create the parser of the command's flags."""
    return pool_parser("how fast a CPU does the parts of an event", heads=HEADS, dtypes=DTYPES)


def main() -> int:
    args = make_parser().parse_args()
    torch.set_num_threads(args.threads)
    return measure_and_publish(Events(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
