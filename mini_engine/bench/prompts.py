"""What the data sets are made of: prompts as chat messages, and what is known of their answers."""

from __future__ import annotations

import base64
import functools
import random
from dataclasses import dataclass
from typing import Any

from mini_engine.config import BUNDLED_MODEL, BUNDLED_NAME, ConfigError

TEXT_TOKENS = 128  # the most to generate where nothing says how many


@dataclass(frozen=True)
class Prompt:
    """`messages` as in a chat request. `answer` is the one right text, None where none is known."""

    messages: list[dict[str, Any]]
    answer: str | None
    output_tokens: int  # the most to generate

    @property
    def urls(self) -> list[str]:
        """Of its media."""
        return [part[part["type"]]["url"] for part in self._parts if part["type"] != "text"]

    @property
    def text(self) -> str:
        """All of its text."""
        return "\n".join(part["text"] for part in self._parts if part["type"] == "text")

    @property
    def _parts(self) -> list[dict[str, Any]]:
        contents = [message["content"] for message in self.messages]
        return [part for one in contents for part in ([text_part(one)] if isinstance(one, str) else one)]


def from_user(content: str | list[dict[str, Any]], answer: str | None, output_tokens: int) -> Prompt:
    """A prompt of one message."""
    return Prompt([{"role": "user", "content": content}], answer, output_tokens)


def text_part(text: str) -> dict[str, Any]:
    """A text as a part of a message."""
    return {"type": "text", "text": text}


def media_part(url: str, kind: str) -> dict[str, Any]:
    """An `image` or a `video` as a part of a message."""
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def data_url(data: bytes, mime: str) -> str:
    """The bytes as a URL."""
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def draws(seed: int, purpose: str) -> random.Random:
    """The random numbers of one purpose, unrelated to those that the same seed gives for another: from one stream, the
    times between requests would determine which sizes of media they bring."""
    return random.Random(f"{seed} {purpose}")


@functools.cache
def load_tokenizer(name: str, purpose: str) -> Any:
    """The Hugging Face tokenizer of the model `name`, which may be the bundled one's.

    Raises:
        ConfigError: there is none; `purpose` says what it is needed for.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(BUNDLED_MODEL if name == BUNDLED_NAME else name)
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"--tokenizer: one is needed {purpose}, and {name} has none ({why})") from None
