"""A model's table of entries in few bits: measured once, kept, found again, and who has none."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.datasets.tasks import grade
from bench.harness.datasets.workload import task_prompts
from kvserve import LLM, SamplingParams
from kvserve.engine.cache import entry_statistics
from kvserve.engine.cache.entry_table import EntryTable
from kvserve.entry_format import BITS, FORMATS, few
from kvserve.log import ConfigError
from kvserve.scheduler.layout import Granularity, KVLayout, LayerKinds
from kvserve.server.cli.commands import run
from tests.checkpoints import edited_tensors, random_prompts, write_checkpoint, write_tokenizer
from tests.engine.models.decoding import make
from tests.thinning import slow

PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, which is empty."""
    monkeypatch.setattr(entry_statistics, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def model(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    folder.mkdir()
    return write_tokenizer(write_checkpoint(kind, folder, vocab_size=259, head_dim=32, **changes))


def started(directory: Path, **settings: Any) -> LLM:
    return make(directory, kv_cache_dtype="3bit", **settings)


def table_of(llm: LLM) -> EntryTable:
    found: EntryTable = llm.engine.core.runner.model.entry_table
    return found


def answers(llm: LLM) -> list[tuple[int, ...]]:
    prompts = random_prompts([150, 70], seed=2)
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


# ---- measured once -----------------------------------------------------------------------------


def test_measured_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next engine of the same weights reads what was kept, and says the same tokens."""
    directory = model(tmp_path / "model")
    first = started(directory)
    (kept,) = cache.iterdir()
    measure = entry_statistics.measure
    monkeypatch.setattr(entry_statistics, "measure", None)
    second = started(directory)
    assert table_of(second).name == table_of(first).name == kept.stem.removeprefix("entries-")
    assert answers(first) == answers(second)
    # Nobody keeps random weights, nor takes what was measured of others.
    monkeypatch.setattr(entry_statistics, "measure", measure)
    assert table_of(started(directory, load_format="dummy")).name == "not kept"
    kept.write_bytes(kept.read_bytes()[:1000])
    assert table_of(started(directory)).name == table_of(first).name
    with edited_tensors(directory) as tensors:
        tensors["model.embed_tokens.weight"][:, 3] += 0.5
    assert table_of(started(directory)).name != table_of(first).name
    assert len(list(cache.iterdir())) == 2


def test_where_nothing_can_be_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.touch()  # no folder can be made there
    directory = model(tmp_path / "model")
    named = table_of(started(directory)).name
    monkeypatch.setattr(entry_statistics, "cache_folder", lambda: None)
    assert table_of(started(directory)).name == named


@pytest.mark.parametrize("ranks", slow(2))
def test_ranks_measure_the_same(tmp_path: Path, cache: Path, ranks: int) -> None:
    """What two ranks measured is what one would, and one goes on with it."""
    directory = model(tmp_path / "model")
    two = started(directory, tensor_parallel_size=ranks)
    expected = answers(two)
    two.close()
    (kept,) = cache.iterdir()
    held = EntryTable.load(kept)
    assert held is not None and answers(started(directory)) == expected
    kept.unlink()
    alone = table_of(started(directory))
    torch.testing.assert_close(held.mean, alone.mean)
    torch.testing.assert_close(held.feedback, alone.feedback, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(held.noise, alone.noise, atol=1e-9, rtol=1e-3)


# ---- who has none ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "tokenizer", "why"),
    [
        ("llama", False, "its tokenizer was not read"),
        ("internlm2", True, "dynamic RoPE rotates by other frequencies"),
    ],
)
def test_models_without(
    tmp_path: Path,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    tokenizer: bool,
    why: str,
) -> None:
    """It is said in one line, entries are rounded plainly, and the engine serves."""
    sizes = (
        {"num_attention_heads": 4, "hidden_size": 64} if kind == "internlm2" else {"head_dim": 32}
    )
    directory = write_checkpoint(kind, tmp_path, vocab_size=259, **sizes)
    if tokenizer:
        write_tokenizer(directory)
    with caplog.at_level(logging.INFO, "kvserve"):
        llm = started(directory)
    (said,) = [x.message for x in caplog.records if "rounded plainly" in x.message]
    assert why in said and table_of(llm).name == ""
    rows = {name: (state, why) for name, state, why in llm.engine.core.described().summary}
    assert rows["entry table"] == ("none", "entries are rounded plainly: the log says why")
    assert len(answers(llm)[0]) == 40


def test_what_is_said(tmp_path: Path, cache: Path) -> None:
    """In the start-up table and with every answer; and others say what 3 bits would hold."""
    directory = model(tmp_path / "model")
    llm = started(directory)
    rows = {name: (state, why) for name, state, why in llm.engine.core.described().summary}
    state, why = rows["entry table"]
    assert table_of(llm).name.startswith(state) and "bits of keys and" in why
    (output,) = llm.generate([[3, 4, 5]], PARAMS, use_tqdm=False)
    assert output.kv_cache_details.entry_table == table_of(llm).name
    others = {name: why for name, _, why in make(directory).engine.core.described().summary}
    assert "3bit holds 9.8 times as many tokens" in others["kv cache dtype"]
    assert "entry table" not in others


# ---- of a user's own text ----------------------------------------------------------------------


def test_calibrate(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table beside the model is taken; another model's is refused."""
    directory, text = model(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("The red box is in the hall. " * 20)
    output = directory / entry_statistics.FILE
    flags = ["calibrate", "--model", str(directory), "--text", str(text), "--disable-tqdm"]
    flags += ["--dtype", "float32"]
    assert run([*flags, "--entries", "--tokens", "300", "--output", str(output)]) == 0
    assert "over 300 tokens" in capsys.readouterr().out
    own = table_of(started(directory))
    held = EntryTable.load(output)
    assert held is not None and own.name == held.name and not cache.exists()
    replace(held, mean=held.mean[:2]).save(output)
    with pytest.raises(ConfigError, match="is not a table of this model's entries"):
        started(directory)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--output x.table", "a .table is what --entries writes"),
        ("--entries --output x.stats", "a .table is what --entries writes"),
        ("--entries --output x.table", "--text FILE is what the model reads"),
    ],
)
def test_wrong_flags(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", *flags.split()]) == 2
    assert said in capsys.readouterr().err


# ---- bits by layer -----------------------------------------------------------------------------


def table(layers: int, seed: int) -> EntryTable:
    """With random noise, that falls by bits."""
    made = EntryTable.plain(layers, 1, 64, "cpu")
    noise = torch.rand(layers, 2, 3, dtype=torch.float64, generator=torch.manual_seed(seed))
    return replace(made, noise=noise.sort(dim=-1, descending=True).values)


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("name", ["3bit", "2.75bit", "2.5bit"])
def test_bits_by_layer(name: str, dim: int) -> None:
    """Bytes are used up but for less than one step, and no single one is better spent."""
    form, own, layers = FORMATS[name], table(6, 1), list(range(6))
    chosen = own.bits(form, dim, layers)
    sizes = {bits: few(bits).levels(dim) for bits in BITS}
    used = sum(sizes[bits] for pair in chosen for bits in pair)
    left = form.level_bytes(dim, 6) - used
    assert 0 <= left < max(sizes[4] - sizes[3], sizes[3] - sizes[2])
    assert own.bits(FORMATS["k3v3"], dim, layers) == [(3, 3)] * 6


def test_layers_of_a_block_share_its_bytes() -> None:
    """Where each layer has blocks of its own, all have the same bits; windows are apart."""
    own, kinds = table(4, 2), LayerKinds(4)
    layout = KVLayout(4, 1, 64, 16, Granularity.LAYER)
    each = own.layers(FORMATS["3bit"], layout, kinds)
    assert {(layer.key.bits, layer.value.bits, layer.at) for layer in each} <= {(3, 3, 0)} | {
        (4, 2, 0),
        (2, 4, 0),
    }


def test_models_that_ship_bring_a_table_of_their_own_tasks() -> None:
    """By a table of prose and code, which it does not speak, this one answers no chain right."""
    llm = LLM("kvserve/tiny-long", kv_cache_dtype="3bit", num_gpu_blocks_override=400)
    assert table_of(llm).by_head is not None
    assert llm.engine.tokenizer is not None
    chains = task_prompts("chain", 3, llm.engine.tokenizer, 5)
    prompts = [chains.prompt(i, []) or [] for i in range(3)]
    params = SamplingParams(max_tokens=chains.limit, temperature=0.0)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert all(grade(chains.samples[i], [text]).exact for i, text in enumerate(texts))
