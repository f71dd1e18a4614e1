"""An engine on the Triton kernels: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvserve import LLM, SamplingParams
from kvserve.engine.policies import kara, scoring
from kvserve.engine.runner import rank
from kvserve.engine.sampling import sampler
from kvserve.kernels.attend import decode_inputs
from kvserve.kernels.dispatch import Kernel
from kvserve.kernels.sample.sample_tokens_triton import sample_tokens_triton
from kvserve.kernels.score.token_to_chunk_triton import token_to_chunk_triton
from kvserve.kernels.score.window_scores_triton import window_scores_triton
from tests.checkpoints import random_prompts, write_checkpoint

pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")
KARA = {
    **{"name": "kara", "window": 6, "buffer": 2, "ratio": 0.5},
    **{"chunk_budget": 1, "max_chunk": 3, "period": 2},
}
SPINDLE = {
    **{"name": "spindlekv", "ratio": 0.8, "window": 8, "flush_every": 8, "raw_fallback": False},
    **{"theta_k": 0.6, "theta_v": 0.5},
}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, top_p=0.9, top_k=20, seed=1)
PROMPTS = random_prompts([3, 13])


def tiny(directory: Path, layers: int) -> Path:
    """Two KV heads of two query heads each."""
    shape = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_checkpoint("llama", directory, **shape)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Kernels that ran. What looks at the device to choose one would choose torch's on a CPU."""
    names: set[str] = set()
    launch = Kernel.launch

    def record(kernel: Kernel, *args: Any, **options: Any) -> None:
        names.add(kernel.source.__name__)
        launch(kernel, *args, **options)

    monkeypatch.setattr(Kernel, "launch", record)
    fill = decode_inputs.decode_inputs_triton
    monkeypatch.setattr(rank, "select_decode_inputs", lambda: fill)
    monkeypatch.setattr(scoring, "window_scores", window_scores_triton)
    monkeypatch.setattr(sampler, "sample_tokens", sample_tokens_triton)
    monkeypatch.setattr(kara, "token_to_chunk", token_to_chunk_triton)
    return names


def generate(
    directory: Path, backend: str, layout: str, policy: Any = KARA, tokens: int = 9, **settings: Any
) -> list[list[int]]:
    """Tokens of two sequences, one greedy, one drawn, whose caches are compacted."""
    llm = LLM(
        str(directory),
        policy=policy,
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend=backend,
        kv_layout=layout,
        block_size=8,
        max_num_batched_tokens=8,
        max_num_seqs=2,
        num_gpu_blocks_override=64,
        **settings,
    )
    params = [replace(each, max_tokens=tokens) for each in (GREEDY, DRAWN)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert ("attention", backend) in [row[:2] for row in llm.engine.core.described().summary]
    assert any(output.kv_cache_details.compactions for output in outputs)
    assert any(output.kv_cache_details.coded_entries for output in outputs) == (
        policy["name"] == "spindlekv"
    )
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.device
@pytest.mark.parametrize(
    "layout", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("model", "layer")), "head"]
)
@pytest.mark.slow
def test_tokens_equal_those_of_torch(
    tmp_path: Path, layout: str, request: pytest.FixtureRequest
) -> None:
    """Chunks over held context mixed with decodes, and an event of each sequence; decodes as in a
    graph, padded, with bounds that are the same for all steps."""
    directory = tiny(tmp_path, 1 + (layout == "layer"))
    expected = generate(directory, "torch", layout)
    launched = request.getfixturevalue("launched")
    assert generate(directory, "triton", layout, cudagraph_capture_sizes=(2,)) == expected
    kernels = {"_rotate_and_store", "attend", "merge", "_gather", "_log_sums", "_shares"}
    kernels |= {"_store_int4", "_gather_int4", "_decode_inputs", "_compact"}
    assert launched == kernels | {"_choose", "_survey", "_pick", "_narrow", "_draw"}


@pytest.mark.compiler
@pytest.mark.slow
def test_rows_of_codes_give_the_tokens_of_others(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The kernels read codes, decodes as in a graph."""
    directory = tiny(tmp_path, 2)
    expected = generate(directory, "cpu", "head", SPINDLE, 12)
    launched = request.getfixturevalue("launched")
    found = generate(directory, "triton", "head", SPINDLE, 12, cudagraph_capture_sizes=(2,))
    assert found == expected and {"_rotate_and_store", "attend"} < launched
