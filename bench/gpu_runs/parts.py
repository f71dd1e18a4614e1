"""The parts of bench/gpu_check.py, each run as ``python -m bench.gpu_runs.parts NAME FILE``.

A part writes its findings to FILE after each case, so that a part that is cut off loses only the
case that was running.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu_runs.engines import (
    BOTH,
    EAGER,
    GRAPHS,
    OVERLAP,
    Shape,
    engine_logits,
    generate,
    reference_logits,
    reference_tokens,
    small_engine,
    spoil_free_memory,
    write_model,
)
from bench.gpu_runs.tile import Batch, decoding, time_tile
from bench.kernel_rows.cases import SMOKE, Setting, Sizes
from bench.kernel_rows.model_cases import AWQ, random_levels
from bench.kernels import copy_bandwidth, differences, measure, median_seconds
from bench.machine import write_json
from kvserve.engine.models.level_products import multiply_fp8
from kvserve.kernels.layer.elementwise import quantize_rows
from kvserve.kernels.layer.weight_levels_triton import (
    WIDENED_ROWS,
    linear_levels_triton,
    widen_triton,
)
from kvserve.kernels.tiles import TILES, Tile
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.messages.output import SchedulerOutput

CUDA = torch.cuda.is_available()
POLICIES: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "kara": {"name": "kara", "window": 24, "buffer": 4, "ratio": 0.4, "period": 4},
    "snapkv": {
        **{"name": "snapkv", "trigger": "threshold", "budget": 24, "threshold": 32, "window": 4},
        "protect_prompt": False,
    },
    "adakv": {
        **{"name": "adakv", "trigger": "threshold", "budget": 24, "threshold": 32, "window": 4},
        "protect_prompt": False,
    },
}
# Queries logged as they are computed: a batch of another size may round one otherwise, a log in 4
# bits makes more of it, and a choice between near equals is another. That log is among the kernels.
EXACT = POLICIES | {"kara": POLICIES["kara"] | {"query_dtype": "model"}}
TINY, WIDE = Shape(64, 96, 2, 4, 2, 16, 128), Shape(256, 384, 2, 4, 2, 128, 128)
LLAMA_8B = Shape(4096, 14_336, 2, 32, 8, 128, 128_256)
LOGITS = 1.3


class Findings:
    """A part's rows, saved after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, list[Any]] = {"rows": [], "left_out": []}

    def add(self, case: str, right: bool, found: Any = "", *, choice: bool = False) -> None:
        """``choice``: the row helps a person decide between two forms, and is always printed."""
        row = {"case": case, "right": right, "found": found}
        self._found["rows"].append({**row, "choice": True} if choice else row)
        self._write()

    def left_out(self, what: str) -> None:
        self._found["left_out"].append(what)
        self._write()

    @contextmanager
    def case(self, case: str) -> Iterator[None]:
        """An exception inside makes this case wrong; the other cases still run."""
        try:
            yield
        except Exception:
            self.add(case, False, traceback.format_exc()[-3000:])
            if CUDA:
                torch.cuda.synchronize()  # raises after an illegal access: nothing works then

    def _write(self) -> None:
        write_json(self._path, self._found)


def check_tokens(found: Findings) -> None:
    """A plain eager float32 engine gives the same greedy tokens as transformers; under policies,
    as the same engine on the CPU, whose attention is torch's."""
    for shape in (TINY, WIDE):
        with found.case(f"head_dim {shape.head_dim}"), tempfile.TemporaryDirectory() as folder:
            directory = write_model(Path(folder), shape, torch.float32)
            prompts = shape.prompts([30, 9, 44, 1])
            engine = small_engine(directory, POLICIES["none"], "float32", **EAGER)
            tokens = generate(engine, prompts, 24)
            expected = reference_tokens(directory, prompts, 24)
            found.add(f"head_dim {shape.head_dim}", *_equal(tokens, expected))
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(Path(folder), TINY, torch.float32)
        prompts = TINY.prompts([30, 9, 44, 21])
        for name, policy in EXACT.items():
            with found.case(f"{name}, on a CPU"):
                plain = small_engine(directory, policy, "float32", **EAGER)
                by_torch = small_engine(directory, policy, "float32", **EAGER, **ON_A_CPU)
                answers = generate(plain, prompts, 60), generate(by_torch, prompts, 60)
                found.add(f"{name}, on a CPU", *_equal(*answers))
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(Path(folder), TINY, torch.float32, "qwen3_5_text")
        # Of rows whose entries all are as they were computed, and of longer ones.
        prompts = TINY.prompts([3, 140, 44, 21])
        for form in ("auto", "k4v4"):
            with found.case(f"states, {form}, beside a CPU"):
                held: dict[str, Any] = {"kv_cache_dtype": form}
                graphs, by_torch = (
                    small_engine(directory, POLICIES["none"], "float32", **how, **held)
                    for how in (GRAPHS, EAGER | ON_A_CPU)
                )
                answers = generate(graphs, prompts, 40), generate(by_torch, prompts, 40)
                found.add(f"states, {form}, beside a CPU", *_equal(*answers))


