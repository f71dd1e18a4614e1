"""The Triton kernels on a GPU: right first, then how near to the bandwidth of a plain copy.

    PYTHONPATH=. python bench/kernels.py --save-result bench/results/DATE-kernels-GPU.json

Needs a CUDA device, torch, Triton and numpy, and nothing else that kvserve depends on. Every kernel
is compared with its torch reference on fresh random inputs, then timed with a cold L2 cache.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvserve.kernels.compact_kv import compact_kv_torch, compact_kv_triton
from kvserve.kernels.gather_kv import gather_keys_torch, gather_keys_triton
from kvserve.kernels.paged_attention import (
    Chunks,
    paged_attention_torch,
    paged_attention_triton,
)
from kvserve.kernels.slot_mapping import slot_mapping
from kvserve.kernels.store_kv import store_kv_torch, store_kv_triton
from kvserve.kernels.window_scores import window_scores_torch, window_scores_triton
from kvserve.scheduler.layout import Granularity, KVLayout

LAYERS = 4  # of a model's, so that a large batch fits; attention and stores are timed on one
BLOCK = 64
WINDOW, KEPT, BUFFER = 512, 144, 32  # Kara's defaults
# query heads, KV heads, head dim
SHAPES = {"llama-8b": (32, 8, 128), "qwen3-4b": (32, 8, 128), "qwen2.5-7b": (28, 4, 128)}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
COLUMNS = ("kernel", "shape", "layout", "context", "rows", "us", "gb_s", "of_copy", "tflop_s")


@dataclass(frozen=True)
class Case:
    """``triton`` and ``torch`` give the same from the same inputs; what it moves and computes."""

    kernel: str
    triton: Callable[[], Tensor]
    torch: Callable[[], Tensor]
    num_bytes: int
    flops: int = 0


@dataclass(frozen=True)
class Setting:
    """A model's shape in a layout, and ``rows`` sequences that hold ``context`` entries each."""

    shape: str
    granularity: Granularity
    context: int
    rows: int
    dtype: torch.dtype
    device: str
    layers: int = LAYERS

    @property
    def layout(self) -> KVLayout:
        _, kv_heads, dim = SHAPES[self.shape]
        return KVLayout(self.layers, kv_heads, dim, BLOCK, self.granularity)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def cache(self) -> tuple[Tensor, Tensor]:
        """A full cache, and block tables [LG, rows, R, M] in random order."""
        layout = self.layout
        columns = -(-self.context // BLOCK)
        count = self.rows * columns * layout.groups
        blocks = torch.randperm(count, device=self.device).int() + 1
        tables = blocks.view(layout.layer_groups, self.rows, layout.rows, columns)
        cache = torch.empty(layout.cache_shape(count + 1), dtype=self.dtype, device=self.device)
        return cache.normal_(), tables


def cases(setting: Setting) -> Iterator[Case]:
    """The kernels' work in a step and in an event of Kara's, one after the other."""
    cache, tables = setting.cache()
    yield from attention_cases(setting, cache, tables)
    yield store_case(setting, cache, tables)
    if setting.context >= WINDOW:
        yield from event_cases(setting, cache, tables)


def attention_cases(setting: Setting, cache: Tensor, tables: Tensor) -> Iterator[Case]:
    q_heads, kv_heads, dim = SHAPES[setting.shape]
    keys, values = cache[:, 0, 0], cache[:, 0, 1]
    for kernel, chunk in (("decode", 1), ("prefill", max(2, min(512, setting.context // 8)))):
        # A chunk for as many rows as make a batch of 2,048 tokens.
        rows = setting.rows if chunk == 1 else max(1, min(setting.rows, 2048 // chunk))
        own = torch.arange(rows, device=setting.device)
        q = setting.random(rows * chunk, q_heads, dim)
        last = torch.arange(chunk, device=setting.device).repeat(rows).int()
        last = (last + setting.context - chunk).expand(tables.shape[2], -1).contiguous()
        starts = None if chunk == 1 else torch.arange(rows + 1, device=setting.device) * chunk
        chunks = Chunks(own, last, setting.context, starts, chunk)
        inputs = q, keys, values, tables[0], chunks, dim**-0.5
        read = 2 * rows * setting.context * kv_heads * dim + 2 * q.numel()
        yield Case(
            kernel,
            partial(paged_attention_triton, *inputs),
            partial(paged_attention_torch, *inputs),
            read * q.itemsize,
            4 * q_heads * dim * int((last[0] + 1).sum()),
        )


def store_case(setting: Setting, cache: Tensor, tables: Tensor) -> Case:
    _, kv_heads, dim = SHAPES[setting.shape]
    key, value = (setting.random(setting.rows, kv_heads, dim) for _ in range(2))
    rows = torch.arange(setting.rows, device=setting.device)
    last = torch.full_like(rows, setting.context - 1).expand(1, setting.layout.rows, -1)
    slots = slot_mapping(tables[:1], rows, last, BLOCK)[0]

    def store(kernel: Callable[..., None]) -> Tensor:
        kernel(cache, 0, slots, key, value)
        return cache

    num_bytes = 4 * key.numel() * key.itemsize
    return Case("store", partial(store, store_kv_triton), partial(store, store_kv_torch), num_bytes)


def event_cases(setting: Setting, cache: Tensor, tables: Tensor) -> Iterator[Case]:
    """An event of every row: gather a window's keys, score them, move what is kept."""
    layout, rows = setting.layout, setting.rows
    _, kv_heads, dim = SHAPES[setting.shape]
    lanes, seen = (layout.num_layers, kv_heads), WINDOW - BUFFER
    start, device = setting.context - WINDOW, setting.device

    def slots(entries: Tensor) -> Tensor:
        owners = torch.arange(rows, device=device).repeat_interleave(entries.shape[-1])
        return slot_mapping(tables, owners, entries.expand(*lanes, rows, -1).flatten(2), BLOCK)

    window = slots(start + torch.arange(seen, device=device))
    entry = dim * cache.itemsize
    yield Case(
        "gather",
        partial(gather_keys_triton, cache, window),
        partial(gather_keys_torch, cache, window),
        2 * window.numel() * entry,
    )
    keys = gather_keys_torch(cache, window).unflatten(2, (rows, -1)).permute(2, 0, 1, 3, 4)
    query = setting.random(rows, *lanes, WINDOW, dim)
    inputs = query, keys, dim**-0.5
    flops = 4 * rows * math.prod(lanes) * WINDOW * seen * dim
    yield Case(
        "window scores",
        partial(window_scores_triton, *inputs),
        partial(window_scores_torch, *inputs),
        2 * (query.numel() + keys.numel()) * query.itemsize,
        flops,
    )
    kept = torch.rand(*lanes, rows, seen, device=device).argsort(-1)[..., :KEPT].sort(-1).values
    buffer = torch.arange(seen, WINDOW, device=device).expand(*lanes, rows, -1)
    src = slots(start + torch.cat([kept, buffer], dim=-1))
    dst = slots(start + torch.arange(KEPT + BUFFER, device=device))

    def compact(kernel: Callable[..., None], *runs: int) -> Tensor:
        kernel(cache, src, dst, *runs)
        return cache

    yield Case(
        "compact",
        partial(compact, compact_kv_triton, rows),
        partial(compact, compact_kv_torch),
        4 * src.numel() * entry,
    )


def differences(setting: Setting) -> dict[str, float]:
    """By kernel, the largest difference from its reference; more than rounding is an error.

    Both begin with the same cache, and the memory that an output may get is nan beforehand.
    """
    seed = int(torch.randint(1 << 30, ()))
    torch.manual_seed(seed)
    expected = [(case.kernel, case.torch().clone()) for case in cases(setting)]
    torch.manual_seed(seed)
    found = {}
    for case, (kernel, right) in zip(cases(setting), expected, strict=True):
        poison = torch.full_like(right, math.nan)
        del poison
        # Of a cache without its null block, which takes what nobody wants.
        same = slice(1, None) if kernel in ("store", "compact") else slice(None)
        got, right = case.triton()[same].float(), right[same].float()
        tolerance = TOLERANCE[setting.dtype]
        torch.testing.assert_close(got, right, atol=tolerance, rtol=tolerance)
        found[kernel] = (got - right).abs().max().item()
    return found


def median_seconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Of ``run`` alone on the device, behind a write that leaves nothing of use in L2.

    The write also outlasts the launch: what the host needs for it is not measured.
    """
    flush = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    run()  # compiles
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a 1 GiB copy on the device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").zero_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source))


def measure(setting: Setting, copy: float) -> Iterator[dict[str, Any]]:
    for case in cases(setting):
        seconds = median_seconds(case.triton)
        yield {
            "kernel": case.kernel,
            "shape": setting.shape,
            "layout": setting.granularity.value,
            "context": setting.context,
            "rows": setting.rows,
            "us": seconds * 1e6,
            "gb_s": case.num_bytes / seconds / 1e9,
            "of_copy": case.num_bytes / seconds / copy,
            "tflop_s": case.flops / seconds / 1e12,
        }


def show(values: Any) -> None:
    cells = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in values)
    sys.stdout.write("  ".join(f"{cell:>13}" for cell in cells) + "\n")
    sys.stdout.flush()


def machine() -> dict[str, str]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="parity and bandwidth of the Triton kernels")
    names, layouts = list(SHAPES), [g.value for g in Granularity]
    parser.add_argument("--shape", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--layout", nargs="+", choices=layouts, default=layouts)
    words = "entries that each row holds (default: 1024 4096 32768)"
    parser.add_argument(
        "--context", nargs="+", type=int, default=[1024, 4096, 32_768], metavar="N", help=words
    )
    words = "entries in all (default: 131072, which is 2 GiB with 8 KV heads)"
    parser.add_argument("--entries", type=int, default=131_072, metavar="N", help=words)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--save-result", type=Path, metavar="FILE", help="write JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write(
            "bench/kernels.py: torch sees no CUDA device, so there is nothing to measure. "
            "`make test` checks the same kernels in Triton's interpreter and compiles them.\n"
        )
        return 2
    dtype = getattr(torch, args.dtype)
    result: dict[str, Any] = {"machine": machine(), "dtype": args.dtype, "parity": [], "rows": []}
    copy = result["copy_bytes_s"] = copy_bandwidth()
    sys.stdout.write(f"{result['machine']['gpu']}: copies {copy / 1e9:.0f} GB/s\n")
    grid = [(name, Granularity(layout)) for name in args.shape for layout in args.layout]
    for name, granularity in grid:
        found = differences(Setting(name, granularity, 700, 5, dtype, "cuda"))
        result["parity"].append({"shape": name, "layout": granularity.value, **found})
        sys.stdout.write(f"{name} {granularity.value}: largest difference {found}\n")
    show(COLUMNS)
    for name, granularity in grid:
        for context in args.context:
            rows = max(1, args.entries // context)
            setting = Setting(name, granularity, context, rows, dtype, "cuda")
            for row in measure(setting, copy):
                result["rows"].append(row)
                show(row[column] for column in COLUMNS)
    if args.save_result:
        args.save_result.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
