"""Random checkpoints written by transformers, and its greedy output to compare with."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma4ForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
)

from bench.harness.setup.checkpoint import random_statistics
from kvserve.config import ModelConfig
from kvserve.engine.compression.query_statistics import FILE
from kvserve.engine.models.hub import read_config
from kvserve.engine.models.implementation import choose_spec
from kvserve.engine.models.spec import ModelSpec, parse_spec

VOCAB = 128
_AS_LLAMA = "as_llama"
"""Beside an InternLM2 checkpoint, which transformers does not know: the Llama it was made of."""
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
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_STATE_AND_ALL = ["linear_attention", "full_attention"]
_TWO_OF_THREE = ["sliding_attention", "full_attention", "sliding_attention"]
_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    # Heads of 16 numbers, the fewest that the kernels know: on a GPU these engines run on them.
    "llama": (LlamaForCausalLM, {"head_dim": 16}),
    "llama-mha-tied": (LlamaForCausalLM, {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, {"sliding_window": None, "head_dim": 16}),
    "internlm2": (
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "granite": (
        GraniteForCausalLM,
        {
            **{"embedding_multiplier": 2.0, "attention_multiplier": 0.2},
            **{"residual_multiplier": 0.5, "logits_scaling": 0.5},
        },
    ),
    # Layers with windows beside layers without: every second one, and two of three.
    "gpt-oss": (
        GptOssForCausalLM,
        {
            **{"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 20, "pad_token_id": 2},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _PLAIN},
        },
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        {
            **{"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 12},
            **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "pad_token_id": 2},
        },
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        {
            **{"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 20, "pad_token_id": 2},
            **{"query_pre_attn_scalar": 16, "layer_types": [*_TWO_OF_THREE, *_TWO_OF_THREE[:2]]},
        },
    ),
    # Larger heads in layers without windows, and the last two layers read what others hold.
    "gemma4": (
        Gemma4ForCausalLM,
        {
            **{"num_hidden_layers": 7, "head_dim": 16, "global_head_dim": 32, "sliding_window": 20},
            **{"layer_types": [*_TWO_OF_THREE[::2], *_TWO_OF_THREE[1:] * 2, _TWO_OF_THREE[1]]},
            **{"num_kv_shared_layers": 2, "pad_token_id": 2, "hidden_size_per_layer_input": 16},
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "mixtral": (MixtralForCausalLM, {"num_local_experts": 5}),
    "olmo2": (Olmo2ForCausalLM, {}),
    "phi3": (Phi3ForCausalLM, {"pad_token_id": 2}),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        {
            **{"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [1]},
        },
    ),
    "smollm3": (SmolLM3ForCausalLM, {"no_rope_layer_interval": 2, "pad_token_id": 2}),
    "qwen2": (Qwen2ForCausalLM, {}),
    # States in two of four layers.
    "qwen3_5": (
        Qwen3_5ForCausalLM,
        {
            **{"num_hidden_layers": 4, "head_dim": 16, "pad_token_id": 2},
            **{"layer_types": [*_STATE_AND_ALL, *_STATE_AND_ALL]},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        },
    ),
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 16}),
}


def architecture_of(kind: str) -> str:
    """The architecture that such a checkpoint names."""
    name: str = _KINDS[kind][0].__name__
    return "InternLM2ForCausalLM" if kind == "internlm2" else name


def read_spec(path: Path) -> ModelSpec:
    """Of a directory with config.json, or of a GGUF file."""
    return parse_spec(*read_config(path))


def write_checkpoint(kind: str, directory: Path, **changes: Any) -> Path:
    """Save a float32 model whose logits differ enough for greedy decoding to be stable."""
    model_class, extra = _KINDS[kind]
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(model_class.config_class(**{**_SHAPE, **extra, **changes}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.3)
        else:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(directory)
    if kind == "internlm2":
        shutil.copytree(directory, directory / _AS_LLAMA)
        _rewrite_as_internlm2(directory, model.config)
    spec = choose_spec(directory, ModelConfig())
    random_statistics(spec, seed=1).save(directory / FILE)  # for policy triattention
    return directory


def _rewrite_as_internlm2(directory: Path, llama: Any) -> None:
    """A Llama checkpoint in InternLM2's names and layout, its config as such files are written."""
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    kv_heads, head_dim = llama.num_key_value_heads, llama.head_dim
    with edited_tensors(directory) as tensors:
        for layer in range(llama.num_hidden_layers):
            attention = f"model.layers.{layer}.self_attn."
            q, k, v = (tensors.pop(f"{attention}{part}_proj.weight") for part in "qkv")
            by_kv_head = [part.view(kv_heads, -1, head_dim, part.shape[1]) for part in (q, k, v)]
            fused = torch.cat(by_kv_head, dim=1).flatten(0, 2)
            tensors[f"model.layers.{layer}.attention.wqkv.weight"] = fused
        for llama_name, name in names.items():
            for key in [key for key in tensors if llama_name in key]:
                tensors[key.replace(llama_name, name)] = tensors.pop(key)
    rope = llama.rope_parameters
    changes: dict[str, Any] = {
        "architectures": ["InternLM2ForCausalLM"],
        "model_type": "internlm2",
        "bias": False,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": rope["rope_type"], "factor": rope["factor"]},
    }
    left_out = "rope_parameters", "attention_bias", "mlp_bias", "head_dim"
    edit_config(directory, **changes, **dict.fromkeys(left_out))


