"""Prompts as chat messages; and from records, which files of JSON and the data sets of the Hugging Face hub hold.

A record has a conversation (`messages`, `conversations` or `conversation`: turns with `role` and `content`, or with
`from` and `value`) or a single text (`prompt`, `question`, `problem`, `instruction` or `text`). A turn's content is a
text, or a list of parts as in a chat request. Media also come as `image`, `images`, `video` or `videos` of the record:
a URL, a path (relative ones from the file's folder), or a dictionary with `bytes`, `path` or `url`; they go before the
text of the first question. The prompt ends before the first answer. `expected` is the one right answer, `output_tokens`
the most tokens to generate; without it they are as many as the record's own answer has, or 128.
"""

from __future__ import annotations

import argparse
import base64
import functools
import json
import mimetypes
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_engine.config import BUNDLED_MODEL, BUNDLED_NAME, ConfigError

TEXT_TOKENS = 128  # the most to generate where nothing says how many
Record = dict[str, Any]
CONVERSATIONS = ("messages", "conversations", "conversation")
TEXTS = ("prompt", "question", "problem", "instruction", "text")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}
MEDIA = {"image": "image", "images": "image", "video": "video", "videos": "video"}
PLACEHOLDER = re.compile(r"<(?:image|video)>\n?")
URL = re.compile(r"(?:data|file|https?):", re.IGNORECASE)
SHUFFLE_BUFFER = 1_000  # records of a stream that are in memory to be drawn from


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


def read_prompts(args: argparse.Namespace, wanted: int, tokenizer: str) -> list[Prompt]:
    """The first `wanted` prompts of --dataset-path, in an order drawn from --seed unless --disable-shuffle.

    Raises:
        ConfigError: no record holds a prompt.
        OSError, ValueError: the file cannot be read.
    """
    path = Path(args.dataset_path)
    folder = path if path.is_dir() else path.parent
    found: list[Prompt] = []
    for record in _from_hub(args) if args.dataset_name == "hf" else _from_file(args, path):
        if len(found) == wanted:
            break
        if turns := _turns(record, folder):
            found.append(_prompt(record, turns, args.output_len, folder, tokenizer))
    if not found:
        raise ConfigError(f"--dataset-path: {path} has no prompt under {', '.join(CONVERSATIONS + TEXTS)}")
    return found


def _from_file(args: argparse.Namespace, path: Path) -> list[Record]:
    """A list of objects, or an object on each line."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        lines = [line for line in text.split("\n") if line.strip()]
        records = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ConfigError(f"--dataset-path: {path} is neither a JSON list nor JSON Lines: {error}") from None
    return records if args.disable_shuffle else draws(args.seed, "records").sample(records, len(records))


def _from_hub(args: argparse.Namespace) -> Iterable[Record]:
    """The records of a data set on the hub, or of a local folder of its files, shuffled as --disable-shuffle says."""
    try:
        import datasets
    except ImportError:
        raise ConfigError("--dataset-name hf needs the package datasets: pip install 'mini-engine[hf]'") from None
    stream = datasets.load_dataset(args.dataset_path, args.hf_subset, split=args.hf_split or "train", streaming=True)
    stream = stream.decode(False)  # media as the bytes they are
    return stream if args.disable_shuffle else stream.shuffle(args.seed, buffer_size=SHUFFLE_BUFFER)


def _turns(record: Record, folder: Path) -> list[dict[str, Any]]:
    """The record's conversation from its start; empty if it asks nothing."""
    text = next((record[key] for key in TEXTS if record.get(key)), None)
    alone = [{"role": "user", "content": text}] if text else []
    turns = []
    for turn in next((record[key] for key in CONVERSATIONS if record.get(key)), alone):
        role = turn.get("role") or turn["from"]
        content = _content(turn["content"] if "content" in turn else turn["value"], folder)
        turns.append({"role": ROLES.get(role, role), "content": content})
    return turns if any(turn["role"] == "user" for turn in turns) else []


def _prompt(record: Record, turns: list[dict], output_len: int | None, folder: Path, tokenizer: str) -> Prompt:
    roles = [turn["role"] for turn in turns]
    asked = roles.index("user")
    # Before the question the assistant may have greeted.
    answered = roles.index("assistant", asked) if "assistant" in roles[asked:] else len(roles)
    tokens = output_len or record.get("output_tokens") or TEXT_TOKENS
    if answered < len(roles) and not (output_len or record.get("output_tokens")):
        purpose = "to count the tokens of the records' own answers, unless --output-len says how many to generate"
        tokens = max(1, len(load_tokenizer(tokenizer, purpose).encode(turns[answered]["content"])))
    if media := [part for key, kind in MEDIA.items() for part in _media(record.get(key), kind, folder)]:
        content = turns[asked]["content"]
        turns[asked]["content"] = media + ([text_part(content)] if isinstance(content, str) else content)
    return Prompt(turns[:answered], record.get("expected"), int(tokens))


def _content(content: str | list[dict[str, Any]], folder: Path) -> str | list[dict[str, Any]]:
    """Without the placeholders of some data sets, which are no text, and with each path's file as a data URL."""
    if isinstance(content, str):
        return PLACEHOLDER.sub("", content)
    parts = []
    for part in content:
        kind = part["type"].removesuffix("_url")
        text = kind == "text"
        parts += [text_part(PLACEHOLDER.sub("", part["text"]))] if text else _media(part[part["type"]], kind, folder)
    return parts


def _media(value: Any, kind: str, folder: Path) -> list[dict[str, Any]]:
    """The parts for one medium or a list of them."""
    if not value:
        return []
    if isinstance(value, list):
        return [part for one in value for part in _media(one, kind, folder)]
    value = value if isinstance(value, dict) else {"url": value}
    place = str(value.get("path") or value.get("url") or "")
    if value.get("bytes") or not URL.match(place):
        guess = mimetypes.guess_type(place)[0] or ""
        mime = guess if guess.startswith(kind) else {"image": "image/jpeg", "video": "video/mp4"}[kind]
        place = data_url(value.get("bytes") or (folder / place).read_bytes(), mime)
    return [media_part(place, kind)]
