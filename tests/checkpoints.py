"""Random checkpoints written by transformers, and its greedy output to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 128
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-mha-tied": (
        LlamaConfig,
        LlamaForCausalLM,
        {"num_key_value_heads": 8, "tie_word_embeddings": True},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}


def write_checkpoint(kind: str, directory: Path, **changes: Any) -> Path:
    """Save a float32 model whose logits differ enough for greedy decoding to be stable."""
    config_class, model_class, extra = _KINDS[kind]
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config_class(**{**_SHAPE, **extra, **changes}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.3)
        else:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(directory)
    return directory


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@dataclass(frozen=True)
class Generated:
    """What transformers makes of a prompt: new tokens, and the logits [n, V] they came from."""

    token_ids: list[int]
    logits: Tensor


def generate(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> list[Generated]:
    """Greedy decoding by transformers, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=attention
    ).eval()
    out = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        # Dynamic RoPE remembers the longest sequence it has seen: each prompt gets a new one.
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        done = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = done.sequences[0, len(prompt) :].tolist()
        out.append(Generated(new, torch.cat(done.logits)))
    return out


def greedy(directory: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """The tokens alone, in float32."""
    return [done.token_ids for done in generate(directory, prompts, tokens)]


def write_tokenizer(directory: Path) -> Path:
    """A byte-level tokenizer with 3 specials and a chat template, for a 259-token vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "</s>", "<user>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", extra_special_tokens=["<user>"]
    )
    tokenizer.chat_template = (
        "<s>{% for m in messages %}<user>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}</s>{% endif %}"
    )
    tokenizer.save_pretrained(directory)
    return directory
