"""Prompts made here: the bundled model's videos and images with questions, media of given sizes, and texts.

Everything follows from the seed. Media are drawn and encoded by threads, since both leave the GIL.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from tqdm import tqdm

from mini_engine.bench.datasets.sample import DataSettings, Kind, Medium, Message, Sample
from mini_engine.demo import questions, videos

FIRST_SEED = 2 * 10**9  # far from what the bundled model was trained on
SEEDS_EACH = 10**6
ANSWER_TOKENS = 32  # the longest answer of the bundled model has fewer
TEXT_TOKENS = 128
Made = TypeVar("Made")


@dataclass(frozen=True)
class Shown:
    """A medium, and what it shows."""

    medium: Medium
    colour: str
    shape: str
    motion: str | None


def show(kind: Kind, seed: int, **fixed: object) -> Shown:
    """The medium of `seed`; keywords as those of `demo.videos.make_scene`."""
    if kind == "video":
        clip = videos.render(seed, **fixed)
        return Shown(Medium(videos.encode(clip), "video/mp4"), clip.colour, clip.shape, clip.motion)
    picture = videos.render_image(seed, **fixed)
    return Shown(Medium(videos.encode_image(picture), "image/png"), picture.colour, picture.shape, None)


def questions_about(kind: Kind, settings: DataSettings, order: list[int]) -> list[Sample]:
    """A question about medium `order[i]` for each i, with its answer."""
    first = FIRST_SEED + settings.seed * SEEDS_EACH
    shown = make(lambda number: show(kind, first + number), max(order) + 1)
    samples = []
    for place, number in enumerate(order):
        asked = questions.ask([shown[number]], None, first + place)
        message = Message("user", (shown[number].medium, asked.text))
        samples.append(Sample((message,), asked.answer, settings.output_tokens or ANSWER_TOKENS))
    return samples


def of_sizes(settings: DataSettings, order: list[int]) -> list[Sample]:
    """Prompts with `items_per_prompt` media each, whose sizes are drawn from the buckets; `order` has one per item."""
    assert settings.buckets is not None
    rng = random.Random(settings.seed)
    sizes = rng.choices(list(settings.buckets), list(settings.buckets.values()), k=max(order) + 1)
    first = FIRST_SEED + settings.seed * SEEDS_EACH

    def one(number: int) -> Medium:
        height, width, frames = sizes[number]
        if frames == 1:
            return show("image", first + number, width=width, height=height).medium
        return show("video", first + number, width=width, height=height, num_frames=frames).medium

    media = make(one, max(order) + 1)
    each = settings.items_per_prompt
    groups = [order[start : start + each] for start in range(0, len(order), each)]
    tokens = settings.output_tokens or TEXT_TOKENS
    return [
        Sample((Message("user", (*(media[number] for number in group), "Describe what you see.")),), None, tokens)
        for group in groups
    ]


def texts(settings: DataSettings, order: list[int]) -> list[Sample]:
    """Short prompts without media, no two alike."""
    first = settings.seed * SEEDS_EACH
    tokens = settings.output_tokens or TEXT_TOKENS
    return [
        Sample((Message("user", (f"Say something about the number {first + number}.",)),), None, tokens)
        for number in order
    ]


def make(one: Callable[[int], Made], count: int) -> list[Made]:
    """`one(0)` to `one(count - 1)`, by as many threads as there are cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = pool.map(one, range(count))
        return list(tqdm(made, "rendering", count, leave=False, file=sys.stderr, unit=" media"))
