"""How fast a CPU attends, does the parts of an event, and multiplies matrices.

    python -m bench.cpu_attention --save-result bench/results/DATE-cpu-attention.json
    python -m bench.cpu_attention --part events --forms bfloat16 k8v4 k4v4 \
        --save-result bench/results/DATE-cpu-events.json
    python -m bench.cpu_attention --part products --save-result bench/results/DATE-cpu-products.json

Attention reads blocks that rows hold in random order, in a pool larger than a CPU's caches, beside
a sum of the same blocks in the same order (``block_sum.cpp``) and torch's sum from end to end. Of
forms that hold the newest entries as they were computed, too, it reads half of the most so. Of each
row in turn an event gathers keys and values, scores a window of 128 queries from the 4-bit log, and
moves half of the entries, beside a copy of as many bytes of numbers; "all" is one such event.
Products are those of all layers of a model, compiled, oneDNN's and torch's. Everything takes turns;
a figure is the median turn's.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from bench.harness.reports.report import Column, Report, measure_and_publish
from bench.harness.setup.checkpoint import SHAPES
from bench.harness.setup.options import add_report_arguments, at_least
from kvserve.engine.cache.entry_store import (
    RawEntries,
    block_bytes,
)
from kvserve.engine.cache.entry_table import EntryTable
from kvserve.engine.cache.level_entries import FewEntries, QuantizedEntries
from kvserve.engine.device.pages import use_large_pages
from kvserve.engine.models.linear import Weight, linear, packed
from kvserve.entry_format import FORMATS, EntryFormat, entry_format
from kvserve.kernels.attend.paged_attention import Newest
from kvserve.kernels.attend.paged_attention_cpu import paged_attention_cpu
from kvserve.kernels.attend.query_segments import QuerySegments
from kvserve.kernels.score.window_scores import window_scores
from kvserve.kernels.storage import COMPILED
from kvserve.kernels.store.few_bits import TILE, FewBlocks
from kvserve.kernels.store.int4_log import quantize as quantize_queries
from kvserve.kernels.store.quantized_entries import QuantizedBlocks, quantize
from kvserve.scheduler.layout import KVLayout, LayerKinds

BLOCK = 16
FORMS = ("bfloat16", "float32", *FORMATS)
HEADS = {"32x2": (32, 2, 4), "64x3": (64, 3, 4), "64x7": (64, 7, 2), "128x4": (128, 4, 8)}
"""Of the shapes 4m, 79m, Qwen2.5-0.5B and Llama-3-8B: dimension, queries a KV head, KV heads."""
ROWS = {"16x2048": (16, 2048), "64x1024": (64, 1024), "1x8192": (1, 8192)}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LENGTH, WINDOW, LAYERS = 2048, 128, 4  # of a row that has an event
PRODUCTS = ("compiled", "oneDNN", "torch")
COLUMNS = (
    *(Column(name, name, left=True) for name in ("heads", "rows", "form", "shape", "dtype")),
    *(Column("part", "part", left=True), Column("tokens", "tokens", ",d")),
    Column("ms", "ms", ".2f"),
    *(Column(f"{name} ms", f"{name}_ms", ",.2f") for name in PRODUCTS),
    Column("GB/s", "gb_s", ".1f"),
    Column("blocks GB/s", "blocks_gb_s", ".1f"),
    Column("of blocks", "of_blocks", ".2f"),
    Column("sum GB/s", "sum_gb_s", ".1f"),
    Column("of a sum", "of_sum", ".2f"),
    Column("spread", "spread", left=True),
    Column("million entries/s", "entries_m_s", ".1f"),
    Column("of bfloat16's", "of_bfloat16", ".2f"),
    Column("times bfloat16's", "times_bfloat16", ".2f"),
    Column("copy GB/s", "copy_gb_s", ".1f"),
    Column("of a copy", "of_copy", ".2f"),
    *(Column("GFLOP/s", "gflop_s", ".0f"), Column("compiled GFLOP/s", "gflops", ",.0f")),
    Column("oneDNN / compiled", "vs_onednn", ".2f"),
    Column("torch / compiled", "vs_torch", ".2f"),
)
Figures = dict[str, Any]


def seconds_of(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """Seconds of each, one after the other."""
    found = []
    for run in runs:
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return found


# ---- attention --------------------------------------------------------------------------------


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


def filled_store(
    blocks: int, layers: int, kv_heads: int, dim: int, name: str, tokens: int = BLOCK
) -> RawEntries:
    """Blocks of ``tokens`` random entries, in large pages as an engine's are."""
    form, dtype = form_of(name)
    if form.few:
        return few_store(form, dtype, (blocks, layers, kv_heads, tokens, dim))
    lane = form.lane_bytes(tokens, dim)
    block = (lane * kv_heads,) if form.quantized else (2, tokens, kv_heads, dim)
    pool = torch.empty((blocks, layers, *block), dtype=torch.uint8 if form.quantized else dtype)
    use_large_pages(pool.data_ptr(), pool.nbytes, written=False)
    if not form.quantized:
        return RawEntries(pool.normal_(), COMPILED)
    held = QuantizedBlocks(pool, form, tokens, dim)
    for vectors in (held.keys, held.values):
        for layer in range(layers):
            one = vectors[:, layer]
            one[...] = quantize(torch.randn(one.shape), one.form)
    return QuantizedEntries(held, COMPILED, dtype)


