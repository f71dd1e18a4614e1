"""What bench/kernels.py would measure is right, and without a GPU it says that it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import kernels as bench
from bench.kernel_rows import cases as kernel_cases
from bench.kernel_rows import peers as kernel_peers
from bench.kernel_rows.cases import Setting
from bench.kernel_rows.level_cases import FORMS, UNEQUAL, level_decodes
from bench.kernel_rows.model_cases import GROUPS, WEIGHTS, all_cases
from bench.kernel_rows.peers import Run
from bench.kernel_rows.targets import EVENT, targets
from kvserve.engine.policies.registry import make_policy
from kvserve.engine.runner.warm_up import warm_up
from kvserve.entry_format import FORMATS, TILE
from kvserve.kernels import dispatch
from kvserve.kernels.attend.paged_attention import paged_attention_torch
from kvserve.kernels.attend.query_segments import QuerySegments
from kvserve.kernels.dispatch import Kernel
from kvserve.scheduler.layout import Granularity
from tests.checkpoints import random_prompts
from tests.meta_device import DRAWN, GREEDY, KARA, on_a_device, small_engine
from tests.thinning import slow
from tests.waiting import WAIT

__all__ = ["on_a_device"]
ROOT = Path(__file__).resolve().parents[2]
BESIDE = "", " by torch"


@pytest.mark.device
@pytest.mark.slow
@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("group", GROUPS)
def test_cases_agree_with_their_references(
    group: str, granularity: Granularity, device: str
) -> None:
    found = bench.differences(tiny(granularity, device), GROUPS[group])
    assert not [kernel for kernel, difference in found.items() if not difference.right], found
    assert set(found) == kernels_of(group, granularity)


def kernels_of(group: str, granularity: Granularity) -> set[str]:
    """What a group compares."""
    if group in FORMATS:
        kinds = ["decode", "prefill", "store", "gather", "move"]
        kinds += ["turn of keys", "turn of values"] * FORMATS[group].few
        return {f"{kind} of {group}" for kind in kinds}
    codes = ["decode of codes"] * (granularity is Granularity.HEAD)
    wide = granularity is Granularity.MODEL
    unequal = [f"{kind} of {form.name}" for form in UNEQUAL for kind in ("decode", "prefill")]
    products = [f"product of {rows} in 4 bits" for rows in ("more", "many", "experts")]
    logged = [f"inputs of a {step}" for step in ("step", "logged step")]
    drawn = [f"{kernel}{by}" for kernel in ("sample", "filter and sample") for by in BESIDE]
    return {
        "step": {"decode", "decode in a graph", "prefill", "store", *drawn, *codes},
        "event": {*EVENT, "window scores e4m3", "select by torch"},
        "shares": {"decode with shares", "prefill with shares"},
        "log": {"log in 4 bits", "gather of 4 bits", "absolute scores of 4 bits"},
        "unequal bits": set(unequal * wide),
        "elementwise": {"norm", "norm of heads", "sum and norm", "rotation", "activation"},
        "rotated": {"rotation and store", "store of rotated keys"},
        "inputs": {*logged, *(f"{step} of chunks" for step in logged)},
        "none": {"decode of none", "prefill of none", "decode in parts"},
        "window": {"decode in a window", "prefill in a window"},
        "centres": {"scores by centres", "scores by the best centre"},
        "weights": {*(f"product in {form}" for form in WEIGHTS), *products},
        "states": {"states of a token", "states of chunks", "gate"},
    }[group]


def note_launches(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> set[Any]:
    """Kernels that are launched from now on, and their constants of these kinds."""
    noted: set[Any] = set()

    def launch(kernel: Kernel, grid: Any, *args: Any, **options: Any) -> None:
        form = tuple((name, options[name]) for name in kinds if name in options)
        noted.add((kernel.source.__name__, form))

    monkeypatch.setattr(Kernel, "launch", launch)
    return noted


@pytest.mark.device
@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("form", ["auto", *slow(*FORMATS)])
def test_what_kara_launches_is_checked(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel of a run of Kara's default, in the form that it has there."""
    kinds = ("SHARES", "CHUNKED", "KEYS", "VALUES", "KEY", "VALUE", "FORM", "INT4", "ADDS", "BITS")
    launched = note_launches(monkeypatch, *kinds)
    llm = small_engine(tmp_path, KARA, kv_cache_dtype=form, block_size=TILE, dim=32)
    llm.generate(random_prompts([5, 17, 33]), [GREEDY, DRAWN, GREEDY], use_tqdm=False)
    by_kara = set(launched)
    launched.clear()
    for case in all_cases(replace(tiny(Granularity.MODEL, "cpu"), dtype=torch.bfloat16)):
        case.triton()
    assert len(by_kara) > 10
    assert not by_kara - launched, f"not among the cases: {by_kara - launched}"


