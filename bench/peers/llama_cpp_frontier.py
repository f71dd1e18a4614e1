"""llama.cpp's caches on the frontier: KL to its own float16 cache, and output tokens per second.

Run by bench/frontier.py in llama.cpp's own environment, with one thread. Speed is that of as many
slots as the pool's bytes hold in whole answers: all slots decode side by side, and steps are timed
at seven lengths between the prompt's and the answer's end. Prints rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

_BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
_BATCH, _TIMED, _LENGTHS = 512, 12, 7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path, help="JSON: lists of token ids")
    parser.add_argument("--output-len", type=int, default=3000)
    parser.add_argument("--at-once", type=float, default=3.0, help="whole answers in float16")
    args = parser.parse_args()
    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(args.model.encode(), settings)
    texts = [np.array(text, np.int32) for text in json.loads(args.texts.read_text())]
    kl: dict[str, list[float]] = {name: [] for name in _BITS}
    for text in texts:
        full = _log_probs(model, text, "f16")
        kl["f16"].append(0.0)
        for name in list(_BITS)[1:]:
            found = _log_probs(model, text, name)
            kl[name].append(float((np.exp(full) * (full - found)).sum(-1).mean()))
    slots = {name: int(args.at_once * 16 / bits) for name, bits in _BITS.items()}
    rows = [
        {
            "policy": "llama.cpp",
            "kv_cache_dtype": name,
            "of_full": bits / 16,
            "kl": float(np.mean(kl[name])),
            "kl_error": float(np.std(kl[name], ddof=1) / len(texts) ** 0.5),
            "output_tok_s": _rate(model, texts[0], name, slots[name], args.output_len),
            "slots": slots[name],
            "n": len(texts),
        }
        for name, bits in _BITS.items()
    ]
    print(json.dumps(rows))
    return 0


def _context(model: Any, cache: str, slots: int, length: int) -> Any:
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = slots * (-(-length // 256) * 256), slots
    settings.n_batch = settings.n_ubatch = _BATCH
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = getattr(llama_cpp, f"GGML_TYPE_{cache.upper()}")
    settings.flash_attn_type = 1  # a cache of values in fewer bits needs it
    return llama_cpp.llama_init_from_model(model, settings)


def _decode(
    context: Any, batch: Any, tokens: np.ndarray, at: int, seqs: range, every: bool
) -> None:
    """``tokens [seqs, count]`` from position ``at`` on; logits of all of them, or of the last."""
    batch.n_tokens = tokens.size
    for i, (seq, token) in enumerate(np.ndindex(tokens.shape)):
        batch.token[i], batch.pos[i] = int(tokens[seq, token]), at + token
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, seqs[seq]
        batch.logits[i] = every or token == tokens.shape[1] - 1
    if status := llama_cpp.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode returned {status}")


def _log_probs(model: Any, text: np.ndarray, cache: str) -> np.ndarray:
    """float32 [second half, V]."""
    context, batch = _context(model, cache, 1, len(text)), llama_cpp.llama_batch_init(_BATCH, 0, 1)
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    half, found = len(text) // 2, []
    for at in range(0, len(text), _BATCH):
        some = text[None, at : at + _BATCH]
        _decode(context, batch, some, at, range(1), True)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (some.size, size))
        wide = logits[max(0, half - at) :].astype(np.float64)
        wide -= wide.max(-1, keepdims=True)
        found.append((wide - np.log(np.exp(wide).sum(-1, keepdims=True))).astype(np.float32))
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    return np.concatenate(found)


def _rate(model: Any, text: np.ndarray, cache: str, slots: int, output_len: int) -> float:
    """Tokens per second of ``slots`` answers side by side."""
    last = 64 + output_len
    context, batch = _context(model, cache, slots, last), llama_cpp.llama_batch_init(_BATCH, 0, 1)
    tokens, memory = np.resize(text, last), llama_cpp.llama_get_memory(context)
    took, at = [], 0
    for length in np.linspace(64, last - _TIMED - 1, _LENGTHS).astype(int):
        for start in range(at, length, _BATCH):
            piece = tokens[None, start : min(start + _BATCH, length)]
            _decode(context, batch, piece, start, range(1), False)
        for seq in range(1, slots):  # the others have the same text
            llama_cpp.llama_memory_seq_rm(memory, seq, -1, -1)
            llama_cpp.llama_memory_seq_cp(memory, 0, seq, -1, -1)
        at = int(length)
        for step in range(_TIMED + 1):
            begun = time.perf_counter()
            _decode(context, batch, np.tile(tokens[at], (slots, 1)), at, range(slots), True)
            at += 1
            if step:  # the first one plans its graph
                took.append(time.perf_counter() - begun)
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    return float(slots / np.mean(took))


if __name__ == "__main__":
    raise SystemExit(main())