def few_store(form: EntryFormat, dtype: torch.dtype, sizes: tuple[int, ...]) -> RawEntries:
    """The same in few bits; by layer, as many in each as a model of which nothing was measured."""
    blocks, layers, kv_heads, tokens, dim = sizes
    layout = KVLayout(layers, kv_heads, dim, tokens)
    table = EntryTable.plain(layers, kv_heads, dim, "cpu")
    few = table.layers(form, layout, LayerKinds(layers))
    pool = torch.empty(blocks, block_bytes(layout, form), dtype=torch.uint8)
    use_large_pages(pool.data_ptr(), pool.nbytes, written=False)
    pool.random_(0, 256)
    held = FewBlocks(pool, few, kv_heads, tokens, dim)
    for layer in range(layers):
        for vectors in held.layer(layer):  # of numbers about 1, as other forms hold here
            codes = vectors.tiles[..., vectors.codes_at :][..., :TILE]
            codes[...] = torch.randint(120, 136, codes.shape)
    return FewEntries(held, COMPILED, dtype, range(layers))


def form_of(name: str) -> tuple[EntryFormat, torch.dtype]:
    """A form, and the type of the numbers that attention and events compute with."""
    dtype = DTYPES.get(name, torch.bfloat16)
    return entry_format(name if name in FORMATS else "auto", dtype.itemsize), dtype


class Held(NamedTuple):
    """What rows hold in blocks of one kind, in random order."""

    store: RawEntries
    tables: Tensor
    chunks: QuerySegments

    @classmethod
    def of(cls, store: RawEntries, batch: int, count: int) -> Held:
        """``count`` entries of each row, in all blocks but the first."""
        blocks = len(store.memory) - 1
        last = torch.full((1, batch), count - 1)
        chunks = QuerySegments(torch.arange(batch), last, count, torch.arange(batch + 1))
        return cls(store, (torch.randperm(blocks) + 1).int().view(batch, 1, -1), chunks)


