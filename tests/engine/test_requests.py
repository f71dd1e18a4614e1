"""What requests may ask: refusals name the field, and the next request works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvserve import LLM, SamplingParams
from kvserve.log import ConfigError, RequestError
from tests.checkpoints import write_checkpoint, write_tokenizer

BLOCKWISE = {"name": "keydiff", "budget": 32, "mode": "block", "block": 32}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = write_checkpoint("llama", tmp_path_factory.mktemp("model"), vocab_size=259)
    write_tokenizer(directory)
    return LLM(str(directory), dtype="float32", num_gpu_blocks_override=40, max_model_len=500)


def answer(llm: LLM, prompt: Any, **params: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([5] * 500, {}, "prompt"),
        ([5] * 400, {"max_tokens": 101}, "max_tokens"),
        ([259], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([5], {"priority": 1}, "priority"),
        ([5], {"logit_bias": {259: 1.0}}, "logit_bias"),
        ([5], {"stop_token_ids": [259], "min_tokens": 1}, "stop_token_ids"),
        ([5], {"thinking_end": 259, "thinking_token_budget": 3}, "thinking_end"),
        ([5], {"allowed_token_ids": [-1]}, "allowed_token_ids"),
        (
            *([5], {"allowed_token_ids": [7], "stop_token_ids": [7, 9], "min_tokens": 2}),
            "allowed_token_ids",
        ),
        ([5], {"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ([5], {"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        ([5], {"structured_outputs": {"json": {"type": "text"}}}, "structured_outputs"),
        ([5] * 90, {"prompt_logprobs": 1, "kv_policy": BLOCKWISE}, "kv_policy"),
        ([5], {"kv_policy": "kora"}, "kv_policy.name"),
        ([5], {"kv_policy": {"name": "kara", "windov": 3}}, "kv_policy.windov"),
        ([5], {"kv_policy": {"name": "kara", "window": 501}}, "kv_policy.window"),
        (
            [5],
            {"kv_policy": {"name": "kara", "query_reduce": "group_mean"}},
            "kv_policy.query_reduce",
        ),
        ([5], {"kv_policy": {"name": "kara", "query_dtype": "fp8"}}, "kv_policy.query_dtype"),
    ],
)
def test_refusals_name_the_field(llm: LLM, prompt: Any, params: Any, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        answer(llm, [prompt], **params)
    assert refused.value.param == field
    (output,) = answer(llm, "next", max_tokens=3, temperature=0.0, ignore_eos=True)
    assert len(output.outputs[0].token_ids) == 3
    assert llm.stats().kv_cache_usage == 0.0


def test_a_prompt_that_can_never_fit_the_pool_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    llm = LLM(str(directory), skip_tokenizer_init=True, num_gpu_blocks_override=5)
    with pytest.raises(RequestError, match="--kv-cache-memory") as refused:
        answer(llm, [[5] * 100])
    assert refused.value.code == "kv_cache_too_small"


def test_branches_differ_by_seed_and_share_nothing_else(llm: LLM) -> None:
    (output,) = answer(llm, "go", n=3, seed=4, max_tokens=12, ignore_eos=True)
    texts = [choice.token_ids for choice in output.outputs]
    assert len({tuple(text) for text in texts}) == 3
    (again,) = answer(llm, "go", n=1, seed=4, max_tokens=12, ignore_eos=True)
    assert again.outputs[0].token_ids == texts[0]
    assert output.kv_cache_details.logical_tokens == 3 * (2 + 11)


def test_stop_strings_and_stop_tokens(llm: LLM) -> None:
    (free,) = answer(llm, "x", temperature=0.0, max_tokens=20, ignore_eos=True)
    choice = free.outputs[0]
    token = choice.token_ids[5]
    cut = choice.token_ids.index(token)
    (stopped,) = answer(llm, "x", temperature=0.0, max_tokens=20, stop_token_ids=[token])
    assert stopped.outputs[0].token_ids == choice.token_ids[: cut + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", token)
    stop = choice.text[3:5]
    (stopped,) = answer(llm, "x", temperature=0.0, max_tokens=20, ignore_eos=True, stop=stop)
    assert stopped.outputs[0].text == choice.text[: choice.text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert stopped.finished and llm.stats().kv_cache_usage == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "cara"}, "--policy: unknown policy"),
        ({"policy": {"name": "kara", "windov": 8}}, "--policy.windov"),
        ({"policy": {"name": "kara", "window": 600}}, "--policy.window"),
        ({"max_model_len": 100000}, "--max-model-len"),
        ({"block_size": 0}, "--block-size"),
        ({"num_gpu_blocks_override": 1}, "--num-gpu-blocks-override"),
        ({"kv_cache_memory": 100}, "--kv-cache-memory"),
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size: 3 ranks .* 2 KV heads"),
        (
            {"tensor_parallel_size": 2, "policy": {"name": "adakv", "budget": 64}},
            "--tensor-parallel-size: with --kv-layout head",
        ),
        (
            {"tensor_parallel_size": 2, "policy": {"name": "spindlekv"}},
            "--tensor-parallel-size: with --kv-layout head",
        ),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "--max-num-batched-tokens"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 256}, "--max-num-batched"),
        ({"windowing": 3}, "windowing"),
    ],
)
def test_settings_that_cannot_work_name_the_flag(
    llama_dir: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(llama_dir), skip_tokenizer_init=True, **settings)


def test_a_prompt_counts_once_a_request(llm: LLM) -> None:
    """It was counted for each of its answers."""
    totals = llm.engine.core.scheduler.totals
    before = totals.prompt_tokens_total
    outputs = answer(llm, [[5] * 7, [6] * 4], n=3, max_tokens=2)
    assert sum(len(output.prompt_token_ids) for output in outputs) == 11
    assert totals.prompt_tokens_total - before == 11


def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    """They could never act, and nobody said so."""
    llm = LLM(str(write_checkpoint("llama", tmp_path)), skip_tokenizer_init=True)
    wrong: list[dict[str, Any]] = [{"stop": "a"}, {"stop": ["a", "b"]}, {"bad_words": ["a"]}]
    for params in wrong:
        with pytest.raises(RequestError, match="tokenizer") as refused:
            answer(llm, [[5]], **params)
        assert refused.value.param == next(iter(params))
    (output,) = answer(llm, [[5]], max_tokens=2, stop=[], ignore_eos=True)
    assert len(output.outputs[0].token_ids) == 2
