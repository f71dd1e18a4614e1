"""Gemma 4 and Gemma 3n: layers with windows have other heads than the others, and the last layers
read what earlier ones hold. transformers' logits and tokens, however rows are computed, beside
whom, and after whatever has happened to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from kvserve import SamplingParams
from kvserve.config import ModelConfig
from kvserve.engine.models.borrowed import Borrowed
from kvserve.engine.models.implementation import choose_spec
from kvserve.log import ConfigError, RequestError
from kvserve.scheduler.layout import WindowShape
from tests.checkpoints import edit_config, edited_tensors, random_prompts
from tests.engine.models import decoding
from tests.engine.models.decoding import (
    answers_beside,
    check_away,
    check_parity,
    make,
    row_of,
    tokens,
    wrap,
)
from tests.engine.models.hybrids import SHAPE, expected
from tests.engine.recorder import Recorder
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import slow

PROMPTS = random_prompts([5, 60, 1, 33, 130, 64, 7, 90])
TOKENS = 64
S, F = "sliding_attention", "full_attention"
_SHARING = {"num_hidden_layers": 7, "layer_types": [S, S, F, S, F, S, F], "num_kv_shared_layers": 2}
_BY_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128}
_GEMMA4: dict[str, Any] = {
    **{"sliding_window": 20, "head_dim": 16, "global_head_dim": 32, "tie_word_embeddings": True},
    **{"num_hidden_layers": 5, "layer_types": [S, S, F, S, F], "hidden_size_per_layer_input": 0},
    **{"final_logit_softcapping": 30.0},
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4_text", {**_GEMMA4, **_SHARING, **_BY_LAYER, "use_double_wide_mlp": True}),
    "gemma4-k_eq_v": (
        "gemma4_text",
        {
            **{**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            "num_key_value_heads": 4,
        },
    ),
    "gemma4-one-full": (
        "gemma4_text",
        {
            **{**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            **{"num_key_value_heads": 4, "num_hidden_layers": 4, "layer_types": [S, S, S, F]},
        },
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            **{**_GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
            "moe_intermediate_size": 48,
        },
    ),
    "gemma4_unified": ("gemma4_unified_text", _GEMMA4),
    "gemma3n": (
        "gemma3n_text",
        {
            **{**_SHARING, **_BY_LAYER, "sliding_window": 20, "altup_num_inputs": 3},
            **{"laurel_rank": 8, "activation_sparsity_pattern": [0.6, 0.6, *[0.0] * 5]},
            "tie_word_embeddings": True,
        },
    ),
}
WINDOWS = {
    "gemma4": WindowShape(3, 1, 2, 16),
    "gemma4-k_eq_v": WindowShape(1, 1, 4, 16),
    "gemma4-one-full": WindowShape(1, 2, 2, 16),
    "gemma4-experts": WindowShape(3, 1, 2, 16),
    "gemma4_unified": WindowShape(3, 1, 2, 16),
    "gemma3n": None,
}
"""How layers with windows lie in a block of the others."""
QUICK = ["gemma4", "gemma4-one-full", "gemma3n"]
every_kind = pytest.mark.parametrize(
    "kind", [*QUICK, *slow(*(kind for kind in KINDS if kind not in QUICK))]
)


def write(kind: str, directory: Path, **changes: Any) -> Path:
    """A checkpoint of one of ``KINDS``. What layers multiply their output by is no 1."""
    name, sizes = KINDS[kind]
    config = AutoConfig.for_model(name, **{**SHAPE, **sizes, **changes})
    decoding.write(AutoModelForCausalLM, config, directory)
    with edited_tensors(directory) as stored:
        for at, layer in enumerate(sorted(n for n in stored if n.endswith("layer_scalar"))):
            stored[layer] += 0.1 * (at - 2)
    return directory


@pytest.fixture(scope="module")
def written() -> dict[str, Path]:
    return {}


@pytest.fixture
def directory(
    kind: str, written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if kind not in written:
        written[kind] = write(kind, tmp_path_factory.mktemp(kind))
    return written[kind]


@every_kind
def test_a_crowd_of_unequal_rows(kind: str, directory: Path) -> None:
    wanted = expected(directory, PROMPTS, TOKENS)
    llm = check_parity(directory, PROMPTS, wanted, 1e-4, max_num_seqs=8)
    model, cache = llm.engine.core.runner.model, llm.engine.core.runner.cache
    assert isinstance(model, Borrowed) and cache.layout.windows == WINDOWS[kind]
    assert llm.stats().steps_total < 80, "they decode together"
    assert [one.token_ids[:32] for one in wanted[:4]] == [
        found[:32] for found in decoding.expected(AutoModelForCausalLM, directory, PROMPTS[:4])
    ]


@pytest.mark.parametrize("chunk", [7, 64])
@every_kind
def test_chunks(kind: str, chunk: int, directory: Path) -> None:
    prompts = [PROMPTS[at] for at in (1, 4)]
    wanted = expected(directory, prompts, TOKENS)
    check_parity(directory, prompts, wanted, 1e-4, max_num_batched_tokens=chunk, max_num_seqs=2)


@every_kind
def test_what_happens_beside_a_row_and_to_it(kind: str, directory: Path) -> None:
    """Chunks beside decodes, aborts, and rows that are preempted and computed again."""
    wanted = expected(directory, PROMPTS[:5], TOKENS)
    llm = make(directory, async_scheduling=True, max_num_batched_tokens=48, max_num_seqs=6)
    core = llm.engine.core
    preempt_now_and_then(core.scheduler, np.random.default_rng(0), 0.05)
    # In its prompt, and as they decode.
    found = answers_beside(llm, PROMPTS, TOKENS, {3: 7, 9: 5, 14: 6})
    assert llm.stats().preemptions_total
    assert found == [one.token_ids for one in wanted]


@every_kind
def test_behind_a_prefix_hit(kind: str, directory: Path) -> None:
    history = random_prompts([100], seed=3)[0]
    turns = [history[:96] + more for more in random_prompts([1, 8, 50], seed=4)]
    wanted = expected(directory, turns, TOKENS)
    llm = make(directory, max_num_seqs=4)
    tokens(llm, [history], 2)
    recorder = Recorder(llm)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(list(turns), params, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [96] * 3
    for output, one, logits in zip(outputs, wanted, recorder.logits.values(), strict=True):
        assert list(output.outputs[0].token_ids) == one.token_ids
        torch.testing.assert_close(torch.stack(logits), one.logits, atol=1e-4, rtol=0.0)


@every_kind
def test_rows_that_were_away(kind: str, directory: Path) -> None:
    """In host memory, as they decode."""
    prompts = PROMPTS[3:7]
    check_away(directory, prompts, expected(directory, prompts, TOKENS), 1e-4)


@pytest.mark.parametrize("form", ["int8", *slow("fp8", "k8v4")])
@pytest.mark.parametrize("kind", ["gemma4", *slow("gemma4-one-full", "gemma3n")])
def test_levels_are_near_what_was_computed(kind: str, form: str, directory: Path) -> None:
    """Both kinds of layers hold levels: one token in levels is far from random, and rows alone get
    what they get in a crowd."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    found = []
    for dtype in ("auto", form):
        llm = make(directory, kv_cache_dtype=dtype, block_size=32)
        recorder = Recorder(llm)
        llm.generate(list(PROMPTS[3:]), params, use_tqdm=False)
        found.append(torch.cat([torch.stack(each) for each in recorder.logits.values()]))
    exact, near = found
    apart = (near - exact).norm() / (exact - exact.mean(0)).norm()
    assert 0 < apart < {"int8": 0.1, "fp8": 0.4, "k8v4": 0.5}[form]


