"""No step waits for its device: an engine on torch's meta device, which holds no numbers.

What would read a number back from a GPU (``item``, ``nonzero``, a mask as an index) has nothing to
read there and raises. Host memory that is copied as torch would wait for it, and operators given
tensors of both devices, are errors of a dispatch mode; numbers of the host as an index, which torch
copies before any operator sees them, are errors of a function mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvserve import LLM, SamplingParams
from kvserve.engine.attention.by_phase import ByPhase
from kvserve.engine.attention.select import Choice, Needs
from kvserve.engine.attention.triton import TritonAttention
from kvserve.engine.cache import entry_store, query_log
from kvserve.engine.compression import coder
from kvserve.engine.compression.coder import Codebook, Coder
from kvserve.engine.core import startup
from kvserve.engine.core.kv_trace import KVTracer, TracedMove
from kvserve.engine.models import transformer
from kvserve.engine.models.operators import TRITON, Operators
from kvserve.engine.policies import kara, scoring
from kvserve.engine.policies.registry import make_policy
from kvserve.engine.runner import rank
from kvserve.engine.runner.model_runner import LaunchedStep, ModelRunnerOutput
from kvserve.engine.runner.warm_up import warm_up
from kvserve.engine.sampling import sampler
from kvserve.kernels import quantized_triton
from kvserve.kernels.compact_kv import compact_kv_triton
from kvserve.kernels.dispatch import VARYING, Kernel
from kvserve.kernels.gather_kv import gather_keys_triton, gather_queries_triton
from kvserve.kernels.int4_log import gather_int4_triton, store_int4_triton
from kvserve.kernels.sample_tokens import sample_tokens_triton
from kvserve.kernels.scores.codebook import Cover
from kvserve.kernels.scores.token_to_chunk import token_to_chunk_triton
from kvserve.kernels.scores.window_scores import window_scores_triton
from kvserve.kernels.store_kv import store_kv_triton, store_queries_triton
from kvserve.log import ConfigError
from kvserve.outputs import KVTraceEvent
from kvserve.scheduler.event import answer
from kvserve.scheduler.output import ObservationTask
from tests.checkpoints import random_prompts, write_checkpoint

ATEN = torch.ops.aten
KARA = {"name": "kara", "window": 20, "buffer": 4, "ratio": 0.4, "period": 5}
RECOMPUTED = {"query_source": "recompute", "query_stride": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TRACED = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, kv_trace=True)
DRAWN = SamplingParams(
    max_tokens=24,
    seed=1,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    min_tokens=3,
    presence_penalty=0.5,
    logit_bias={3: 1.0},
    stop_token_ids=[7],
    logprobs=2,
)


class NoWaits(TorchDispatchMode):
    """Raises where a GPU would be waited for, or would refuse."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket in (ATEN.to, ATEN._to_copy, ATEN.copy_):
            names = (argument.name for argument in func._schema.arguments)
            given = dict(zip(names, args, strict=False)) | kwargs
            source = given.get("src", given["self"])
            if source.device != result.device:
                assert given.get("non_blocking"), f"a copy to {result.device} is waited for"
            return result
        devices = {x.device for x in args if isinstance(x, Tensor) and x.dim()}
        assert len(devices) <= 1, f"{func} is given tensors of {devices}"
        return result