def edit_config(directory: Path, **changes: Any) -> None:
    """Set fields of a checkpoint's config.json; ``None`` takes one out."""
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


@contextmanager
def edited_tensors(directory: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a checkpoint in one file; what is done to them is written back."""
    tensors = load_file(directory / "model.safetensors")
    yield tensors
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@dataclass(frozen=True)
class Generated:
    """What transformers makes of a prompt: new tokens, and the logits [n, V] they came from."""

    token_ids: list[int]
    logits: Tensor


def generate(directory: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[Generated]:
    """Greedy decoding by transformers in float32, one prompt at a time."""
    if (directory / _AS_LLAMA).exists():
        directory = directory / _AS_LLAMA
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
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
    """The tokens alone, in float32; of the same files they are computed once."""
    files = tuple(sorted((path, path.stat().st_mtime_ns) for path in directory.rglob("*")))
    return [list(row) for row in _greedy(directory, files, tuple(map(tuple, prompts)), tokens)]


@functools.cache
def _greedy(
    directory: Path,
    files: tuple[tuple[Path, int], ...],
    prompts: tuple[tuple[int, ...], ...],
    tokens: int,
) -> list[list[int]]:
    return [done.token_ids for done in generate(directory, prompts, tokens)]


def write_tokenizer(
    directory: Path, marks: Sequence[str] = (), plain_marks: Sequence[str] = ()
) -> Path:
    """A byte-level tokenizer with 3 specials and a chat template, for a 259-token vocabulary.

    ``marks`` are further special tokens, ``plain_marks`` tokens that texts show.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "</s>", "<user>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["<user>", *marks],
    )
    tokenizer.add_tokens(list(plain_marks))
    tokenizer.chat_template = (
        "<s>{% for m in messages %}<user>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}</s>{% endif %}"
    )
    tokenizer.save_pretrained(directory)
    return directory


def write_byte_fallback_tokenizer(directory: Path) -> Path:
    """A tokenizer as Llama 2, Mistral and InternLM2 have it: some words, and bytes for the rest."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["\u2581", "\u2581one", "\u2581two", *"abc.", "\u4f60"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *bytes_, *words])}
    merges = [("\u2581", "one"), ("\u2581", "two")]
    backend = Tokenizer(
        models.BPE(vocab | {"one": 500, "two": 501}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    return directory
