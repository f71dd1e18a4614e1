"""The engine in this process: text in, growing request outputs out, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence

from kvserve.config import EngineConfig, ModelConfig
from kvserve.engine.core.engine_core import EngineCore
from kvserve.engine.frontend.output_processor import OutputProcessor
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.engine.messages import StepOutputs
from kvserve.engine.models.hub import LOADING, find_model
from kvserve.engine.models.implementation import choose_spec
from kvserve.engine.models.transformer import Transformer
from kvserve.log import RequestError
from kvserve.outputs import RequestOutput
from kvserve.sampling_params import SamplingParams
from kvserve.stats import EngineStats


class LLMEngine:
    """``add_request``, then ``step`` while ``has_unfinished_requests``.

    ``model``: a model that an earlier engine has loaded with the same settings.
    """

    def __init__(self, config: EngineConfig, model: Transformer | None = None) -> None:
        self.core = EngineCore(config, model)
        self.tokenizer = load_tokenizer(config.model, self.core.info.model_path)
        eos = self.core.info.eos_token_ids
        self._outputs = OutputProcessor(self.tokenizer, eos)

    @property
    def has_unfinished_requests(self) -> bool:
        return self.core.has_work

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        text: str | None = None,
    ) -> None:
        """Queue a request; raises ``RequestError`` and leaves nothing behind if it is refused.

        ``text`` is what a prompt of token ids was made of, if that is known.
        """
        _, branches = self._outputs.add(request_id, prompt, params, text)
        try:
            for new in branches.each():
                self.core.add(new)
        except RequestError:
            self.abort_request(request_id)
            raise

    def abort_request(self, request_id: str) -> None:
        """End a request and free its blocks; an unknown one is ignored."""
        self.core.abort(self._outputs.remove(request_id))

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests it changed."""
        changed, abort, _ = self._outputs.process(self.core.step())
        if abort:
            ended = StepOutputs(finished=self.core.abort(abort))
            changed += [out for out in self._outputs.process(ended)[0] if out not in changed]
        return changed

    def stats(self) -> EngineStats:
        return self.core.stats()


def load_tokenizer(config: ModelConfig, model_path: str | None = None) -> Tokenizer | None:
    """The configured tokenizer, or ``None`` under ``skip_tokenizer_init``.

    ``model_path`` is where the model is, if that is known.
    """
    if config.skip_tokenizer_init:
        return None
    code, place = config.trust_remote_code, config.download_dir
    if config.tokenizer is not None:
        named = config.tokenizer
        found = find_model(named, None, place, weights=False, code=code, flag="--tokenizer")
        model_path = str(found)
    elif model_path is None:
        where, form = (config.model, config.revision, place), config.load_format
        found = find_model(*where, load_format=form, weights=False, code=code)
        with LOADING:
            choose_spec(found, config)  # what is wrong with it is not the tokenizer's
        model_path = str(found)
    with LOADING:
        return Tokenizer(model_path, trust_remote_code=code)