class Reads:
    """One pool, and what reads it."""

    def __init__(self, heads: str, rows: str, form: str, mib: int, block_sum: Any) -> None:
        (dim, group, kv_heads), (batch, context) = HEADS[heads], ROWS[rows]
        own, dtype = form_of(form)
        raw = entry_format("auto", dtype.itemsize)
        newest = own.newest // 2
        blocks = batch * -(-(context - newest) // BLOCK) + 1
        layer = own.block_bytes(BLOCK, dim, LAYERS, kv_heads) / LAYERS
        self.layers = max(1, round(mib * 2**20 / (layer * blocks)))
        shape = self.layers, kv_heads, dim
        self.held = Held.of(filled_store(blocks, *shape, form), batch, context - newest)
        self.newest = None
        if newest:
            tokens = int(layer // (kv_heads * raw.entry_bytes(dim)))
            store = filled_store(batch * -(-newest // tokens) + 1, *shape, "bfloat16", tokens)
            self.newest = Held.of(store, batch, newest)
        self.block_sum = block_sum
        self.words = self.held.store.memory.view(-1).view(torch.uint8).view(torch.int64)
        self.query = torch.randn(batch, kv_heads * group, dim).to(dtype)
        self.scale = dim**-0.5
        lanes = batch * kv_heads * self.layers
        self.entries = lanes * context
        each = (context - newest) * own.mean_bytes(dim, LAYERS) + newest * raw.entry_bytes(dim)
        self.bytes = lanes * each

    def attend(self) -> None:
        for layer in range(self.layers):
            newest = None
            if self.newest is not None:
                keys, values = self.newest.store.layer(layer)
                assert isinstance(keys, Tensor) and isinstance(values, Tensor)
                newest = Newest(keys, values, self.newest.tables, self.newest.chunks)
            own = self.held.store.layer(layer)
            how = self.held.tables, self.held.chunks, self.scale
            paged_attention_cpu(self.query, own[0], own[1], *how, newest=newest)

    def sum_blocks(self) -> None:
        """Read what attention reads, in its order."""
        for held in (self.held, self.newest):
            if held is None:
                continue
            pool, blocks = held.store.memory, held.tables.view(-1)
            pool = pool.view(len(pool), self.layers, -1)
            stride, size = (pool.stride(at) * pool.itemsize for at in (0, 1))
            for layer in range(self.layers):
                start = pool.data_ptr() + layer * size
                self.block_sum(start, blocks.data_ptr(), len(blocks), stride, size)

    def figures(self, repeat: int) -> Figures:
        runs = (self.attend, self.sum_blocks, self.words.sum)
        turns = [seconds_of(runs) for _ in range(repeat + 1)][1:]
        own, blocks, summed = (median(seconds) for seconds in zip(*turns, strict=True))
        ratios = [self.bytes / self.words.nbytes * end / start for start, _, end in turns]
        return {
            **{"gb_s": 1e-9 * self.bytes / own, "blocks_gb_s": 1e-9 * self.bytes / blocks},
            "of_blocks": median(blocks_s / own_s for own_s, blocks_s, _ in turns),
            **{"sum_gb_s": 1e-9 * self.words.nbytes / summed, "of_sum": median(ratios)},
            "spread": f"{min(ratios):.2f}–{max(ratios):.2f}",
            "entries_m_s": 1e-6 * self.entries / own,
        }


def attention(args: argparse.Namespace) -> Iterator[Figures]:
    block_sum = compiled_block_sum()
    for heads, rows in product(args.heads, args.rows):
        plain = 0.0
        for form in args.forms:
            torch.manual_seed(0)
            row = Reads(heads, rows, form, args.mib, block_sum).figures(args.repeat)
            plain = row["entries_m_s"] if form == "bfloat16" else plain
            row["of_bfloat16"] = row["entries_m_s"] / plain if plain else None
            yield {"heads": heads, "rows": rows, "form": form, **row}


# ---- events -----------------------------------------------------------------------------------


def events(args: argparse.Namespace) -> Iterator[Figures]:
    for heads in args.heads:
        plain: dict[str, float] = {}
        for form in args.forms:
            torch.manual_seed(0)
            for row in _event_parts(heads, form, args.mib, args.repeat):
                if form == "bfloat16":
                    plain[row["part"]] = row["ms"]
                times = row["ms"] / plain[row["part"]] if plain else None
                yield {"heads": heads, "form": form, **row, "times_bfloat16": times}


def _event_parts(heads: str, form: str, mib: int, repeat: int) -> Iterator[Figures]:
    (dim, group, kv_heads), (own, _) = HEADS[heads], form_of(form)
    entry = LAYERS * kv_heads * own.mean_bytes(dim, LAYERS)
    rows = max(1, int(mib * 2**20 / (LENGTH * entry)))
    blocks, lanes = rows * LENGTH // BLOCK, (LAYERS, kv_heads, LENGTH)
    store = filled_store(blocks + 1, LAYERS, kv_heads, dim, form)
    order = (torch.randperm(blocks) + 1).view(rows, -1, 1) * BLOCK
    every = (order + torch.arange(BLOCK)).view(rows, 1, 1, LENGTH)
    slots = every.expand(rows, *lanes).contiguous()
    kept = torch.rand(lanes).topk(LENGTH // 2, dim=-1).indices.sort(dim=-1).values
    kept_slots = torch.stack([each.gather(-1, kept) for each in slots])
    front = slots[..., : LENGTH // 2].contiguous()
    queries = torch.randn(LAYERS, kv_heads * group, WINDOW, dim)
    logged = quantize_queries(queries, torch.zeros(queries.shape[:-1]))
    keys = store.keys(slots[0], None)
    pool = store.memory.view(-1).view(torch.uint8)
    copied = torch.empty(min(keys.nbytes, len(pool)), dtype=torch.uint8)

    def copy(row: int) -> None:
        first = (row * 2 + 1) * len(copied) % (len(pool) - len(copied) + 1)
        copied.copy_(pool[first : first + len(copied)])

    flops = 2.0 * dim * WINDOW * LENGTH * LAYERS * kv_heads * group
    parts: dict[str, Callable[[int], Any]] = {
        "gather keys": lambda row: store.keys(slots[row], None),
        "gather values": lambda row: store.values(slots[row], None),
        "score a window": lambda row: window_scores(logged, keys, dim**-0.5),
        "move half": lambda row: store.move(kept_slots[row], front[row], 1),
    }

    def whole(row: int) -> None:
        for run in parts.values():
            run(row)

    for part, run in {**parts, "all": whole}.items():
        turns = []
        for row in [0, *(row for _ in range(repeat) for row in range(rows))]:
            turns.append(seconds_of((partial(run, row), partial(copy, row))))
        seconds, copy_s = (median(each) for each in zip(*turns[1:], strict=True))
        yield {
            **{"part": part, "ms": 1e3 * seconds, "gb_s": 1e-9 * keys.nbytes / seconds},
            "copy_gb_s": 1e-9 * len(copied) / copy_s,
            "of_copy": median(other / mine for mine, other in turns[1:]),
            "gflop_s": 1e-9 * flops / seconds if part == "score a window" else None,
        }


# ---- products ---------------------------------------------------------------------------------


def matrices(shape: str, dtype: torch.dtype) -> list[nn.Parameter]:
    """A model's weights, layer after layer: qkv, out, gate and up, down."""
    spec = SHAPES[shape]
    hidden, inner, heads = (
        spec[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    qkv = hidden * (heads + 2 * spec["num_key_value_heads"]) // heads
    sizes = [(qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    weights = (torch.randn(size).to(dtype) / size[1] ** 0.5 for size in sizes)
    return [
        nn.Parameter(weight.clone(), requires_grad=False)
        for weight in list(weights) * spec["num_hidden_layers"]
    ]


def multiply(weights: Sequence[Weight], xs: Sequence[Tensor]) -> None:
    for x, weight in zip(xs, weights, strict=True):
        linear(x, weight)


def products(args: argparse.Namespace) -> Iterator[Figures]:
    for shape, name in product(args.shapes, args.dtypes):
        plain = matrices(shape, DTYPES[name])
        ways: dict[str, list[Weight]] = {"torch": [*plain]}
        for way in PRODUCTS[:2]:
            clones = (nn.Parameter(each.data.clone(), requires_grad=False) for each in plain)
            ways[way] = [packed(each, way) for each in clones]
        numbers = sum(weight.numel() for weight in plain)
        for tokens in args.tokens:
            widths = {weight.shape[1] for weight in plain}
            inputs = {n: torch.randn(tokens, n).to(DTYPES[name]) for n in widths}
            xs = [inputs[weight.shape[1]] for weight in plain]

            runs = [partial(multiply, ways[way], xs) for way in PRODUCTS]
            turns = [seconds_of(runs) for _ in range(args.repeat + 1)][1:]
            seconds = dict(zip(PRODUCTS, map(median, zip(*turns, strict=True)), strict=True))
            best = seconds["compiled"]
            yield {
                **{"shape": shape, "dtype": name, "tokens": tokens},
                **{f"{way}_ms": 1e3 * seconds[way] for way in PRODUCTS},
                "gflops": 2e-9 * numbers * tokens / best,
                "gb_s": 1e-9 * numbers * DTYPES[name].itemsize / best,
                "vs_onednn": seconds["oneDNN"] / best,
                "vs_torch": seconds["torch"] / best,
            }


PARTS = {"attention": attention, "events": events, "products": products}


class CpuSpeed:
    """The rows of one command."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._rows = args, list[Figures]()

    def measure(self) -> None:
        silent = True if self._args.disable_tqdm else None
        for row in tqdm(PARTS[self._args.part](self._args), disable=silent, unit="row"):
            self._rows.append(row)

    def report(self) -> Report:
        args = self._args
        about = [
            "an entry: key and value of one token and KV head; heads: dimension x queries of each",
            f"pools of {args.mib} MiB in random order; medians of {args.repeat} turns",
        ]
        settings = {name: getattr(args, name) for name in ("part", "repeat", "threads", "mib")}
        name, program = f"cpu_{args.part}", "python -m bench.cpu_attention"
        return Report(name, about, COLUMNS, self._rows, settings, program=program)


def make_parser() -> argparse.ArgumentParser:
    """Create the parser of the command's flags."""
    parser = argparse.ArgumentParser(description="how fast a CPU attends, compacts and multiplies")
    add_report_arguments(parser)
    parser.add_argument("--part", choices=PARTS, default="attention", help="default: attention")
    some: dict[str, Iterable[str]] = {
        "heads": HEADS,
        "rows": ROWS,
        "forms": FORMS,
        "dtypes": DTYPES,
    }
    for name, known in some.items():
        parser.add_argument(f"--{name}", nargs="+", choices=list(known), default=list(known))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["4m", "79m"])
    count, sizes = at_least(1), [1, 4, 16, 64, 256, 1024]
    parser.add_argument("--tokens", nargs="+", type=count, default=sizes, help="of a product")
    parser.add_argument("--mib", type=count, default=256, help="of a pool (default: 256)")
    parser.add_argument("--repeat", type=count, default=5, help="turns (default: 5)")
    parser.add_argument("--threads", type=count, default=1, help="default: 1")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    torch.set_num_threads(args.threads)
    return measure_and_publish(CpuSpeed(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
