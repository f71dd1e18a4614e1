"""A checkpoint that says what it is told to, at any temperature: for whole loops of agents.

Its next token depends on the last one alone: attention and MLP add nothing, and the head's row of a
token is the embedding of its predecessor in the script. Texts are cut into tokens of their own, so
that each has one successor. The chat template counts the assistant's turns, and ends the prompt
with a token for each: what the model says in a turn is that turn's text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_WIDTH = 128
_PIECE = 6
"""The fewest characters of a token of the script."""
_CONTEXT = 131_072
_END = "<|end|>"
_COUNT = "(messages | selectattr('role', 'equalto', 'assistant') | list | length)"


def make_scripted(folder: Path, turns: Sequence[str], template: str, language: str) -> Path:
    """Write a checkpoint whose answers are ``turns``, one after the other, and the last one again.

    ``template`` ends where the assistant's turn begins; ``language`` is any text, by which the
    tokenizer gets its words.
    """
    starts = [f"<|turn{at}|>" for at in range(len(turns))]
    mark = f"{{{{ '<|turn%d|>' % [{_COUNT}, {len(turns) - 1}] | min }}}}"
    pieces = list(_cut(turns))
    base = _trained(language)
    base.add_special_tokens([AddedToken(text, special=True) for text in (_END, *starts)])
    base.add_tokens([AddedToken(piece, normalized=False) for turn in pieces for piece in turn])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=base, eos_token=_END, clean_up_tokenization_spaces=False
    )
    hf.chat_template = f"{template}{{%- if add_generation_prompt %}}{mark}{{% endif %}}"
    hf.save_pretrained(folder)
    size = base.get_vocab_size()
    successors: dict[int, int] = {}
    for start, turn in zip(starts, pieces, strict=True):
        ids: Any = [base.token_to_id(text) for text in (start, *turn, _END)]
        successors |= dict(pairwise(ids))
    _model(size, successors, hf.eos_token_id).save_pretrained(folder)
    return folder


def _cut(turns: Sequence[str]) -> Iterator[list[str]]:
    """Each turn in pieces, of which no two are the same."""
    seen = set[str]()
    for turn in turns:
        pieces, start = list[str](), 0
        while start < len(turn):
            end = min(start + _PIECE, len(turn))
            while turn[start:end] in seen and end < len(turn):
                end += 1
            piece = turn[start:end]
            if piece in seen:  # the end of a turn: it belongs to the piece before it
                piece = pieces.pop() + piece
                seen.discard(piece)
            pieces.append(piece)
            seen.add(piece)
            start = end
        yield pieces


def _trained(language: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=4000, initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator([language], trainer)
    return tokenizer


def _model(size: int, successors: dict[int, int], end: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=_CONTEXT,
        eos_token_id=end,
        bos_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    layer, rows = model.model.layers[0], model.model.embed_tokens.weight
    with torch.no_grad():
        rows.normal_()
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token, successor in successors.items():
            model.lm_head.weight[successor] += rows[token]
    return model


def xml_call(name: str, **arguments: Any) -> str:
    """A call as Qwen3-Coder writes it."""
    written = (v if isinstance(v, str) else json.dumps(v) for v in arguments.values())
    pairs = zip(arguments, written, strict=True)
    body = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in pairs)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"