def _equal(tokens: list[list[int]], expected: list[list[int]]) -> tuple[bool, str]:
    """Whether all answers are equal, and how many."""
    equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
    return equal == len(expected), f"{equal} of {len(expected)} answers are equal"


def check_graphs(found: Findings) -> None:
    """Graphs, overlap and both give the greedy tokens of neither, with free memory full of -1."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(Path(folder), TINY, torch.float32)
        prompts = TINY.prompts([30, 9, 44, 21, 17, 38])
        forms = [(name, "auto") for name in EXACT] + [("kara", "k4v4")] * ("kara" in EXACT)
        for name, form in forms:
            expected: list[list[int]] = []
            for how, settings in (("plain", EAGER), *GRAPHS_AND_OVERLAP.items()):
                case = f"{name}, {how}" if form == "auto" else f"{name}, {form}, {how}"
                with found.case(case):
                    given = settings | {"kv_cache_dtype": form}
                    engine = small_engine(directory, EXACT[name], "float32", **given)
                    if CUDA:
                        spoil_free_memory()
                    tokens = generate(engine, prompts, 60)
                    expected = expected or tokens
                    stats, graphs = engine.stats(), engine.core.runner.graphs
                    compacted = bool(stats.compactions_total) == (name != "none")
                    replayed = 0 if graphs is None else graphs.replays
                    equal, words = _equal(tokens, expected)
                    right = equal and compacted and bool(replayed) == (how in ("graphs", "both"))
                    words += f", {stats.compactions_total} events, {replayed} replays"
                    found.add(case, right, words)


ON_A_CPU = {"device": "cpu", "attention_backend": "torch"}
GRAPHS_AND_OVERLAP = {"graphs": GRAPHS, "overlap": OVERLAP, "both": BOTH}


def check_waits(found: Findings) -> None:
    """No launch of a step waits for the device, by torch's own check, over 600 steps."""
    if not CUDA:
        found.left_out("torch looks out for waits on CUDA alone; test_device_waits.py does without")
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(Path(folder), TINY, torch.float32)
        for name in ("kara", "snapkv", "adakv"):
            with found.case(name):
                engine = small_engine(directory, POLICIES[name], "float32", **BOTH)
                generate(engine, TINY.prompts([20]), 40)  # one-time setup may wait
                waits, steps = _look_out(engine.core.runner)
                generate(engine, TINY.prompts([30, 9, 44, 21]), 200)
                events = engine.stats().compactions_total
                words = f"{len(steps)} steps, {events} events; waits: {sorted(waits) or 'none'}"
                found.add(name, not waits and len(steps) >= 200, words)


def _look_out(runner: Any) -> tuple[set[str], list[int]]:
    """From now on, collect the places where ``runner.launch`` waits, and each step's tokens."""
    launch = runner.launch
    waits: set[str] = set()
    steps: list[int] = []

    def watched(output: SchedulerOutput) -> Any:
        steps.append(output.num_tokens)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # "error" would show only the first place
            try:
                step = launch(output)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.update(
            f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)
        )
        return step

    runner.launch = watched
    return waits, steps


def check_logits(found: Findings) -> None:
    """bfloat16 logits of a prompt and of 16 decode steps; two layers of an 8B model's shape.

    Sums in another order give other logits, so those of transformers in float32 are the measure:
    ours may be ``LOGITS`` times as far from them as transformers' own in bfloat16.
    """
    shape = LLAMA_8B if CUDA else TINY
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(Path(folder), shape, torch.bfloat16)
        prompt, forced = shape.prompts([100])[0], shape.prompts([16])[0]
        exact, theirs = (
            reference_logits(directory, prompt, forced, dtype)
            for dtype in (torch.float32, torch.bfloat16)
        )
        most = LOGITS * _apart(theirs, exact)
        for how, settings in (("plain", EAGER), ("graphs and overlap", BOTH)):
            with found.case(how):
                engine = small_engine(directory, POLICIES["none"], "bfloat16", **settings)
                apart = _apart(engine_logits(engine, prompt, forced), exact)
                words = f"{apart:.1e} from float32, transformers {most / LOGITS:.1e}"
                found.add(how, apart <= most, words)


