"""Prompts made here: the bundled model's videos and images with questions, media of given sizes, and texts.

Everything follows from the seed. Media are drawn and encoded by threads, since both leave the GIL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from mini_engine.bench.datasets.sample import DataSettings, Kind, Medium, Message, Sample, draws
from mini_engine.bench.datasets.tokenized import RandomTexts, drawn_length
from mini_engine.demo import questions, videos

FIRST_SEED = 2 * 10**9  # far from what the bundled model was trained on
SEEDS_EACH = 10**6
QUESTION_DRAWS = 3  # beside a seed, where those of a medium have 1 and 2
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


def question_about(shown: Shown, seed: int) -> questions.Question:
    """A question with its answer, drawn apart from what is shown: `seed` may be the medium's own, whose first draw is
    the colour, and by the same draw every red shape would be asked for its colour and no blue one ever.
    """
    return questions.ask([shown], None, np.random.default_rng([seed, QUESTION_DRAWS]))


def questions_about(kind: Kind, settings: DataSettings, order: list[int]) -> list[Sample]:
    """A question about medium `order[i]` for each i, with its answer."""
    first = FIRST_SEED + settings.seed * SEEDS_EACH
    shown = make(lambda number: show(kind, first + number), max(order) + 1, settings.progress)
    samples = []
    for place, number in enumerate(order):
        asked = question_about(shown[number], first + place)
        message = Message("user", (shown[number].medium, asked.text))
        samples.append(Sample((message,), asked.answer, settings.output_tokens or ANSWER_TOKENS))
    return samples


def of_sizes(settings: DataSettings, order: list[int]) -> list[Sample]:
    """Prompts with `items_per_prompt` media each, whose sizes are drawn from the buckets; `order` has one per item."""
    assert settings.buckets is not None
    buckets, weights = list(settings.buckets), list(settings.buckets.values())
    sizes = draws(settings.seed, "sizes").choices(buckets, weights, k=max(order) + 1)
    first = FIRST_SEED + settings.seed * SEEDS_EACH

    def one(number: int) -> Medium:
        height, width, frames = sizes[number]
        if frames == 1:
            return show("image", first + number, width=width, height=height).medium
        return show("video", first + number, width=width, height=height, num_frames=frames).medium

    media = make(one, max(order) + 1, settings.progress)
    each = settings.items_per_prompt
    groups = [order[start : start + each] for start in range(0, len(order), each)]
    written = written_texts(settings, ["Describe what you see."] * len(groups))
    return [
        Sample((Message("user", (*(media[number] for number in group), one.text)),), None, one.output_tokens)
        for group, one in zip(groups, written, strict=True)
    ]


def texts(settings: DataSettings, order: list[int]) -> list[Sample]:
    """Prompts without media, no two short ones alike."""
    first = settings.seed * SEEDS_EACH
    written = written_texts(settings, [f"Say something about the number {first + number}." for number in order])
    return [Sample((Message("user", (one.text,)),), None, one.output_tokens) for one in written]


@dataclass(frozen=True)
class Written:
    """A prompt's text, and the most tokens of its answer."""

    text: str
    output_tokens: int


def written_texts(settings: DataSettings, short: list[str]) -> list[Written]:
    """The `short` texts, or as many of the length that the settings name."""
    tokens, ratio = settings.output_tokens or TEXT_TOKENS, settings.range_ratio
    if settings.input_tokens is None:
        return [Written(text, tokens) for text in short]
    made = RandomTexts(settings.tokenizer, settings.prefix_tokens, settings.seed)
    rng = draws(settings.seed, "lengths")
    return [
        Written(made.text(drawn_length(settings.input_tokens, ratio, rng)), drawn_length(tokens, ratio, rng))
        for _ in short
    ]


def make(one: Callable[[int], Made], count: int, progress: bool = True) -> list[Made]:
    """`one(0)` to `one(count - 1)`, by as many threads as there are cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = pool.map(one, range(count))
        return list(
            tqdm(
                made,
                "rendering",
                count,
                leave=False,
                file=sys.stderr,
                unit=" media",
                disable=not progress or sys.stderr is None,
            )
        )
