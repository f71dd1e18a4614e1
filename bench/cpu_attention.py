"""How fast decode attention reads a CPU's blocks, beside a plain sum of the same memory.

    python -m bench.cpu_attention --save-result bench/results/DATE-cpu-attention.json

Each case has a pool of blocks that rows hold in random order, larger than a CPU's caches. Its
layers are read one after another, as a step reads them: by attention, by a sum of the blocks in
the same order (``block_sum.cpp``), and from end to end by torch's sum. A figure is the median
turn's, and a ratio that of a turn.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Iterable
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvserve.benchmarks.reports.report import Column, Report, measure_and_publish
from kvserve.benchmarks.setup.options import add_report_arguments, at_least
from kvserve.engine.device.pages import use_large_pages
from kvserve.kernels.cpu.paged_attention import CpuQuerySegments, paged_attention
from kvserve.kernels.entry_format import FORMATS, EntryFormat, entry_format
from kvserve.kernels.quantized_entries import QuantizedBlocks, quantize

BLOCK = 16
FORMS = ("bfloat16", "float32", *FORMATS)
HEADS = {"32x2": (32, 2, 4), "64x3": (64, 3, 4), "64x7": (64, 7, 2), "128x4": (128, 4, 8)}
"""Of the shapes 4m, 79m, Qwen2.5-0.5B and Llama-3-8B: dimension, queries a KV head, KV heads."""
ROWS = {"16x2048": (16, 2048), "64x1024": (64, 1024), "1x8192": (1, 8192)}
COLUMNS = (
    Column("heads", "heads", left=True),
    Column("rows", "rows", left=True),
    Column("form", "form", left=True),
    Column("GB/s", "gb_s", ".1f"),
    Column("blocks GB/s", "blocks_gb_s", ".1f"),
    Column("of blocks", "of_blocks", ".2f"),
    Column("sum GB/s", "sum_gb_s", ".1f"),
    Column("of a sum", "of_sum", ".2f"),
    Column("spread", "spread", left=True),
    Column("million entries/s", "entries_m_s", ".1f"),
    Column("of bfloat16's", "of_bfloat16", ".2f"),
)


def compiled_block_sum() -> Any:
    """``block_sum.cpp``, compiled for this CPU."""
    source = Path(__file__).with_name("block_sum.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder, "block_sum.so"))
        command = ["g++", "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", library]
        subprocess.run(command, check=True)
        block_sum = ctypes.CDLL(library).block_sum
    block_sum.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3
    block_sum.restype = ctypes.c_int64
    return block_sum


def filled_pool(shape: tuple[int, ...], form: EntryFormat, dim: int, dtype: torch.dtype) -> Tensor:
    """Blocks of random entries, in large pages as an engine's are."""
    pool = torch.empty(shape, dtype=torch.uint8 if form.quantized else dtype)
    use_large_pages(pool.data_ptr(), pool.nbytes, written=False)
    if not form.quantized:
        return pool.normal_()
    blocks = QuantizedBlocks(pool, form, BLOCK, dim)
    for held in (blocks.keys, blocks.values):
        for layer in range(shape[1]):
            held[:, layer].set(..., quantize(torch.randn(held[:, layer].shape), held.form))
    return pool


