#!/bin/sh
# onnxruntime-extensions 0.15.2 (its pp_api.Tokenizer) beside tokenizers 0.23.3: one tokenizer.json
# Guess: the tokens that the file says: it reads the normalizer, the pre-tokenizer and their settings, or refuses what it does not know
# Seen: every normalizer is passed over (NFC, which Qwen 2 and GPT-NeoX have, NFKC, Lowercase), and so is add_prefix_space; a Split that isolates what its pattern finds, as Falcon's [0-9][0-9][0-9], keeps what it finds and drops the rest of the text: "hello" is no token at all. Nothing is raised
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q onnxruntime-extensions==0.15.2 tokenizers==0.23.3 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import os
from importlib.metadata import version

from onnxruntime_extensions.pp_api import Tokenizer as Other
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("Ã", "©"), ("h", "e"), ("Ġ", "he")]
VOCABULARY = {token: number for number, token in enumerate(LETTERS + ["".join(pair) for pair in MERGES])}


def both(name, text, normalizer=None, before=(), prefix=False):
    tokenizer = Tokenizer(models.BPE(VOCABULARY, MERGES))
    if normalizer:
        tokenizer.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([last, *before]) if before else last
    tokenizer.decoder = decoders.ByteLevel()
    os.makedirs(name)
    tokenizer.save(f"{name}/tokenizer.json")
    with open(f"{name}/tokenizer_config.json", "w") as file:
        json.dump({"tokenizer_class": "GPT2Tokenizer"}, file)
    numbers = [int(number) for number in Other(name).tokenize(text)]
    return tokenizer.encode(text).tokens, [tokenizer.id_to_token(number) for number in numbers]


threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
seen = {
    "plain": both("plain", "he\u00e9"), "NFC": both("nfc", "e\u0301", normalizers.NFC()), "Lowercase": both("lower", "HE", normalizers.Lowercase()),
    "prefix": both("prefix", "he", prefix=True), "threes": both("threes", "hello 12345", before=[threes]), "no digit": both("none", "hello", before=[threes]),
}
print("tokenizers", version("tokenizers"), "beside onnxruntime-extensions", version("onnxruntime-extensions"), seen)
wanted = {
    "plain": (["he", "Ã©"], ["he", "Ã©"]), "NFC": (["Ã©"], ["e", "Ì", "ģ"]), "Lowercase": (["he"], ["H", "E"]), "prefix": (["Ġhe"], ["he"]),
    "threes": (["he", "l", "l", "o", "Ġ", "1", "2", "3", "4", "5"], ["1", "2", "3"]), "no digit": (["he", "l", "l", "o"], []),
}
raise SystemExit(seen != wanted)
PYTHON