def test_blocks_are_counted_as_they_lie(tmp_path: Path) -> None:
    """A block of 16 tokens of two full layers holds three layers with windows."""
    write("gemma4", tmp_path)
    llm = make(tmp_path, block_size=16)
    cache = llm.engine.core.runner.cache
    assert cache.kv.shape[1:] == (2, 2, 16, 2, 32)
    assert cache.keys_values(0)[0].shape[1:] == (16, 2, 16)
    assert cache.keys_values(2)[0].shape[1:] == (16, 2, 32)
    assert row_of(llm, "kv heads in windows")[1:] == (
        "2 of 16, the others' 2 of 32",
        "a block holds 3 of these layers, or 2 of the others",
    )
    assert row_of(llm, "shared entries")[1] == "2 layers read those of 5 others"
    size = 4 * 2 * (2 * 2 * 32 + 3 * 2 * 16)
    assert row_of(llm, "kv cache dtype")[2].startswith(f"{size} bytes a token;")


def test_what_two_sizes_of_heads_rule_out_is_said(tmp_path: Path) -> None:
    write("gemma4", tmp_path)
    for settings, message in (
        ({"kv_cache_dtype": "3bit", "block_size": 32}, "--kv-cache-dtype 3bit: .* other heads"),
        ({"policy": "pyramidinfer"}, "pyramidinfer prunes between layers"),
        ({"policy": "spindlekv"}, "spindlekv is not built for layers with sliding windows"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: Gemma4ForCausalLM"),
        (
            {"policy": {"name": "kara", "query_source": "recompute"}},
            "query_source recompute wants what windows and states have given back; use log$",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make(tmp_path, **settings)
    recompute = SamplingParams(kv_policy={"name": "kara", "query_source": "recompute"})
    with pytest.raises(RequestError, match=r"windows and states have given back; use log$"):
        make(tmp_path).generate([3, 4], recompute, use_tqdm=False)
    edit_config(tmp_path, per_layer_config={"2": {"head_dim": 64}, "4": {"head_dim": 32}})
    with pytest.raises(ConfigError, match="layers of one kind differ in their heads"):
        choose_spec(tmp_path, ModelConfig(model=str(tmp_path)))
    edit_config(tmp_path, per_layer_config={str(n): {"head_dim": 8} for n in (2, 4, 6)})
    with pytest.raises(ConfigError, match="--kv-layout head: a block holds no head of 16"):
        make(tmp_path, load_format="dummy", kv_layout="head")


@pytest.mark.parametrize("kind", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_what_guesses_for_another_model_is_not_served(kind: str, tmp_path: Path) -> None:
    """Its text part looks like a decoder, and reads keys and values of the other model."""
    text = {**SHAPE, **_GEMMA4, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 5}
    config = AutoConfig.for_model(kind, text_config=text)
    config.architectures = [NAMES[kind]]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{NAMES[kind]}: it guesses tokens of another model"):
        choose_spec(tmp_path, ModelConfig(model=str(tmp_path)))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", ["gemma4", "gemma3n"])
def test_every_tensor_is_read(kind: str, wrapped: bool, tmp_path: Path) -> None:
    """Of a file of text alone, and of one of a model that also sees and hears; what the layers that
    share entries would have made them of may be there."""
    write(kind, tmp_path)
    wanted = tokens(make(tmp_path), PROMPTS[:2], 8)
    prefix = "model.language_model." if wrapped else "model."
    if wrapped:
        wrap(kind, f"{kind.capitalize()}ForConditionalGeneration", tmp_path)
    with edited_tensors(tmp_path) as stored:
        own = stored[f"{prefix}layers.4.self_attn.k_proj.weight"]
        stored[f"{prefix}layers.6.self_attn.k_proj.weight"] = own.clone()
    assert tokens(make(tmp_path), PROMPTS[:2], 8) == wanted
    with edited_tensors(tmp_path) as stored:
        stored[f"{prefix}layers.1.self_attn.more.weight"] = own.clone()
    with pytest.raises(ConfigError, match=r"has a tensor model\.layers\.1\.self_attn\.more.weight"):
        make(tmp_path)
    names = ["layers.1.per_layer_input_gate.weight", "norm.weight"]
    for name in [*names, *["layers.2.layer_scalar"] * (kind == "gemma4")]:
        with edited_tensors(tmp_path) as stored:
            stored.pop(f"{prefix}layers.1.self_attn.more.weight", None)
            kept = stored.pop(prefix + name)
        with pytest.raises(ConfigError, match=rf"has no tensor model\.{name} \(1 missing\)"):
            make(tmp_path)
        with edited_tensors(tmp_path) as stored:
            stored[prefix + name] = kept


@pytest.mark.compiler
def test_heads_of_the_sizes_that_are_published(tmp_path: Path) -> None:
    """256 and 512: the compiled kernel takes both, but no levels of the larger ones."""
    write("gemma4", tmp_path, head_dim=256, global_head_dim=512, num_attention_heads=2)
    with edited_tensors(tmp_path) as stored:  # attention's logits would reach 512 otherwise
        for name in (name for name in stored if name.endswith("q_norm.weight")):
            stored[name] *= 0.1
    llm = check_parity(tmp_path, PROMPTS[:2], expected(tmp_path, PROMPTS[:2], 8), 1e-4)
    assert row_of(llm, "attention")[1] == "cpu"
    assert row_of(make(tmp_path, kv_cache_dtype="int8"), "attention")[1] == "torch"
