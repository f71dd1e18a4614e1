#!/bin/sh
# tokenizers 0.23.3: decoders.DecodeStream, which gives out the text of a growing list of tokens
# Guess: the pieces together are what decode gives for all tokens
# Seen: a step gives nothing while the text ends in U+FFFD, since that looks like half of a character, and there is no last step: a text that ends in a true U+FFFD, or in half of a character because max_tokens was reached, loses its end; a run of U+FFFD comes out all at once behind it. The rule: tokenizers/src/tokenizer/mod.rs, step_decode_stream
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q tokenizers==0.23.3
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.decoder = decoders.ByteLevel()


def streamed(ids):
    stream = decoders.DecodeStream()
    return [stream.step(tokenizer, token) for token in ids]


cases = {name: tokenizer.encode(text).ids for name, text in (("a\ufffd", "a\ufffd"), ("a\ufffd\ufffdb", "a\ufffd\ufffdb"), ("\u00e9", "\u00e9"))}
cases["half of \u00e9"] = tokenizer.encode("a\u00e9").ids[:2]
seen = {name: (tokenizer.decode(ids), "".join(filter(None, streamed(ids)))) for name, ids in cases.items()}
steps = sum(piece is not None for piece in streamed(cases["a\ufffd\ufffdb"]))
print("tokenizers", tokenizers.__version__, "decode and DecodeStream:", seen, "| pieces of a, two U+FFFD and b:", steps)
wanted = {"a\ufffd": ("a\ufffd", "a"), "a\ufffd\ufffdb": ("a\ufffd\ufffdb",) * 2, "\u00e9": ("\u00e9",) * 2, "half of \u00e9": ("a\ufffd", "a")}
raise SystemExit(seen != wanted or steps != 2)
PYTHON
