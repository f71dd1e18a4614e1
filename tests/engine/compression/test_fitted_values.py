"""Kara with fitted values, through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve import LLM, SamplingParams
from kvserve.engine.cache.entry_store import RawEntries
from kvserve.engine.policies.base import PolicyError
from kvserve.engine.policies.kara import Kara
from kvserve.engine.policies.registry import make_policy
from kvserve.engine.policies.scoring import Observation, Remainder
from kvserve.log import ConfigError, RequestError
from tests.checkpoints import random_prompts

KARA = {"name": "kara", "window": 20, "buffer": 4, "period": 5, "protect_prompt": False}
FITTED = {**KARA, "values": "fitted"}
PROMPTS = random_prompts([30, 9, 61, 21], seed=5)
PARAMS = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)


def start(directory: Path, policy: Any, **settings: Any) -> LLM:
    settings = {"block_size": 4, "dtype": "float32", **settings}
    return LLM(str(directory), policy=policy, skip_tokenizer_init=True, **settings)


def generate(directory: Path, policy: Any, **settings: Any) -> list[list[int]]:
    llm = start(directory, policy, **settings)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert all(output.kv_cache_details.compactions for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("layout", ["model", "layer", "head"])
def test_old_values_put_in_their_places_change_nothing(
    llama_dir: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several windows an event, rows of several lengths; what is written goes where it belongs."""
    windows = []

    def same(self: Kara, obs: Observation, kept: Tensor, left: Remainder | None) -> Tensor:
        windows.append(len(kept))
        assert obs.values is not None
        places = kept[..., None].expand(*kept.shape, obs.values.shape[-1])
        return obs.values.gather(-2, places).float()

    expected = generate(llama_dir, KARA, kv_layout=layout)
    fitted = generate(llama_dir, FITTED, kv_layout=layout)
    assert fitted != expected
    monkeypatch.setattr(Kara, "new_values", same)
    assert generate(llama_dir, FITTED, kv_layout=layout) == expected
    assert max(windows) > 1


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_layout": "head"},
        {"max_num_seqs": 1},
        {"num_gpu_blocks_override": 60, "swap_space": 1 / 1024},
        {"cudagraph_capture_sizes": (1, 2, 4)},
        {"attention_backend": "torch"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_tokens_do_not_depend_on_company(llama_dir: Path, settings: dict[str, Any]) -> None:
    assert generate(llama_dir, FITTED, **settings) == generate(llama_dir, FITTED)


def test_what_cannot_be_fitted_is_refused_by_name(llama_dir: Path) -> None:
    for fields in ({"query_source": "recompute"}, {"query_reduce": "group_mean"}):
        with pytest.raises(PolicyError, match="values must be kept unless"):
            make_policy({**FITTED, **fields})
    with pytest.raises(ConfigError, match=r"--policy\.values fitted: .*--kv-cache-dtype"):
        start(llama_dir, FITTED, kv_cache_dtype="int8")
    llm = start(llama_dir, KARA, kv_cache_dtype="int8")
    with pytest.raises(RequestError, match="fewer bits") as refused:
        llm.generate(PROMPTS[:1], SamplingParams(kv_policy=FITTED), use_tqdm=False)
    assert refused.value.param == "kv_policy.values"


def test_only_values_are_written(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, changed = RawEntries.write_values, []

    def watched(self: RawEntries, slots: Tensor, values: Tensor) -> None:
        before = self.memory.view(torch.int32).clone()  # NaN, where nothing was written, is itself
        write(self, slots, values)
        different = self.memory.view(torch.int32) != before
        assert not different[:, :, 0].any()
        changed.append(int(different[:, :, 1].any(-1).sum()))

    monkeypatch.setattr(RawEntries, "write_values", watched)
    generate(llama_dir, FITTED)
    assert changed and min(changed) > 0
