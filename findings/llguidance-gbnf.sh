#!/bin/sh
# llguidance 1.9.1, gbnf_to_lark: grammars in GBNF, beside llama.cpp (xllamacpp 2026.10.11549), whose format that is
# Guess: it converts what llama.cpp reads
# Seen: a . is no line end any more; "\u00e9" becomes "\ue9", an error, as are "\[", {0} and a rule named start; [&&&] has no match
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q llguidance==1.9.1 xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import os
import random
import sys
import urllib.request
from importlib.metadata import version

import gguf
import numpy as np
import xllamacpp
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

writer = gguf.GGUFWriter("model.gguf", "llama")
tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "\u2581"]
fields = {
    "block_count": 1, "context_length": 512, "embedding_length": 32, "feed_forward_length": 32, "head_count": 1,
    "head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 32, "tokenizer_model": "llama",
    "tokenizer_pre": "default", "token_list": tokens, "token_types": [2, 3, 3] + [6] * 256 + [1],
    "token_scores": [0.0] * len(tokens), "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0,
}
for name, value in fields.items():
    getattr(writer, f"add_{name}")(value)
numbers, count = np.random.default_rng(0), len(tokens)
shapes = {"token_embd": (count, 32), "output_norm": (32,), "output": (count, 32)}
shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
matrices = "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"
shapes |= {f"blk.0.{name}": (32, 32) for name in matrices}
for name, shape in shapes.items():
    writer.add_tensor(f"{name}.weight", numbers.standard_normal(shape).astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.warmup, params.port = "model.gguf", 256, False, random.randint(20000, 60000)
server, tokenizer = xllamacpp.Server(params), LLTokenizer("byte")


def by_llama_cpp(grammar, wanted):
    """What it writes under the grammar, pushed towards the characters of a text."""
    pushed = [[3 + byte, 100] for byte in set(wanted.encode())]
    body = {"prompt": "a", "n_predict": 8, "grammar": grammar, "logit_bias": pushed, "temperature": 0}
    request = urllib.request.Request(server.listening_address + "/completion", json.dumps(body).encode(), {"content-type": "application/json"})
    return json.loads(urllib.request.urlopen(request).read())["content"]


def by_llguidance(grammar, text):
    try:
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(gbnf_to_lark(grammar)), log_level=0)
    except Exception as error:
        return str(error)[:60]
    if matcher.is_error():
        return matcher.get_error()[:60]
    given = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()


seen = []
print("llguidance", version("llguidance"), "xllamacpp", version("xllamacpp"))
for grammar, text in (
    ("root ::= . .", "\n\n"),
    (r'root ::= "\u00e9"', "\u00e9"),
    (r'root ::= "\[" "\]"', "[]"),
    ('root ::= start\nstart ::= "x"', "x"),
    ('root ::= "a"{0} "b"', "b"),
    ("root ::= [&&&]", "&"),
    (r'root ::= [^"\\]{2} "\x41"', "xyA"),
):
    one, other = by_llama_cpp(grammar, text), by_llguidance(grammar, text)
    seen.append((len(one) == len(text), other is True))
    print(repr(grammar), "llama.cpp writes", ascii(one), "| llguidance takes", ascii(text), other)
sys.stdout.flush()
os._exit(seen != [(True, False)] * 6 + [(True, True)])
PYTHON
