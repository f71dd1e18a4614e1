"""How many log-probabilities one answer may have, and all that are being made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvserve.log import RequestError
from kvserve.sampling_params import MAX_LOGPROBS, SamplingParams
from kvserve.server.state.engine_protocol import OpenRequest
from kvserve.server.state.errors import ApiError

_LEAST = 2**19
_AT_ONCE = 2
"""How many of the largest answers may be made at once. A number takes some 300 bytes."""


def prompt_numbers(params: SamplingParams, prompts: Sequence[Sequence[int]]) -> int:
    """Log-probabilities of the prompts' tokens; each choice repeats its prompt's."""
    if params.prompt_logprobs is None:
        return 0
    return sum(map(len, prompts)) * (params.prompt_logprobs + 1) * params.n


def check_logprobs(
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    context: int,
    others: Iterable[OpenRequest],
) -> None:
    """400 for an answer with too many log-probabilities, 429 while ``others`` have too many.

    One choice with a full context of tokens is never too much.
    """
    if params.logprobs is None and params.prompt_logprobs is None:
        return
    most = max(_LEAST, context * (MAX_LOGPROBS + 1))
    prompt = prompt_numbers(params, prompts)
    longest = max(context - min(map(len, prompts), default=0), 0)
    tokens = longest if params.max_tokens is None else min(params.max_tokens, longest)
    each = 0 if params.logprobs is None else params.logprobs + 1
    wanted = prompt + len(prompts) * params.n * tokens * each
    if wanted > most:
        field = "prompt_logprobs" if params.logprobs is None else "logprobs"
        raise RequestError(
            f"{field}: this asks for up to {wanted} log-probabilities, and an answer has at most "
            f"{most}; send fewer prompts at once, or lower {field}, max_tokens or n",
            param=field,
        )
    if prompt and prompt + sum(other.num_logprobs for other in others) > _AT_ONCE * most:
        raise ApiError(
            429,
            "too many log-probabilities are being computed for others; try again",
            code="busy",
            headers={"Retry-After": "1"},
        )
