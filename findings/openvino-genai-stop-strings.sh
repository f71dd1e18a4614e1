#!/bin/sh
# openvino-genai 2026.4.1.0, on a CPU, with either attention backend: stop_strings, and no_repeat_ngram_size without beams
# Guess: an answer "abcde" with stop_strings={"ab"} ends before "ab"; no_repeat_ngram_size=2 forbids a pair to come twice, or is refused
# Seen: where the tokenizer has a token "ab" and the answer is written as a, b, it does not stop: as many of the last tokens are looked at as the longest stop string has; {"ab", "cde"} stops at "ab". The n-grams of a greedy answer are not looked at: "jk" comes four times
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 openvino==2026.4.1 gguf==0.19.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import gguf
import numpy as np
import openvino_genai
import openvino_tokenizers  # noqa: F401, finds its library

plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = iter(range(256, 512))
NAMES = [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)] + ["ab", "<s>", "</s>"]
NUMBERS = {name: number for number, name in enumerate(NAMES)}
FOLLOWS = {one: {other: 12} for one, other in zip("xabcd", "abcde")} | {"e": {"</s>": 12}, "j": {"k": 12}, "k": {"j": 12}}  # logits
WIDTH = 288
fields = {
    "block_count": 1, "context_length": 512, "embedding_length": WIDTH, "feed_forward_length": 32, "head_count": 4, "head_count_kv": 4,
    "layer_norm_rms_eps": 1e-6, "rope_dimension_count": 72, "rope_freq_base": 10000.0, "vocab_size": len(NAMES), "file_type": 1,
    "tokenizer_model": "gpt2", "tokenizer_pre": "llama-bpe", "token_list": NAMES, "token_types": [1] * 257 + [3, 3],
    "token_merges": ["a b"], "bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 258, "add_bos_token": False,
    "chat_template": "{{ messages[0]['content'] }}",
}
writer = gguf.GGUFWriter("model.gguf", "llama")
for name, value in fields.items():
    getattr(writer, f"add_{name}")(value)
embedding, head = np.eye(len(NAMES), WIDTH, dtype=np.float16), np.zeros((len(NAMES), WIDTH), np.float16)
for one, row in FOLLOWS.items():  # logits are a table: the layer adds nothing, and each token is a direction of its own
    for other, logit in row.items():
        head[NUMBERS[other], NUMBERS[one]] = logit / WIDTH**0.5
tensors = {"token_embd": embedding, "output": head, "output_norm": np.ones(WIDTH, np.float32)}
tensors |= {f"blk.0.{name}_norm": np.ones(WIDTH, np.float32) for name in ("attn", "ffn")}
tensors |= {f"blk.0.attn_{name}": np.zeros((WIDTH, WIDTH), np.float16) for name in ("q", "k", "v", "output")}
tensors |= {f"blk.0.ffn_{name}": np.zeros((32, WIDTH), np.float16) for name in ("gate", "up")}
tensors["blk.0.ffn_down"] = np.zeros((WIDTH, 32), np.float16)
for name, tensor in tensors.items():
    writer.add_tensor(f"{name}.weight", tensor)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
seen = {}
for backend in ("PA", "SDPA"):
    pipeline = openvino_genai.LLMPipeline("model.gguf", "CPU", ATTENTION_BACKEND=backend)

    def text(prompt="x", **settings):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.eos_token_id = 8, 258
        for name, value in settings.items():
            setattr(config, name, value)
        return pipeline.generate([prompt], config).texts[0]

    stopped = {",".join(sorted(stops)): text(stop_strings=stops) for stops in ({"bc"}, {"ab"}, {"ab", "cde"})}
    seen[backend] = stopped | {"pairs": text("j", no_repeat_ngram_size=2)}
print("openvino-genai", version("openvino-genai"), seen)
wanted = {"bc": "a", "ab": "abcde", "ab,cde": "", "pairs": "kjkjkjkj"}
raise SystemExit(any(each != wanted for each in seen.values()))
PYTHON
