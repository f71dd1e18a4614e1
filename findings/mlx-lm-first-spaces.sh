#!/bin/sh
# mlx-lm 0.32.2 (mlx 0.32.4, on a CPU): the text of its streaming detokenizers, which generate and the server give out
# Guess: the tokenizer's decode of the new tokens, in pieces
# Seen: of a byte-level BPE (GPT-2, Llama 3, Qwen) the first space of an answer is dropped: behind "return" the answer " x" is "x", so that prompt and answer are "returnx", and of four spaces of indentation three are left. decode keeps them, and so does the stream of a Llama 2 tokenizer
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.23.0 tokenizers==0.23.3
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import os
from importlib.metadata import version
from pathlib import Path

from mlx_lm.tokenizer_utils import load
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers


def save(name, tokenizer):
    os.makedirs(name)
    tokenizer.save(f"{name}/tokenizer.json")
    with open(f"{name}/tokenizer_config.json", "w") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "eos_token": "x"}, file)
    return load(Path(name))


letters = sorted(pre_tokenizers.ByteLevel.alphabet())
byte_level = Tokenizer(models.BPE({token: number for number, token in enumerate([*letters, "ĠĠ"])}, [("Ġ", "Ġ")]))
byte_level.pre_tokenizer, byte_level.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
words = ["<unk>", *(f"<0x{number:02X}>" for number in range(256)), "▁", *"abcxyz", "▁▁"]
pieces = Tokenizer(models.BPE({token: number for number, token in enumerate(words)}, [("▁", "▁")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
seen = {}
for name, tokenizer in (("byte-level", byte_level), ("llama 2", pieces)):
    wrapper = save(name, tokenizer)
    for text in ("x y", " x", "    x"):
        numbers, detokenizer = tokenizer.encode(text).ids, wrapper.detokenizer
        detokenizer.reset()
        for number in numbers:
            detokenizer.add_token(number)
        detokenizer.finalize()
        seen[name, text] = tokenizer.decode(numbers), detokenizer.text
print("mlx-lm", version("mlx-lm"), "decode beside the stream:", seen)
wanted = {(name, text): (text, text) for name in ("byte-level", "llama 2") for text in ("x y", " x", "    x")}
wanted |= {("byte-level", " x"): (" x", "x"), ("byte-level", "    x"): ("    x", "   x")}
raise SystemExit(seen != wanted)
PYTHON
