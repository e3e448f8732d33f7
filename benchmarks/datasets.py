"""The data sets that a benchmark can send, as chat messages. Everything that is drawn follows from --seed.

    synthetic-video, synthetic-image   the bundled model's clips and pictures, each with a question and its answer
    random-mm                          media whose sizes are drawn from --random-mm-bucket-config
    random                             texts of --random-input-len words, each of them one token
    sharegpt, custom                   records of the JSON file --dataset-path

A record has a conversation (`messages`, `conversations` or `conversation`: turns with `role` and `content`, or with
`from` and `value`) or a single text (`prompt`, `question`, `problem`, `instruction` or `text`). A turn's content is a
text, or a list of parts as in a chat request. Media also come as `image`, `images`, `video` or `videos` of the record:
a URL, a path (relative ones from the file's folder), or a dictionary with `path` or `url`; they go before the text of
the first question. The prompt ends before the first answer. `expected` is the one right answer, `output_tokens` the
most tokens to generate; without it they are as many as the record's own answer has, or 128.
"""

import argparse
import ast
import base64
import functools
import itertools
import json
import math
import mimetypes
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.cli import say
from mini_engine.config import BUNDLED_MODEL, BUNDLED_NAME, ConfigError
from mini_engine.demo import videos
from training import questions

READ = ("sharegpt", "custom")
NAMES = ("synthetic-video", "synthetic-image", "random-mm", "random", *READ)
FIRST_SEED = 2 * 10**9  # far from what the bundled model was trained on
SEEDS_EACH = 10**6
QUESTION_DRAWS = 3  # beside a seed, where those of a medium have 1 and 2
ANSWER_TOKENS = 32  # the longest answer of the bundled model has fewer
TEXT_TOKENS = 128  # the most to generate where nothing says how many
RANDOM_TOKENS = 1024
SPACES = ("Ġ", "▁")  # how vocabularies write the space before a word

CONVERSATIONS = ("messages", "conversations", "conversation")
TEXTS = ("prompt", "question", "problem", "instruction", "text")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}
MEDIA = {"image": "image", "images": "image", "video": "video", "videos": "video"}
PLACEHOLDER = re.compile(r"<(?:image|video)>\n?")
URL = re.compile(r"(?:data|file|https?):", re.IGNORECASE)
Record = dict[str, Any]
Part = dict[str, Any]  # of a message's content


@dataclass(frozen=True)
class Prompt:
    """`messages` as in a chat request, with parts as content. `answer` is the one right text, None: none is known."""

    messages: list[dict[str, Any]]
    answer: str | None
    output_tokens: int  # the most to generate

    @property
    def urls(self) -> list[str]:
        """Of its media."""
        parts = [part for message in self.messages for part in message["content"]]
        return [part[part["type"]]["url"] for part in parts if part["type"] != "text"]

    @property
    def text(self) -> str:
        """All of its text."""
        parts = [part for message in self.messages for part in message["content"]]
        return "\n".join(part["text"] for part in parts if part["type"] == "text")


@dataclass(frozen=True)
class Prompts:
    """What was loaded. No medium of `warm_ups` is in `measured`."""

    measured: list[Prompt]
    warm_ups: list[Prompt]


def load(args: argparse.Namespace, model: str) -> Prompts:
    """The prompts that the flags ask for; `model` has the tokenizer if --tokenizer and --model name none.

    Raises:
        ConfigError: there is no tokenizer, or no record that can be used.
    """
    each = args.random_mm_base_items_per_request or 1
    unique_ratio = 1.0 if args.unique_ratio is None else args.unique_ratio
    order = repeat_order(args.num_prompts * each, unique_ratio, draws(args.seed, "repeats"))
    unique = max(order) + 1
    tokenizer = args.tokenizer or args.model or model
    if args.dataset_name in READ:
        return _read(args, tokenizer, order)
    order += range(unique, unique + args.num_warmups * each)
    if args.dataset_name.startswith("synthetic"):
        prompts = _questions(args, order)
    else:
        media = _of_sizes(args, order) if args.dataset_name == "random-mm" else []
        texts = [("Describe what you see.", args.output_len or TEXT_TOKENS)] * (args.num_prompts + args.num_warmups)
        if args.dataset_name == "random" or args.input_len:
            texts = _texts(args, tokenizer, len(texts))
        prompts = [
            _from_user([*media[i * each : (i + 1) * each], _text_part(text)], None, tokens)
            for i, (text, tokens) in enumerate(texts)
        ]
    return Prompts(prompts[: args.num_prompts], prompts[args.num_prompts :])


