"""`kvserve inspect`: kept positions of a given text are those of the engine that wrote it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvserve import SamplingParams
from kvserve.engine.frontend.inspect import KeptPositions, inspect
from kvserve.log import RequestError
from kvserve.server.cli.commands import run
from tests.checkpoints import random_prompts, write_checkpoint, write_tokenizer
from tests.engine.models.decoding import make

KARA = {"name": "kara", "window": 20, "buffer": 4, "chunk_budget": 3, "max_chunk": 4, "period": 5}
KARA_FLAGS = ("--policy", "kara:window=20,buffer=4,chunk_budget=3,max_chunk=4,period=5")
PROMPT, CONTINUATION = random_prompts([37, 70], seed=5)


llm_of = partial(make, policy=KARA)


def test_a_forced_continuation_is_as_good_as_a_generated_one(llama_dir: Path) -> None:
    llm = llm_of(llama_dir)
    runner = llm.engine.core.runner
    layout = runner.cache.layout
    kept = KeptPositions(layout.num_layers, layout.num_kv_heads)
    runner.compressor.on_moves = kept.on_moves
    params = SamplingParams(temperature=0.0, max_tokens=72, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    generated = output.outputs[0].token_ids[:70]

    found = inspect(llm, PROMPT, generated)
    assert len(found.events) == len(kept.events) == output.kv_cache_details.compactions > 2
    for event, same in zip(found.events, kept.events, strict=True):
        assert event.seen == same.seen
        assert np.array_equal(event.held, same.held)
    assert np.array_equal(found.held, kept.held_at(107))
    assert found.input_ids.tolist() == PROMPT + generated

    other = inspect(llm, PROMPT, [*generated[:-30], *CONTINUATION[:30]])
    assert not np.array_equal(found.held, other.held), "the tokens make no difference"
    again = llm.generate([PROMPT], params, use_tqdm=False)
    assert again[0].outputs[0].token_ids == output.outputs[0].token_ids, "force stayed on"


def test_an_event_due_at_the_very_end_has_run(llama_dir: Path) -> None:
    found = inspect(llm_of(llama_dir), PROMPT, CONTINUATION[:20])
    assert [event.seen for event in found.events] == [57]
    assert np.array_equal(found.held, found.events[0].held)
    assert (found.held[..., :37] == np.arange(37)).all() and found.held.shape[2] < 57
    assert (found.held[..., -4:] == np.arange(53, 57)).all()
    earlier = inspect(llm_of(llama_dir), PROMPT, CONTINUATION[:19])
    assert not earlier.events and (earlier.held == np.arange(56)).all()


def test_too_much_for_the_context_or_the_pool_is_refused(llama_dir: Path) -> None:
    with pytest.raises(RequestError, match="leaves room for 98"):
        inspect(llm_of(llama_dir, max_model_len=100), PROMPT, CONTINUATION)
    small = make(llama_dir, num_gpu_blocks_override=5)
    with pytest.raises(RequestError, match="pool"):
        inspect(small, PROMPT, CONTINUATION)
    with pytest.raises(RequestError, match=r"outside \[0, 128\)"):
        inspect(llm_of(llama_dir), PROMPT, [128])


# ---- the command ------------------------------------------------------------------------------


def test_the_command_dumps_and_plots(
    llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    prompt, continuation = tmp_path / "prompt.npy", tmp_path / "continuation.json"
    np.save(prompt, np.array(PROMPT))
    continuation.write_text(json.dumps(CONTINUATION))
    dump, plot = tmp_path / "kept.npz", tmp_path / "kept.png"
    given = ("--prompt-ids", str(prompt), "--continuation-ids", str(continuation), *KARA_FLAGS)
    saved = ("--dump", str(dump), "--plot", str(plot), "--policy.ratio", "0.4")
    assert run(["inspect", "--model", str(llama_dir), "--dtype", "float32", *given, *saved]) == 0
    kept = np.load(dump)
    expected = inspect(make(llama_dir, policy={**KARA, "ratio": 0.4}), PROMPT, CONTINUATION)
    assert kept["counts"].shape == (3, 2) and kept["event_len"].tolist() == [57, 77, 92, 107]
    for layer in range(3):
        for head in range(2):
            lane = kept[f"kept_L{layer}_H{head}"]
            assert lane.dtype == np.int32 and len(lane) == kept["counts"][layer, head]
            assert np.array_equal(lane, expected.held[layer, head])
            assert np.array_equal(kept[f"ev3_L{layer}_H{head}"], lane)
    assert kept["input_ids"].tolist() == PROMPT + CONTINUATION
    assert plot.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "107 tokens" in out and "tokens seen" in out and "held per head" in out


def test_text_goes_through_the_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tokenizer(write_checkpoint("llama", tmp_path, vocab_size=259))
    flags = ("--prompt", "abcdef", *KARA_FLAGS)
    assert run(["inspect", "--model", str(model), *flags]) == 0
    assert "6 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        ("[1, 2", "does not match"),
        ("[]", "token ids"),
        ("[1.5]", "token ids"),
        ("[[1, 2], [3, 4]]", "token ids"),
        ("[[1, 2], [3]]", "does not match"),
        ('{"ids": 3}', "token ids"),
        ("[true]", "token ids"),
    ],
)
def test_bad_files_give_one_line(
    content: str | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ids.json"
    if content is not None:
        file.write_text(content)
    assert run(["inspect", "--prompt-ids", str(file), *KARA_FLAGS]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1
