"""KL divergence of llama.cpp's float16 cache to its caches in fewer bits, on Python's own texts.

Run by bench/frontier.py in llama.cpp's own environment. The texts are those of `kvserve eval
--fidelity`, without planted facts; figures are of their second halves. Prints rows as JSON.
"""

from __future__ import annotations

import argparse
import json
from pydoc_data.topics import topics
from typing import Any

import llama_cpp
import numpy as np

_BITS = {"q8_0": 8.5, "q4_0": 4.5}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("types", nargs="+", choices=_BITS)
    parser.add_argument("--num-texts", type=int, default=8)
    parser.add_argument("--text-len", type=int, default=3000)
    args = parser.parse_args()
    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(args.model.encode(), settings)
    vocab = llama_cpp.llama_model_get_vocab(model)
    source = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = (llama_cpp.llama_token * len(source))()
    count = llama_cpp.llama_tokenize(vocab, source, len(source), tokens, len(source), False, False)
    ids = np.array(tokens[:count], np.int32)
    starts = np.linspace(0, count - args.text_len, args.num_texts).astype(int)
    kl: dict[str, list[float]] = {name: [] for name in args.types}
    for start in starts:
        text = ids[start : start + args.text_len]
        full = _log_probs(model, vocab, text, "f16")
        for name in args.types:
            found = _log_probs(model, vocab, text, name)
            kl[name].append(float((np.exp(full) * (full - found)).sum(-1).mean()))
    rows = [
        {
            "policy": "llama.cpp",
            "policy_args": {"name": "llama.cpp"},
            "kv_cache_dtype": name,
            "of_full": _BITS[name] / 16,
            "kl": float(np.mean(values)),
            "kl_error": float(np.std(values, ddof=1) / len(values) ** 0.5),
            "facts": None,
            "output_tok_s": None,
            "ratio_to_first": None,
            "frontier": "",
            "n": len(values),
        }
        for name, values in kl.items()
    ]
    print(json.dumps(rows))
    return 0


def _log_probs(model: Any, vocab: Any, text: np.ndarray, cache: str) -> np.ndarray:
    """float32 [second half, V]."""
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = len(text) + 32, 512, 512
    settings.n_threads = settings.n_threads_batch = 1
    kind = getattr(llama_cpp, f"GGML_TYPE_{cache.upper()}")
    settings.type_k = settings.type_v = kind
    settings.flash_attn_type = 1  # a cache of values in fewer bits needs it
    context = llama_cpp.llama_init_from_model(model, settings)
    size, half = llama_cpp.llama_vocab_n_tokens(vocab), len(text) // 2
    found = []
    batch = llama_cpp.llama_batch_init(512, 0, 1)
    for at in range(0, len(text), 512):
        some = text[at : at + 512]
        batch.n_tokens = len(some)
        for i, token in enumerate(some):
            batch.token[i], batch.pos[i] = int(token), at + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(some), size))
        wide = logits[max(0, half - at) :].astype(np.float64)
        wide -= wide.max(-1, keepdims=True)
        found.append((wide - np.log(np.exp(wide).sum(-1, keepdims=True))).astype(np.float32))
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    return np.concatenate(found)


if __name__ == "__main__":
    raise SystemExit(main())
