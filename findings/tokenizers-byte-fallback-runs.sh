#!/bin/sh
# tokenizers 0.23.3, the decoder ByteFallback: a byte token of ">" before one that makes no character, beside sentencepiece 0.2.3
# Guess: the text ">" and one replacement character, as sentencepiece and every UTF-8 decoder have it
# Seen: two replacement characters: a row of byte tokens is a text as a whole or no text at all; and DecodeStream, which has given ">" out by then, raises an error at the next token
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q tokenizers==0.23.3 sentencepiece==0.2.3
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import io
from importlib.metadata import version

import sentencepiece
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

tokens = ["<unk>", "a", *(f"<0x{n:02X}>" for n in range(256))]
built = Tokenizer(models.BPE({t: n for n, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
built.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
row = [tokens.index("<0x3E>"), tokens.index("<0xA8>")]
whole, stream, pieces = built.decode(row), DecodeStream(skip_special_tokens=False), []
try:
    for token in [*row, tokens.index("a")]:
        pieces.append(stream.step(built, token))
    failed = ""
except Exception as error:
    failed = str(error)[:60]
model = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["ab ba abba baab"] * 20), model_writer=model, vocab_size=280, byte_fallback=True,
    hard_vocab_limit=False, minloglevel=2,
)
other = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
theirs = other.decode([other.piece_to_id("<0x3E>"), other.piece_to_id("<0xA8>")])
print("tokenizers", version("tokenizers"), ascii(whole), "stream:", pieces, failed, "| sentencepiece", version("sentencepiece"), ascii(theirs))
raise SystemExit((whole, theirs, pieces[:1]) != ("\ufffd\ufffd", ">\ufffd", [">"]) or not failed)
PYTHON
