"""What comes with the weights: generation_config.json, ending tokens, tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvserve import LLM, SamplingParams
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.log import ConfigError
from tests.checkpoints import greedy, random_prompts, write_checkpoint, write_tokenizer
from tests.engine.models.decoding import make, row_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_any_of_several_ending_tokens_ends(where: str, tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    prompts = random_prompts([7, 20])
    expected = greedy(directory, prompts, 40)
    # Two tokens, of which one ends each answer: the first's 11th, and the second's 21st.
    eos = [expected[0][10], expected[1][20]]
    path = directory / where
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": eos}))
    if where == "config.json":
        (directory / "generation_config.json").unlink()
    llm = make(directory)
    for output, tokens in zip(llm.generate(prompts, GREEDY, use_tqdm=False), expected, strict=True):
        choice = output.outputs[0]
        end = min(tokens.index(token) for token in eos if token in tokens)
        assert choice.token_ids == tokens[: end + 1]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_sampling_defaults_are_the_checkpoints(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    prompts = random_prompts([7])
    expected = greedy(directory, prompts, 16)
    fields = {"temperature": 0.7, "top_k": 1, "repetition_penalty": -1.0, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(fields))
    llm = make(directory)
    assert llm.engine.core.info.default_sampling == {"temperature": 0.7, "top_k": 1}
    row = row_of(llm, "sampling defaults")
    assert row[1] == "temperature 0.7, top_k 1"
    assert "repetition_penalty -1.0 is out of range" in row[2]
    # With top_k 1 sampling is greedy: the defaults were used.
    (output,) = llm.generate(prompts, use_tqdm=False)
    assert [output.outputs[0].token_ids] == expected

    llm = make(directory, generation_config="none")
    assert llm.engine.core.info.default_sampling == {}


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    write_tokenizer(directory)
    (directory / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ConfigError, match="--tokenizer: cannot load one from") as refused:
        LLM(str(directory))
    assert "\n" not in str(refused.value)


def test_the_template_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    """transformers 5 writes chat_template.jinja; before, it was a line of tokenizer_config.json."""
    write_tokenizer(tmp_path)
    assert (tmp_path / "chat_template.jinja").exists()
    messages = [{"role": "user", "content": "ab"}]
    ids = Tokenizer(str(tmp_path)).apply_chat_template(messages)
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    path = tmp_path / "tokenizer_config.json"
    assert not Tokenizer(str(tmp_path)).has_chat_template
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    assert Tokenizer(str(tmp_path)).apply_chat_template(messages) == ids
    assert len(ids) == 5  # <s> <user> a b </s>, and no second <s>