def _apart(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


def check_kernels(shape: str, layout: Granularity, found: Findings) -> None:
    """Every kernel against its float32 reference, on a model's shape in a layout."""
    types = (torch.bfloat16, torch.float16) if CUDA else (torch.float32,)
    sizes, context, rows = (Sizes(), 700, 5) if CUDA else (SMOKE, 70, 2)
    for dtype in types:
        case = f"{shape}, {layout.value}, {str(dtype)[6:]}"
        with found.case(case):
            device = "cuda" if CUDA else "cpu"
            setting = Setting(shape, layout, context, rows, dtype, device, sizes)
            for kernel, difference in differences(setting).items():
                words = difference.error or f"{difference.relative_norm:.1e}"
                found.add(f"{case}: {kernel}", difference.right, words)


def check_bandwidth(found: Findings) -> None:
    """The share of a copy's bandwidth that the kernels reach; a case is wrong only if it fails."""
    if not CUDA:
        found.left_out("bandwidth is a GPU's")
        return
    copy = copy_bandwidth()
    found.add("a copy", True, f"{copy / 1e9:.0f} GB/s", choice=True)
    for shape, layout, context in (
        ("llama-8b", Granularity.MODEL, 1024),
        ("qwen2.5-7b", Granularity.HEAD, 4096),
    ):
        rows = 131_072 // context
        with found.case(f"{shape} {context}"):
            setting = Setting(shape, layout, context, rows, torch.bfloat16, "cuda")
            for row in measure(setting, copy):
                words = f"{row['us']:.0f} us, {row['of_copy']:.2f} of a copy"
                found.add(f"{shape} {context}: {row['kernel']}", True, words, choice=True)


def check_choices(found: Findings) -> None:
    """Times the alternatives behind kvserve/kernels/tiles.py, which only a device can decide
    between."""
    if not CUDA:
        found.left_out("which form is faster is a GPU's to say")
        return
    tile = TILES[9, 0]["decode"]

    def add(case: str, form: Tile, batch: Batch, expected: torch.Tensor) -> None:
        seconds = time_tile("decode", form, batch, expected, "cuda")
        words = seconds if isinstance(seconds, str) else f"{seconds * 1e6:.0f} us"
        found.add(case, words is not seconds, words, choice=True)

    with found.case("long rows beside short ones"):
        batch = decoding("", [1000] * 255 + [8000], "llama-8b", "cuda", Sizes(layers=1))
        expected = batch.reference()
        for longest in (0, 1024, 2048, 4096):
            form = tile._replace(longest=longest)
            add(f"decode, longest={longest}", form, batch, expected)
    with found.case("FP8 products"):
        plain = torch.randn(28_672, 4096, device="cuda").bfloat16()
        weight, scales = quantize_rows(plain)
        for rows in (1, 64, 256, 2048):
            x = torch.randn(rows, 4096, device="cuda").bfloat16()
            apart = _apart(multiply_fp8(x, weight, scales), F.linear(x, plain))
            half, small = (
                median_seconds(run)
                for run in (partial(F.linear, x, plain), partial(multiply_fp8, x, weight, scales))
            )
            words = f"bfloat16 {half * 1e6:.0f} us, FP8 {small * 1e6:.0f} us, {apart:.1e} apart"
            found.add(f"product of {rows} rows", apart < 0.06, words, choice=True)

    with found.case("products in 4 bits"):
        setting = Setting("llama-8b", Granularity.MODEL, 1, 1, torch.bfloat16, "cuda")
        many = (1, 16, 32, 64, WIDENED_ROWS - 1, WIDENED_ROWS, 256, 2048)
        for outputs, counts in ((28_672, many), (4096, (1, 64, WIDENED_ROWS - 1))):
            levels = random_levels(AWQ, (outputs, 4096), setting)
            exact = levels.numbers(slice(None)).float()
            plain = exact.bfloat16()
            for rows in counts:
                x = torch.randn(rows, 4096, device="cuda").bfloat16()
                apart = _apart(linear_levels_triton(x, levels), F.linear(x.float(), exact))
                half, small, whole = (
                    median_seconds(run) * 1e6
                    for run in (
                        partial(F.linear, x, plain),
                        partial(linear_levels_triton, x, levels),
                        partial(widen_triton, levels, x.dtype),
                    )
                )
                words = f"bfloat16 {half:.0f} us, 4 bits {small:.0f} us, {apart:.1e} apart; to "
                words += f"widen all of it {whole:.0f} us (WIDENED_ROWS)"
                case = f"product of {rows} rows in 4 bits, {outputs} outputs"
                found.add(case, apart < 0.02, words, choice=True)


@dataclass(frozen=True)
class Part:
    """A part: ``what`` it shows, and ``run``, which may take ``limit`` seconds. ``alone``: it times
    something, or takes all memory, so nothing runs beside it."""

    what: str
    run: Callable[[Findings], None]
    limit: float
    alone: bool = False


PARTS = {
    "tokens": Part("tokens equal transformers' and a CPU's", check_tokens, 120),
    "logits": Part("bfloat16 logits of a large shape", check_logits, 120),
    "waits": Part("no step waits for the device", check_waits, 90),
    **{
        # A process each: after an illegal access nothing else in a process works.
        f"kernels-{shape}-{layout.value}": Part(
            "kernels agree with their references", partial(check_kernels, shape, layout), 240
        )
        for shape in (("llama-8b", "qwen2.5-7b") if CUDA else ("smoke",))
        for layout in Granularity
    },
    "graphs": Part("graphs, overlap and both change no token", check_graphs, 150, alone=True),
    "bandwidth": Part("bandwidth of the kernels", check_bandwidth, 120, alone=True),
    "choices": Part("two forms of the same, timed", check_choices, 90, alone=True),
}


if __name__ == "__main__":
    PARTS[sys.argv[1]].run(Findings(Path(sys.argv[2])))
