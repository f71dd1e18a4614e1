"""Compiles Triton's kernels on all cores before a GPU needs them.

    python -m bench.gpu_runs.precompile note FILE       # without a GPU: what will be launched
    python -m bench.gpu_runs.precompile compile FILE    # on the GPU's machine

Triton compiles in the process that launches, on one core, half a second for each variant. ``note``
lets the parts of bench/gpu_check.py and the first rows of bench/gpu.py launch on torch's meta
device, and writes down what they would compile on a GPU of compute capability 9.0; run it with the
Triton of that machine. ``compile`` fills Triton's cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_OPTIONS = "num_warps", "num_stages", "maxnreg", "enable_fp_fusion"
_NOTED: dict[str, dict[str, Any]] = {}


def note_launches() -> None:
    """From now on, launches are specialised as on a GPU and noted; nothing is compiled or run."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from kvserve.kernels.dispatch import Kernel

    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_device_interface=lambda: torch.cuda,
        )
    )

    def note(
        self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, *rest: Any
    ) -> None:
        attributes, _ = rest
        self.device_caches[device][0][key] = SimpleNamespace()
        given = {name: getattr(options, name) for name in _OPTIONS}
        entry = {
            "module": self.fn.__module__,
            "kernel": self.fn.__name__,
            "signature": signature,
            "constants": [[list(k), v] for k, v in constexprs.items()],
            "attributes": [[list(k), v] for k, v in attributes.items()],
            "options": {name: value for name, value in given.items() if value is not None},
        }
        _NOTED.setdefault(json.dumps(entry, sort_keys=True), entry)

    def launch(self: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if all(grid):
            self.compiler.run(*args, grid=grid, warmup=True, **options)

    JITFunction._do_compile = note
    Kernel.launch = launch  # type: ignore[method-assign]


def note_kernels() -> None:
    """What the parts ``kernels``, ``bandwidth`` and ``choices`` launch, and bench/gpu_runs/sdpa."""
    import torch

    from bench.gpu_runs.sdpa import CASES
    from bench.gpu_runs.tile import DECODE_LEVELS, batches, decoding, prefilling
    from bench.kernel_rows.cases import Setting, Sizes, cases
    from bench.kernel_rows.level_cases import level_decodes
    from bench.kernel_rows.model_cases import all_cases
    from kvserve.kernels.tiles import TILES
    from kvserve.scheduler.layout import Granularity

    for shape in ("llama-8b", "qwen2.5-7b"):
        for layout in Granularity:
            for dtype in (torch.bfloat16, torch.float16):
                _launch(all_cases(Setting(shape, layout, 700, 5, dtype, "cpu", Sizes())))
    for shape, layout, context in (
        ("llama-8b", Granularity.MODEL, 1024),
        ("qwen2.5-7b", Granularity.HEAD, 4096),
    ):
        # As many rows as there, since splits follow them, and of one layer.
        rows = 131_072 // context
        setting = Setting(shape, layout, context, rows, torch.bfloat16, "cpu", Sizes(1))
        _launch((*cases(setting), *level_decodes(setting)))
    size, table = ("llama-8b", "meta", Sizes(layers=1)), TILES[9, 0]
    for levels in DECODE_LEVELS:
        before, table["decode levels"] = table["decode levels"], levels
        for batch in batches("decode levels", "meta"):
            batch.run()
        table["decode levels"] = before
    tile = table["decode"]
    for longest in (0, 1024, 2048, 4096):
        table["decode"] = tile._replace(longest=longest)
        decoding("", [1000] * 255 + [8000], *size).run()
    table["decode"] = tile
    for _, rows, context, chunk in CASES:
        (
            decoding("", [context] * rows, *size)
            if chunk == 1
            else prefilling("", rows, chunk, *size)
        ).run()


def _launch(found: Iterable[Any]) -> None:
    for case in found:
        try:
            case.triton()
        except Exception as error:  # a case that needs numbers
            sys.stderr.write(f"not noted: {case.kernel}: {error!r}\n"[:200])


def note_engines() -> None:
    """What warm-ups, steps and events of the parts' small engines and of the first rows launch."""
    import numpy as np
    import pytest
    import torch

    from bench.gpu_runs import parts
    from bench.gpu_runs.engines import BOTH, EAGER, generate, small_engine, write_model
    from bench.gpu_runs.jobs import CONFIGS, JOBS
    from bench.gpu_runs.row import settings_of
    from kvserve.config import EngineConfig
    from kvserve.engine.frontend.llm_engine import LLMEngine
    from kvserve.engine.models import loader
    from kvserve.engine.policies.registry import make_policy
    from kvserve.engine.runner.cuda_graph import DecodeGraphs
    from kvserve.engine.runner.warm_up import warm_up
    from kvserve.kernels.dispatch import Kernel
    from tests import meta_device

    launch = Kernel.launch
    folders = {
        shape: write_model(Path(tempfile.mkdtemp()), shape, torch.float32)
        for shape in (parts.TINY, parts.WIDE)
    }
    fixture: Any = meta_device.on_a_device
    (getattr(fixture, "__wrapped__", None) or fixture.__pytest_wrapped__.obj)(pytest.MonkeyPatch())
    Kernel.launch = launch  # type: ignore[method-assign]
    loader.fill_randomly = lambda model, seed: None  # type: ignore[assignment]

    def play(
        engine: LLMEngine, policy: dict[str, Any], most: int, lengths: Sequence[int], tokens: int
    ) -> None:
        core, layout = engine.core, engine.core.runner.cache.layout
        made = make_policy(dict(policy)).for_model(layout.num_layers, layout.num_kv_heads)
        warm_up(core.runner, made, core.info.max_model_len, max_tokens=most)
        if isinstance(graphs := core.runner.graphs, DecodeGraphs):
            for step in (*graphs._steps.values(), *graphs._chunks.values()):
                step.run()
        rng = np.random.default_rng(0)
        generate(engine, [rng.integers(2, 100, length).tolist() for length in lengths], tokens)

    by_shape = {parts.WIDE: [parts.POLICIES["none"]]}
    by_shape[parts.TINY] = [*parts.POLICIES.values(), parts.EXACT["kara"]]
    for shape, policies in by_shape.items():
        for policy in policies:
            for settings in (EAGER, BOTH):
                engine = small_engine(folders[shape], policy, "float32", **settings)
                play(engine, policy, 256, [30, 9, 44, 21], 60)
    eight = {"load_format": "dummy", "num_gpu_blocks_override": 2048}
    engine = small_engine(
        CONFIGS / "llama-3.1-8b", parts.POLICIES["none"], "bfloat16", **BOTH, **eight
    )
    play(engine, parts.POLICIES["none"], 256, [100], 20)
    served: dict[str, Any] = {"name": "kara"}  # bench/gpu_runs/served.py
    long = Path("kvserve/tiny-long")
    engine = small_engine(long, served, "bfloat16", kv_cache_dtype="k8v4", **BOTH, **eight)
    play(engine, served, 2048, [3, 290, 60, 130], 600)
    for job in JOBS[:7]:
        given = settings_of(job, "cuda") | {
            "num_gpu_blocks_override": 5234,
            "swap_space": 0.001,
            "dtype": "bfloat16",
        }
        del given["device"], given["kv_cache_memory"]
        policy = {"name": given["policy"], **given["policy_args"]}
        play(
            LLMEngine(EngineConfig.from_flat(**given)),
            policy,
            2048,
            [3, 290, 60, 130, 17, 200],
            600,
        )


def compile_one(entry: dict[str, Any]) -> tuple[str, str | None]:
    """A kernel's name, and the error if it does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    try:
        kernel = getattr(importlib.import_module(entry["module"]), entry["kernel"]).compiler
        constants = {tuple(k): v for k, v in entry["constants"]}
        attributes = {tuple(k): [list(x) for x in v] for k, v in entry["attributes"]}
        source = ASTSource(kernel, entry["signature"], constants, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=entry["options"])
    except Exception as error:
        return entry["kernel"], repr(error)[:500]
    with suppress(Exception):  # the C function that launches it, where there is a driver
        triton.runtime.driver.active.launcher_cls(source, made.metadata)
    return entry["kernel"], None


def compile_all(entries: list[dict[str, Any]]) -> int:
    """Compile on all cores; returns how many failed."""
    began, failed = time.perf_counter(), 0
    attention = "attend", "decode_levels"
    slowest_first = sorted(entries, key=lambda entry: entry["kernel"] not in attention)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in as_completed([pool.submit(compile_one, entry) for entry in slowest_first]):
            kernel, error = done.result()
            if error is not None:
                failed += 1
                sys.stdout.write(f"{kernel}: {error}\n")
    took = time.perf_counter() - began
    sys.stdout.write(f"{len(entries)} variants compiled in {took:.0f} s, {failed} failed\n")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compile Triton's kernels on all cores")
    parser.add_argument("verb", choices=("note", "compile"))
    parser.add_argument("file", type=Path)
    parser.add_argument("result", type=Path, nargs="?", help="JSON: how many failed to compile")
    args = parser.parse_args(arguments)
    if args.verb == "compile":
        failed = compile_all(json.loads(args.file.read_text()))
        if args.result is not None:
            args.result.write_text(json.dumps({"failed": failed}))
        return int(failed > 0)
    note_launches()
    note_kernels()
    kernels = len(_NOTED)
    note_engines()
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.write_text(json.dumps(list(_NOTED.values())))
    sys.stdout.write(f"{kernels} variants of kernels, {len(_NOTED) - kernels} more of engines\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
