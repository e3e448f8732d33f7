"""The questions that the bundled model answers, in several phrasings, with the exact expected answers.

    colour    "What colour is the shape?"       red
    shape     "Which shape is it?"              circle
    motion    "Which way does it move?"         left        (left, right, up, down or still)
    describe  "Describe the video."             a red circle moving left / a red circle standing still
              "Describe the image."             a red circle
    list      "Describe the items in order."    first: a red circle moving left; second: a blue square

`list` asks about two or three items in one prompt. The motion of a picture is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mini_engine.demo.videos import Thing

KINDS = ("colour", "shape", "motion", "describe", "list")
ORDINALS = ("first", "second", "third")
HELP = "Send me a video or an image of a moving shape, and ask what you see."

# Of each kind, divided by bars.
_TEXTS = {
    "colour": "What colour is the shape? | What color is it? | Which colour does the object have? | Name the colour. "
    "| What is the colour of the moving thing? | Which color do you see?",
    "shape": "Which shape is it? | What shape do you see? | Name the shape. | What kind of shape is shown? | What is "
    "the shape of the object? | Is it a circle, a square, a triangle or a cross?",
    "motion": "Which way does it move? | In which direction does the shape move? | Where does the shape go? | Name "
    "the direction of the motion. | Does it move left, right, up, down, or is it still? | How does the object move?",
    "describe video": "Describe the video. | What happens in the video? | What do you see? | What is in this video? "
    "| What does the clip show? | Describe what you see.",
    "describe image": "Describe the image. | What is in this image? | What do you see? | What does the picture show? "
    "| Describe what you see.",
    "list": "Describe the items in order. | Describe each of them in order. | What do you see in each, in order? | "
    "What do they show, one after the other? | Describe the first, then the second. | What is in each of them?",
}
PHRASINGS = {kind: tuple(texts.split(" | ")) for kind, texts in _TEXTS.items()}


@dataclass(frozen=True)
class Question:
    """A question about the items of one prompt, and the one answer that counts as right."""

    kind: str  # one of KINDS
    text: str
    answer: str


def phrase(thing: Thing) -> str:
    """One item in words: "an orange cross moving up", "a red circle standing still", of a picture "a red circle"."""
    article = "an" if thing.colour[0] in "aeiou" else "a"
    motion = {None: "", "still": " standing still"}.get(thing.motion, f" moving {thing.motion}")
    return f"{article} {thing.colour} {thing.shape}{motion}"


def answer(kind: str, things: Sequence[Thing]) -> str:
    """The exact answer to a question of `kind` about `things`, the items of the prompt in order."""
    if kind == "list":
        return "; ".join(f"{ordinal}: {phrase(thing)}" for ordinal, thing in zip(ORDINALS, things, strict=False))
    (thing,) = things
    if kind == "describe":
        return phrase(thing)
    if kind == "motion":
        return thing.motion or "still"
    return str(getattr(thing, kind))


def kinds_for(things: Sequence[Thing]) -> tuple[str, ...]:
    """The kinds of question that can be asked about these items."""
    if len(things) > 1:
        return ("list",)
    return ("colour", "shape", "motion", "describe") if things[0].motion else ("colour", "shape", "describe")


def phrasings(kind: str, things: Sequence[Thing]) -> tuple[str, ...]:
    """The phrasings of a kind of question for these items."""
    if kind == "describe":
        return PHRASINGS["describe image" if things[0].motion is None else "describe video"]
    return PHRASINGS[kind]


def ask(things: Sequence[Thing], kind: str | None = None, seed: int | np.random.Generator = 0) -> Question:
    """A question about `things` with its answer. Kind (unless given) and phrasing are drawn from `seed`."""
    rng = np.random.default_rng(seed)
    kind = kind or str(rng.choice(kinds_for(things)))
    return Question(kind, str(rng.choice(phrasings(kind, things))), answer(kind, things))
