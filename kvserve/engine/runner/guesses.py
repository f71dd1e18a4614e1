"""Steps that verify guesses, on the device: what of their chunks counts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.device.transfer import to_device
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.drafts import Drafts


def keep_states(model: Any, drafts: Drafts) -> None:
    """Before a forward: a model whose layers keep states has to remember those of its rows."""
    model.guessing = len(drafts.lengths)


def confirm(
    model: Any, cache: KVCache, batch: InputBatch, drafts: Drafts, rows: IntArray, token_ids: Tensor
) -> None:
    """Take the tokens ``[S]`` that were sampled for ``rows [S]``: chunks of ``drafts``, then one
    token of each other row. Lengths no longer count what was guessed wrong, nor do states."""
    on_device = partial(to_device, device=batch.device)
    n, guessed = len(drafts.lengths), len(drafts.token_ids)
    longest = int(drafts.lengths.max())
    places = drafts.starts[:, None] + np.arange(longest)
    right = token_ids[:guessed] == on_device(drafts.guesses)
    # Behind a chunk's end nothing is right: its own last place says so first.
    right = right[on_device(np.minimum(places, guessed - 1))]
    counts = right.long().cumprod(dim=1).sum(dim=1)
    starts, lengths = on_device(drafts.starts), on_device(drafts.lengths)
    wrong = lengths - 1 - counts
    batch.kv_lens[:, :n] -= wrong[:, None]
    batch.num_computed[:n] -= wrong
    batch.last_token[:n] = token_ids[starts + counts]
    batch.last_token[on_device(rows[guessed:])] = token_ids[guessed:]
    if model.spec.states:
        model.take_back(cache, starts, lengths, counts + 1, longest)
