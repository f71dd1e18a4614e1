"""The checkpoint's tokenizer and chat template, through transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from kvserve.engine.models.hub import SHIPPED_MODELS, SOURCES, read_json
from kvserve.log import ConfigError, RequestError, logger

if TYPE_CHECKING:
    from kvserve.engine.frontend.chat_template import Forms

_TEMPLATES_KEPT = 16
_SHORT = 1000
"""Characters, or tokens, up to which a text is not worth a batch."""
_TEXTS = (
    *("word", " word", "  two  words ", "\n\n  line\r\n\tof code();", "1234567 3.14 1,000"),
    *(
        "don't I'LL HTTPServer snake_case",
        "\u00e9 e\u0301 \u00df \ufb01 \uff21",
        "\u4f60\u597d\u4e16\u754c",
    ),
    *("\U0001f469\u200d\U0001f680 \u2581x", "<s> </s> [INST]", "a\u00a0b\u200bc \x07"),
)
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Text to ids and back. ``hf`` is the tokenizer of transformers, ``backend`` the fast one of it
    that streams are decoded with."""

    def __init__(self, path: str, *, trust_remote_code: bool = False) -> None:
        if (source := SOURCES.get(Path(path).suffix)) is not None:
            self.hf = source.tokenizer(path)
        else:
            self.hf = _of_directory(Path(path), trust_remote_code)
        if not self.hf.chat_template and (beside := Path(path, "chat_template.json")).exists():
            # Where models that also see once had it: their processors read this file.
            self.hf.chat_template = read_json(beside).get("chat_template")
        self.backend = self.hf.backend_tokenizer
        self.backend.no_padding()
        self.backend.no_truncation()
        self._texts: dict[int, str] = {}
        self._forms: dict[str | None, Forms] = {}

    @property
    def eos_token_id(self) -> int | None:
        return self.hf.eos_token_id

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, the most that a text can have per token."""
        return max(map(len, self.hf.get_vocab()), default=1)

    @cached_property
    def added_tokens(self) -> dict[str, tuple[int, bool]]:
        """Tokens that no text is merged into: id, and whether ``skip_special_tokens`` skips it."""
        added = self.backend.get_added_tokens_decoder().items()
        return {token.content: (token_id, token.special) for token_id, token in added}

    def describe(self) -> dict[str, Any]:
        """What remote clients need to build the same prompts."""
        return {
            "tokenizer_class": type(self.hf).__name__,
            "vocab_size": len(self.hf),
            "model_max_length": self.hf.model_max_length,
            "bos_token": self.hf.bos_token,
            "eos_token": self.hf.eos_token,
            "pad_token": self.hf.pad_token,
            "chat_template": self.hf.chat_template,
        }

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= _SHORT:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # A batch does not hold the interpreter's lock, and makes no offsets.
        [encoded] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(ids) <= _SHORT:
            text = str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        else:
            made = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
            text = str(made[0])
        if "\ufffd" in text and not self.fallback_bytes.keys().isdisjoint(ids):
            return self._decode_rows_of_bytes(ids, skip_special_tokens)
        return text

    @cached_property
    def fallback_bytes(self) -> dict[int, int]:
        """The byte that a token stands for, by its id, in tokenizers that fall back to bytes."""
        if self._decoder != "ByteFallback":
            return {}
        found = ((self.backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
        return {token_id: byte for token_id, byte in found if token_id is not None}

    @cached_property
    def plain_token(self) -> int:
        """The id of a token with a text of its own, no byte's."""
        words = range(self.backend.get_vocab_size())
        return next(i for i in words if i not in self.fallback_bytes and self.decode([i]))

    def _decode_rows_of_bytes(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """As ``decode``, where tokens of bytes make no text: tokenizers' decoder takes each row of
        them as a whole, and loses the characters in it with the bytes that are none."""
        hidden = {i for i, special in self.added_tokens.values() if special and skip_special_tokens}
        named = ((i, self.backend.id_to_token(i)) for i in ids if i not in hidden)
        known = ((i, token) for i, token in named if token is not None)
        tokens = list[str]()
        for is_byte, row in groupby(known, lambda one: one[0] in self.fallback_bytes):
            if is_byte:
                held = bytes(self.fallback_bytes[i] for i, _ in row)
                tokens.append(held.decode(errors="replace"))
            else:
                tokens += [token for _, token in row]
        return str(self.backend.decoder.decode(tokens))

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones included. A part of a character has no text: it is
        ``bytes:`` and its bytes (``bytes:\\xf0\\x9f``), as OpenAI writes it."""
        text = self._texts.get(token_id)
        if text is None:
            held = self.token_bytes(token_id)
            try:
                text = held.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in held)
            self._texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        token = self.backend.id_to_token(token_id)
        if token is None or token in self.added_tokens:
            return (token or "").encode()
        if self._decoder == "ByteLevel":
            letters = _byte_letters()
            if all(letter in letters for letter in token):
                return bytes(letters[letter] for letter in token)
        if self._decoder == "ByteFallback":
            byte = _BYTE.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Where each token's text begins in the text of all, special ones included, and its end."""
        stream, length, offsets = DecodeStream(skip_special_tokens=False), 0, [0]
        for token_id in token_ids:
            try:
                length += len(stream.step(self.backend, token_id) or "")
            except Exception:  # bytes that make no character
                stream = DecodeStream(skip_special_tokens=False)
            offsets.append(length)
        return offsets

    @cached_property
    def _decoder(self) -> str:
        """How tokens stand for bytes: a part of the decoder."""
        described = repr(self.backend.decoder)
        return next((kind for kind in ("ByteLevel", "ByteFallback") if kind in described), "")

    def forms(self, chat_template: str | None = None) -> Forms:
        """What a template wants of conversations; the tokenizer's own by default."""
        if chat_template not in self._forms:
            while len(self._forms) >= _TEMPLATES_KEPT:
                self._forms.pop(next(iter(self._forms)))

            from kvserve.engine.frontend.template_probe import find_forms

            def render(messages: Sequence[dict[str, Any]], **kwargs: Any) -> str:
                return self._render(messages, chat_template=chat_template, **kwargs)

            self._forms[chat_template] = find_forms(render)
        return self._forms[chat_template]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Messages as the prompt's text, in the form that the template wants.

        ``kwargs`` are ``add_generation_prompt``, ``continue_final_message``, ``tools`` and what
        the template knows. Raises ``RequestError`` where it refuses them.
        """
        if not self.has_chat_template and chat_template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions or --chat-template",
                param="messages",
            )
        forms = self.forms(chat_template)
        kwargs |= {"chat_template": chat_template, "tools": forms.tools(kwargs.get("tools"))}
        formed = forms.apply(messages)
        try:
            return self._render(formed, **kwargs)
        except Exception as error:  # jinja2 raises what the template's author chose
            raise RequestError(f"the chat template failed: {error}", param="messages") from error

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> list[int]:
        """``render_chat``, as ids."""
        return self.encode(self.render_chat(messages, **kwargs), add_special_tokens=False)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Any = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """As the tokenizer does, but that drops a content that is ``None``."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts: Any = render_jinja_template(
            [[dict(message) for message in messages]],
            tools,
            chat_template=self.hf.get_chat_template(chat_template, tools),
            add_generation_prompt=add_generation_prompt,
            **{**self.hf.special_tokens_map, **kwargs},
        )
        return str(texts[0][0])