def repeat_order(count: int, unique_ratio: float, rng: np.random.Generator) -> list[int]:
    """Which medium each of `count` places shows, as numbers from 0 in the order of their first use.

    max(1, round(count * unique_ratio)) of them are new, the first among these; the places of the others are drawn, and
    each repeats one drawn from those before it.
    """
    new = np.zeros(count, bool)
    new[0] = True
    new[1 + rng.choice(count - 1, max(0, round(count * unique_ratio) - 1), replace=False)] = True
    seen = np.cumsum(new)
    return np.where(new, seen - 1, rng.integers(seen)).tolist()


# --- prompts made here ----------------------------------------------------------------------------------------------


def _questions(args: argparse.Namespace, order: list[int]) -> list[Prompt]:
    """Questions that the bundled model answers; that of place i is about medium `order[i]`."""
    first = FIRST_SEED + args.seed * SEEDS_EACH
    show = _video if args.dataset_name == "synthetic-video" else _image
    media = _render([functools.partial(show, first + number) for number in range(max(order) + 1)], args)
    prompts = []
    for place, number in enumerate(order):
        scene = videos.make_scene(first + number)
        thing = scene if show is _video else videos.Thing(scene.colour, scene.shape, None)
        # Drawn apart from what is shown: by the medium's own seed, whose first draw is the colour, every red shape
        # would be asked for its colour and no blue one ever.
        asked = questions.ask([thing], None, np.random.default_rng([first + place, QUESTION_DRAWS]))
        tokens = args.output_len or ANSWER_TOKENS
        prompts.append(_from_user([media[number], _text_part(asked.text)], asked.answer, tokens))
    return prompts


def _of_sizes(args: argparse.Namespace, order: list[int]) -> list[Part]:
    """Media with sizes drawn from --random-mm-bucket-config; that of place i is number `order[i]`."""
    sizes, weights = zip(*ast.literal_eval(args.random_mm_bucket_config).items(), strict=True)
    shares = np.divide(weights, sum(weights))
    first, work = FIRST_SEED + args.seed * SEEDS_EACH, []
    for number, index in enumerate(draws(args.seed, "sizes").choice(len(sizes), max(order) + 1, p=shares)):
        height, width, frames = sizes[index]
        show = _image if frames == 1 else functools.partial(_video, num_frames=frames)
        work.append(functools.partial(show, first + number, width=width, height=height))
    media = _render(work, args)
    return [media[number] for number in order]


@functools.cache  # for the other values of a sweep
def _video(seed: int, **fixed: Any) -> Part:
    """The video of `seed`; keywords as those of `demo.videos.make_scene`."""
    return _media_part(videos.encode(videos.render(seed, **fixed)), "video", "video/mp4")


@functools.cache
def _image(seed: int, **fixed: Any) -> Part:
    return _media_part(videos.encode_image(videos.render_image(seed, **fixed)), "image", "image/png")


def _render(work: Sequence[Callable[[], Part]], args: argparse.Namespace) -> list[Part]:
    """By as many threads as there are cores: drawing and encoding leave the GIL."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = pool.map(lambda show: show(), work)
        return list(tqdm(made, "rendering", len(work), leave=False, unit=" media", disable=args.disable_tqdm or None))


def _texts(args: argparse.Namespace, tokenizer: str, count: int) -> list[tuple[str, int]]:
    """Texts of --random-input-len tokens after the common prefix, and the most tokens of each answer; of both up to the
    share --random-range-ratio less or more is drawn. They are made of words that are one token after a space."""
    vocabulary = _load_tokenizer(tokenizer).get_vocab()
    words = [token[1:] for token in sorted(vocabulary) if token.startswith(SPACES)]
    words = [word for word in words if word.isascii() and word.isalpha()]
    rng, lengths = draws(args.seed, "texts"), draws(args.seed, "lengths")
    ratio = args.random_range_ratio or 0.0

    def some(number: int) -> list[str]:
        return [words[index] for index in rng.integers(len(words), size=number)]

    def drawn(mean: int) -> int:
        low, high = max(1, math.floor(mean * (1 - ratio))), math.ceil(mean * (1 + ratio))
        return int(lengths.integers(low, high, endpoint=True))

    prefix = some(args.random_prefix_len or 0)
    return [
        (" ".join(["", *prefix, *some(drawn(args.input_len or RANDOM_TOKENS))]), drawn(args.output_len or TEXT_TOKENS))
        for _ in range(count)
    ]


# --- prompts of records ---------------------------------------------------------------------------------------------


def _read(args: argparse.Namespace, tokenizer: str, order: list[int]) -> Prompts:
    """Prompts of which place i is that of record `order[i]` of --dataset-path, in an order drawn from --seed unless
    --disable-shuffle; and warm-ups whose media none of them shows.

    Raises:
        ConfigError: no record holds a prompt.
        OSError, ValueError: the file cannot be read.
    """
    path, unique = Path(args.dataset_path), max(order) + 1
    prompts = (_prompt(record, args.output_len, path.parent, tokenizer) for record in _records(args, path))
    found = [*itertools.islice((prompt for prompt in prompts if prompt is not None), unique + args.num_warmups)]
    if not found:
        raise ConfigError(f"--dataset-path: {path} has no prompt under {', '.join(CONVERSATIONS + TEXTS)}")
    if len(found) < unique:
        end = "each is sent once" if args.no_oversample else "some are sent again"
        say(f"{path} has {len(found)} prompts; --num-prompts asks for {unique} different ones: {end}")
        order = list(range(len(found))) if args.no_oversample else [number % len(found) for number in order]
    measured = [found[number] for number in order]
    shown = {url for prompt in measured for url in prompt.urls}
    return Prompts(measured, [prompt for prompt in found[unique:] if shown.isdisjoint(prompt.urls)])


def _records(args: argparse.Namespace, path: Path) -> Iterable[Record]:
    """A list of objects, or an object on each line."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        lines = [line for line in text.split("\n") if line.strip()]
        records = json.loads(text if text.lstrip().startswith("[") else f"[{','.join(lines)}]")
    except json.JSONDecodeError as error:
        raise ConfigError(f"--dataset-path: {path} is neither a JSON list nor JSON Lines: {error}") from None
    return records if args.disable_shuffle else draws(args.seed, "records").permutation(records).tolist()


