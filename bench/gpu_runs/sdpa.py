"""A layer's attention beside torch's own: ``python -m bench.gpu_runs.sdpa FILE``.

Ours reads blocks in random order; torch's ``scaled_dot_product_attention`` reads keys and values
that lie together, by each of its backends, so it is a bound and not a rival. A backend that refuses
a case leaves its error.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu_runs.tile import in_pieces
from bench.kernel_rows.cases import SHAPES, SMOKE, Setting, Sizes
from bench.kernels import TOLERANCE, Difference, median_seconds
from bench.machine import write_json
from kvserve.kernels.attend.paged_attention_triton import paged_attention_triton
from kvserve.kernels.attend.query_segments import QuerySegments
from kvserve.scheduler.layout import Granularity

CASES = (
    ("decode 256 x 1300", 256, 1300, 1),
    ("decode 64 x 2000", 64, 2000, 1),
    ("decode 64 x 8192", 64, 8192, 1),
    ("decode 17 x 2000", 17, 2000, 1),
    ("decode 1 x 8000", 1, 8000, 1),
    ("chunk of 2048, first", 1, 2048, 2048),
    ("chunk of 2048 over 4096", 1, 4096, 2048),
    ("4 chunks of 512 over 1024", 4, 1024, 512),
)
"""Names, rows, entries of each, and newest tokens of each that are attended for."""
_SMOKE_CASES = (("decode 3 x 40", 3, 40, 1), ("chunk of 8 over 24", 1, 24, 8))
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def measured(setting: Setting, case: tuple[str, int, int, int]) -> Iterator[dict[str, Any]]:
    """A row for ours and for each backend of torch's."""
    name, rows, context, chunk = case
    q_heads, kv_heads, dim = SHAPES[setting.shape]
    device, dtype = setting.device, setting.dtype
    cache, tables = setting.cache()
    q = setting.random(rows * chunk, q_heads, dim)
    last = torch.arange(context - chunk, context, dtype=torch.int32, device=device).repeat(rows)
    starts = None if chunk == 1 else torch.arange(rows + 1, device=device) * chunk
    own = torch.arange(rows, device=device)
    chunks = QuerySegments(own, last[None].contiguous(), context, starts, chunk)
    inputs = q, cache[:, 0, 0], cache[:, 0, 1], tables[0], chunks, dim**-0.5
    expected = in_pieces(*inputs)

    def together(half: int) -> Tensor:
        """Keys or values as [rows, KV heads, context, head dim]."""
        blocks = cache[:, 0, half][tables[0, :, 0].long()]
        return blocks.flatten(1, 2)[:, :context].transpose(1, 2).contiguous()

    keys, values = together(0), together(1)
    by_row = q.view(rows, chunk, q_heads, dim).transpose(1, 2).contiguous()
    mask = None
    if chunk > 1:  # aligned with the last key, as `is_causal` is not
        place = torch.arange(context, device=device)
        seen = place <= place[context - chunk :, None]
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)

    def by_torch() -> Tensor:
        return F.scaled_dot_product_attention(by_row, keys, values, attn_mask=mask, enable_gqa=True)

    def of_itself() -> Tensor:
        """The chunk's attention to itself, which needs no mask."""
        own_keys, own_values = keys[:, :, -chunk:], values[:, :, -chunk:]
        return F.scaled_dot_product_attention(
            by_row, own_keys, own_values, is_causal=True, enable_gqa=True
        )

    def by_token(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(rows * chunk, q_heads, dim)

    num_bytes = 2 * rows * context * kv_heads * dim * q.itemsize
    pairs = chunk * (context - chunk) + chunk * (chunk + 1) // 2

    def row(kernel: str, run: Callable[[], Tensor], pairs: int, compares: bool = True) -> Any:
        entry: dict[str, Any] = {"case": name, "kernel": kernel}
        try:
            if compares:
                got = by_token(run()) if kernel != "ours" else run()
                entry["right"] = Difference.of(got, expected, TOLERANCE[dtype]).right
            seconds = _seconds(run, device)
            work = 4 * q_heads * dim * rows * pairs
            entry |= {"us": seconds * 1e6, "tb_s": num_bytes / seconds / 1e12}
            entry["tflop_s"] = work / seconds / 1e12
        except Exception:
            entry["error"] = traceback.format_exc()[-600:]
        return entry

    yield row("ours", partial(paged_attention_triton, *inputs), pairs)
    for label, backend in _BACKENDS.items() if device == "cuda" else (("math", SDPBackend.MATH),):
        with sdpa_kernel(backend):
            yield row(f"sdpa {label}", by_torch, pairs)
            if chunk > 1:
                yield row(
                    f"sdpa {label}, the chunk alone", of_itself, chunk * (chunk + 1) // 2, False
                )


def _seconds(run: Callable[[], Tensor], device: str) -> float:
    if device == "cuda":
        return median_seconds(run)
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="attention beside torch's")
    parser.add_argument("file", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU")
    args = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    shapes = [("llama-8b", case) for case in CASES]
    shapes += [("qwen2.5-7b", (f"{case[0]}, Qwen2.5-7B", *case[1:])) for case in CASES[1:5]]
    for shape, case in [("smoke", case) for case in _SMOKE_CASES] if args.smoke else shapes:
        _, rows, context, _ = case
        model = Granularity.MODEL
        setting = Setting(shape, model, context, rows, torch.bfloat16, "cuda", Sizes(layers=1))
        if args.smoke:
            setting = Setting("smoke", model, context, rows, torch.float32, "cpu", SMOKE)
        for entry in measured(setting, case):
            found.append(entry)
            write_json(args.file, {"rows": found})
            sys.stdout.write(_shown(entry))
            sys.stdout.flush()
        if not args.smoke:
            torch.cuda.empty_cache()
    return int(any(entry["kernel"] == "ours" and not entry.get("right") for entry in found))


def _shown(entry: dict[str, Any]) -> str:
    said = entry.get("error", "").strip().splitlines()
    words = (
        said[-1]
        if said
        else (
            f"{entry['us']:.0f} us, {entry['tb_s']:.2f} TB/s, {entry['tflop_s']:.0f} TFLOP/s, "
            f"right: {entry.get('right')}"
        )
    )
    return f"{entry['case']}: {entry['kernel']}: {words}\n"


if __name__ == "__main__":
    raise SystemExit(main())
