"""llama.cpp through the C functions that llama-cpp-python exposes: one batch of all sequences."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from bench.peers.adapter import Tokens, serve, versions
from bench.peers.gguf_file import write_gguf


class LlamaCpp:
    def load(
        self, *, model: str, dtype: str, max_num_seqs: int, max_model_len: int
    ) -> dict[str, Any]:
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(model)
            if file.is_dir():
                file = Path(folder, "model.gguf")
                write_gguf(Path(model), file, dtype)
            settings = llama_cpp.llama_model_default_params()
            settings.use_mmap = False
            self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
        if not self._model:
            raise RuntimeError("llama.cpp refuses the model")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._dtype, self._length, self._context, self._seqs = dtype, max_model_len, None, 0
        return versions("llama-cpp-python")

    def run(self, prompts: Tokens, *, max_tokens: int) -> dict[str, Any]:
        """All prompts in one batch, then a batch of one token of each per step."""
        self._open(len(prompts))
        started = time.perf_counter()
        newest = self._decode(prompts, first=0)
        tokens = [newest]
        for step in range(1, max_tokens):
            newest = self._decode(newest[:, None], first=len(prompts[0]) + step - 1)
            tokens.append(newest)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": np.stack(tokens, 1).tolist()}

    def _open(self, seqs: int) -> None:
        """Empty the cache, or make a context for exactly ``seqs`` sequences, which is faster than a
        larger one."""
        if self._seqs == seqs:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
            return
        if self._context:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self._context)
        settings = llama_cpp.llama_context_default_params()
        size = seqs * self._length
        settings.n_ctx = settings.n_batch = size
        settings.n_seq_max = seqs
        settings.n_threads = settings.n_threads_batch = 1
        settings.kv_unified = False
        if self._dtype == "float32":  # its default is float16, which is as wide as bfloat16
            settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._batch = llama_cpp.llama_batch_init(size, 0, 1)
        self._seqs = seqs

    def _decode(self, tokens: Any, first: int) -> np.ndarray:
        """Feed ``tokens [seqs, count]`` from position ``first`` on; returns each next token."""
        tokens = np.asarray(tokens, np.int32)
        seqs, count = tokens.shape
        batch, size = self._batch, tokens.size
        batch.n_tokens = size
        as_array = np.ctypeslib.as_array
        as_array(batch.token, (size,))[:] = tokens.ravel()
        as_array(batch.pos, (size,))[:] = np.tile(np.arange(first, first + count), seqs)
        as_array(batch.n_seq_id, (size,))[:] = 1
        as_array(batch.logits, (size,))[:] = np.tile(np.arange(count) == count - 1, seqs)
        for i, seq in enumerate(np.repeat(np.arange(seqs), count).tolist()):
            batch.seq_id[i][0] = seq
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = llama_cpp.llama_get_logits(self._context)
        return as_array(logits, (seqs, self._vocab_size)).argmax(1)


if __name__ == "__main__":
    serve(LlamaCpp())