class Case:
    """One pool, and what reads it."""

    def __init__(self, heads: str, rows: str, form: str, mib: int, block_sum: Any) -> None:
        (dim, group, kv_heads), (batch, context) = HEADS[heads], ROWS[rows]
        dtype = torch.float32 if form == "float32" else torch.bfloat16
        self.form = entry_format(form if form in FORMATS else "auto", dtype.itemsize)
        columns = -(-context // BLOCK)
        num_blocks = batch * columns + 1
        lane = self.form.lane_bytes(BLOCK, dim)
        layers = max(1, round(mib * 2**20 / (lane * kv_heads * num_blocks)))
        quantized = self.form.quantized
        block = (lane * kv_heads,) if quantized else (2, BLOCK, kv_heads, dim)
        pool = filled_pool((num_blocks, layers, *block), self.form, dim, dtype)
        if quantized:
            blocks = QuantizedBlocks(pool, self.form, BLOCK, dim)
            self.layers: list[Any] = [blocks.layer(layer) for layer in range(layers)]
        else:
            self.layers = [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(layers)]
        self._block_sum = block_sum
        self._pool = pool
        self.words = pool.view(-1).view(torch.uint8).view(torch.int64)
        self.query = torch.randn(batch, kv_heads * group, dim).to(dtype)
        self.tables = (torch.randperm(num_blocks - 1) + 1).int().view(1, batch, 1, columns)
        last = torch.full((1, 1, batch), context - 1)
        self.chunks = CpuQuerySegments(torch.arange(batch), torch.arange(batch + 1), last)
        self.scale = dim**-0.5
        self.entries = batch * context * kv_heads * layers
        self.bytes = self.entries * self.form.entry_bytes(dim)

    def attend(self) -> None:
        for keys, values in self.layers:
            paged_attention(self.query, keys, values, self.tables, self.chunks, 0, self.scale)

    def sum_blocks(self) -> None:
        """Read what attention reads, in its order."""
        pool, blocks = self._pool, self.tables.view(-1)
        stride, size = (pool.stride(at) * pool.itemsize for at in (0, 1))
        for layer in range(pool.shape[1]):
            start = pool.data_ptr() + layer * size
            self._block_sum(start, blocks.data_ptr(), len(blocks), stride, size)

    def turn(self) -> tuple[float, ...]:
        """Seconds of attention, of a sum of blocks and of a sum, in turns."""
        times = [time.perf_counter()]
        for read in (self.attend, self.sum_blocks, self.words.sum):
            read()
            times.append(time.perf_counter())
        return tuple(end - start for start, end in pairwise(times))


class Reading:
    """The runs of one command."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rows: list[dict[str, Any]] = []

    def measure(self) -> None:
        args = self._args
        shapes = list(product(args.heads, args.rows))
        block_sum = compiled_block_sum()
        silent = True if args.disable_tqdm else None
        with tqdm(total=len(shapes) * len(args.forms), disable=silent, unit="case") as bar:
            for heads, rows in shapes:
                plain = 0.0
                for form in args.forms:
                    torch.manual_seed(0)
                    row = self._row(Case(heads, rows, form, args.mib, block_sum))
                    plain = row["entries_m_s"] if form == "bfloat16" else plain
                    row["of_bfloat16"] = row["entries_m_s"] / plain if plain else None
                    self._rows.append({"heads": heads, "rows": rows, "form": form, **row})
                    bar.update()

    def _row(self, case: Case) -> dict[str, Any]:
        turns = [case.turn() for _ in range(self._args.repeat + 1)][1:]
        ratios = [case.bytes / case.words.nbytes * sum_s / own_s for own_s, _, sum_s in turns]
        own, blocks, summed = (median(seconds) for seconds in zip(*turns, strict=True))
        return {
            "gb_s": 1e-9 * case.bytes / own,
            "blocks_gb_s": 1e-9 * case.bytes / blocks,
            "of_blocks": median(blocks_s / own_s for own_s, blocks_s, _ in turns),
            "sum_gb_s": 1e-9 * case.words.nbytes / summed,
            "of_sum": median(ratios),
            "spread": f"{min(ratios):.2f}–{max(ratios):.2f}",
            "entries_m_s": 1e-6 * case.entries / own,
        }

    def report(self) -> Report:
        args = self._args
        about = [
            "an entry: key and value of one token and KV head; heads: dimension x queries of each",
            "blocks: a sum of the same blocks in the same order; sum: of the pool, end to end",
            f"pools of {args.mib} MiB in random order; medians of {args.repeat} turns",
        ]
        settings = {"repeat": args.repeat, "threads": args.threads, "mib": args.mib}
        program = "python -m bench.cpu_attention"
        return Report("cpu_attention", about, COLUMNS, self._rows, settings, program=program)


def pool_parser(description: str, **axes: Iterable[str]) -> argparse.ArgumentParser:
    """Create a command's parser, with a flag for each of the ``axes``: which of its values."""
    parser = argparse.ArgumentParser(description=description)
    add_report_arguments(parser)
    for name, choices in axes.items():
        known = list(choices)
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=known)
    count = at_least(1)
    parser.add_argument("--mib", type=count, default=256, help="of a pool (default: 256)")
    parser.add_argument("--repeat", type=count, default=5, help="turns (default: 5)")
    parser.add_argument("--threads", type=count, default=1, help="default: 1")
    return parser


def make_parser() -> argparse.ArgumentParser:
    """Create the parser of the command's flags."""
    words = "how fast attention reads a CPU's blocks"
    return pool_parser(words, heads=HEADS, rows=ROWS, forms=FORMS)


def main() -> int:
    args = make_parser().parse_args()
    torch.set_num_threads(args.threads)
    return measure_and_publish(Reading(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
