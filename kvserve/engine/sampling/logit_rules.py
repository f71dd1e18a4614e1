"""Penalties, biases and bans: rules that change the logits of some rows before sampling.

Only rows with rules have a slot here, and slots are allocated as needed: counts over a vocabulary
of 128 k tokens are half a megabyte a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvserve.engine.device.transfer import to_device
from kvserve.engine.messages import NewSequence
from kvserve.log import RequestError
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import NewRequest


@dataclass(frozen=True, slots=True)
class RowRules:
    """The rules of a request, which its branches share.

    ``allowed`` empty allows every token. ``words`` are token ids [W, L], aligned at their ends,
    with -1 in front.
    """

    penalties: tuple[float, float, float]
    """Presence, frequency and repetition."""
    biased: IntArray
    bias: np.ndarray[Any, Any]
    allowed: IntArray
    words: IntArray

    @classmethod
    def of(cls, new: NewSequence) -> RowRules:
        """Those of a request that ``has_rules``; ``RequestError`` if they leave no token."""
        banned = {word[0] for word in new.bad_words if len(word) == 1}
        banned |= {*new.stop_token_ids} if new.min_tokens else set()
        if new.allowed_token_ids and banned.issuperset(new.allowed_token_ids):
            said = "allowed_token_ids: bad_words or min_tokens leave none of them"
            raise RequestError(said, param="allowed_token_ids")
        longest = max(map(len, new.bad_words), default=1)
        return cls(
            (new.presence_penalty, new.frequency_penalty, new.repetition_penalty),
            np.fromiter(new.logit_bias.keys(), np.int32),
            np.fromiter(new.logit_bias.values(), np.float32),
            np.array(new.allowed_token_ids, np.int32),
            np.array([[-1] * (longest - len(w)) + w for w in new.bad_words], np.int32).reshape(
                -1, longest
            ),
        )


class LogitRules:
    """The rules of all rows, applied to a batch at once.

    As in vLLM, the repetition penalty counts prompt and output, the other penalties and bad words
    look at the output alone.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._slot: IntArray = np.full(max_rows, -1, np.int32)
        self._free: list[int] = []
        self._settings = torch.zeros(0, 3, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._bias = torch.zeros(0, vocab_size, device=device)
        # Bad words, aligned at their ends; -1 in front of a word matches anything.
        self._words = torch.zeros(0, 1, 1, dtype=torch.int64, device=device)
        self._history = torch.zeros(0, 0, dtype=torch.int64, device=device)

    def set_row(self, seq: NewRequest, rules: RowRules | None) -> None:
        """Set the rules of a newly admitted sequence; its output so far counts."""
        row = seq.row
        if rules is None:
            if self._slot[row] >= 0:
                self._free.append(int(self._slot[row]))
                self._slot[row] = -1
            return
        if self._slot[row] < 0:
            self._slot[row] = self._take_slot()
        slot, output = int(self._slot[row]), seq.token_ids[seq.num_prompt_tokens :]
        self._settings[slot] = self._on_device(rules.penalties, torch.float32)
        counts = np.bincount(output, minlength=self._vocab_size)
        self._counts[slot] = self._on_device(counts, torch.int32)
        self._in_prompt[slot] = False
        prompt = np.unique(seq.token_ids[: seq.num_prompt_tokens])
        self._in_prompt[slot].index_fill_(0, self._on_device(prompt), True)
        self._bias[slot].fill_(-torch.inf if len(rules.allowed) else 0.0)
        if len(rules.allowed):
            self._bias[slot].index_fill_(0, self._on_device(rules.allowed), 0.0)
        if len(rules.biased):
            added = self._on_device(rules.bias, torch.float32)
            self._bias[slot].index_add_(0, self._on_device(rules.biased), added)
        self._set_words(slot, rules.words, output)

    def move_rows(self, to: IntArray, source: IntArray) -> None:
        self._slot[to] = self._slot[source]

    def apply(self, logits: Tensor, at: IntArray) -> Tensor:
        """Logits [S, V] of rows ``at`` under their rules, as a new tensor."""
        picked, slots = self._active(at)
        x = logits[picked]
        presence, frequency, repetition = self._settings[slots][:, :, None].unbind(1)
        counts = self._counts[slots]
        made = counts > 0
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(made | self._in_prompt[slots], repeated, x)
        x = x - frequency * counts - presence * made + self._bias[slots]
        words, history = self._words[slots], self._history[slots]
        begun, last = words[..., :-1], words[..., -1]
        said = ((begun < 0) | (begun == history[:, None])).all(-1) & (last >= 0)
        x = x.scatter_add(1, last.clamp(min=0), torch.where(said, -torch.inf, 0.0))
        return logits.index_copy(0, picked, x)

    def observe(self, tokens: Tensor, at: IntArray) -> None:
        """Count the tokens [S] that rows ``at`` got."""
        picked, slots = self._active(at)
        got = tokens[picked]
        self._counts[slots, got] += 1
        if self._history.shape[1]:
            shifted = torch.cat([self._history[slots, 1:], got[:, None]], dim=1)
            self._history[slots] = shifted

    def _active(self, at: IntArray) -> tuple[Tensor, Tensor]:
        """Places in ``at`` that have rules, and their slots."""
        slots = self._slot[at]
        places = np.flatnonzero(slots >= 0)
        return self._on_device(places), self._on_device(slots[places])

    def _on_device(self, array: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return to_device(array, self._settings.device, dtype)

    def _take_slot(self) -> int:
        if not self._free:
            size = len(self._settings)
            more = max(size, 2)
            self._settings = _with_rows(self._settings, more)
            self._counts = _with_rows(self._counts, more)
            self._in_prompt = _with_rows(self._in_prompt, more)
            self._bias = _with_rows(self._bias, more)
            self._words = _with_rows(self._words, more)
            self._history = _with_rows(self._history, more)
            self._free = list(range(size, size + more))
        return self._free.pop()

    def _set_words(self, slot: int, words: IntArray, output: IntArray) -> None:
        count, length = self._words.shape[1:]
        wider, longer = max(len(words) - count, 0), max(words.shape[1] - length, 0)
        self._words = F.pad(self._words, (longer, 0, 0, wider), value=-1)
        self._history = F.pad(self._history, (longer, 0), value=-1)
        self._words[slot] = -1
        if len(words):
            self._words[slot, : len(words), -words.shape[1] :] = self._on_device(words)
        kept = self._history.shape[1]
        self._history[slot] = -1
        if kept and len(output):
            tail = self._on_device(output[-kept:])
            self._history[slot, -len(tail) :] = tail


def _with_rows(tensor: Tensor, more: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])