class NoHostIndices(TorchFunctionMode):
    """Raises where a tensor of the device is indexed with what first has to be copied there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for part in index:
                there = isinstance(part, int | slice | EllipsisType | None) or (
                    isinstance(part, Tensor) and part.is_meta
                )
                assert there, f"an index is copied to the device and waited for: {part!r}"
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_is_waited_for() -> Iterator[None]:
    with NoHostIndices(), NoWaits():
        yield


@pytest.mark.parametrize("index", [[0, 1], np.array([1]), torch.tensor([1])], ids=repr)
def test_an_index_of_the_host_is_found(index: Any) -> None:
    x = torch.empty(2, 3, device="meta")
    with nothing_is_waited_for():
        x[:, 0], x[..., None], x[torch.zeros(2, dtype=torch.int64, device="meta")]
        with pytest.raises(AssertionError, match="waited for"):
            x[:, index]
        with pytest.raises(AssertionError, match="waited for"):
            x[index] = 0.0


traced: list[list[TracedMove]] = []
"""What was queued for followers: it cannot be read either."""


def note_moves(tracer: KVTracer, moves: list[TracedMove]) -> list[tuple[int, KVTraceEvent]]:
    traced.append(moves)
    return []


def collect(step: LaunchedStep) -> ModelRunnerOutput:
    """Some tokens, and counts for policies that choose them: nothing can be read back."""
    tokens = 0 if step.sampled is None else len(step.sampled.token_ids)
    scores = [answer(kind, np.full(kept.shape, 4, np.int32)) for kind, kept in step.events]
    return ModelRunnerOutput(np.full(tokens, 5, np.int32), None, scores, [], 0.0)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on ``meta`` takes the launchers that it takes on CUDA; kernels do not run."""

    def choose(wanted: str, needs: Needs) -> Choice:
        attention = TritonAttention(needs.scale, needs.block_size)
        quantized = quantized_triton.TRITON
        stores = store_kv_triton, store_queries_triton, store_int4_triton, quantized
        return Choice("triton", ByPhase(attention, attention), *stores, "")

    monkeypatch.setattr(startup, "_device", lambda config: "meta")
    monkeypatch.setattr(rank, "select_backend", choose)
    operators = Operators("triton", "", *TRITON)
    monkeypatch.setattr(transformer, "select_operators", lambda dtype, device: operators)
    monkeypatch.setattr(entry_store, "gather_keys", gather_keys_triton)
    monkeypatch.setattr(query_log, "gather_queries", gather_queries_triton)
    monkeypatch.setattr(query_log, "gather_int4", gather_int4_triton)
    monkeypatch.setattr(entry_store, "compact_kv", compact_kv_triton)
    monkeypatch.setattr(scoring, "window_scores", window_scores_triton)
    monkeypatch.setattr(sampler, "sample_tokens", sample_tokens_triton)
    monkeypatch.setattr(kara, "token_to_chunk", token_to_chunk_triton)
    monkeypatch.setattr(Kernel, "launch", lambda kernel, grid, *args, **options: None)
    monkeypatch.setattr(LaunchedStep, "collect", collect)
    monkeypatch.setattr(KVTracer, "read", note_moves)
    traced.clear()


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("sizes", [(), (2, 6)], ids=["eager", "padded"])
@pytest.mark.parametrize(
    "policy",
    [
        KARA,
        KARA | RECOMPUTED,
        {"name": "h2o", "budget": 16},
        {"name": "adakv", "budget": 8, "window": 4},
        {"name": "chunkkv", "budget": 8, "window": 4, "chunk_size": 2, "reuse_layers": 2},
        {"name": "windowkv", "budget": 8, "window": 4, "reuse_layers": 3},
    ],
    ids=["kara", "recompute", "h2o", "adakv", "chunkkv", "windowkv"],
)
def test_no_step_waits(policy: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Chunks and decodes (as they are, and as graphs hold them), events of all sources of queries,
    sampling by most rules."""
    llm = LLM(
        str(write_checkpoint("llama", tmp_path, num_attention_heads=4)),
        policy=policy,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        block_size=4,
        max_num_batched_tokens=32,
        max_num_seqs=6,
        num_gpu_blocks_override=240,
        cudagraph_capture_sizes=sizes,
    )
    with nothing_is_waited_for():
        prompts = random_prompts([5, 17, 33, 1])
        outputs = llm.generate(prompts, [GREEDY, DRAWN, TRACED, DRAWN], use_tqdm=False)
    assert any(output.kv_cache_details.compactions for output in outputs)
    assert any(move.plan is not None for moves in traced for move in moves)


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize(
    ("sizes", "gqa"),
    [((), "mean"), ((2, 6), "mean"), ((), "repeat")],
    ids=["eager", "padded", "repeat"],
)
def test_codes_are_written_and_read_without_waits(
    sizes: tuple[int, ...], gqa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compares entries, to find codes for them, does wait: it takes as many rounds as there
    are likenesses. It is left out."""

    def compare(
        new: Tensor, there: Tensor, *entries: Tensor, weights: Tensor | None = None
    ) -> Cover:
        assert weights is None or gqa == "repeat"
        return Cover(torch.zeros_like(there.long()), torch.zeros_like(there.long()), entries[-1])

    def codebook(self: Coder, task: ObservationTask, tables: tuple[Tensor, ...]) -> Codebook:
        counts = self._by_lane(tables[5], task.rows)
        none = counts.new_zeros(*counts.shape, 0)
        vectors = self._store.vectors.new_zeros(*none.shape, self._store.vectors.shape[-1])
        return Codebook(vectors, counts, none.bool(), none)

    monkeypatch.setattr(coder, "extend", compare)
    monkeypatch.setattr(Coder, "_codebook", codebook)
    spindle = {"name": "spindlekv", "gqa": gqa}
    llm = LLM(
        str(write_checkpoint("llama", tmp_path, num_attention_heads=4)),
        policy={**spindle, "window": 4, "flush_every": 4, "raw_fallback": False},
        dtype="bfloat16",
        skip_tokenizer_init=True,
        block_size=4,
        max_num_batched_tokens=32,
        max_num_seqs=6,
        num_gpu_blocks_override=2000,
        cudagraph_capture_sizes=sizes,
    )
    assert ("codes", "read") in [row[:2] for row in llm.engine.core.info.summary]
    with nothing_is_waited_for():
        outputs = llm.generate(random_prompts([5, 17, 33]), GREEDY, use_tqdm=False)
    for output in outputs:
        details = output.kv_cache_details
        assert details.compactions > 2 and details.coded_entries and details.codebook_entries


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize(
    "policy",
    [KARA, KARA | RECOMPUTED, {"name": "h2o", "budget": 16}],
    ids=["kara", "recompute", "h2o"],
)
def test_nothing_is_compiled_for_a_request(
    policy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What chunks, decodes, draws and events launch was launched before, with the same constants:
    Triton compiles a kernel anew for others, and for numbers that are 1 or multiples of 16."""
    launched: set[Any] = set()

    def launch(kernel: Kernel, grid: Any, *args: Any, **options: Any) -> None:
        code = kernel.source.__code__
        given = dict(zip(code.co_varnames, args, strict=False))
        kinds = tuple(_kind(name, value) for name, value in given.items())
        launched.add((kernel.source.__name__, kinds, tuple(sorted(options.items()))))

    monkeypatch.setattr(Kernel, "launch", launch)
    llm = LLM(
        str(write_checkpoint("llama", tmp_path, num_attention_heads=4)),
        policy=policy,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        block_size=4,
        max_num_batched_tokens=32,
        max_num_seqs=6,
        num_gpu_blocks_override=240,
    )
    core = llm.engine.core
    prepared = make_policy(policy).for_model(3, 4)
    warm_up(core.runner, prepared, core.info.max_model_len, max_tokens=32)
    before = set(launched)
    outputs = llm.generate(random_prompts([5, 17, 33, 1]), [GREEDY, DRAWN] * 2, use_tqdm=False)
    assert any(output.kv_cache_details.compactions for output in outputs)
    assert len(before) > 10
    for name, kinds, options in launched - before:
        known = [launch[1:] for launch in before if launch[0] == name]
        pytest.fail(f"{name} {options} {kinds} is new beside {known}")


def _kind(name: str, value: Any) -> Any:
    """What Triton compiles a kernel for: a tensor's type, and some properties of numbers."""
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, int) and name not in VARYING:
        return value == 1, value % 16 == 0, value >= 2**31
    return type(value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--device cuda: torch sees no CUDA device"):
        LLM(str(llama_dir), device="cuda", skip_tokenizer_init=True)
