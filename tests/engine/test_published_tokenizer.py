"""A folder's tokenizer.json is its tokenizer, whatever class tokenizer_config.json names."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.engine.gguf.tokenizer import _SPLITS
from kvserve.log import ConfigError

SPACE = "\u2581"
TEXTS = ("hi", " ab", "  hi ab", "1234", "</s>hi", "a</s> b\n <s>", "e\u0301 \u00e9", "")


def sentencepiece() -> Backend:
    """As Llama 2's was published: a space before each text, behind special tokens too."""
    pieces = [SPACE, "a", "b", f"{SPACE}a", "ab", f"{SPACE}ab", "h", "i", f"{SPACE}h", f"{SPACE}hi"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [(SPACE, "a"), ("a", "b"), (f"{SPACE}a", "b"), (SPACE, "h"), (f"{SPACE}h", "i")]
    vocab = {token: place for place, token in enumerate(tokens)}
    backend = Backend(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    before, spaces = normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([before, spaces])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:3]])
    return backend


def byte_level() -> Backend:
    """Digits by threes, as Llama 3's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("1", "2"), ("12", "3"), ("h", "i"), ("Ġ", "Ġ")]
    tokens = ["<unk>", "<s>", "</s>", *alphabet, *("".join(pair) for pair in merges)]
    backend = Backend(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    cut = pre_tokenizers.Split(Regex(_SPLITS["llama-bpe"] or ""), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, whole])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(tokens[:3])
    return backend


@pytest.mark.parametrize(
    ("backend", "named", "differs"),
    [
        (sentencepiece(), "LlamaTokenizer", True),
        (sentencepiece(), "PreTrainedTokenizerFast", False),
        (byte_level(), "Qwen2Tokenizer", True),
        (byte_level(), "CohereTokenizer", True),
        (byte_level(), "GPT2Tokenizer", False),
    ],
)
def test_tokenizer_json_is_taken(
    backend: Backend, named: str, differs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvserve")
    backend.save(str(tmp_path / "tokenizer.json"))
    config: dict[str, object] = {"tokenizer_class": named, "bos_token": "<s>", "eos_token": "</s>"}
    config |= {"unk_token": "<unk>", "chat_template": "{{ bos_token }}", "model_max_length": 77}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    found = Tokenizer(str(tmp_path))
    for text in TEXTS:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert found.encode(text, False) == ids, text
        assert found.hf.encode(text, add_special_tokens=False) == ids, text
        assert found.decode(ids, False) == backend.decode(ids, skip_special_tokens=False)
        if backend.post_processor is not None and differs:
            assert found.encode(text) == backend.encode(text).ids, text
    told = [record.getMessage() for record in caplog.records]
    assert bool(told) is differs and all(f"{named} cuts" in line for line in told)
    described = found.describe()
    assert described["eos_token"] == "</s>" and described["model_max_length"] == 77
    assert found.render_chat([{"role": "user", "content": "x"}]) == "<s>"


def test_a_model_of_sentencepiece_alone_is_refused(tmp_path: Path) -> None:
    """Libraries make different tokenizers of it."""
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"no tokenizer.json, and tokenizer.model alone is not"):
        Tokenizer(str(tmp_path))
