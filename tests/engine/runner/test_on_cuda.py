"""What the engine does on a GPU alone, without one: see ``tests/pretend_cuda.py``."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvserve.engine.cache.kv_cache import SWAP_STAGING_BYTES, KVCache
from kvserve.engine.cache.log_form import BLOCK_SIZES, LogForm
from kvserve.engine.device.transfer import HostCopy, Stopwatch, to_device
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import RowMove, RowMoves
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.guesses import SPECULATIVE, Oracle
from tests.engine.models.decoding import row_of
from tests.engine.runner.test_cuda_graph import KARA, generate, make_llm, make_plain
from tests.pretend_cuda import pretend_cuda
from tests.scheduler.traffic import preempt_now_and_then

pytestmark = pytest.mark.device
PROMPTS = random_prompts([30, 9, 44, 21])
GRAPHS: dict[str, Any] = {
    "num_gpu_blocks_override": 1000,
    "max_num_seqs": 8,
    "cudagraph_capture_sizes": (3, 8),
}


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


@pytest.mark.parametrize(
    ("policy", "guesses"),
    [
        (KARA, False),
        pytest.param({"name": "adakv", "budget": 8, "window": 4}, False, marks=pytest.mark.slow),
        pytest.param(KARA, True, marks=pytest.mark.slow),
    ],
    ids=["kara", "adakv", "guesses"],
)
def test_graphs_and_overlap_give_the_tokens_of_neither(
    tiny_dir: Path, policy: Any, guesses: bool
) -> None:
    """Graphs repeat on addresses alone: what was to be freed with their capture is gone."""
    policies = [policy] * len(PROMPTS)
    expected = generate(make_plain(tiny_dir, policy), PROMPTS, policies)
    how = GRAPHS | ({"speculative_config": SPECULATIVE} if guesses else {})
    with pretend_cuda() as queue:
        llm = make_llm(tiny_dir, policy, **how)
        oracle = Oracle(llm, expected.__getitem__, 0.8) if guesses else None
        gc.collect()
        assert generate(llm, PROMPTS, policies) == expected
    graphs = llm.engine.core.runner.graphs
    # Two sizes, with queries logged and without; with guesses, of rows and of chunks.
    assert graphs is not None and queue.graphs == 4 * (1 + guesses)
    assert queue.streams == 1, "a stream has a workspace of cuBLAS"
    if oracle is not None:
        assert graphs.chunk_replays > 5 and oracle.guessed > oracle.confirmed > 10


def test_steps_without_tokens_are_waited_for(tiny_dir: Path) -> None:
    """Sequences that are computed again have their events in steps that sample nothing: the device
    has to be there before anybody asks what an event took."""
    policies = [KARA] * len(PROMPTS)
    expected = generate(make_plain(tiny_dir, KARA), PROMPTS, policies)
    with pretend_cuda() as queue:
        llm = make_plain(
            tiny_dir,
            KARA,
            num_gpu_blocks_override=40,
            max_num_batched_tokens=16,
            max_num_seqs=4,
            swap_space=0,
        )
        preempt_now_and_then(llm.engine.core.scheduler, np.random.default_rng(0), 0.1)
        waited = queue.waits
        assert generate(llm, PROMPTS, policies) == expected
    stats = llm.stats()
    assert stats.preemptions_total and stats.compaction_seconds_total > 0
    assert queue.waits - waited == stats.steps_total and not queue.graphs
    assert [row_of(llm, name)[1] for name in ("cuda graphs", "overlapped steps")] == ["off"] * 2


def test_a_copy_of_nothing_waits_all_the_same() -> None:
    with pretend_cuda() as queue:
        watch = Stopwatch("cuda")
        watch.stop()
        copy = HostCopy([], "cuda")
        with pytest.raises(RuntimeError, match="has not come"):
            watch.seconds()
        assert copy.wait() == [] and watch.seconds() > 0
        assert queue.reached == queue.given


def test_what_a_copy_brings_is_read_once_it_is_there() -> None:
    with pretend_cuda() as queue:
        sent = torch.tensor([[3, 4], [5, 6]]), torch.tensor([0.5]), torch.tensor([True])
        copy = HostCopy(sent, "cuda")
        assert not queue.waits
        places, share, agreed = copy.wait()
    assert (
        places.tolist() == [[3, 4], [5, 6]] and share.tolist() == [0.5] and agreed.tolist() == [1]
    )


def test_numbers_go_to_the_device_without_a_wait() -> None:
    with pretend_cuda() as queue:
        numbers = to_device([1, 2, 3], "cuda")
        assert len(queue.reads) == 1 and not queue.waits and numbers.tolist() == [1, 2, 3]


def test_host_memory_is_not_pinned_as_a_whole() -> None:
    """Blocks come and go by a part that is, and come back as they were."""
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, block_size=256)
    block_bytes = 4 * math.prod(layout.cache_shape(1))
    blocks = SWAP_STAGING_BYTES // block_bytes + 3  # more than are staged at once
    with pretend_cuda() as queue:
        cache = KVCache(
            layout, blocks + 1, LogForm(2), torch.float32, "cuda", num_host_blocks=2 * blocks
        )
        assert 0 < queue.pinned_bytes <= SWAP_STAGING_BYTES < cache.host.nbytes
        cache.kv[1:] = torch.arange(1, blocks + 1).view(-1, 1, 1, 1, 1, 1)
        before, there = cache.kv.clone(), np.arange(1, blocks + 1)
        task = RowMove(there, there + 7)
        cache.swap(RowMoves(outs=(task,)))
        cache.kv.fill_(-1.0)
        cache.swap(RowMoves(ins=(task,)))
        assert torch.equal(cache.kv[1:], before[1:])


def test_blocks_are_as_large_as_tiles_on_a_gpu() -> None:
    assert BLOCK_SIZES == {"cpu": 16, "cuda": 64}
