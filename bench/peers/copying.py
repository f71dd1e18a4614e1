"""A text that every engine copies, for guesses to be found in: weights that walk along a cycle.

The blocks of the model add nothing, and its head answers each token with the next one of the
cycle, in any engine and number format, at the cost of random weights. A prompt is the whole cycle
from some token on, so the answer is a copy of it; with edits, of what it was before some of its
tokens were changed, as code is that is given out again with a correction.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

PROMPTS = ("random", "copy", "edit")
_FIRST = 3
_EVERY, _EDITED = 40, 4
"""Of so many tokens of a prompt so many are others than those of the answer."""


def cycle(vocab: int, length: int, seed: int) -> list[int]:
    """``length`` tokens, each of them once."""
    if length > vocab - _FIRST:
        raise SystemExit(f"--input-len {length}: a cycle of {vocab - _FIRST} tokens at most")
    ids = np.random.default_rng(seed).permutation(np.arange(_FIRST, vocab))[:length]
    return [int(token) for token in ids]


def copying_prompts(text: list[int], batch: int, *, edited: bool, seed: int) -> list[list[int]]:
    """``batch`` prompts, each from another token of the cycle ``text`` on."""
    rng, length = np.random.default_rng(seed), len(text)
    prompts = []
    for row in range(batch):
        start = row * length // batch
        prompt = np.array(text[start:] + text[:start])
        if edited:
            places = np.arange(length - 1)  # the answer follows the last token
            places = places[places % _EVERY >= _EVERY - _EDITED]
            prompt[places] = rng.choice(text, len(places))
        prompts.append([int(token) for token in prompt])
    return prompts


def let_it_walk(model: Path, text: list[int]) -> None:
    """Change the checkpoint ``model``: its answer to each token of ``text`` is the next one."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    (file,) = model.glob("*.safetensors")
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("o_proj.weight") or "down_proj" in name:
            weight.zero_()
    embedded = weights["model.embed_tokens.weight"]
    head = torch.zeros_like(embedded)
    head[[*text[1:], text[0]]] = embedded[text]
    save_file({**weights, "lm_head.weight": head}, file, metadata={"format": "pt"})
