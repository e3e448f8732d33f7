"""How often the bundled model is exactly right, on seeds that it never saw.

`quick` runs inside training on prepared items. `python -m training.evaluate` goes the whole way that a user's
video goes: encode, decode, sample, Hugging Face processor, `generate`; it prints one row per codec, and one for videos
of a second renderer, `paint`, which shares no drawing code with the one that the training draws from.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageColor, ImageDraw, ImageOps
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLForConditionalGeneration
from transformers.video_utils import VideoMetadata

from mini_engine.demo import videos
from training import codecs, forward, questions
from training.data import Item, Sample, Writer, sample_indices
from training.model import WEIGHTS

FRESH_SEEDS = 1_000_000_000  # from here on: never used in training, only to watch it
TABLE_SEEDS = FRESH_SEEDS + 1_000_000  # from here on: not even for that
SHADES = {  # of the second renderer: names of CSS colours
    "red": ("red", "crimson", "firebrick"),
    "green": ("lime", "limegreen", "green"),
    "blue": ("blue", "royalblue", "dodgerblue"),
    "yellow": ("yellow", "gold", "khaki"),
    "orange": ("orange", "darkorange", "coral"),
    "purple": ("purple", "darkviolet", "mediumorchid"),
    "cyan": ("cyan", "darkturquoise", "mediumturquoise"),
    "white": ("white", "snow", "gainsboro"),
}
BACKDROPS = ("black", "midnightblue", "darkslategray", "dimgray", "saddlebrown", "darkolivegreen", "slategray")


def exact_rows(outputs: forward.Outputs) -> dict[int, bool]:
    """Of each sample, whether every answer token is the most likely one: that is, whether greedy decoding says it."""
    right: dict[int, bool] = defaultdict(lambda: True)
    hits = outputs.logits.argmax(-1) == outputs.targets
    for row, hit in zip(outputs.rows.tolist(), hits.tolist(), strict=True):
        right[row] &= hit
    return right


@torch.inference_mode()
def quick(model: Qwen2_5_VLForConditionalGeneration, writer: Writer, items: list[Item]) -> dict[str, float]:
    """Exact share per kind of question over `items`, each asked once; pairs of neighbours are asked to be listed."""
    rng = np.random.default_rng(0)
    share: dict[str, float] = {}
    for kind in questions.KINDS:
        groups = [(item,) for item in items if kind in questions.kinds_for((item,))]
        if kind == "list":
            groups = list(zip(items[::2], items[1::2], strict=False))  # type: ignore[arg-type]
        samples = [sample_of(writer, group, kind, rng) for group in groups]
        right: list[bool] = []
        for at in range(0, len(samples), 32):
            right += exact_rows(forward.run(model, writer.batch(samples[at : at + 32]))).values()
        share[kind] = sum(right) / len(right)
    return share


def sample_of(writer: Writer, things: tuple[Item, ...], kind: str, rng: np.random.Generator) -> Sample:
    """One question of `kind` about `things` with its right answer, as a conversation."""
    asked = questions.ask(things, kind, rng)
    messages = [*user_message(things, asked.text), {"role": "assistant", "content": asked.answer}]
    return Sample(things, writer.expand(messages, things))


def user_message(things: Sequence[videos.Thing], text: str) -> list[dict]:
    """The chat messages that ask `text` about `things`."""
    parts: list[dict] = [{"type": "image" if thing.motion is None else "video"} for thing in things]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def paint(seed: int) -> videos.Clip:
    """The clip of `seed` by the second renderer: Pillow draws four times too large, so the motion is sub-pixel."""
    rng = np.random.default_rng([seed, 3])
    colour, shape, motion = (str(rng.choice(names)) for names in (list(SHADES), videos.SHAPES, videos.MOTIONS))
    width, height = (2 * int(side) for side in rng.integers(60, 161, 2))
    num_frames, radius = int(rng.integers(12, 61)), rng.uniform(0.15, 0.26) * min(width, height)
    fill = ImageColor.getrgb(str(rng.choice(SHADES[colour])))
    gradient = Image.linear_gradient("L") if rng.uniform() < 0.7 else Image.radial_gradient("L")
    gradient = gradient.rotate(float(rng.choice([0, 90, 180, 270]))).resize((4 * width, 4 * height))
    first, last = (str(name) for name in rng.choice(BACKDROPS, 2, replace=False))
    backdrop = ImageOps.colorize(gradient, first, last)
    step = np.array(videos.DIRECTIONS[motion]) * rng.uniform(0.25, 0.5) * (width, height)
    room = np.array([width, height]) - 2 * radius - abs(step)
    start = radius + rng.uniform(0, 1, 2) * room - np.minimum(step, 0)
    frames = []
    for when in np.linspace(0, 1, num_frames):
        canvas = backdrop.copy()
        x, y = 4 * (start + when * step)
        _outline(ImageDraw.Draw(canvas), shape, x, y, 4 * radius, fill)
        frames.append(np.asarray(canvas.reduce(4)))
    return videos.Clip(colour, shape, motion, np.stack(frames), int(rng.choice([12, 24, 30])))


def _outline(pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, fill: tuple) -> None:
    """Fill a shape of the second renderer around (x, y)."""
    thin, low, wide = radius / 4, radius / 2, radius * math.sqrt(3) / 2
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill)
    elif shape == "square":
        pen.rectangle((x - wide, y - wide, x + wide, y + wide), fill)
    elif shape == "triangle":
        pen.polygon([(x, y - radius), (x - wide, y + low), (x + wide, y + low)], fill)
    else:
        pen.rectangle((x - thin, y - radius, x + thin, y + radius), fill)
        pen.rectangle((x - radius, y - thin, x + radius, y + thin), fill)


def processed(processor: Any, media: Sequence[videos.Clip], text: str, num_frames: int | None = None) -> Any:
    """The Hugging Face processor's tensors for one prompt, its videos sampled beforehand as the server does it."""
    wanted = num_frames or processor.video_processor.num_frames
    clips, metadata, pictures = [], [], []
    for item in media:
        if item.motion is None:
            pictures.append(item.frames[0])
            continue
        indices = sample_indices(len(item.frames), wanted)
        clips.append(item.frames[indices])
        metadata.append(VideoMetadata(total_num_frames=len(item.frames), fps=item.fps, frames_indices=indices.tolist()))
    prompt = processor.apply_chat_template(user_message(media, text), tokenize=False, add_generation_prompt=True)
    extra = {"videos": clips, "video_metadata": metadata, "do_sample_frames": False} if clips else {}
    return processor(text=[prompt], images=pictures or None, return_tensors="pt", **extra)


