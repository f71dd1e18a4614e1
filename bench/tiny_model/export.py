"""Write a training checkpoint as a Hugging Face directory.

`python -m bench.tiny_model.export /tmp/tiny/checkpoint.pt kvserve/data/tiny`
"""

import argparse
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from bench.tiny_model.model import ModelConfig, TinyLlama
from bench.tiny_model.recipes import RECIPES
from bench.tiny_model.tokenizer import BOS, EOS, PAD, USER, build_tokenizer


def llama_config(c: ModelConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_positions,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


@torch.no_grad()
def export(checkpoint: Path, directory: Path) -> None:
    saved = torch.load(checkpoint, map_location="cpu")
    config = ModelConfig(**saved["config"])
    source = TinyLlama(config)
    source.load_state_dict(saved["model"])
    target = LlamaForCausalLM(llama_config(config)).eval()
    missing, unexpected = target.load_state_dict(source.state_dict(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"parameter names differ: {missing} {unexpected}")
    target.tie_weights()
    ids = torch.arange(64)[None]
    difference = (source(ids, ids) - target(ids).logits).abs().max().item()
    if difference > 1e-3:
        raise RuntimeError(f"logits differ from transformers' by {difference}")
    target.generation_config = GenerationConfig(
        do_sample=False, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=[EOS, USER]
    )
    target.to(torch.bfloat16).save_pretrained(directory)
    build_tokenizer(RECIPES[saved["recipe"]]).save_pretrained(directory, save_jinja_files=False)
    for path in directory.iterdir():
        path.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    export(args.checkpoint, args.directory)


if __name__ == "__main__":
    main()
