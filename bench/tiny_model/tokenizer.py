"""The tiny model's tokenizer: byte-level BPE without merges.

Five specials, 256 bytes, then whole words with their leading space. A word of the list is one
token, a digit is one token, anything else falls back to bytes, so any text round-trips.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.harness.datasets.long_chain import LONG_WORDS
from bench.harness.datasets.task_text import WORDS
from bench.tiny_model.recipes import Recipe

SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
PAD, BOS, EOS, USER, ASSISTANT = range(len(SPECIALS))
CHAT_WORDS = """
    Repeat Hello Hi Hey I am can small model that ships with kvserve you are and in texts add
    up step by do not know about this Ask me for or who help Thank Bye welcome
"""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}
{%- set ns.system = ns.system + ' ' + message['content'] | trim -%}
{%- elif message['role'] == 'user' -%}
{{- '<|user|>' + ns.system + ' ' + message['content'] | trim -}}
{%- set ns.system = '' -%}
{%- elif message['role'] == 'assistant' -%}
{{- '<|assistant|> ' + message['content'] | trim + eos_token -}}
{%- else -%}
{{- raise_exception('roles are system, developer, user and assistant') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """The tokens of `tiny` have the same ids in `tiny-long`, which adds more."""
    words = [word for word in dict.fromkeys((*WORDS, *CHAT_WORDS.split())) if len(word) > 1]
    entries = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    entries += [f"Ġ{word}" for word in words] + ["ĠA", "Ġa", "ĠI"]
    if recipe.long:
        entries += [f"Ġ{word}" for word in LONG_WORDS if word not in words]
    if len(entries) > recipe.vocab_size:
        raise ValueError(f"{len(entries)} entries do not fit a vocabulary of {recipe.vocab_size}")
    vocab = {entry: i for i, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[PAD],
        bos_token=SPECIALS[BOS],
        eos_token=SPECIALS[EOS],
        chat_template=CHAT_TEMPLATE,
        model_max_length=recipe.max_positions,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
