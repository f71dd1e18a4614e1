"""Tokenizers from a GGUF file's tables beside those that transformers makes of the same file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, Qwen2Tokenizer, Qwen3_5Tokenizer

from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.engine.gguf.tokenizer import _SPLITS
from kvserve.engine.sampling.grammar_backends import BackendSource, load_backend
from kvserve.log import ConfigError
from kvserve.sampling_params import StructuredOutput
from tests.engine.gguf.texts import lines

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
LINES = lines(2000)
SPACE = "\u2581"
WHOLE = [*SPECIALS, "<think>"]


def write_tables(
    file: Path, family: str, kind: str, tokens: list[str], types: list[int], **more: Any
) -> Path:
    """A file with a tokenizer, and as little of a model as makes a config."""
    writer = gguf.GGUFWriter(file, family)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for fact, number in {
        **{"block_count": 1, "context_length": 64, "embedding_length": 8, "head_count": 1},
        **{"feed_forward_length": 8, "head_count_kv": 1, "layer_norm_rms_eps": 1e-5},
        **more,
    }.items():
        getattr(writer, f"add_{fact}")(number)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def train(pre_tokenizer: Any, alphabet: list[str], size: int) -> tuple[list[str], list[list[str]]]:
    """Tokens and merges of BPE, learned from the lines."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(LINES[:1300], trainer)
    model = json.loads(backend.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), model["merges"]


def byte_level(file: Path, pre: str, **more: Any) -> Path:
    split = _SPLITS[pre]
    steps: list[Any] = []
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learned, merges = train(pre_tokenizers.Sequence(steps), alphabet, 1500)
    types = [CONTROL] * len(SPECIALS) + [NORMAL] * len(learned) + [USER_DEFINED]
    more = {"eos_token_id": 2, "bos_token_id": 1, "chat_template": TEMPLATE, **more}
    pairs = [" ".join(pair) for pair in merges]
    tokens = [*SPECIALS, *learned, "<think>"]
    return write_tables(
        file, "llama", "gpt2", tokens, types, tokenizer_pre=pre, token_merges=pairs, **more
    )


def sentencepiece(file: Path, family: str, **more: Any) -> Path:
    """Scores fall with each merge, as SentencePiece writes them; a few tokens are found whole."""
    learned, _ = train(pre_tokenizers.Metaspace(SPACE, "first"), [], 1500)
    chars = [token for token in learned if len(token) == 1]
    merged = [token for token in learned if len(token) > 1]
    gemma = family.startswith("gemma")
    named = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"] if gemma else ["<unk>", "<s>", "</s>"]
    whole = ["\n\n", "  ", "   "] if gemma else ["<|im_start|>"]
    tokens = [*named, *[f"<0x{byte:02X}>" for byte in range(256)], *whole, *merged, *chars]
    types = [UNKNOWN if name == "<unk>" else CONTROL for name in named]
    types += [BYTE] * 256 + [USER_DEFINED] * len(whole) + [NORMAL] * len(learned)
    ranks = [-1000.0] * (len(tokens) - len(learned)) + [-float(n) for n in range(len(learned))]
    bos, eos, unknown = (2, 1, 3) if gemma else (1, 2, 0)
    ids = {"bos_token_id": bos, "eos_token_id": eos, "unk_token_id": unknown, "token_scores": ranks}
    return write_tables(file, family, "llama", tokens, types, **{**ids, **more})


TABLE = json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text())
"""What llama.cpp makes of texts with the tables of ``few_tokens``, and by which version."""


