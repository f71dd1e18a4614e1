"""The tokenizer that a GGUF file's tables describe, as the model's own tokenizer.json has it.

The tables name the pre-tokenizer (``tokenizer.ggml.pre``) and leave its rules to the reader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvserve.engine.gguf.config import CONTROL, family_of
from kvserve.engine.gguf.reader import GgufFile, read_gguf

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = _QWEN2.replace(_WORDS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+")
_QWEN35 = _QWEN35.replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(ending: str, digits: str) -> str:
    """Words end where capitals begin."""
    forms = (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
    words = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{form}{ending}" for form in forms)
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_SPLITS = {
    "dbrx": _LLAMA3,  # Phi-4
    "default": None,
    "deepseek-r1-qwen": _QWEN2,
    "falcon3": _LLAMA3,
    "gpt-2": None,
    "gpt-4o": _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),
    "lfm2": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "smaug-bpe": _LLAMA3,
    "smollm": None,
    "tekken": _by_case("", r"\p{N}"),  # Mistral Nemo, Mistral Small
}
"""How text is cut into words; ``None``: as the package's GPT-2 does."""
_WHOLE_WORDS = ("falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "tekken")
"""Where a word that is a token is that token, whatever the merges make of it, and texts begin with
the first token unless the file says otherwise."""
_USER_DEFINED = 4
_SPACE = "\u2581"


def gguf_tokenizer(path: str) -> Any:
    """A fast tokenizer of transformers; ``ConfigError`` names what of the tables is not read."""
    from transformers import PreTrainedTokenizerFast

    file = read_gguf(Path(path))
    tokens, kind = file.strings("tokenizer.ggml.tokens"), file.value("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise file.error(f"has a tokenizer of kind {kind!r}; kvserve reads gpt2 and llama")
    if not tokens or len(set(tokens)) < len(tokens):
        raise file.error(f"has {len(tokens)} tokens of which {len(set(tokens))} differ")
    types = file.value("tokenizer.ggml.token_type", np.ndarray, ())
    typed = list(zip(tokens, types, strict=False))
    backend = (_byte_level if kind == "gpt2" else _sentencepiece)(file, tokens)
    backend.add_special_tokens([_whole(token) for token, type_ in typed if type_ == CONTROL])
    known = backend.get_vocab()
    own = [token for token, type_ in typed if type_ == _USER_DEFINED and token in known]
    backend.add_tokens([_whole(token) for token in own])
    named = {}
    first = kind == "llama" or file.value("tokenizer.ggml.pre", str) in _WHOLE_WORDS
    for name in ("bos", "eos", "unknown", "padding"):
        if (token := _named(file, name, tokens)) is not None:
            named[f"{name[:3]}_token"] = token
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=file.value("tokenizer.ggml.add_bos_token", bool, first),
        add_eos_token=file.value("tokenizer.ggml.add_eos_token", bool, False),
        chat_template=file.value("tokenizer.chat_template", str),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _named(file: GgufFile, name: str, tokens: list[str]) -> str | None:
    """The token of a role, if the file gives one."""
    number = file.value(f"tokenizer.ggml.{name}_token_id", int)
    return None if number is None or not 0 <= number < len(tokens) else tokens[number]


def _whole(token: str) -> AddedToken:
    """A token that is found in text as it is, before the text is cut."""
    return AddedToken(token, normalized=False)


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """BPE of bytes, whose merges are in the file."""
    words = file.value("tokenizer.ggml.pre", str)
    if words not in _SPLITS:
        raise file.error(f"has pre-tokenizer {words!r}; kvserve reads {', '.join(sorted(_SPLITS))}")
    merges = [pair.partition(" ")[::2] for pair in file.strings("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=words in _WHOLE_WORDS))
    except Exception as error:  # tokenizers raises nothing narrower
        raise file.error(f"has merges that are not of its tokens ({error})") from None
    steps: list[Any] = []
    if words == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if words == "default":
        cuts = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
        steps += [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    if (split := _SPLITS[words]) is not None:
        steps.append(pre_tokenizers.Split(Regex(split), "isolated"))
    if split in (_QWEN2, _QWEN35):
        backend.normalizer = normalizers.NFC()
    by_itself = split is None and words != "default"
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_itself))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """BPE of characters, and of bytes where there is no token; its merges follow from scores."""
    from transformers.tokenization_utils_base import generate_merges

    family, scores = family_of(file), file.value("tokenizer.ggml.scores", np.ndarray, ())
    gemma = family.startswith("gemma")
    if gemma:  # runs of spaces are written as spaces, and the order is that of the tokens
        tokens = [_SPACE * len(t) if not t.strip(" ") else t for t in tokens]
        scores = [-index for index in range(len(tokens))]
    if len(scores) != len(tokens):
        raise file.error(
            f"has {len(scores)} scores (tokenizer.ggml.scores) of {len(tokens)} tokens"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(
            vocab,
            generate_merges(vocab, dict(zip(tokens, map(float, scores), strict=True))),
            unk_token=_named(file, "unknown", tokens),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    prefix = file.value("tokenizer.ggml.add_space_prefix", bool, True) and not gemma
    if gemma:
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    # As llama.cpp and SentencePiece: whatever a piece of text begins with, and behind each token
    # that is found whole.
    before = [normalizers.Prepend(_SPACE)] * prefix
    backend.normalizer = normalizers.Sequence([*before, spaces])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *[decoders.Strip(" ", 1, 0)] * prefix])
    return backend
