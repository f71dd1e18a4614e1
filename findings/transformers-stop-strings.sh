#!/bin/sh
# transformers 5.23.0, torch 2.13.0: generate(stop_strings=...) where the prompt ends with the beginning of a stop string
# Guess: "should terminate generation if the model outputs them": the stop string is looked for in the new text alone
# Seen: it may begin in the prompt: behind "a ST", "OPEN" is cut after "OP", and behind a prompt that ends with a line end, "\n\n" stops at the first one
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 tokenizers==0.23.3 numpy==2.3.5
cd "$work"
cat > stops.py <<'PYTHON'
import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

vocabulary = {chr(n): n for n in range(128)}
inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
inner.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=128)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()


def generated(prompt, says, stop):
    """The new text of a model that says ``says``, and spaces after it."""
    ids = torch.tensor([[vocabulary[c] for c in prompt]])

    def allowed(_, so_far):
        place = len(so_far) - len(prompt)
        return [vocabulary[says[place] if place < len(says) else " "]]

    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=len(says),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        prefix_allowed_tokens_fn=allowed,
        stop_strings=[stop],
        tokenizer=tokenizer,
    )
    return "".join(map(chr, out[0, len(prompt) :].tolist()))


cases = ("a ST", "OPEN it", "STOP"), ("Answer:\n", "\nYes", "\n\n"), ("a STOP", "more", "STOP"), ("a", " STOP it", "STOP")
seen = [generated(*case) for case in cases]
for case, text in zip(cases, seen, strict=True):
    print(transformers.__version__, "prompt, text, stop:", case, "->", repr(text))
raise SystemExit(seen != ["OP", "\n", "more", " STOP"])
PYTHON
"$work/venv/bin/python" stops.py
