#!/bin/sh
# tokenizers 0.23.3, beside sentencepiece 0.2.3 and tiktoken 0.14.0: decode of a number that no token has
# Guess: an error, as of the other two
# Seen: it is left out: decode and decode_batch give the text of the others, DecodeStream.step gives None, as for a token whose text is not complete. A model's logits may be more than its vocabulary (rows added for alignment): a number drawn from those counts as a token, has no text and raises nothing
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q tokenizers==0.23.3 sentencepiece==0.2.3 tiktoken==0.14.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import io
from importlib.metadata import version

import sentencepiece
import tiktoken
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

letters = {letter: number for number, letter in enumerate("abcdefgh")}
tokenizer = Tokenizer(models.BPE(letters, []))
tokenizer.decoder = decoders.Fuse()
stream = DecodeStream()
made = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(["abc abd"]), model_writer=made, vocab_size=8, hard_vocab_limit=False, minloglevel=2)
pieces = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
ranks = tiktoken.Encoding("letters", pat_str=".", mergeable_ranks={bytes([n]): n for n in range(256)}, special_tokens={})


def fails(call):
    try:
        return repr(call())
    except Exception as error:
        return type(error).__name__


seen = {
    "decode": tokenizer.decode([0, 99, 1]), "decode_batch": tokenizer.decode_batch([[0, 99, 1], [99]]),
    "stream": [stream.step(tokenizer, number) for number in (0, 99, 1)],
    "sentencepiece": fails(lambda: pieces.decode([3, 999])), "tiktoken": fails(lambda: ranks.decode([97, 999])),
}
print("tokenizers", version("tokenizers"), "sentencepiece", version("sentencepiece"), "tiktoken", version("tiktoken"), seen)
wanted = {"decode": "ab", "decode_batch": ["ab", ""], "stream": ["a", None, "b"], "sentencepiece": "IndexError", "tiktoken": "KeyError"}
raise SystemExit(seen != wanted)
PYTHON
