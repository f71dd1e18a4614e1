"""Settings and sampling fields from Python: sizes as on the command line, other names, and errors
that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvserve import EngineConfig, SamplingParams
from kvserve.log import ConfigError, RequestError


def test_sizes_are_read_as_on_the_command_line() -> None:
    config = EngineConfig.from_flat(
        kv_cache_memory="5GiB", max_model_len="1k", cudagraph_capture_sizes=["1k", 2]
    )
    assert config.cache.kv_cache_memory == 5 * 2**30 and config.model.max_model_len == 1000
    assert config.cudagraph_capture_sizes == (1000, 2)


def test_names_of_vllm_are_other_names_of_settings() -> None:
    config = EngineConfig.from_flat(kv_cache_memory_bytes="1GiB", dtype="half", tp=2)
    assert config.cache.kv_cache_memory == 2**30 and config.model.dtype == "float16"
    assert config.parallel.tensor_parallel_size == 2
    assert EngineConfig.from_flat(dtype="float").model.dtype == "float32"
    with pytest.raises(ConfigError, match="kv_cache_memory is given twice"):
        EngineConfig.from_flat(kv_cache_memory=1, kv_cache_memory_bytes=1)


def test_paths_and_numbers_of_numpy() -> None:
    config = EngineConfig.from_flat(
        model=Path("/models/a"), max_num_seqs=np.int64(8), gpu_memory_utilization=1
    )
    assert config.model.model == "/models/a" and config.scheduler.max_num_seqs == 8


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_num_seqs", "many", "an integer, got 'many'"),
        ("max_num_seqs", 1.5, "an integer, got 1.5"),
        ("max_num_seqs", True, "an integer, got True"),
        ("max_num_seqs", None, "an integer, got None"),
        ("max_model_len", "long", "'long' is not a whole number like 4096, 32k or 2GiB"),
        ("kv_cache_memory", 2.5, "an integer, or a text like '2GiB'"),
        ("swap_space", "4", "a number, got '4'"),
        ("enforce_eager", "yes", "True or False"),
        ("model", 3, "a text, got 3"),
        ("policy_args", [1], "a mapping"),
        ("request_policies", "kara", "a list, each of it a text"),
        ("cudagraph_capture_sizes", ["a"], "'a' is not a whole number"),
    ],
)
def test_a_wrong_value_names_the_setting_and_its_flag(name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_flat(**{name: value})
    message = str(refused.value)
    assert message.startswith(f"{name} (--{name.replace('_', '-')})") and said in message


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("dtype", "fp64", "--dtype: 'fp64' is not one of auto, float32, bfloat16, float16"),
        ("device", "tpu", "--device: 'tpu' is not one of auto, cuda, cpu"),
        ("max_num_seqs", 0, "--max-num-seqs must be an integer of at least 1, got 0"),
        ("max_prefill_tokens", 0, "--max-prefill-tokens must be an integer of at least 1, got 0"),
        (
            "max_num_seqs_per_client",
            0,
            "--max-num-seqs-per-client must be an integer of at least 1, got 0",
        ),
        ("swap_space", float("nan"), "--swap-space must be a number of at least 0, got nan"),
        ("gpu_memory_utilization", 2, "--gpu-memory-utilization must be a number in (0, 1], got 2"),
    ],
)
def test_a_value_beyond_its_limits_names_the_flag(name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_flat(**{name: value})
    assert str(refused.value) == said


def test_a_limit_of_prefills_needs_chunks() -> None:
    with pytest.raises(ConfigError, match="--max-prefill-tokens needs --enable-chunked-prefill"):
        EngineConfig.from_flat(max_prefill_tokens=8, enable_chunked_prefill=False)


def test_an_unknown_setting_suggests_another() -> None:
    with pytest.raises(ConfigError, match="'max_num_seq'; did you mean max_num_seqs"):
        EngineConfig.from_flat(max_num_seq=3)
    with pytest.raises(ConfigError, match=r"unknown setting 'xyz'$"):
        EngineConfig.from_flat(xyz=3)
    off = {"pipeline_parallel_size": 1, "disable_log_stats": True, "hf_token": None}
    assert EngineConfig.from_flat(**off, enable_lora=False) == EngineConfig()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("top_p", None),
        ("n", "2"),
        ("max_tokens", "many"),
        ("max_tokens", 1.5),
        ("seed", "x"),
        ("logprobs", [1]),
        ("stop", 5),
        ("stop", [5]),
        ("stop_token_ids", 7),
        ("allowed_token_ids", ["a"]),
        ("bad_words", [1]),
        ("logit_bias", "x"),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: "b"}),
        ("client", 7),
    ],
)
def test_the_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{field} must be") as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field


def test_numbers_of_numpy_are_numbers() -> None:
    given: dict[str, Any] = {"temperature": np.float32(0.5), "top_k": np.int64(3)}
    SamplingParams(**given, stop_token_ids=list(np.array([1, 2])))
