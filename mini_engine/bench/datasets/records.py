"""Prompts from records: dictionaries as the files and hub data sets of this field hold them.

A record has a conversation (`messages`, `conversations` or `conversation`: turns with `role` and `content`, or with
`from` and `value`) or a single text (`prompt`, `question`, `problem`, `instruction` or `text`). A turn's content is a
text, or a list of parts as in a chat request. Media also come as `image`, `images`, `video` or `videos` of the record:
a URL, a path (relative ones from the file's folder), a dictionary with `bytes` or `path`, or a Pillow image; they go
before the text of the first question. The prompt ends before the first answer. `expected` is the one right answer,
`output_tokens` the most tokens to generate; without it they are as many as the record's own answer has, or 128.
"""

from __future__ import annotations

import contextlib
import functools
import io
import mimetypes
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_engine.bench.datasets.sample import Kind, Link, Medium, Message, Part, Sample
from mini_engine.bench.datasets.tokenized import load_tokenizer
from mini_engine.config import ConfigError

Record = dict[str, Any]
CONVERSATIONS = ("messages", "conversations", "conversation")
TEXTS = ("prompt", "question", "problem", "instruction", "text")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}
MEDIA: dict[str, Kind] = {"image": "image", "images": "image", "video": "video", "videos": "video"}
PARTS: dict[str, Kind] = {"image_url": "image", "video_url": "video"}
PLACEHOLDER = re.compile(r"<(?:image|video)>\n?")
URL = re.compile(r"(?:data|file|https?):", re.IGNORECASE)
DEFAULT_TOKENS = 128
MOST_TOKENS = 2**31 - 1
SHOWN = 50  # characters of a value in an error


@dataclass(frozen=True)
class Reader:
    """Turns records into samples. Relative paths begin at `folder`; `tokenizer` is loaded once it is needed."""

    folder: Path
    output_tokens: int | None  # for all of them
    tokenizer: str | None
    flag: str  # which says how long answers are, for error texts

    def samples(self, records: Iterable[Record], wanted: int) -> tuple[list[Sample], list[str]]:
        """The first `wanted` prompts, or fewer if there are no more, and sentences about what was passed over.

        Raises:
            ConfigError: no record holds a prompt, or a medium cannot be read.
        """
        found: list[Sample] = []
        empty = 0
        record: Record = {}
        for record in records:
            if len(found) == wanted:
                break
            turns = _turns(record)
            if any(message.role == "user" for message in turns):
                found.append(self._sample(record, turns))
            else:
                empty += 1
        if not found:
            raise ConfigError(
                f"no record holds a prompt under {', '.join(CONVERSATIONS + TEXTS)}; the last record has "
                f"{', '.join(record) or 'nothing'}"
            )
        return found, [f"{empty} records hold no prompt and were passed over"] if empty else []

    def _sample(self, record: Record, turns: list[Message]) -> Sample:
        answers = [place for place, message in enumerate(turns) if message.role == "assistant"]
        asked = next(place for place, message in enumerate(turns) if message.role == "user")
        answers = [place for place in answers if place > asked]  # before it the assistant may have greeted
        prompt = turns[: answers[0]] if answers else turns
        media = tuple(part for key, kind in MEDIA.items() for part in self._media(record.get(key), kind))
        prompt[asked] = Message("user", (*media, *prompt[asked].parts))
        prompt = [Message(turn.role, tuple(self._loaded(part) for part in turn.parts)) for turn in prompt]
        answer = turns[answers[0]].text if answers else None
        expected = record.get("expected")
        if not isinstance(expected, str | None):
            raise ConfigError(f"a record's expected is {str(expected)[:SHOWN]}: the one right answer must be a text")
        return Sample(tuple(prompt), expected, self._length(record, answer))

    def _length(self, record: Record, answer: str | None) -> int:
        if self.output_tokens is not None:
            return self.output_tokens
        if (asked := record.get("output_tokens")) is not None:
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                if 0 < (tokens := int(asked)) <= MOST_TOKENS and not isinstance(asked, bool):
                    return tokens
            raise ConfigError(
                f"a record's output_tokens is {repr(asked)[:SHOWN]}: use a whole number above 0, or {self.flag}"
            )
        return max(1, len(self._tokenizer.encode(answer))) if answer is not None else DEFAULT_TOKENS

    @functools.cached_property
    def _tokenizer(self) -> Any:
        purpose = "to count the tokens of the records' own answers, which say how many to generate"
        return load_tokenizer(self.tokenizer, purpose, f"or the number itself by {self.flag}")

    def _loaded(self, part: Part) -> Part:
        """A path in a chat part, which is no URL, is a file as well."""
        if not isinstance(part, Link) or URL.match(part.url):
            return part
        return self._file(part.url, part.kind)

    def _media(self, value: Any, kind: Kind) -> list[Part]:
        if value is None:
            return []
        if isinstance(value, (list, tuple)) and not any(isinstance(one, (list, tuple)) for one in value):
            return [part for one in value for part in self._media(one, kind)]
        if isinstance(value, str):
            return [Link(value, kind)]
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            return [Medium(value["bytes"], _mime(str(value.get("path") or ""), kind))]
        if isinstance(value, dict) and isinstance(value.get("path") or value.get("url"), str):
            return [Link(value.get("path") or value["url"], kind)]
        if hasattr(value, "save"):  # a Pillow image
            sink = io.BytesIO()
            value.convert("RGB").save(sink, format="PNG")
            return [Medium(sink.getvalue(), "image/png")]
        raise ConfigError(f"a record's {kind} is a {type(value).__name__}: use a URL, a path, or an object with bytes")

    def _file(self, path: str, kind: Kind) -> Medium:
        try:
            return Medium((self.folder / path).read_bytes(), _mime(path, kind))
        except OSError as error:
            raise ConfigError(f"a record's {kind} {path!r} cannot be read: {error.strerror}") from None
        except ValueError:
            raise ConfigError(
                f"a record's {kind} {path!r} is no path: it has characters that no path can have"
            ) from None


