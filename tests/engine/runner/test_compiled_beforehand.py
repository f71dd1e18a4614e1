"""No kernel is compiled while the engine serves: the warm-up has launched all that requests launch.

Triton compiles a kernel anew for other constants and types, for numbers that are 1 or multiples of
16, and for addresses that are multiples of 16 bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvserve.engine.models import delta_layers
from kvserve.engine.policies.registry import make_policy, policy_class, policy_names
from kvserve.engine.runner.cuda_graph import DecodeGraphs
from kvserve.engine.runner.warm_up import warm_up
from kvserve.kernels.attend import paged_attention_triton
from kvserve.kernels.dispatch import UNALIGNED, VARYING, Kernel
from kvserve.scheduler.layout import Granularity
from tests.checkpoints import random_prompts
from tests.engine.guesses import LOOKUP, always_guess
from tests.engine.models.hybrids import write_hybrid
from tests.meta_device import DRAWN, GREEDY, KARA, RECOMPUTED, small_engine
from tests.thinning import slow

WINDOW = {"budget": 16, "window": 4}
THRESHOLD = {"trigger": "threshold", "threshold": 24}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "kara": KARA,
    "streaming_llm": {"budget": 16},
    "h2o": {"budget": 16},
    "snapkv": WINDOW | THRESHOLD | {"protect_prompt": False},
    "rkv": WINDOW | {"threshold": 24},
    "keydiff": {"budget": 16},
    "triattention": {"budget": 16, "period": 8},
    "chunkkv": WINDOW | {"chunk_size": 4},
    "pyramidkv": WINDOW,
    "pyramidinfer": {"min_context": 8, "decay": 0.2, "period": 8, "decode_decay": 0.3},
    "dynamickv": WINDOW,
    "windowkv": WINDOW | {"reuse_layers": 3},
    "adakv": WINDOW,
    "spindlekv": {"window": 4, "flush_every": 4, "raw_fallback": False},
}
CASES = {name: {"name": name} | fields for name, fields in POLICIES.items()}
CASES |= {
    "kara-recompute": CASES["kara"] | RECOMPUTED,
    "adakv-threshold": CASES["adakv"] | THRESHOLD | {"protect_prompt": False},
    "spindlekv-raw": {"name": "spindlekv", "window": 4, "codebook": False},
}

OFTEN = {"none", "kara", "pyramidkv", "pyramidinfer", "adakv", "spindlekv", "triattention"}
FEW_OFTEN = {"kara", "kara-recompute"}
QUICK = {"kara", "spindlekv"}


def test_no_policy_is_left_out() -> None:
    built_in = {n for n in policy_names() if policy_class(n).__module__.startswith("kvserve.")}
    assert set(POLICIES) == built_in


def layouts(policy: dict[str, Any]) -> list[str]:
    """The names of the layouts that can hold what ``policy`` leaves."""
    least = make_policy(policy).for_model(3, 4).granularity
    return [layout.value for layout in Granularity if least.fits(layout)]


def cases() -> Iterator[Any]:
    """A policy, a layout and a type of cache; most of them are slow together."""
    for name, policy in CASES.items():
        for i, layout in enumerate(layouts(policy)):
            for form in ("auto", "k8v4", "k4v4"):
                few = form == "k4v4" and name == "pyramidinfer"
                if form == "auto" or (name != "spindlekv" and not few):
                    first = i == 0 and form == "auto"
                    marks = [] if first and name in QUICK else [pytest.mark.slow]
                    often = OFTEN if form == "auto" else FEW_OFTEN if form == "k4v4" else ()
                    marks += [pytest.mark.device] * (i == 0 and name in often)
                    yield pytest.param(name, layout, form, marks=marks)


@pytest.mark.usefixtures("on_a_device", "no_likenesses")
@pytest.mark.parametrize(("name", "layout", "form"), list(cases()))
def test_nothing_is_compiled_for_a_request(
    name: str, layout: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks beside any number of decodes, draws and events, in every layout."""
    launched = noted(monkeypatch)
    policy = CASES[name]
    how: Any = {"kv_layout": layout, "kv_cache_dtype": form, "num_gpu_blocks_override": 2000}
    if form == "k4v4":
        how["block_size"] = 16
    tokens = 64 if name == "pyramidinfer" else 32  # which takes a prompt in one step
    llm = small_engine(tmp_path, policy, max_num_batched_tokens=tokens, **how)
    core = llm.engine.core
    prepared = make_policy(policy).for_model(3, 4)
    warm_up(core.runner, prepared, core.info.max_model_len, max_tokens=tokens)
    before = set(launched)
    prompts = random_prompts([5, 17, 33, 1, 7, 12, 29, 8])
    outputs = llm.generate(prompts, [GREEDY, DRAWN] * 4, use_tqdm=False)
    assert name == "none" or any(output.kv_cache_details.compactions for output in outputs)
    assert_nothing_new(launched, before)


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("sizes", [*slow(()), (1, 3, 6)], ids=["eager", "captured"])
@pytest.mark.parametrize("policy", [*slow("none"), "kara"])
def test_nothing_is_compiled_for_guesses(
    policy: str, sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of any lengths."""
    launched = noted(monkeypatch)
    how = {"num_gpu_blocks_override": 2000, "cudagraph_capture_sizes": sizes}
    lookup = LOOKUP | {"prompt_lookup_min": 1}
    llm = small_engine(tmp_path, CASES[policy], speculative_config=lookup, **how)
    core = llm.engine.core
    if isinstance(core.runner.graphs, DecodeGraphs):  # as a capture does
        graphs = core.runner.graphs
        for captured in [*graphs._steps.values(), *graphs._chunks.values()]:
            captured.run()
    prepared = make_policy(CASES[policy]).for_model(3, 4)
    warm_up(core.runner, prepared, core.info.max_model_len, max_tokens=32)
    before = set(launched)
    always_guess(llm)
    llm.generate(random_prompts([5, 17, 33, 1, 7, 12, 29, 8]), [GREEDY, DRAWN] * 4, use_tqdm=False)
    assert llm.stats().draft_tokens_total > 50
    assert_nothing_new(launched, before)


@pytest.mark.usefixtures("on_a_device")
def test_nothing_is_compiled_for_rows_with_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without graphs."""
    monkeypatch.setattr(delta_layers, "on_gpu", lambda x: True)
    launched, model = noted(monkeypatch), write_hybrid("qwen3_5_text", tmp_path)
    llm = small_engine(tmp_path, "none", model=model, enforce_eager=True)
    core = llm.engine.core
    warm_up(core.runner, core.runner.policies[0], core.info.max_model_len, max_tokens=32)
    before = set(launched)
    llm.generate(random_prompts([5, 17, 33, 1]), GREEDY, use_tqdm=False)
    assert_nothing_new(launched, before)


def noted(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What is launched from now on, as Triton tells launches apart."""
    launched: set[Any] = set()

    def launch(kernel: Kernel, grid: Any, *args: Any, **options: Any) -> None:
        code = kernel.source.__code__
        given = dict(zip(code.co_varnames, args, strict=False))
        kinds = tuple((name, kind(name, value)) for name, value in given.items())
        launched.add((kernel.source.__name__, kinds, tuple(sorted(options.items()))))

    monkeypatch.setattr(Kernel, "launch", launch)
    return launched


def assert_nothing_new(launched: set[Any], before: set[Any]) -> None:
    assert len(before) > 10
    new = launched - before
    assert not new, "\n".join(
        f"{kernel} {near(kernel, kinds, options, before)}" for kernel, kinds, options in new
    )


def kind(name: str, value: Any) -> Any:
    """What Triton compiles a kernel for: a tensor's type and address, some properties of
    numbers."""
    if isinstance(value, Tensor):
        aligned = value.storage_offset() * value.itemsize % 16 == 0
        return value.dtype, name in UNALIGNED or aligned
    if isinstance(value, int) and name not in VARYING:
        return value == 1, value % 16 == 0, value >= 2**31
    return type(value)


def near(kernel: str, kinds: Any, options: Any, known: set[Any]) -> str:
    """How a launch differs from those of ``known`` that it resembles most."""
    same = [found for found in known if found[0] == kernel]
    differences = [
        sorted(set(found) ^ set(kinds), key=str) + sorted(set(other) ^ set(options), key=str)
        for _, found, other in same
    ]
    return str(min(differences, key=len, default="was never launched"))


# ---- how many kernels a captured step launches: one row's step is bound by their number ----------

VIEWS = {
    *("view", "slice", "select", "transpose", "expand", "unsqueeze", "squeeze", "split", "unbind"),
    *("t", "permute", "as_strided", "detach", "alias", "unfold", "_unsafe_view", "flatten"),
    *("empty", "new_empty", "empty_like", "empty_strided", "split_with_sizes", "reshape"),
    *("_reshape_alias", "new_empty_strided"),
}
PER_LAYER = {"linear": 4, "_rms_norm": 2, "attend": 1, "_silu_and_mul": 1}
NUMBERS = {"_rotate_and_store": 1}
LEVELS = {"_rotate": 1, "_store_levels": 1}
AROUND = 5


class Launches(TorchDispatchMode):
    """Counts torch's operators, but for views of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (name := func.overloadpacket.__name__) not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.device
@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("logs", [False, True], ids=["plain", "logged"])
@pytest.mark.parametrize(("form", "split"), [("auto", True), ("auto", False), ("int8", True)])
def test_launches_of_a_graph(
    form: str, split: bool, logs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each layer, and before the first; one is behind the last. Rows are ``split`` as long as
    they are too few for the device; one launch more adds their parts up."""
    if not split:
        monkeypatch.setattr(paged_attention_triton, "num_processors", lambda device: 1)
    llm = small_engine(tmp_path, KARA, cudagraph_capture_sizes=(6,), kv_cache_dtype=form)
    runner = llm.engine.core.runner
    assert isinstance(runner.graphs, DecodeGraphs)
    step = runner.graphs._steps[6, logs].step
    launches = Launches()
    parts: list[int] = []

    def launch(kernel: Kernel, grid: Any, *args: Any, **options: Any) -> None:
        launches.counts[kernel.source.__name__] += 1
        if kernel.source.__name__ == "attend":
            parts.append(grid[2])

    monkeypatch.setattr(Kernel, "launch", launch)
    with torch.inference_mode():
        step.forward()  # as before a capture
        parts.clear()
        launches.counts.clear()
        with launches:
            step.forward()
    assert parts and all((each > 1) == split for each in parts)
    layer = PER_LAYER | (NUMBERS if form == "auto" else LEVELS)
    layer |= {"_store_int4": 1} if logs else {}
    layer |= {"merge": 1} if split else {}
    layers = Counter({name: len(runner.model.layers) * n for name, n in layer.items()})
    assert layers <= launches.counts
    assert sum(layer.values()) == 9 + (form != "auto") + logs + split
    assert (launches.counts - layers).total() <= AROUND, launches.counts - layers
