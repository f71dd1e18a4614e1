"""Structured output: which tokens a grammar allows, for all sequences that follow one.

Grammars are compiled by llguidance, once each, after another process has tried them; a sequence has
a copy of its own that follows its tokens. The mask has a bit per token and is made on the host.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvserve.config import ModelConfig
from kvserve.engine.device.pages import resident_bytes, trim_memory
from kvserve.engine.device.transfer import to_device
from kvserve.engine.messages import EngineInfo, NewSequence
from kvserve.engine.sampling.grammar_backends import (
    BackendSource,
    Compile,
    Matcher,
    compile_and_try,
    is_backends,
    load_backend,
    refused,
)
from kvserve.engine.sampling.grammar_trial import GrammarTrial
from kvserve.log import RequestError, logger
from kvserve.sampling_params import StructuredOutput

_CACHED_BYTES = 32 * 2**20
_TIDY_EVERY = 64


class SequenceGrammar:
    """One sequence's place in its grammar.

    ``thinking`` are the tokens that begin and end reasoning. The grammar applies from the token
    behind the end on (``None``: from the first one), until one of ``stop_token_ids`` is sampled.
    With a beginning there is reasoning only if the first token is that.
    """

    def __init__(
        self,
        matcher: Matcher,
        thinking: tuple[int | None, int | None],
        stop_token_ids: Sequence[int],
        field: str = "structured_outputs",
    ) -> None:
        self._matcher = matcher
        self._begins, self._ends = thinking
        self._after = None if self._begins is not None else self._ends
        self._stop_token_ids = stop_token_ids
        self._field = field
        self._over = False
        self.failure: RequestError | None = None
        """The error, if the grammar has failed."""

    @staticmethod
    def allowed(grammars: Sequence[tuple[int, SequenceGrammar]], logits: Tensor) -> TokenMasks:
        """What G grammars, each with the place of its row in ``logits [S, V]``, allow next."""
        bits = np.full((len(grammars), -(-logits.shape[1] // 32)), -1, np.int32)
        for row, (_, grammar) in zip(bits, grammars, strict=True):
            grammar.fill(row)
        places = to_device([place for place, _ in grammars], logits.device)
        return TokenMasks(places, to_device(bits.view(np.uint8), logits.device, torch.uint8))

    def fill(self, mask: np.ndarray[Any, Any]) -> None:
        if self._after is not None or self._over:
            return
        try:
            self._matcher.fill(mask)
        except BaseException as error:
            self._fail(error)
            mask[:] = -1  # what is sampled now will not be sent
        if self._begins is not None and self._begins < 32 * len(mask):
            mask.view(np.uint32)[self._begins // 32] |= np.uint32(1 << self._begins % 32)

    def accept(self, token_id: int) -> None:
        begins, self._begins = self._begins, None
        if token_id == begins:
            self._after = self._ends
        elif self._after is not None:
            self._after = None if token_id == self._after else self._after
        elif not self._over:
            try:
                accepted = self._matcher.accept(token_id)
            except BaseException as error:
                self._fail(error)
                return
            self._over = not accepted or token_id in self._stop_token_ids
            if not accepted:
                self._fail(ValueError(f"it refused the token {token_id} that it had allowed"))

    def _fail(self, error: BaseException) -> None:
        """Record the failure, which ends the sequence: its text could no longer match.

        ``error`` may be a panic of the backend, which is no ``Exception``.
        """
        if not is_backends(error):
            raise error
        logger.error("a grammar failed: %s", error)
        self._over = True
        self.failure = RequestError(
            "the grammar failed while it was followed; it may be too complex",
            param=self._field,
            code="invalid_grammar",
        )


class GrammarCompiler:
    """Compiles grammars, each text once; the tokenizer is read for the first one.

    The most recently used grammars are kept, up to ``_CACHED_BYTES`` in all.
    """

    def __init__(self, model: ModelConfig, info: EngineInfo) -> None:
        self._source = BackendSource(
            model.tokenizer or info.model_path,
            model.trust_remote_code,
            info.vocab_size,
            list(info.eos_token_ids),
        )
        self._has_tokenizer = not model.skip_tokenizer_init and bool(info.eos_token_ids)
        self._trial = GrammarTrial(self._source)
        self._make: Compile | None = None
        self._compiled: OrderedDict[tuple[str, str], tuple[Matcher, int]] = OrderedDict()
        self._ended = 0
        """Sequences with grammars that have ended since memory was last given back."""

    def compile(self, wanted: StructuredOutput) -> Matcher:
        """A matcher at the grammar's start; ``RequestError`` if the backend refuses the grammar."""
        key = wanted.kind, wanted.value
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return self._compiled[key][0].copy()
        if not self._has_tokenizer:
            raise RequestError(
                f"{wanted.field} needs a tokenizer with an end-of-sequence token",
                param=wanted.field,
            )
        self._trial.check(wanted)
        if self._make is None:
            self._make = load_backend(self._source)
        before, refusal = resident_bytes(), None
        try:
            first = compile_and_try(self._make, wanted, self._source.words)
        except BaseException as error:
            if not is_backends(error):
                raise
            refusal = refused(wanted, str(error))
        if refusal is not None:
            # By now the error's frames are gone, which held what the library had built: 80 MiB now
            # and then.
            if resident_bytes() - before > _CACHED_BYTES:
                trim_memory()
            raise refusal
        # Memory that other threads take meanwhile counts too, so the cache is never larger.
        weight = max(resident_bytes() - before, len(wanted.value))
        if weight > _CACHED_BYTES // 4:
            return first
        self._compiled[key] = first, weight
        while sum(weight for _, weight in self._compiled.values()) > _CACHED_BYTES:
            self._compiled.popitem(last=False)
        return first.copy()

    def follow(self, new: NewSequence, matcher: Matcher | None) -> SequenceGrammar:
        """The place of a new sequence in its grammar, of which ``matcher`` is the start if it is
        compiled already; ``RequestError`` as ``compile``."""
        wanted, thinking = new.structured_output, (new.thinking_start, new.thinking_end)
        assert wanted is not None
        started = matcher or self.compile(wanted)
        return SequenceGrammar(started, thinking, new.stop_token_ids, wanted.field)

    def count_ended(self) -> None:
        """Count an ended sequence that had a grammar; every ``_TIDY_EVERY``, give memory back."""
        self._ended += 1
        if self._ended >= _TIDY_EVERY:
            self.tidy()

    def tidy(self) -> None:
        """Give the memory of ended sequences' grammars back to the system."""
        if self._ended:
            self._ended = 0
            trim_memory()

    def close(self) -> None:
        """End the process that tries grammars."""
        self._trial.close()


class TokenMasks(NamedTuple):
    """``bits`` uint8 [G, >= V / 8], on the device: the tokens of the rows ``places [G]``.

    They are unpacked there, for these rows alone: as booleans for 256 rows of 128k tokens they
    take the host 34 ms to make.
    """

    places: Tensor
    bits: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        """A copy of ``logits [S, V]`` with -inf for what the masks do not allow."""
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        allowed = (self.bits[..., None] >> shifts & 1).flatten(1)[:, : logits.shape[1]].bool()
        own = logits.index_select(0, self.places).masked_fill(~allowed, -torch.inf)
        return logits.index_copy(0, self.places, own)
