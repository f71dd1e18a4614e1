#!/bin/sh
# transformers 5.23.0, on a CPU: /v1/completions of `transformers serve`, with a model whose generation_config does not sample
# Guess: as OpenAI's: the text ends before a stop string, a temperature samples, frequency_penalty counts the answer's tokens, finish_reason is "stop" for an end token, a stream ends with [DONE]; logprobs and n are honoured or refused
# Seen: the stop string stays in the text; temperature=50 gives the greedy text each time; frequency_penalty=f is repetition_penalty=1+f, which counts the prompt; an end token that is the last one allowed is "length"; a stream has no [DONE]; logprobs and n are dropped, with a line in the server's log (cli/serving/utils.py, completion.py)
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 'transformers[serving]==5.23.0' accelerate==1.15.0 tokenizers==0.23.3 fastapi==0.165.0 uvicorn==0.54.0 openai==3.52.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = ["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "<unk>", "0", "1", "2"]
NUMBERS = {name: number for number, name in enumerate(NAMES)}
FOLLOWS = {"x": {"a": 12, "b": 11}, "a": {"b": 12}, "b": {"c": 12}, "c": {"d": 12}, "d": {"</s>": 12}}  # logits; others have 0
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6}
config = LlamaConfig(vocab_size=32, num_hidden_layers=1, bos_token_id=0, eos_token_id=1, pad_token_id=0, tie_word_embeddings=False, **sizes)
model = LlamaForCausalLM(config)
with torch.no_grad():  # logits are a table: the layer adds nothing, and each token is a direction of its own
    for name, parameter in model.named_parameters():
        parameter.fill_(float("norm" in name))
    model.model.embed_tokens.weight.copy_(torch.eye(32))
    for one, row in FOLLOWS.items():
        for other, logit in row.items():
            model.lm_head.weight[NUMBERS[other], NUMBERS[one]] = logit / 32**0.5
model.save_pretrained("model")
tokenizer = Tokenizer(models.BPE(vocab=NUMBERS, merges=[], unk_token="<unk>"))
tokenizer.decoder = decoders.Fuse()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>").save_pretrained("model")
path, port = os.path.abspath("model"), random.randint(20000, 60000)
command = [sys.executable, "-m", "transformers.cli.transformers", "serve", path, "--port", str(port), "--device", "cpu"]
server = subprocess.Popen(command, env=dict(os.environ, HF_HUB_OFFLINE="1"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ask(**settings):
    body = json.dumps({"model": path, "prompt": "x", "max_tokens": 8, **settings}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"})
    for _ in range(240):
        try:
            return urllib.request.urlopen(request).read().decode()
        except urllib.error.HTTPError:
            raise
        except OSError:
            time.sleep(1)
    raise SystemExit("no answer")


def choices(**settings):
    return [(each["text"], each["finish_reason"], "logprobs" in each) for each in json.loads(ask(**settings))["choices"]]


try:
    seen = {
        "stop": choices(stop=["cd"]),
        "temperature": sorted({choices(temperature=50.0)[0] for _ in range(8)}),
        "penalty": choices(prompt="ax", frequency_penalty=1.0),
        "five tokens": choices(max_tokens=5),
        "logprobs and n": choices(logprobs=2, n=2),
    }
    ends = ask(stream=True).rstrip().endswith("[DONE]")
finally:
    server.terminate()
print("transformers", transformers.__version__, seen, "| [DONE]:", ends)
whole = [("abcd", "stop", False)]
wanted = {name: whole for name in seen} | {"penalty": [("bcd", "stop", False)], "five tokens": [("abcd", "length", False)]}
raise SystemExit(seen != wanted or ends)
PYTHON