def _prompt(record: Record, output_len: int | None, folder: Path, tokenizer: str) -> Prompt | None:
    """None if the record asks nothing."""
    text = next((record[key] for key in TEXTS if record.get(key)), None)
    turns: list[Record] = next(
        (record[key] for key in CONVERSATIONS if record.get(key)), [{"role": "user", "content": text}]
    )
    roles = [ROLES.get(role, role) for role in (str(turn.get("role") or turn["from"]) for turn in turns)]
    contents = [_parts(turn["content"] if "content" in turn else turn["value"], "text", folder) for turn in turns]
    if "user" not in roles or not contents[roles.index("user")]:
        return None
    asked = roles.index("user")
    # Before the question the assistant may have greeted.
    answered = roles.index("assistant", asked) if "assistant" in roles[asked:] else len(roles)
    tokens = output_len or record.get("output_tokens")
    if not tokens and answered < len(roles):
        tokens = len(_load_tokenizer(tokenizer).encode(contents[answered][0]["text"]))
    media = [part for key, kind in MEDIA.items() for part in _parts(record.get(key), kind, folder)]
    contents[asked] = media + contents[asked]
    messages = [{"role": role, "content": parts} for role, parts in zip(roles, contents, strict=True)]
    return Prompt(messages[:answered], record.get("expected"), int(tokens or TEXT_TOKENS))


def _parts(value: Any, kind: str, folder: Path) -> list[Part]:
    """The parts of a content: of a text without the placeholders of some data sets, of a medium, whose file becomes a
    data URL, of a part as in a request, or of a list of them."""
    if not value:
        return []
    if isinstance(value, list):
        return [part for item in value for part in _parts(item, kind, folder)]
    if isinstance(value, dict) and "type" in value:
        return _parts(value[value["type"]], value["type"].removesuffix("_url"), folder)
    if kind == "text":
        return [_text_part(PLACEHOLDER.sub("", value))]
    value = value if isinstance(value, dict) else {"url": value}
    place = str(value.get("path") or value.get("url") or "")
    if URL.match(place):
        return [_media_part(place, kind)]
    guess = mimetypes.guess_type(place)[0] or ""
    mime = guess if guess.startswith(kind) else {"image": "image/jpeg", "video": "video/mp4"}[kind]
    return [_media_part((folder / place).read_bytes(), kind, mime)]


# --- parts ----------------------------------------------------------------------------------------------------------


def _from_user(parts: list[Part], answer: str | None, output_tokens: int) -> Prompt:
    """A prompt of one message."""
    return Prompt([{"role": "user", "content": parts}], answer, output_tokens)


def _text_part(text: str) -> Part:
    """A text as a part of a message."""
    return {"type": "text", "text": text}


def _media_part(url: str | bytes, kind: str, mime: str = "") -> Part:
    """An `image` or a `video` as a part of a message, by its URL or as bytes of a MIME type."""
    if isinstance(url, bytes):
        url = f"data:{mime};base64,{base64.b64encode(url).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def draws(seed: int, purpose: str) -> np.random.Generator:
    """The random numbers of one purpose, unrelated to those that the same seed gives for another: from one stream, the
    times between requests would determine which sizes of media they bring."""
    return np.random.default_rng([seed, *purpose.encode()])


@functools.cache
def _load_tokenizer(name: str) -> Any:
    """The Hugging Face tokenizer of the model `name`, which may be the bundled one's.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(BUNDLED_MODEL if name == BUNDLED_NAME else name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tokenizer: {name} has none ({str(error).splitlines()[0]}); random texts need one, and so do records "
            "with answers, whose tokens are counted unless --output-len says how many to generate"
        ) from None
