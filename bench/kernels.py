"""The Triton kernels on a GPU: correctness first, then bandwidth relative to a plain copy.

    python -m bench.kernels --save-result bench/results/DATE-kernels-GPU.json

Needs a CUDA device, torch, Triton and numpy; kvserve's other dependencies are not needed. Every
kernel is compared with its torch reference on fresh random inputs, then timed with a cold L2 cache.
Results are written after each setting: run the command again with the same file to continue.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kernel_rows.cases import SHAPES, Case, Setting, Sizes, cases
from bench.kernel_rows.level_cases import level_decodes
from bench.kernel_rows.model_cases import all_cases
from bench.kernel_rows.peers import PEERS, peer_case
from bench.kernel_rows.targets import targets
from kvserve.scheduler.layout import Granularity

SIZES = Sizes()
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Most that the difference from a reference may be, as a share of the reference's norm."""
_OUTLIER = 0.05  # most that one number may differ by, as a share of the largest
COLUMNS = ("kernel", "shape", "layout", "context", "rows", "us", "gb_s", "of_copy", "tflop_s")


@dataclass(frozen=True)
class Difference:
    """How far a kernel is from its reference: the norm of the difference over the reference's norm,
    and the largest difference of a number; or the error because of which there is no result."""

    relative_norm: float
    largest: float
    right: bool
    error: str | None = None

    @classmethod
    def of(cls, got: Tensor, expected: Tensor, tolerance: float) -> Difference:
        """Integers (tokens, places) have to be equal."""
        exact = not expected.is_floating_point()
        got, expected = got.double(), expected.double()
        apart = got - expected
        most, size = apart.abs().max().item(), expected.norm().item()
        share = apart.norm().item() / size if size else most
        fine = share <= tolerance and most <= _OUTLIER * expected.abs().max().item()
        right = most == 0.0 if exact else fine  # false for nan
        return cls(share, most, right)


def differences(
    setting: Setting, made: Callable[[Setting], Iterator[Case]] = all_cases
) -> dict[str, Difference]:
    """For each kernel, the difference from its reference, or the error that it ended with.

    Both start from the same cache. Memory that an output may get is filled with nan beforehand.
    """
    seed = int(torch.randint(1 << 30, ()))
    torch.manual_seed(seed)
    expected = [(case.kernel, case.torch().clone()) for case in made(setting)]
    torch.manual_seed(seed)
    return {
        kernel: _difference(case, right, setting)
        for case, (kernel, right) in zip(made(setting), expected, strict=True)
    }


def _difference(case: Case, right: Tensor, setting: Setting) -> Difference:
    poison = torch.full_like(right.view(torch.uint8), 0xFF)  # nan, as bytes
    del poison
    # Caches are compared without the null block, whose contents do not matter.
    same = slice(1, None) if case.kernel in ("store", "compact") else slice(None)
    try:
        return Difference.of(case.triton()[same], right[same], TOLERANCE[setting.dtype])
    except Exception as error:  # the other kernels are still checked
        return Difference(math.nan, math.nan, right=False, error=repr(error))


def median_seconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median seconds of ``run`` on the device, each time after a write that clears L2.

    The write takes longer than the launch, so that the host's time is not measured.
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
    """A row for each kernel, and for each peer that is installed."""
    peers = [case for name in PEERS if (case := peer_case(name, setting)) is not None]
    agreed = {case.kernel: _difference(case, case.torch(), setting).right for case in peers}
    for case in [*cases(setting), *level_decodes(setting), *peers]:
        try:
            seconds = median_seconds(case.triton)
        except Exception as error:
            if case not in peers:
                raise
            sys.stderr.write(f"{case.kernel}: {error!r}\n"[:500])  # the peer is not timed
            continue
        yield {
            "right": agreed.get(case.kernel),
            "kernel": case.kernel,
            "shape": setting.shape,
            "layout": setting.granularity.value,
            "context": setting.context,
            "rows": setting.rows,
            "layers": case.layers,
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
    }


