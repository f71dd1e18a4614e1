#!/bin/sh
# transformers 5.23.0: AutoTokenizer builds some tokenizers anew by the class that tokenizer_config.json names
# Guess: a tokenizer.json in the folder is the tokenizer
# Seen: LlamaTokenizer drops a Prepend normaliser, Qwen2Tokenizer cuts digits one by one; PreTrainedTokenizerFast keeps the file
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.23.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from pathlib import Path

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

pieces = ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *pieces]
merges = [("\u2581", "a"), ("a", "b"), ("\u2581a", "b")]
llama = Tokenizer(models.BPE({t: n for n, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True))
llama.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
llama.add_special_tokens([AddedToken(t, normalized=False) for t in tokens[:3]])

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
merges = [("1", "2"), ("12", "3")]
tokens = ["<s>", "</s>", *letters, "12", "123"]
digits = Tokenizer(models.BPE({t: n for n, t in enumerate(tokens)}, merges))
cut = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
digits.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
digits.add_special_tokens(["<s>", "</s>"])

print("transformers", transformers.__version__)
seen = []
for backend, name, text in (
    (llama, "LlamaTokenizer", " ab"),
    (llama, "PreTrainedTokenizerFast", " ab"),
    (digits, "Qwen2Tokenizer", "1234"),
    (digits, "PreTrainedTokenizerFast", "1234"),
):
    folder = Path(f"{name}-{len(seen)}")
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    found = AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)
    wanted = backend.encode(text, add_special_tokens=False).ids
    seen.append(found == wanted)
    print(f"{name}: {text!r} -> {found}, by tokenizer.json {wanted}")
raise SystemExit(seen != [False, True, False, True])
PYTHON