def _turns(record: Record) -> list[Message]:
    """The record's conversation, empty if it has none."""
    for key in CONVERSATIONS:
        if isinstance(record.get(key), (list, tuple)):
            return [message for turn in record[key] if (message := _turn(turn)) is not None]
    for key in TEXTS:
        if isinstance(record.get(key), str) and record[key]:
            return [Message("user", _parts(record[key]))]
    return []


def _turn(turn: Any) -> Message | None:
    if not isinstance(turn, dict):
        return None
    role = str(turn.get("role") or turn.get("from") or "")
    parts = _parts(turn.get("content", turn.get("value")))
    return Message(ROLES.get(role, role), parts) if role and parts else None


def _parts(content: Any) -> tuple[Part, ...]:
    """The parts of a content; a place holder for a medium, as some data sets have, is no text."""
    if isinstance(content, str):
        text = PLACEHOLDER.sub("", content)
        return (text,) if text else ()
    parts: list[Part] = []
    for part in content if isinstance(content, (list, tuple)) else ():
        if not isinstance(part, dict):
            raise ConfigError(f"a record's content is a list with a {type(part).__name__}: its parts are objects")
        kind = part.get("type")
        if kind == "text":
            parts += _parts(part.get("text"))
        elif isinstance(kind, str) and kind in PARTS:
            parts.append(Link(_url(part.get(kind), kind), PARTS[kind]))
        else:
            known = ", ".join(["text", *PARTS])
            raise ConfigError(f"a record has a part of the type {kind!r}: the types are {known}")
    return tuple(parts)


def _url(value: Any, kind: str) -> str:
    """Of an object with `url`, or bare, as some files have it."""
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise ConfigError(f'a record has a part of the type {kind!r} without its URL: use "{kind}": {{"url": "..."}}')
    return url


def _mime(path: str, kind: Kind) -> str:
    guess = mimetypes.guess_type(path)[0] or ""
    return guess if guess.startswith(kind) else {"image": "image/jpeg", "video": "video/mp4"}[kind]