def few_tokens(kind: str) -> dict[str, Any]:
    """Tables with a few tokens, so that each cut shows: for SentencePiece's models, or for merges
    of bytes (``kind`` is the pre-tokenizer)."""
    if not kind.startswith("llama"):
        pairs = [
            *("l C", "e L", "a B", "t '", "' s", "1 2", "12 3", "123 4", "Ġ Ġ", "Ġ x", "/ /"),
            *("Ċ Ċ", ". Ċ", ".Ċ /", "= >", "$ 5", "Ã ©", "Ì ģ", "e Ìģ", "Ã ī", "Ãī T", "Ãī s"),
        ]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = [*SPECIALS, *alphabet, *("".join(pair.split()) for pair in pairs)]
        types = [CONTROL] * len(SPECIALS) + [NORMAL] * (len(tokens) - len(SPECIALS))
        merges = {"tokenizer_pre": kind.rpartition(" ")[2], "token_merges": pairs}
        return {"kind": "gpt2", "tokens": tokens, "types": types, **merges}
    merged = [*("in", "fi", "▁f", "fin", "▁fi", "ite", "nite", "▁▁", "▁fin", "finite", "▁▁▁▁")]
    merged += ["▁finite", "Hi", "▁Hi", "▁<", "s>"]
    named, whole = ["<unk>", "<s>", "</s>"], ["<|im_start|>"]
    chars = [*"▁Hfinte<>s|_", "\n"]
    tokens = [*named, *[f"<0x{byte:02X}>" for byte in range(256)], *whole, *merged, *chars]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [USER_DEFINED]
    types += [NORMAL] * (len(merged) + len(chars))
    ranks = [0.0] * 260 + [-float(n) for n in range(len(merged) + len(chars))]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "token_scores": ranks}
    prefix = {"add_space_prefix": "no prefix" not in kind}
    return {"kind": "llama", "tokens": tokens, "types": types, **ids, **prefix}


@pytest.mark.parametrize("kind", TABLE["ids"])
def test_texts_are_cut_as_llama_cpp_does(kind: str, tmp_path: Path) -> None:
    file = write_tables(tmp_path / "model.gguf", "llama", **few_tokens(kind))
    ours = Tokenizer(str(file))
    for text, ids in zip(TABLE["texts"], TABLE["ids"][kind], strict=True):
        assert ours.encode(text, False) == ids, text


@pytest.mark.parametrize("pre", ["tekken", "gpt-4o"])
def test_marks_belong_to_words(pre: str, tmp_path: Path) -> None:
    """In the patterns that the models were trained with (mistral-common's tekken_240911.json,
    tiktoken's o200k_base), and not in llama.cpp's."""
    file = write_tables(tmp_path / "model.gguf", "llama", **few_tokens(pre))
    ours = Tokenizer(str(file))
    e_acute = ours.backend.token_to_id("eÌģ")
    assert ours.encode("e\u0301te\u0301") == [e_acute, ours.backend.token_to_id("t"), e_acute]


