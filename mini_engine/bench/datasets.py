"""The data sets that a benchmark can send; `prompts.py` reads those of files and the hub.

    synthetic-video, synthetic-image   the bundled model's clips and pictures, each with a question and its answer
    random-mm                          media whose sizes are drawn from --random-mm-bucket-config
    random                             texts of --random-input-len words, each of them one token
    sharegpt, custom, hf               records of --dataset-path

Everything that is drawn follows from --seed. Knows nothing of servers or of when prompts are sent.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from mini_engine.bench.prompts import (
    TEXT_TOKENS,
    Prompt,
    data_url,
    draws,
    from_user,
    load_tokenizer,
    media_part,
    read_prompts,
    text_part,
)
from mini_engine.bench.report import say
from mini_engine.demo import questions, videos

READ = ("sharegpt", "custom", "hf")
NAMES = ("synthetic-video", "synthetic-image", "random-mm", "random", *READ)
FIRST_SEED = 2 * 10**9  # far from what the bundled model was trained on
SEEDS_EACH = 10**6
QUESTION_DRAWS = 3  # beside a seed, where those of a medium have 1 and 2
ANSWER_TOKENS = 32  # the longest answer of the bundled model has fewer
RANDOM_TOKENS = 1024
SPACES = ("Ġ", "▁")  # how vocabularies write the space before a word
Kind = Literal["image", "video"]
Made = TypeVar("Made")


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
    if args.dataset_name == "random":
        texts = _texts(args, tokenizer, len(order), args.input_len or RANDOM_TOKENS)
        prompts = [from_user(text, None, tokens) for text, tokens in texts]
    elif args.dataset_name == "random-mm":
        prompts = _of_sizes(args, tokenizer, order, each)
    else:
        prompts = _questions("video" if args.dataset_name == "synthetic-video" else "image", args, order)
    return Prompts(prompts[: args.num_prompts], prompts[args.num_prompts :])


def repeat_order(count: int, unique_ratio: float, rng: random.Random) -> list[int]:
    """Which medium each of `count` places shows, as numbers from 0 in the order of their first use.

    max(1, round(count * unique_ratio)) of them are new, the first among these; the places of the others are drawn, and
    each repeats one drawn from those before it.
    """
    new = {0, *rng.sample(range(1, count), max(1, round(count * unique_ratio)) - 1)}
    order: list[int] = []
    seen = 0
    for place in range(count):
        order.append(seen if place in new else rng.randrange(seen))
        seen += place in new
    return order


def _read(args: argparse.Namespace, tokenizer: str, order: list[int]) -> Prompts:
    """Prompts of which place i is that of record `order[i]`; and warm-ups whose media none of them shows."""
    unique = max(order) + 1
    found = read_prompts(args, unique + args.num_warmups, tokenizer)
    if len(found) < unique:
        say(f"{args.dataset_path} has {len(found)} prompts; --num-prompts asks for {unique} different ones: "
            f"{'each is sent once' if args.no_oversample else 'some are sent again'}")  # fmt: skip
        order = list(range(len(found))) if args.no_oversample else [number % len(found) for number in order]
    measured = [found[number] for number in order]
    shown = {url for prompt in measured for url in prompt.urls}
    return Prompts(measured, [prompt for prompt in found[unique:] if shown.isdisjoint(prompt.urls)])


# --- prompts made here ----------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """A medium, and what it shows."""

    url: str
    colour: str
    shape: str
    motion: str | None


def show(kind: Kind, seed: int, **fixed: Any) -> Shown:
    """The medium of `seed`; keywords as those of `demo.videos.make_scene`."""
    if kind == "video":
        clip = videos.render(seed, **fixed)
        return Shown(data_url(videos.encode(clip), "video/mp4"), clip.colour, clip.shape, clip.motion)
    picture = videos.render_image(seed, **fixed)
    return Shown(data_url(videos.encode_image(picture), "image/png"), picture.colour, picture.shape, None)


def _questions(kind: Kind, args: argparse.Namespace, order: list[int]) -> list[Prompt]:
    first = FIRST_SEED + args.seed * SEEDS_EACH
    shown = _render(lambda number: show(kind, first + number), max(order) + 1, not args.disable_tqdm)
    prompts = []
    for place, number in enumerate(order):
        # Drawn apart from what is shown: by the medium's own seed, whose first draw is the colour, every red shape
        # would be asked for its colour and no blue one ever.
        asked = questions.ask([shown[number]], None, np.random.default_rng([first + place, QUESTION_DRAWS]))
        content = [media_part(shown[number].url, kind), text_part(asked.text)]
        prompts.append(from_user(content, asked.answer, args.output_len or ANSWER_TOKENS))
    return prompts


def _of_sizes(args: argparse.Namespace, tokenizer: str, order: list[int], each: int) -> list[Prompt]:
    """Prompts with `each` media, of which place i is medium `order[i]`."""
    buckets: dict[tuple[int, int, int], float] = ast.literal_eval(args.random_mm_bucket_config)
    count, first = max(order) + 1, FIRST_SEED + args.seed * SEEDS_EACH
    sizes = draws(args.seed, "sizes").choices(list(buckets), list(buckets.values()), k=count)

    def one(number: int) -> dict[str, Any]:
        height, width, frames = sizes[number]
        kind: Kind = "image" if frames == 1 else "video"
        return media_part(show(kind, first + number, width=width, height=height, num_frames=frames).url, kind)

    media = _render(one, count, not args.disable_tqdm)
    groups = [order[start : start + each] for start in range(0, len(order), each)]
    texts = [("Describe what you see.", args.output_len or TEXT_TOKENS)] * len(groups)
    if args.input_len:
        texts = _texts(args, tokenizer, len(groups), args.input_len)
    return [
        from_user([*(media[number] for number in group), text_part(text)], None, tokens)
        for group, (text, tokens) in zip(groups, texts, strict=True)
    ]


def _render(one: Callable[[int], Made], count: int, progress: bool) -> list[Made]:
    """`one(0)` to `one(count - 1)`, by as many threads as there are cores: drawing and encoding leave the GIL."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = pool.map(one, range(count))
        return list(tqdm(made, "rendering", count, leave=False, file=sys.stderr, unit=" media", disable=not progress))


def _texts(args: argparse.Namespace, tokenizer: str, count: int, length: int) -> list[tuple[str, int]]:
    """Texts of `length` tokens after the common prefix, and the most tokens of each answer; of both up to the share
    --random-range-ratio less or more is drawn. They are made of words that are one token after a space."""
    vocabulary = load_tokenizer(tokenizer, "for texts of --random-input-len").get_vocab()
    words = [token[1:] for token in sorted(vocabulary) if token.startswith(SPACES)]
    words = [word for word in words if word.isascii() and word.isalpha()]
    rng, lengths = draws(args.seed, "texts"), draws(args.seed, "lengths")
    prefix = rng.choices(words, k=args.random_prefix_len or 0)
    ratio = args.random_range_ratio or 0.0

    def drawn(mean: int) -> int:
        return lengths.randint(max(1, math.floor(mean * (1 - ratio))), max(1, math.ceil(mean * (1 + ratio))))

    return [
        (" ".join(["", *prefix, *rng.choices(words, k=drawn(length))]), drawn(args.output_len or TEXT_TOKENS))
        for _ in range(count)
    ]