def say(model: Any, processor: Any, media: Sequence[videos.Clip], text: str, num_frames: int | None = None) -> str:
    """What transformers' greedy `generate` answers to `text` about `media`."""
    inputs = processed(processor, media, text, num_frames).to(model.device)
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=64, do_sample=False, temperature=None)
    return processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def measure(folder: Path, count: int, first_seed: int = TABLE_SEEDS) -> dict[str, dict[str, list[bool]]]:
    """Right or wrong per row (container and codec, images, several items) and kind of question, `count` seeds each."""
    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    results: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))

    def ask(row: str, media: tuple[videos.Clip, ...], seed: int) -> None:
        for kind in questions.kinds_for(media):
            asked = questions.ask(media, kind, seed)
            results[row][kind].append(say(model, processor, media, asked.text) == asked.answer)

    for seed in range(first_seed, first_seed + count):
        picture = videos.render_image(seed)
        pixels = codecs.decode_image(videos.encode_image(picture, "jpeg"))
        still = replace(picture, frames=pixels[None])
        seen = [codecs.roundtrip(videos.render(seed + n * count), *pair) for n, pair in enumerate(videos.PAIRS, 1)]
        for (container, codec), media in zip(videos.PAIRS, seen, strict=True):
            ask(f"{codec} in {container}", (media,), seed)
        ask("painted", (codecs.roundtrip(paint(seed)),), seed)
        ask("jpeg", (still,), seed)
        ask("two videos", (seen[seed % len(seen)], seen[(seed + 1) % len(seen)]), seed)
        ask("image, video", (still, seen[seed % len(seen)]), seed)
        ask("video, image", (seen[seed % len(seen)], still), seed)
        ask("three videos", (seen[0], seen[1], seen[2]), seed)
    return results


def table(results: dict[str, dict[str, list[bool]]]) -> str:
    """The results as text, percent exact per row and kind; "-" where nothing was asked."""
    lines = [f"{'':<14}" + "".join(f"{kind:>10}" for kind in questions.KINDS)]
    for row, kinds in results.items():
        cells = (f"{100 * sum(k) / len(k):.1f}" if (k := kinds.get(kind)) else "-" for kind in questions.KINDS)
        lines.append(f"{row:<14}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Print the table for a model directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="model directory (default: the bundled one)")
    parser.add_argument("--count", type=int, default=30, help="fresh seeds per row")
    arguments = parser.parse_args()
    print(table(measure(arguments.model, arguments.count)))


if __name__ == "__main__":
    main()
