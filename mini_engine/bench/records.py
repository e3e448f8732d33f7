"""Prompts from records: dictionaries as files of JSON and the data sets of the Hugging Face hub hold them.

A record has a conversation (`messages`, `conversations` or `conversation`: turns with `role` and `content`, or with
`from` and `value`) or a single text (`prompt`, `question`, `problem`, `instruction` or `text`). A turn's content is a
text, or a list of parts as in a chat request. Media also come as `image`, `images`, `video` or `videos` of the record:
a URL, a path (relative ones from the file's folder), or a dictionary with `bytes`, `path` or `url`; they go before the
text of the first question. The prompt ends before the first answer. `expected` is the one right answer, `output_tokens`
the most tokens to generate; without it they are as many as the record's own answer has, or 128.
"""

from __future__ import annotations

import argparse
import functools
import json
import mimetypes
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mini_engine.bench.prompts import TEXT_TOKENS, Prompt, data_url, draws, load_tokenizer, media_part, text_part
from mini_engine.bench.report import BenchError, say
from mini_engine.config import ConfigError

Record = dict[str, Any]
CONVERSATIONS = ("messages", "conversations", "conversation")
TEXTS = ("prompt", "question", "problem", "instruction", "text")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}
MEDIA = {"image": "image", "images": "image", "video": "video", "videos": "video"}
PLACEHOLDER = re.compile(r"<(?:image|video)>\n?")
URL = re.compile(r"(?:data|file|https?):", re.IGNORECASE)
SHUFFLE_BUFFER = 1_000  # records of a stream that are in memory to be drawn from


def read_prompts(args: argparse.Namespace, wanted: int, tokenizer: str) -> list[Prompt]:
    """The first `wanted` prompts of --dataset-path, in an order drawn from --seed unless --disable-shuffle.

    Raises:
        ConfigError: the file cannot be read, or no record holds a prompt.
    """
    path = Path(args.dataset_path)
    records = _from_hub(args) if args.dataset_name == "hf" else _read_json(path)
    if isinstance(records, list) and not args.disable_shuffle:
        records = draws(args.seed, "records").sample(records, len(records))
    reader = _Reader(path if path.is_dir() else path.parent, args.output_len, tokenizer)
    found: list[Prompt] = []
    empty = 0
    for record in records:
        if len(found) == wanted:
            break
        prompt = reader.prompt(record)
        found += [prompt] if prompt is not None else []
        empty += prompt is None
    if empty:
        say(f"{empty} records have no prompt under {', '.join(CONVERSATIONS + TEXTS)} and were skipped")
    if not found:
        raise ConfigError(f"--dataset-path: {path} has no record with a prompt")
    return found


def _read_json(path: Path) -> list[Record]:
    """A list of objects, or an object on each line."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--dataset-path: {path} is neither a JSON list nor an object on each line: {error}"
        ) from None


def _from_hub(args: argparse.Namespace) -> Iterable[Record]:
    """The records of a data set on the hub, or of a local folder of its files, shuffled as --disable-shuffle says."""
    try:
        import datasets
    except ImportError:
        raise ConfigError("--dataset-name hf needs the package datasets: pip install 'mini-engine[hf]'") from None
    split = args.hf_split or "train"
    try:
        stream = datasets.load_dataset(args.dataset_path, args.hf_subset, split=split, streaming=True)
        stream = stream.decode(False)  # media as the bytes they are
        return stream if args.disable_shuffle else stream.shuffle(args.seed, buffer_size=SHUFFLE_BUFFER)
    except (OSError, ValueError, RuntimeError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise BenchError(f"--dataset-path: {args.dataset_path} cannot be loaded: {why}") from None


class _Reader:
    """Turns records into prompts. Relative paths begin at `folder`; the tokenizer is loaded once it is needed."""

    def __init__(self, folder: Path, output_tokens: int | None, tokenizer: str):
        self._folder = folder
        self._output_tokens = output_tokens
        self._tokenizer_name = tokenizer

    def prompt(self, record: Record) -> Prompt | None:
        """None where the record has no question."""
        turns = self._turns(record)
        asked = next((place for place, turn in enumerate(turns) if turn["role"] == "user"), None)
        if asked is None:
            return None
        # Before the question the assistant may have greeted.
        answered = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i > asked), None)
        answer = turns[answered]["content"] if answered is not None else None
        turns = turns[:answered]
        media = [part for key, kind in MEDIA.items() for part in self._media(record.get(key), kind)]
        if media:
            content = turns[asked]["content"]
            parts = [text_part(content)] if isinstance(content, str) else content
            turns[asked] = {"role": "user", "content": media + parts}
        return Prompt(turns, record.get("expected"), self._length(record, answer))

    def _length(self, record: Record, answer: str | None) -> int:
        if self._output_tokens is not None:
            return self._output_tokens
        if record.get("output_tokens"):
            return int(record["output_tokens"])
        return max(1, len(self._tokenizer.encode(answer))) if answer else TEXT_TOKENS

    @functools.cached_property
    def _tokenizer(self) -> Any:
        purpose = "to count the tokens of the records' own answers, unless --output-len says how many to generate"
        return load_tokenizer(self._tokenizer_name, purpose)

    def _turns(self, record: Record) -> list[dict[str, Any]]:
        """The record's conversation, empty if it has none."""
        for key in CONVERSATIONS:
            if record.get(key):
                turns = [
                    (turn.get("role") or turn["from"], turn.get("content", turn.get("value"))) for turn in record[key]
                ]
                return [{"role": ROLES.get(role, role), "content": self._content(content)} for role, content in turns]
        text = next((record[key] for key in TEXTS if record.get(key)), None)
        return [{"role": "user", "content": self._content(text)}] if text else []

    def _content(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """Without the placeholders of some data sets, which are no text, and with each path's file as a data URL."""
        if isinstance(content, str):
            return PLACEHOLDER.sub("", content)
        parts = []
        for part in content:
            kind = part["type"].removesuffix("_url")
            if kind == "text":
                parts.append(text_part(PLACEHOLDER.sub("", part["text"])))
            else:
                parts += self._media(part[part["type"]], kind)
        return parts

    def _media(self, value: Any, kind: str) -> list[dict[str, Any]]:
        """The parts for one medium or a list of them."""
        if not value:
            return []
        if isinstance(value, list):
            return [part for one in value for part in self._media(one, kind)]
        if isinstance(value, dict) and value.get("bytes"):
            return [media_part(data_url(value["bytes"], _mime(value.get("path") or "", kind)), kind)]
        place = str(value.get("path") or value["url"]) if isinstance(value, dict) else str(value)
        if not URL.match(place):
            place = data_url((self._folder / place).read_bytes(), _mime(place, kind))
        return [media_part(place, kind)]


def _mime(path: str, kind: str) -> str:
    guess = mimetypes.guess_type(path)[0] or ""
    return guess if guess.startswith(kind) else {"image": "image/jpeg", "video": "video/mp4"}[kind]
