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
from kvserve.engine.models import delta_layers
from kvserve.log import ConfigError
from tests.checkpoints import random_prompts
from tests.engine.guesses import LOOKUP, always_guess
from tests.engine.models.hybrids import write_hybrid
from tests.meta_device import DRAWN, GREEDY, KARA, RECOMPUTED, small_engine, traced
from tests.thinning import thinned

pytestmark = pytest.mark.device
ATEN = torch.ops.aten
TRACED = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, kv_trace=True)


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
            if func is Tensor.__setitem__ and isinstance(args[2], int | float):
                # So is a number, unless it fills a slice.
                fills = not any(isinstance(part, Tensor) for part in index)
                assert fills and args[0][args[1]].dim(), "a number is waited for: fill_ it"
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


def test_a_number_of_the_host_is_found() -> None:
    """As torch 2.11 did on an H100, of which the meta device knows nothing."""
    x, rows = torch.empty(2, 3, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    with nothing_is_waited_for():
        x[0], x[:, 1:] = 1.0, 2.0
        x[0, 1].fill_(1.0)
        for index in ((0, 1), (slice(None), rows), rows):
            with pytest.raises(AssertionError, match="waited for"):
                x[index] = 1.0


@pytest.mark.usefixtures("on_a_device")
@thinned(
    {
        "policy": [
            KARA,
            KARA | RECOMPUTED,
            {"name": "h2o", "budget": 16},
            {"name": "adakv", "budget": 8, "window": 4},
            {"name": "chunkkv", "budget": 8, "window": 4, "chunk_size": 2, "reuse_layers": 2},
            {"name": "windowkv", "budget": 8, "window": 4, "reuse_layers": 3},
        ],
        "sizes": [(), (2, 6)],
    }
)
def test_no_step_waits(policy: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Chunks and decodes (as they are, and as graphs hold them), events of all sources of queries,
    sampling by most rules."""
    llm = small_engine(tmp_path, policy, cudagraph_capture_sizes=sizes)
    with nothing_is_waited_for():
        prompts = random_prompts([5, 17, 33, 1])
        outputs = llm.generate(prompts, [GREEDY, DRAWN, TRACED, DRAWN], use_tqdm=False)
    assert any(output.kv_cache_details.compactions for output in outputs)
    assert any(move.plan is not None for moves in traced for move in moves)


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("sizes", [(), (2, 6)], ids=["eager", "captured"])
def test_guesses_are_checked_without_waits(sizes: tuple[int, ...], tmp_path: Path) -> None:
    """The device sees for itself how many were right."""
    lookup = LOOKUP | {"prompt_lookup_min": 1}
    llm = small_engine(tmp_path, KARA, speculative_config=lookup, cudagraph_capture_sizes=sizes)
    always_guess(llm)
    with nothing_is_waited_for():
        params = [GREEDY, DRAWN, GREEDY, GREEDY]
        llm.generate(random_prompts([5, 17, 33, 1]), params, use_tqdm=False)
    assert llm.stats().draft_tokens_total >= llm.stats().accepted_tokens_total > 0
    graphs = llm.engine.core.runner.graphs
    assert (graphs is None) == (not sizes)
    assert graphs is None or graphs.chunk_replays > 2


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("sizes", [(), (2, 6)], ids=["eager", "captured"])
def test_states_are_taken_back_without_waits(
    sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_layers, "on_gpu", lambda x: True)
    how = {
        "speculative_config": LOOKUP | {"prompt_lookup_min": 1},
        "model": write_hybrid("qwen3_5_text", tmp_path),
    }
    llm = small_engine(tmp_path, "none", cudagraph_capture_sizes=sizes, **how)
    always_guess(llm)
    with nothing_is_waited_for():
        llm.generate(random_prompts([5, 17, 33, 1]), GREEDY, use_tqdm=False)
    assert llm.stats().draft_tokens_total >= llm.stats().accepted_tokens_total > 0


@pytest.mark.usefixtures("on_a_device", "no_likenesses")
@pytest.mark.parametrize("sizes", [(), (2, 6)], ids=["eager", "padded"])
def test_codes_are_written_and_read_without_waits(sizes: tuple[int, ...], tmp_path: Path) -> None:
    policy = {"name": "spindlekv", "window": 4, "flush_every": 4, "raw_fallback": False}
    how = {"num_gpu_blocks_override": 2000, "cudagraph_capture_sizes": sizes}
    llm = small_engine(tmp_path, policy, **how)
    with nothing_is_waited_for():
        outputs = llm.generate(random_prompts([5, 17, 33]), GREEDY, use_tqdm=False)
    for output in outputs:
        details = output.kv_cache_details
        assert details.compactions > 2 and details.coded_entries and details.codebook_entries


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--device cuda: torch sees no CUDA device"):
        LLM(str(llama_dir), device="cuda", skip_tokenizer_init=True)