def _of_directory(path: Path, trust_remote_code: bool) -> Any:
    """transformers' tokenizer, by tokenizer.json: that was published, and grammars read it, while
    transformers builds some anew by the class that tokenizer_config.json names."""
    from transformers import PreTrainedTokenizerFast

    if path in SHIPPED_MODELS.values():
        # AutoTokenizer finds the same class, and loads torch and more to find it.
        return PreTrainedTokenizerFast.from_pretrained(str(path))
    from transformers import AutoTokenizer

    described = path / "tokenizer.json"
    alone = next(path.glob("*.model"), None)
    if alone is not None and not described.exists() and not trust_remote_code:
        raise _no_description(path, f"{alone.name} alone is not read")
    try:
        hf = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        if described.exists():
            own = Backend.from_file(str(described))
            other = next((t for t in _probes(own) if not hf.is_fast or _differ(hf, own, t)), None)
            if other is not None:
                logger.warning(
                    "%s: transformers' %s cuts %r otherwise than its tokenizer.json does, which is "
                    "taken",
                    *(path, type(hf).__name__, other),
                )
                hf = PreTrainedTokenizerFast.from_pretrained(str(path))
    except Exception as error:  # any error of the file, the library or remote code
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"--tokenizer: cannot load one from {path} ({reason}); give a directory with "
            "tokenizer.json, --trust-remote-code if it brings code, or --skip-tokenizer-init"
        ) from error
    if not hf.is_fast:
        raise _no_description(path, "other forms are not read")
    return hf


def _no_description(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"--tokenizer: {path} has no tokenizer.json, and {why}; give the directory of one, such as "
        "another copy of the model has"
    )


def _probes(backend: Backend) -> list[str]:
    """Texts that show how a tokenizer cuts, with two of its tokens that are found whole."""
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    marks = [*added[:1], *added[-1:]]
    return [*_TEXTS, *(f"a{mark}b{mark} c{mark}\n {mark}" for mark in marks)]


def _differ(hf: Any, backend: Backend, text: str) -> bool:
    ids = backend.encode(text, add_special_tokens=False).ids
    built = hf.backend_tokenizer
    if built.encode(text, add_special_tokens=False).ids != ids:
        return True
    return bool(built.decode(ids) != backend.decode(ids))


def tokenize(
    tokenizer: Tokenizer | None, prompt: str | Sequence[int]
) -> tuple[str | None, list[int]]:
    """A prompt as (its text, its ids); ids pass through."""
    if not isinstance(prompt, str):
        return None, list(prompt)
    if tokenizer is None:
        raise RequestError("text needs a tokenizer; send token ids", param="prompt")
    return prompt, tokenizer.encode(prompt)


@cache
def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in the vocabularies of byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
