"""What a data set gives: prompts with their media, and what is known about the answer.

Knows nothing of servers or of how a medium travels to one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["image", "video"]


@dataclass(frozen=True)
class Medium:
    """An encoded image or video. Prompts that repeat a medium hold the same object."""

    data: bytes
    mime: str  # such as video/mp4

    @property
    def kind(self) -> Kind:
        """Image or video, by the type."""
        return "video" if self.mime.startswith("video/") else "image"


@dataclass(frozen=True)
class Link:
    """A medium that the data set names by a URL of its own; it is passed on as it stands."""

    url: str
    kind: Kind


Part = str | Medium | Link


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """Its text alone."""
        return "\n".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True)
class Sample:
    """One prompt. `answer` is the one right text, None where there is none; `output_tokens` the most to generate."""

    messages: tuple[Message, ...]
    answer: str | None
    output_tokens: int

    @property
    def media(self) -> list[Medium]:
        """The media that travel as the benchmark says."""
        return [part for message in self.messages for part in message.parts if isinstance(part, Medium)]

    @property
    def shown(self) -> list[Medium | Link]:
        """All of its media, however they travel."""
        return [part for message in self.messages for part in message.parts if not isinstance(part, str)]


@dataclass(frozen=True)
class DataSettings:
    """Which prompts are wanted. What a data set has no use for is None."""

    name: str
    count: int
    warm_ups: int
    seed: int
    output_tokens: int | None  # None: as the data set says
    unique_ratio: float = 1.0  # share of the prompts whose media no earlier prompt had
    path: str | None = None
    subset: str | None = None
    split: str | None = None
    shuffle: bool = True
    oversample: bool = True  # records are sent again where there are too few
    buckets: dict[tuple[int, int, int], float] | None = None  # (height, width, frames) -> weight
    items_per_prompt: int = 1
    input_tokens: int | None = None  # of a prompt's text; None: a short one
    prefix_tokens: int = 0  # before these, the same for all prompts
    range_ratio: float = 0.0  # by which share these and the output's tokens are less or more
    tokenizer: str | None = None  # directory or hub name
    progress: bool = True  # shown while media are made


@dataclass(frozen=True)
class Prompts:
    """What was loaded. `notes` are sentences for the user."""

    samples: list[Sample]
    warm_ups: list[Sample]
    notes: list[str]


def draws(seed: int, purpose: str) -> random.Random:
    """The random numbers of one purpose, unrelated to those that the same seed gives for another: from one stream, the
    times between requests would say which sizes of media they bring.
    """
    return random.Random(f"{seed} {purpose}")


def repeat_order(count: int, unique_ratio: float, rng: random.Random) -> list[int]:
    """Which medium each of `count` places shows, as numbers from 0 in the order of their first use.

    max(1, round(count * unique_ratio)) of them are new, the first among these; the places of the others are drawn, and
    each repeats one drawn from those seen before it.
    """
    unique = max(1, round(count * unique_ratio)) if count else 0
    new = {0, *rng.sample(range(1, count), unique - 1)} if count else set()
    order: list[int] = []
    seen = 0
    for place in range(count):
        order.append(seen if place in new else rng.randrange(seen))
        seen += place in new
    return order