class Report:
    """The results so far, saved after every step."""

    def __init__(self, path: Path | None, dtype: str) -> None:
        self.path = path
        self.found: dict[str, Any] = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "command": " ".join(["python -m bench.kernels", *sys.argv[1:]]),
            "dtype": dtype,
            "parity": [],
            "rows": [],
        }
        if path is not None and path.exists():
            before = json.loads(path.read_text())
            if before["machine"] != self.found["machine"] or before["dtype"] != dtype:
                raise SystemExit(f"{path}: of another machine, versions or dtype")
            self.found = before

    def has(self, part: str, **key: Any) -> bool:
        return any(key.items() <= row.items() for row in self.found[part])

    @property
    def all_right(self) -> bool:
        """Whether every kernel agreed with its reference."""
        kernels = (kernel for row in self.found["parity"] for kernel in row["kernels"].values())
        return all(kernel["right"] for kernel in kernels)

    def write(self, **changes: Any) -> None:
        self.found |= changes | {
            "targets": targets(self.found["rows"], SIZES.window - SIZES.buffer)
        }
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=1) + "\n")


def check_parity(report: Report, grid: list[tuple[str, Granularity]]) -> None:
    for dtype in DTYPES:
        for name, granularity in grid:
            key = {"shape": name, "layout": granularity.value, "dtype": dtype}
            if report.has("parity", **key):
                continue
            found = differences(Setting(name, granularity, 700, 5, DTYPES[dtype], "cuda"))
            kernels = {kernel: asdict(difference) for kernel, difference in found.items()}
            report.found["parity"].append({**key, "kernels": kernels})
            report.write()
            wrong = [kernel for kernel, difference in found.items() if not difference.right]
            worst = max(difference.relative_norm for difference in found.values())
            state = f"WRONG: {', '.join(wrong)}" if wrong else f"right, to {worst:.1e}"
            sys.stdout.write(f"{' '.join(key.values())}: {state}\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="parity and bandwidth of the Triton kernels")
    names, layouts = list(SHAPES), [g.value for g in Granularity]
    words = "default: all but smoke, which is for trying the command"
    parser.add_argument("--shape", nargs="+", choices=names, default=names[:-1], help=words)
    parser.add_argument("--layout", nargs="+", choices=layouts, default=layouts)
    words = "entries that each row holds (default: 1024 4096 32768)"
    parser.add_argument(
        "--context", nargs="+", type=int, default=[1024, 4096, 32_768], metavar="N", help=words
    )
    words = "entries in all (default: 131072, which is 2 GiB with 8 KV heads)"
    parser.add_argument("--entries", type=int, default=131_072, metavar="N", help=words)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="what is timed")
    words = "begin no setting after so long (default: 480); run again to go on"
    parser.add_argument("--seconds", type=float, default=480.0, metavar="S", help=words)
    parser.add_argument("--save-result", type=Path, metavar="FILE", help="write JSON")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if not torch.cuda.is_available():
        sys.stderr.write(
            "bench/kernels.py: torch sees no CUDA device, so there is nothing to measure. "
            "`make test` checks the same kernels in Triton's interpreter and compiles them.\n"
        )
        return 2
    began = time.monotonic()
    report = Report(args.save_result, args.dtype)
    copy = copy_bandwidth()
    report.write(copy_bytes_s=copy)
    sys.stdout.write(f"{report.found['machine']['gpu']}: copies {copy / 1e9:.0f} GB/s\n")
    grid = [(name, Granularity(layout)) for name in args.shape for layout in args.layout]
    check_parity(report, grid)
    show(COLUMNS)
    left = 0
    for context in args.context:
        for name, granularity in grid:
            key = {"shape": name, "layout": granularity.value, "context": context}
            if report.has("rows", **key):
                continue
            if time.monotonic() - began > args.seconds:
                left += 1
                continue
            rows = max(1, args.entries // context)
            setting = Setting(name, granularity, context, rows, DTYPES[args.dtype], "cuda")
            found = list(measure(setting, copy))
            report.found["rows"] += found
            report.write()
            for row in found:
                show(row[column] for column in COLUMNS)
    for target in report.found["targets"]:
        show(target.values())
    if left:
        sys.stdout.write(f"{left} settings left: run again with the same --save-result to go on\n")
    return int(not report.all_right)


if __name__ == "__main__":
    raise SystemExit(main())