@pytest.mark.device
@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("form", ["auto", *slow(*(form.name for form in FORMS))])
def test_all_tiles_of_a_model_are_checked(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention that an engine of Llama's shape compiles before its first request."""
    kinds = "QUERIES", "SPLIT", "SHARES", "REMAINDER", "CHUNKED", "KEYS", "VALUES"
    noted = note_launches(monkeypatch, *kinds)
    monkeypatch.setattr(dispatch, "capability", lambda _: (9, 0))
    for policy in ({"name": "none"}, KARA):
        options = {"max_num_batched_tokens": 256, "block_size": 64, "num_gpu_blocks_override": 64}
        llm = small_engine(tmp_path, policy, heads=8, dim=32, kv_cache_dtype=form, **options)
        core, layout = llm.engine.core, llm.engine.core.runner.cache.layout
        assert layout.num_kv_heads == 2, "a group of four query heads, as Llama's"
        made = make_policy(policy).for_model(layout.num_layers, layout.num_kv_heads)
        warm_up(core.runner, made, core.info.max_model_len, max_tokens=256)
    by_engines = {launch for launch in noted if launch[0] in ("attend", "decode_levels")}
    noted.clear()
    setting = Setting("llama-8b", Granularity.MODEL, 700, 5, torch.bfloat16, "meta")
    for group in ("step", "shares", "none", "window", *([form] if form in GROUPS else [])):
        for case in GROUPS[group](setting):
            if case.kernel.startswith(("decode", "prefill")) or "tokens in" in case.kernel:
                case.triton()
    assert len(by_engines) > 10
    assert not by_engines - noted, f"not among the cases: {by_engines - noted}"


def test_decodes_over_levels_agree(device: str) -> None:
    """Those that are timed beside numbers, with the bytes of their form; in float16, for which
    there is a kernel of their own."""
    setting = replace(tiny(Granularity.MODEL, device), dtype=torch.float16)
    found = {case.kernel: case for case in level_decodes(setting)}
    assert set(found) == {f"decode of {form.name}" for form in FORMS}
    wrong = bench.differences(setting, level_decodes)
    assert all(difference.right for difference in wrong.values()), wrong
    eight, four = (found[f"decode of {form}"].num_bytes for form in ("k8v4", "k4v4"))
    assert four < eight


def tiny(granularity: Granularity, device: str) -> Setting:
    return Setting("smoke", granularity, 70, 2, torch.float32, device, kernel_cases.SMOKE)


def test_one_kernel_s_error_leaves_the_others(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is found out whole: in a call that costs minutes of a lent machine."""

    def fail(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    def off(*args: Any, **beside: Any) -> Tensor:
        return paged_attention_torch(*args, **beside) * 1.1

    monkeypatch.setattr(kernel_cases, "store_kv_triton", fail)
    monkeypatch.setattr(kernel_cases, "paged_attention_triton", off)
    found = bench.differences(tiny(Granularity.MODEL, device), GROUPS["step"])
    assert found["store"].error and "illegal memory access" in found["store"].error
    assert not found["decode"].right and found["decode"].relative_norm == pytest.approx(0.1)
    assert [kernel for kernel, difference in found.items() if not difference.right] == [
        *("decode", "decode in a graph", "prefill", "store")
    ]
    assert found["sample"].right


def test_differences_are_measured_against_the_reference() -> None:
    right = torch.ones(100)
    assert bench.Difference.of(right, right, 0.0).right
    one = right.clone()
    one[3] = 1.2
    outlier = bench.Difference.of(one, right, 0.1)
    assert outlier.relative_norm == pytest.approx(0.02) and not outlier.right
    assert not bench.Difference.of(right * torch.nan, right, 1.0).right
    assert not bench.Difference.of(right.long() * 2, right.long(), 1.0).right


def test_a_peer_gets_the_same_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tiny(Granularity.MODEL, device)

    def attend(setting: Setting, q: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> Run:
        last = torch.full((1, len(q)), setting.context - 1, device=device)
        chunks = QuerySegments(torch.arange(len(q), device=device), last, setting.context)
        inputs = q, keys, values, table[:, None], chunks, q.shape[-1] ** -0.5
        return lambda: paged_attention_torch(*inputs)

    monkeypatch.setitem(kernel_peers.PEERS, "torch", attend)
    case = kernel_peers.peer_case("torch", setting)
    assert case is not None and case.kernel == "decode by torch"
    torch.testing.assert_close(case.triton(), case.torch())
    assert kernel_peers.peer_case("no_such_peer", setting) is None
    head = replace(setting, granularity=Granularity.HEAD)
    assert kernel_peers.peer_case("torch", head) is None


def test_targets_name_the_worst() -> None:
    def row(kernel: str, context: int, us: float, of_copy: float, layers: int = 1) -> Any:
        place = {"shape": "llama-8b", "layout": "model", "context": context}
        return {"kernel": kernel, **place, "us": us, "of_copy": of_copy, "layers": layers}

    rows = [row("decode", 1024, 100.0, 0.8), row("decode", 4096, 100.0, 0.9)]
    rows += [row("decode by flashinfer", 1024, 95.0, 0.84), row("compact", 4096, 400.0, 0.9, 4)]
    rows += [row(name, 4096, 4000.0, 0.5, 4) for name in EVENT if name != "compact"]
    rows += [row("select by torch", 4096, 2000.0, 0.5, 4)]
    decode, compact, peers, event, fused = targets(rows, 100)
    assert decode["worst"] == 0.8 and decode["at"] == "llama-8b model 1024" and not decode["met"]
    assert compact["met"] and peers["worst"] == 0.95 and peers["met"]
    # Four kernels of 1,000 us a layer and one of 100, every hundred steps of 100 us.
    assert event["worst"] == pytest.approx(0.41) and not event["met"]
    assert fused["worst"] == 2.0 and fused["at"] == "select llama-8b model 4096"
    assert [target["met"] for target in targets([], 100)] == [None] * 5


def test_a_run_goes_on_where_it_stopped(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setting, timed = tiny(Granularity.MODEL, device), []

    def seconds(run: Callable[[], Any]) -> float:
        timed.append(run)
        return 1e-3

    def small(shape: str, granularity: Granularity, context: int, *_: Any) -> Setting:
        return replace(setting, granularity=granularity, context=context)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "machine", lambda: {"gpu": "none"})
    monkeypatch.setattr(bench, "DTYPES", {"bfloat16": torch.float32})
    monkeypatch.setattr(bench, "median_seconds", seconds)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(
        bench, "differences", lambda setting: {"decode": bench.Difference(0.0, 0.0, True)}
    )
    monkeypatch.setattr(bench, "Setting", small)
    path = tmp_path / "result.json"
    settings = ["--shape", "smoke", "--layout", "model", "--context", "50", "70"]
    for limit, new, left in (("-1", 0, 2), ("480", 42, 0), ("480", 0, 0)):
        timed.clear()
        arguments = [*settings, "--seconds", limit, "--save-result", str(path)]
        monkeypatch.setattr(sys, "argv", ["kernels.py", *arguments])
        assert bench.main() == 0
        assert len(timed) == new
        assert (f"{left} settings left" in capsys.readouterr().out) == bool(left)
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 42 and len(found["parity"]) == 1
    assert [row["context"] for row in found["rows"] if row["kernel"] == "compact"] == [50, 70]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_there_is_no_figure() -> None:
    absent = (
        "import sys; sys.modules.update(dict.fromkeys(['pydantic', 'fastapi', 'transformers']))"
    )
    script = (
        f"{absent}; sys.argv = ['kernels.py']; from bench.kernels import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 2 and "no CUDA device" in done.stderr
    assert not done.stdout
