"""The checkpoint's tokenizer and chat template, through transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from kvserve.log import ConfigError, RequestError


class Tokenizer:
    """Text to ids and back. ``backend`` is the fast tokenizer that streams are decoded with."""

    def __init__(self, path: str, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        try:
            if path.endswith(".gguf"):
                from kvserve.engine.gguf.tokenizer import gguf_tokenizer

                self._hf = gguf_tokenizer(path)
            else:
                self._hf = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except ConfigError:  # of a GGUF file
            raise
        except Exception as error:  # any error of the file, the library or remote code
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"--tokenizer: cannot load one from {path} ({reason}); give a directory with "
                "tokenizer.json, --trust-remote-code if it brings code, or --skip-tokenizer-init"
            ) from error
        if not self._hf.is_fast:
            raise ConfigError(f"--tokenizer: {path} has no tokenizer.json (a fast tokenizer)")
        self.backend = self._hf.backend_tokenizer
        self._texts: dict[int, str] = {}

    @property
    def eos_token_id(self) -> int | None:
        return self._hf.eos_token_id

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, the most that a text can have per token."""
        return max(map(len, self._hf.get_vocab()), default=1)

    def describe(self) -> dict[str, Any]:
        """What remote clients need to build the same prompts."""
        return {
            "tokenizer_class": type(self._hf).__name__,
            "vocab_size": len(self._hf),
            "model_max_length": self._hf.model_max_length,
            "bos_token": self._hf.bos_token,
            "eos_token": self._hf.eos_token,
            "pad_token": self._hf.pad_token,
            "chat_template": self._hf.chat_template,
        }

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # Without transformers' warning about its own limit: the engine has one, and refuses.
        return list(self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones included."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **chat_template_kwargs: Any,
    ) -> list[int]:
        """Messages to prompt ids; raises ``RequestError`` where the template refuses them."""
        if not self.has_chat_template and chat_template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions or --chat-template",
                param="messages",
            )
        try:
            text = self._hf.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **chat_template_kwargs,
            )
        except Exception as error:  # jinja2 raises what the template's author chose
            raise RequestError(f"the chat template failed: {error}", param="messages") from error
        return self.encode(str(text), add_special_tokens=False)
