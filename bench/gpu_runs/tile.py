"""Finds the fastest tiles on this GPU: ``python -m bench.gpu --tile``.

Every candidate is compared with its reference before it is timed, on batches of different kinds:
many equal rows, few rows, one row, and many rows beside a long one. The candidate with the best
geometric mean goes into kvserve/kernels/tiles.py, under this GPU's generation. Afterwards, update
the budget of registers with ``python -m tests.kernels.compile_kernels --write``.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kernel_rows.cases import SHAPES, SMOKE, Setting, Sizes
from bench.kernel_rows.level_cases import chunks_of, level_blocks
from bench.kernels import TOLERANCE, Difference, median_seconds
from bench.machine import ROOT, machine, write_json
from kvserve.entry_format import FORMATS
from kvserve.kernels import tiles
from kvserve.kernels.attend.paged_attention import paged_attention_torch
from kvserve.kernels.attend.paged_attention_triton import paged_attention_triton
from kvserve.kernels.attend.query_segments import QuerySegments
from kvserve.kernels.dispatch import capability
from kvserve.kernels.score.window_scores import window_scores_torch
from kvserve.kernels.score.window_scores_triton import window_scores_triton
from kvserve.kernels.store.entries import Entries
from kvserve.kernels.tiles import Tile
from kvserve.scheduler.layout import Granularity

TABLE = ROOT / "kvserve" / "kernels" / "tiles.py"
DECODE = [
    Tile(16, columns, warps, stages, programs=programs)
    for columns, warps, stages, programs in (
        *((32, 1, 3, 6), (32, 2, 3, 5), (32, 4, 3, 5), (32, 2, 4, 4), (32, 4, 5, 3)),
        *((64, 2, 3, 3), (64, 4, 3, 3), (64, 8, 3, 3), (128, 4, 3, 1), (128, 8, 3, 1)),
    )
]
DECODE_LEVELS = [
    Tile(16, columns, 1, stages, programs=programs, longest=2048)
    for columns, stages, programs in (
        *((32, 3, 12), (32, 5, 12), (32, 3, 16), (32, 3, 8)),
        *((64, 3, 12), (64, 5, 8)),
    )
]
PREFILL = [
    Tile(rows, columns, warps, stages, programs=1)
    for rows, columns, warps, stages in (
        *((128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3)),
        *((128, 128, 8, 2), (64, 128, 4, 2), (64, 32, 4, 3)),
    )
]
SCORES = [
    Tile(rows, columns, warps, stages)
    for rows, columns, warps, stages in (
        *((64, 64, 4, 3), (128, 64, 8, 3), (64, 128, 8, 3), (128, 128, 8, 3), (64, 64, 4, 4)),
    )
]
_AT_ONCE = 64
"""Tokens whose reference is computed at once."""
CANDIDATES = {
    "decode levels": DECODE_LEVELS,
    "decode": DECODE,
    "prefill": PREFILL,
    "scores": SCORES,
}
SPREADS = [(programs, longest) for programs in (2, 3, 4, 6) for longest in (0, 1024, 2048, 4096)]
"""Variants of the best decode tile: programs per multiprocessor, and entries above which a row is
split."""


@dataclass(frozen=True)
class Batch:
    """Inputs that a kernel is timed on: ``run`` is the kernel's work, ``reference`` the right
    result."""

    name: str
    run: Callable[[], Tensor]
    reference: Callable[[], Tensor]


def decoding(name: str, lengths: list[int], shape: str, device: str, sizes: Sizes) -> Batch:
    """Rows that hold ``lengths``, as in a CUDA graph: the bounds are those of the longest row."""
    q_heads, _, dim = SHAPES[shape]
    setting = _setting(shape, max(lengths), len(lengths), device, sizes)
    cache, tables = setting.cache()
    q = setting.random(len(lengths), q_heads, dim)
    last = torch.tensor([lengths], dtype=torch.int32, device=device) - 1
    rows = torch.arange(len(lengths), device=device)
    chunks = QuerySegments(rows, last, max(lengths))
    inputs = q, cache[:, 0, 0], cache[:, 0, 1], tables[0], chunks, dim**-0.5
    return Batch(name, lambda: paged_attention_triton(*inputs), lambda: in_pieces(*inputs))


def decoding_levels(
    name: str, rows: int, context: int, form: str, shape: str, device: str, sizes: Sizes
) -> Batch:
    """Equal rows of a cache of levels, without newest entries beside them."""
    dim = SHAPES[shape][2]
    setting = _setting(shape, context, rows, device, sizes)
    if device == "cpu":  # float32 is for another kernel
        setting = replace(setting, dtype=torch.float16)
    _, tables = setting.cache()
    held = level_blocks(setting, FORMATS[form], tables).blocks.layer(0)
    q, chunks = chunks_of(setting, 1)
    inputs = q, *held, tables[0], chunks, dim**-0.5
    return Batch(name, lambda: paged_attention_triton(*inputs), lambda: in_pieces(*inputs))


def prefilling(name: str, rows: int, chunk: int, shape: str, device: str, sizes: Sizes) -> Batch:
    """Chunks that follow as many cached tokens as they have themselves."""
    q_heads, _, dim = SHAPES[shape]
    setting = _setting(shape, 2 * chunk, rows, device, sizes)
    cache, tables = setting.cache()
    q = setting.random(rows * chunk, q_heads, dim)
    last = torch.arange(chunk, 2 * chunk, dtype=torch.int32, device=device).repeat(rows)[None]
    starts = torch.arange(rows + 1, device=device) * chunk
    own = torch.arange(rows, device=device)
    chunks = QuerySegments(own, last.contiguous(), 2 * chunk, starts, chunk)
    inputs = q, cache[:, 0, 0], cache[:, 0, 1], tables[0], chunks, dim**-0.5
    return Batch(name, lambda: paged_attention_triton(*inputs), lambda: in_pieces(*inputs))


def in_pieces(
    q: Tensor, keys: Entries, values: Entries, tables: Tensor, chunks: QuerySegments, scale: float
) -> Tensor:
    """``paged_attention_torch`` of a few tokens at a time: it copies their keys for each query
    head."""
    rows = chunks.rows
    if chunks.starts is not None:
        rows = rows.repeat_interleave(chunks.starts.diff(), output_size=len(q))
    parts = []
    for first in range(0, len(q), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        seen = QuerySegments(rows[some], chunks.last[:, some], chunks.max_held)
        parts.append(paged_attention_torch(q[some], keys, values, tables, seen, scale))
    return torch.cat(parts)


def scoring(name: str, events: int, shape: str, device: str, sizes: Sizes) -> Batch:
    """The windows of ``events`` events of Kara."""
    _, kv_heads, dim = SHAPES[shape]
    setting = _setting(shape, sizes.window, events, device, sizes)
    lanes = events, sizes.layers, kv_heads
    query = setting.random(*lanes, sizes.window, dim)
    key = setting.random(*lanes, sizes.window - sizes.buffer, dim)
    inputs = query, key, dim**-0.5
    return Batch(name, lambda: window_scores_triton(*inputs), lambda: window_scores_torch(*inputs))


def _setting(shape: str, context: int, rows: int, device: str, sizes: Sizes) -> Setting:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return Setting(shape, Granularity.MODEL, context, rows, dtype, device, sizes)


def batches(kernel: str, device: str) -> Iterator[Batch]:
    """The batches on which a tile of ``kernel`` is timed."""
    if device == "cpu":
        shape = "smoke", device, SMOKE
        if kernel == "decode":
            yield decoding("3 rows", [40, 20, 5], *shape)
        elif kernel == "decode levels":
            yield decoding_levels("2 rows, k8v4", 2, 40, "k8v4", *shape)
        elif kernel == "prefill":
            yield prefilling("a chunk", 1, 20, *shape)
        else:
            yield scoring("2 events", 2, *shape)
        return
    shape = "llama-8b", device, Sizes(layers=1)
    if kernel == "decode":
        yield decoding("256 rows of 1,300", [1300] * 256, *shape)
        yield decoding("255 of 1,000, one of 8,000", [1000] * 255 + [8000], *shape)
        yield decoding("64 rows of 2,000", [2000] * 64, *shape)
        yield decoding("17 rows of 2,000", [2000] * 17, *shape)
        yield decoding("a row of 8,000", [8000], *shape)
    elif kernel == "decode levels":
        e4m3 = capability(torch.device(device)) >= (8, 9)
        for form in ("k8v4", "int8", *(("fp8",) if e4m3 else ()), "k4v4", "k3v3", "k2v2"):
            yield decoding_levels(f"128 rows of 1,024, {form}", 128, 1024, form, *shape)
        for form in ("k8v4", "k3v3"):
            yield decoding_levels(f"a row of 8,000, {form}", 1, 8000, form, *shape)
            other = "qwen2.5-7b", *shape[1:]
            yield decoding_levels(f"32 rows of 4,096, Qwen, {form}", 32, 4096, form, *other)
    elif kernel == "prefill":
        yield prefilling("a chunk of 2,048", 1, 2048, *shape)
        yield prefilling("4 chunks of 512", 4, 512, *shape)
    else:
        yield scoring("8 events", 8, *shape)


def time_tile(kernel: str, tile: Tile, batch: Batch, expected: Tensor, device: str) -> float | str:
    """Seconds, or what is wrong: the result, or the error that came instead of it."""
    table = _table(device, kernel)
    before = table[kernel]
    table[kernel] = tile
    try:
        found = batch.run()
        if not Difference.of(found, expected, TOLERANCE[expected.dtype]).right:
            return "wrong"
        if device == "cuda":
            return median_seconds(batch.run)
        began = time.perf_counter()
        batch.run()
        return time.perf_counter() - began
    except Exception as error:  # too much shared memory, say; Triton's errors share no class
        return repr(error)
    finally:
        table[kernel] = before


def _table(device: str, kernel: str) -> dict[str, Tile]:
    """The table of tiles that launchers read on this device."""
    if device != "cuda":
        return tiles.TILES[9, 0] if kernel == "decode levels" else tiles.FLOAT32_TILES
    generation = capability(torch.device(device))
    known = max(each for each in tiles.TILES if each <= generation)
    return tiles.TILES.setdefault(generation, dict(tiles.TILES[known]))


def sweep(kernel: str, candidates: Sequence[Tile], device: str) -> list[dict[str, Any]]:
    """Candidates with their times, the best first; those that failed anywhere are left out."""
    rows: dict[Tile, dict[str, Any]] = {tile: {"tile": tuple(tile)} for tile in candidates}
    for batch in batches(kernel, device):
        expected = batch.reference()
        for tile, row in list(rows.items()):
            seconds = time_tile(kernel, tile, batch, expected, device)
            if isinstance(seconds, str):
                del rows[tile]
            else:
                row[batch.name] = seconds * 1e6
        del expected
    return sorted(rows.values(), key=_mean)


def _mean(row: dict[str, Any]) -> float:
    times = [time for name, time in row.items() if name != "tile"]
    return math.exp(sum(map(math.log, times)) / len(times))


def written(source: str, tables: dict[tuple[int, int], dict[str, Tile]]) -> str:
    """The text of tiles.py, its table replaced by ``tables``."""
    lines = ["TILES = {"]
    for generation, table in sorted(tables.items()):
        lines.append(f"    {generation}: {{")
        for kernel, tile in table.items():
            fields = [*map(str, tile[:4])]
            defaults = Tile._field_defaults
            fields += [
                f"{name}={value}"
                for name, value in zip(tile._fields[4:], tile[4:], strict=True)
                if value != defaults[name]
            ]
            lines.append(f'        "{kernel}": Tile({", ".join(fields)}),')
        lines.append("    },")
    text, count = re.subn(
        r"^TILES = \{$.*?^\}$", "\n".join([*lines, "}"]), source, flags=re.M | re.S
    )
    assert count == 1, f"{TABLE} has no table"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="time tiles")
    default = ROOT / "build" / "bench-gpu.json"
    parser.add_argument("--save-result", type=Path, default=default, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="tries the command, writes no table")
    parser.add_argument("--kernel", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    words = "just this file, and the table beside it, which may be all that is kept of a machine"
    parser.add_argument("--result", type=Path, metavar="FILE", help=words)
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = args.result or args.save_result.with_name(f"{args.save_result.stem}-tiles.json")
    found: dict[str, Any] = {"machine": machine()}
    for kernel in args.kernel:
        candidates = CANDIDATES[kernel]
        some = candidates[:2] if args.smoke else candidates
        if args.smoke:  # float32 tiles are smaller
            some = [tile._replace(rows=16, columns=16) for tile in some]
        ranked = sweep(kernel, some, device)
        if kernel == "decode" and ranked:
            best = Tile(*ranked[0]["tile"])
            spreads = SPREADS[:2] if args.smoke else SPREADS
            variants = [
                best._replace(programs=programs, longest=longest) for programs, longest in spreads
            ]
            ranked = sorted([*ranked, *sweep(kernel, variants, device)], key=_mean)
        found[kernel] = ranked
        write_json(path, found)
        for row in ranked:
            print(kernel, *(f"{k} {v:.1f}" if k != "tile" else v for k, v in row.items()), sep="  ")
        if ranked and not args.smoke:
            _table(device, kernel)[kernel] = Tile(*ranked[0]["tile"])
            TABLE.write_text(written(TABLE.read_text(), tiles.TILES))
            path.with_name("tiles.py").write_text(TABLE.read_text())
    return int(not all(found[kernel] for kernel in args.kernel))


if __name__ == "__main__":
    raise SystemExit(main())