def by_transformers(file: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


KINDS: dict[str, Callable[[Path], Path]] = {
    **{
        f"{pre}": (lambda file, pre=pre: byte_level(file, pre))  # type: ignore[misc]
        for pre in ("qwen2", "gpt-2", "dbrx")
    },
    "llama-bpe": lambda file: byte_level(file, "llama-bpe", add_bos_token=False),
    "llama-bpe-bos": lambda file: byte_level(file, "llama-bpe", add_bos_token=True),
    "llama": lambda file: sentencepiece(file, "llama"),
    "gemma3": lambda file: sentencepiece(file, "gemma3", add_space_prefix=False),
    "phi3": lambda file: sentencepiece(file, "phi3", add_bos_token=False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(kind: str, tmp_path: Path) -> None:
    file = KINDS[kind](tmp_path / "model.gguf")
    ours, theirs = Tokenizer(str(file)), by_transformers(file)
    for line in LINES:
        if kind == "llama" and re.match("[ ▁]|.*(<s>|</s>|<.im_start.>)", line, re.DOTALL):
            continue  # transformers writes no space there, as llama.cpp does (below)
        ids = theirs.encode(line)
        assert ours.encode(line) == ids, line
        assert ours.encode(line, False) == theirs.encode(line, add_special_tokens=False), line
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), line
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.describe()["bos_token"] == theirs.bos_token


def test_smollm_cuts_digits_before_spaces(tmp_path: Path) -> None:
    """As its tokenizer.json and llama.cpp do; transformers cuts as GPT-2, where two spaces before
    a digit are no word."""
    file = byte_level(tmp_path / "model.gguf", "smollm")
    ours, theirs = Tokenizer(str(file)), by_transformers(file)
    assert any(ours.encode(line) != theirs.encode(line) for line in LINES)
    cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    for line in LINES:
        assert ours.encode(line) == theirs.encode(line), line


@pytest.mark.parametrize(
    ("pre", "own"), [("qwen2", Qwen2Tokenizer), ("qwen35", Qwen3_5Tokenizer)], ids=["2", "3.5"]
)
def test_qwen_composes_characters(pre: str, own: Any, tmp_path: Path) -> None:
    """As its own tokenizer does, and llama.cpp and transformers' conversion do not. Marks belong to
    words in Qwen 3.5's."""
    file = byte_level(tmp_path / "model.gguf", pre)
    ours = Tokenizer(str(file))
    vocab = ours.backend.get_vocab()
    merges = [tuple(pair) for pair in json.loads(ours.backend.to_str())["model"]["merges"]]
    theirs = own(vocab=vocab, merges=merges)
    marks = (
        "e\u0301te\u0301",
        "\u1112\u1161\u11ab",
        "A\u030a 12",
        "plain",
        "\u0915\u093f\u0924 x\u0305y",
    )
    for text in (*marks, *(line for line in LINES if not any(t in line for t in WHOLE))):
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.encode("e\u0301") == ours.encode("\u00e9")


def test_llama_3_keeps_words_that_are_tokens(tmp_path: Path) -> None:
    """Whether or not merges lead to them (``ignore_merges`` in its tokenizer.json); and texts begin
    with the first token, also of a file that does not say so, as llama.cpp has it."""
    found = {}
    for pre in ("llama-bpe", "lfm2", "dbrx"):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = [*alphabet, "wo", "word"]
        types = [NORMAL] * len(tokens)
        file = tmp_path / f"{pre}.gguf"
        more = {"tokenizer_pre": pre, "token_merges": ["w o"], "bos_token_id": 0}
        write_tables(file, "llama", "gpt2", tokens, types, **more)
        found[pre] = Tokenizer(str(file)).encode("word")
    assert found["llama-bpe"] == found["lfm2"] == [0, 257] and len(found["dbrx"]) == 3


def test_grammars_read_it_too(tmp_path: Path) -> None:
    file = byte_level(tmp_path / "model.gguf", "smollm")
    ours = Tokenizer(str(file))
    size = len(ours.backend.get_vocab())
    matcher = load_backend(BackendSource(str(file), False, size, [2]))(
        StructuredOutput("regex", "[0-9]+")
    )
    mask = np.zeros(-(-size // 32), np.int32)
    matcher.fill(mask)
    allowed = [n for n in range(size) if mask[n // 32] >> n % 32 & 1]
    texts = {ours.token_text(token) for token in allowed}
    assert texts.issuperset("0123456789") and all(text.isdigit() for text in texts)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pre": ({"tokenizer_pre": "chameleon"}, "has pre-tokenizer 'chameleon'; kvserve reads dbrx, "),
    "no pre": ({}, "has pre-tokenizer None"),
    "merges": ({"tokenizer_pre": "gpt-2", "token_merges": ["x y"]}, "that are not of its tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tables_that_are_not_read(case: str, tmp_path: Path) -> None:
    more, message = REFUSED[case]
    more = {"token_merges": ["a b"], **more}
    file = write_tables(
        tmp_path / "m.gguf", "llama", "gpt2", ["a", "b", "ab"], [NORMAL] * 3, **more
    )
    with pytest.raises(ConfigError, match=message):
        Tokenizer(str(file))


def test_kinds_that_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_tables(file, "llama", "t5", ["a"], [NORMAL])
    with pytest.raises(ConfigError, match="tokenizer of kind 't5'; kvserve reads gpt2 and llama"):
        Tokenizer(str(file))
    write_tables(file, "llama", "llama", ["a"], [NORMAL])
    with pytest.raises(ConfigError, match="has 0 scores"):
        Tokenizer(str(file))
    write_tables(file, "llama", "llama", ["a", "a"], [NORMAL] * 2)
    with pytest.raises(ConfigError, match="has 2 tokens of which 1 differ"):
        Tokenizer(str(file))
