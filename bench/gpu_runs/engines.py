"""Small engines for bench/gpu_check.py, and transformers' results from the same weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvserve.config import EngineConfig
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.log import logger
from kvserve.sampling_params import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_SIZES = (2, 8)
EAGER: dict[str, Any] = {"enforce_eager": True, "async_scheduling": False}
GRAPHS: dict[str, Any] = {"cudagraph_capture_sizes": _SIZES, "async_scheduling": False}
OVERLAP: dict[str, Any] = {"enforce_eager": True, "async_scheduling": True}
BOTH: dict[str, Any] = {"cudagraph_capture_sizes": _SIZES, "async_scheduling": True}


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        generator = torch.Generator().manual_seed(len(lengths))
        return [
            torch.randint(2, self.vocabulary, (length,), generator=generator).tolist()
            for length in lengths
        ]


_DELTA: dict[str, Any] = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}


def write_model(directory: Path, shape: Shape, dtype: torch.dtype, kind: str = "llama") -> Path:
    """A random Llama, or a ``qwen3_5_text`` of two layers, as transformers writes it. Its logits
    are so far apart that greedy tokens do not change if additions are done in another order."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        **(_DELTA if kind == "qwen3_5_text" else {}),
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = AutoModelForCausalLM.from_config(config)
    model.to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 2.4 * shape.hidden**-0.5)
    model.save_pretrained(directory)
    return directory


def small_engine(directory: Path, policy: dict[str, Any], dtype: str, **settings: Any) -> LLMEngine:
    """A small engine with the layout that the policy needs and no prefix cache."""
    fields = {name: value for name, value in policy.items() if name != "name"}
    given: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "policy": policy["name"],
        "policy_args": fields,
        "dtype": dtype,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 512,
        "num_gpu_blocks_override": 2048,
        "enable_prefix_caching": False,
    }
    return LLMEngine(EngineConfig.from_flat(**given | settings))


def generate(engine: LLMEngine, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """``tokens`` greedy tokens for each prompt; ``RuntimeError`` if a step of the engine failed."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    answers: dict[str, list[int]] = {}
    with EngineErrors() as errors:
        while engine.has_unfinished_requests:
            for output in engine.step():
                answers[output.request_id] = output.outputs[0].token_ids
    if errors.newest is not None:
        raise RuntimeError(errors.newest)
    return [answers[str(i)] for i in range(len(prompts))]


class EngineErrors(logging.Handler):
    """``with EngineErrors() as errors``: ``errors.newest`` is the newest error that the engine
    logged meanwhile, with its traceback. The engine itself survives a failed step."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.newest: str | None = None

    def __enter__(self) -> EngineErrors:
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.newest = logging.Formatter().format(record)


def engine_logits(engine: LLMEngine, prompt: list[int], forced: list[int]) -> Tensor:
    """Logits after the prompt and each forced token: float32 [1 + len(forced), vocabulary]."""
    runner, seen = engine.core.runner, []
    logits = runner.model.logits
    tokens = torch.tensor([*forced, 0], device=DEVICE)

    def record(hidden: Tensor) -> Tensor:
        found = logits(hidden)
        seen.append(found[:1].clone())
        return found

    runner.model.logits = record  # type: ignore[method-assign]
    runner.force = lambda positions: tokens[positions - len(prompt)]
    generate(engine, [prompt], len(forced) + 1)
    return torch.cat(seen).float()


def reference_logits(
    directory: Path, prompt: list[int], forced: list[int], dtype: torch.dtype
) -> Tensor:
    """The same logits from transformers in ``dtype``, in one forward."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.to(DEVICE).eval()
    with torch.inference_mode():
        found = model(torch.tensor([[*prompt, *forced]], device=DEVICE)).logits[0]
    return found[len(prompt) - 1 :].float()


def reference_tokens(
    directory: Path, prompts: Sequence[Sequence[int]], tokens: int
) -> list[list[int]]:
    """Greedy float32 decoding by transformers, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.to(DEVICE).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=DEVICE)
        done = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(done[0, len(prompt) :].tolist())
    return answers


def spoil_free_memory() -> None:
    """Fill free memory of this GPU with bytes of 255 (-1 as integers, nan as floats), including the
    unused parts of torch's segments."""
    torch.cuda.empty_cache()
    held = []

    def hold(size: int) -> None:
        held.append(torch.full((size,), 255, dtype=torch.uint8, device="cuda"))

    while torch.cuda.mem_get_info()[0] > 2 << 30:
        hold(1 << 30)
    # Unused parts of segments: allocate smaller and smaller sizes, each until torch takes a new
    # segment.
    for size in (1 << 26, 1 << 21, 1 << 16, 1 << 9):
        before = torch.cuda.memory_reserved()
        while torch.cuda.memory_reserved() == before:
            hold(size)
    torch.cuda.synchronize()
    held.clear()
    torch.cuda.empty_cache()
