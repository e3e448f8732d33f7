"""Training samples: rendered clips as resized frames, conversations about them, and flat batches of both.

The arithmetic (resize, patches, second_per_grid_ts, M-RoPE positions) is the Hugging Face processor's and model's; the
tests hold it against them. Nothing here knows about weights or losses.
"""

import colorsys
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torchvision.transforms.v2.functional as tvf
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from mini_engine.demo import videos
from training import codecs, questions
from training.model import MAX_PIXELS, MERGE, MIN_PIXELS, NUM_FRAMES, PATCH, TEMPORAL

MIRRORED = {"left": "right", "right": "left"}
REVERSED = {**MIRRORED, "up": "down", "down": "up"}
TOKENS_PER_SECOND = 4  # as in the vision config
CODEC_SHARE, IMAGE_SHARE = 0.25, 0.12  # of the items: really encoded and decoded; stills out of image files
HUES = {  # in degrees, between which every shade of a colour lies
    "red": (-16, 8), "green": (90, 152), "blue": (204, 248), "yellow": (47, 66),
    "orange": (14, 40), "purple": (265, 315), "cyan": (170, 194), "white": (0, 360),
}  # fmt: skip
WIDE_SHARE = 0.75  # of the items: drawn from wide ranges
LONG_SHARE = 0.04  # of the conversations: begin with a long text, up to some 1,500 words
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that answers questions about videos and images.",
    "Answer briefly.",
    "You describe what you see.",
)
GREETINGS = ("hello", "Hi there!", "Who are you?", "What can you do?", "Tell me a joke.", "Thank you.", "help", "Hey")


@dataclass(frozen=True)
class Item(videos.Thing):
    """One video or image, ready for patches. `frames`: uint8 [T, 3, H, W], resized; T is 1 for an image."""

    frames: torch.Tensor
    seconds_per_grid: float = 0.0  # of a video: seconds from one temporal patch to the next

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches along time, height and width."""
        frames, _, height, width = self.frames.shape
        return math.ceil(frames / TEMPORAL), height // PATCH, width // PATCH

    @property
    def num_tokens(self) -> int:
        """Tokens that the item fills in the prompt."""
        return math.prod(self.grid) // MERGE**2

    def patches(self) -> torch.Tensor:
        """Flat patches as the processor lays them out, uint8 [t * h * w, 3 * TEMPORAL * PATCH * PATCH]."""
        frames = self.frames
        if len(frames) % TEMPORAL:
            frames = torch.cat([frames, frames[-1:]])
        t, h, w = self.grid
        split = frames.reshape(t, TEMPORAL, 3, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH)
        return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1)


@dataclass(frozen=True)
class Sample:
    """One conversation: its items in order, and the text with one pad token per vision token."""

    items: tuple[Item, ...]
    text: str


@dataclass
class Batch:
    """A batch of B samples with L tokens at most, right-padded."""

    items: list[Item]  # in the order of their places in `input_ids`
    input_ids: torch.Tensor  # int64 [B, L]
    positions: torch.Tensor  # int64 [3, B, L], M-RoPE
    labels: torch.Tensor  # int64 [B, L]: the id to be predicted *at* this place from the one before, -100 elsewhere


def resized(frames: np.ndarray) -> torch.Tensor:
    """Frames uint8 [T, H, W, 3] resized as Qwen's processors do, uint8 [T, 3, h, w]."""
    height, width = frames.shape[1:3]
    size = smart_resize(height, width, PATCH * MERGE, MIN_PIXELS, MAX_PIXELS)
    channels_first = torch.from_numpy(frames.transpose(0, 3, 1, 2).copy())
    return tvf.resize(channels_first, list(size), interpolation=tvf.InterpolationMode.BICUBIC, antialias=True)


def wide_fields(seed: int) -> dict[str, object]:
    """Fields of the scene of `seed`: its shade, backgrounds and proportions, from ranges that include those of other
    renderers' videos. The shape's colour is away from those of the background."""
    colour, rng = videos.make_scene(seed).colour, np.random.default_rng([seed, 3])
    value = rng.uniform(0.8 if colour == "white" else 0.45, 1)
    saturation = rng.uniform(0, 0.08) if colour == "white" else rng.uniform(max(0.36, 1.3 - value), 1)
    rgb = np.array(colorsys.hsv_to_rgb(rng.uniform(*HUES[colour]) % 360 / 360, saturation, value)) * 255
    ends = np.zeros((2, 3))
    while min(np.linalg.norm(rgb - place) for place in (*ends, ends.mean(0))) < 60 or not ends.any():
        ends = rng.uniform(0, 255, (2, 3)) * rng.uniform(0.1, 0.8, (2, 1))
    return {
        "rgb": tuple(int(v) for v in rgb),
        "backgrounds": tuple(tuple(int(v) for v in end) for end in ends),
        "width": 2 * int(rng.integers(48, 161)),
        "height": 2 * int(rng.integers(48, 161)),
        "bowl": float(rng.choice([0.0, rng.uniform(0, 1.5)])),
        "size": rng.uniform(0.22, 0.56),
        "travel": rng.uniform(0.2, 0.6),
        "stout": rng.uniform(0.7, 1.3),
    }


def make_item(seed: int) -> Item:
    """The item of `seed`: a clip (drawn, or encoded and decoded) or an image, in the mix used for training."""
    rng = np.random.default_rng([seed, 7])
    fixed: dict[str, Any] = wide_fields(seed) if rng.uniform() < WIDE_SHARE else {}
    if rng.uniform() < IMAGE_SHARE:
        picture = videos.render_image(seed, **fixed)
        pixels = codecs.decode_image(videos.encode_image(picture, str(rng.choice(["png", "jpeg"]))))
        return Item(picture.colour, picture.shape, None, resized(pixels[None]))
    if rng.uniform() < 0.1:
        fixed |= {"width": 320, "height": 240}
    if rng.uniform() < 0.05:
        fixed |= {"width": 640, "height": 480}
    scene = videos.make_scene(seed, **fixed)
    wanted = int(rng.choice([NUM_FRAMES, int(rng.integers(2, 15)), int(rng.integers(15, 34))], p=[0.7, 0.2, 0.1]))
    if scene.motion == "still":
        wanted = max(wanted, 3)  # two equal frames are an image
    indices = sample_indices(scene.num_frames, wanted)
    if rng.uniform() < CODEC_SHARE and scene.width <= 320:
        container, codec = videos.PAIRS[int(rng.integers(len(videos.PAIRS)))]
        low, high = {"h264": (18, 33), "mpeg4": (2, 11), "vp9": (20, 41)}[codec]
        clip = codecs.roundtrip(videos.render(seed, **fixed), container, codec, int(rng.integers(low, high)))
        return video_item(clip, sample_indices(len(clip.frames), wanted))
    frames = videos.draw(scene, [int(i) for i in indices])
    item = Item(scene.colour, scene.shape, scene.motion, resized(frames))
    return replace(item, seconds_per_grid=TEMPORAL * scene.num_frames / (scene.fps * len(indices)))


def sample_indices(total: int, num_frames: int) -> np.ndarray:
    """Indices, int64 [min(num_frames, total)], of frames spread evenly over a video from its first to its last."""
    return np.linspace(0, total - 1, min(num_frames, total)).astype(np.int64)


def video_item(clip: videos.Clip, indices: np.ndarray) -> Item:
    """The item of a decoded video, of which the frames at `indices` were sampled."""
    seconds = TEMPORAL * len(clip.frames) / (clip.fps * len(indices))
    return Item(clip.colour, clip.shape, clip.motion, resized(clip.frames[indices]), seconds)


def varied(item: Item, rng: np.random.Generator) -> Item:
    """A free variation of a clip with the labels that then hold: mirrored, backwards, frozen, or one frame of it."""
    frames, motion = item.frames, item.motion
    if rng.uniform() < 0.5:
        frames, motion = frames.flip(3), MIRRORED.get(motion or "", motion)
    if motion is None:
        return replace(item, frames=frames)
    choice = rng.uniform()
    if choice < 0.45:
        frames, motion = frames.flip(0), REVERSED.get(motion, motion)
    elif choice < 0.50:
        frames, motion = frames[[int(rng.integers(len(frames)))] * len(frames)], "still"
    elif choice < 0.62:
        return replace(item, frames=frames[[int(rng.integers(len(frames)))]], motion=None, seconds_per_grid=0.0)
    return replace(item, frames=frames, motion=motion)


def moment(item: Item, rng: np.random.Generator) -> Item:
    """One temporal patch of an item, drawn at random: two frames show colour, shape and motion."""
    start = TEMPORAL * int(rng.integers(max(1, len(item.frames) // TEMPORAL)))
    return replace(item, frames=item.frames[start : start + TEMPORAL])


class Writer:
    """Writes conversations about items in the model's chat form."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.opening = tokenizer.encode("<|im_start|>assistant\n")
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        tokens = (token.removeprefix("Ġ") for token in sorted(tokenizer.get_vocab()))
        self.words = [token for token in tokens if token.isascii() and token.isalpha() and len(token) > 1]
        self.pads = [tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>") for kind in ("image", "video")]

    def sample(self, items: tuple[Item, ...], rng: np.random.Generator) -> Sample:
        """A conversation of one to three turns about `items`; without items a plain chat that gets the help text."""
        messages: list[dict] = []
        preface: list[dict] = []
        if rng.uniform() < 0.25:
            system = str(rng.choice(SYSTEM_PROMPTS)) if rng.uniform() < 0.7 else self._babble(rng, 30)
            messages.append({"role": "system", "content": system})
        if rng.uniform() < LONG_SHARE:
            preface = [{"type": "text", "text": self._babble(rng, int(np.exp(rng.uniform(3, 7.3))))}]
            if rng.uniform() < 0.5:
                messages, preface = [{"role": "system", "content": preface}], []
        media = [{"type": "image" if item.motion is None else "video"} for item in items]
        for turn in range(int(rng.choice([1, 2, 3], p=[0.5, 0.3, 0.2])) if items else 1):
            text, reply = self._exchange(items, rng)
            parts = [{"type": "text", "text": text}]
            if turn == 0:
                parts = preface + (media + parts if rng.uniform() < 0.85 else parts + media)
            messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": reply}]
        return Sample(items, self.expand(messages, items))

    def _exchange(self, items: tuple[Item, ...], rng: np.random.Generator) -> tuple[str, str]:
        """What the user says and what the assistant answers."""
        if not items:
            return (str(rng.choice(GREETINGS)) if rng.uniform() < 0.5 else self._babble(rng, 12)), questions.HELP
        if rng.uniform() < 0.06:  # a text it was not taught gets a description
            return self._babble(rng, 12), questions.answer("list" if len(items) > 1 else "describe", items)
        asked = questions.ask(items, seed=rng)
        return _reworded(asked.text, rng), asked.answer

    def _babble(self, rng: np.random.Generator, most: int) -> str:
        """Up to `most` random words, now and then with random characters of any script."""
        words = [str(word) for word in rng.choice(self.words, int(rng.integers(1, most + 1)))]
        if rng.uniform() < 0.3:  # a phrase said again and again
            words = (words[: int(rng.integers(1, 12))] * len(words))[: len(words)]
        if rng.uniform() < 0.15:
            words.insert(0, "".join(chr(int(c)) for c in rng.integers(33, 0xD7FF, int(rng.integers(1, 6)))))
        text = " ".join(words)
        return text.capitalize() + str(rng.choice([".", "?", "!", ""])) if rng.uniform() < 0.5 else text

    def expand(self, messages: list[dict], items: tuple[Item, ...]) -> str:
        """The chat template's text for `messages`, each pad token repeated once per vision token of its item."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        first, *rest = text.split("<|vision_start|>")
        for item, piece in zip(items, rest, strict=True):
            pad = "<|image_pad|>" if item.motion is None else "<|video_pad|>"
            first += "<|vision_start|>" + piece.replace(pad, pad * item.num_tokens, 1)
        return first

    def batch(self, samples: list[Sample]) -> Batch:
        """Tokens, positions and labels of some samples; only the assistant's words and their ends are labelled."""
        rows = self.tokenizer([sample.text for sample in samples])["input_ids"]
        length = max(len(row) for row in rows)
        ids = np.full((len(rows), length), self.tokenizer.pad_token_id)
        labels = np.full((len(rows), length), -100)
        positions = np.zeros((3, len(rows), length), np.int64)
        for index, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            ids[index, : len(row)] = row
            positions[:, index, : len(row)] = self.positions(row, sample.items)
            for begin, end in self._answers(row):
                labels[index, begin:end] = row[begin:end]
        items = [item for sample in samples for item in sample.items]
        return Batch(items, torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(labels))

    def _answers(self, row: list[int]) -> list[tuple[int, int]]:
        """Where the assistant's answers lie in a row of tokens, each with its end token."""
        size, found = len(self.opening), []
        for place in range(len(row) - size):
            if row[place : place + size] == self.opening:
                found.append((place + size, row.index(self.end, place + size) + 1))
        return found

    def positions(self, row: list[int], items: tuple[Item, ...]) -> np.ndarray:
        """M-RoPE positions, int64 [3, len(row)], as Qwen2.5-VL's `get_rope_index` computes them."""
        out, place, current = np.empty((3, len(row)), np.int64), 0, 0
        for item in items:
            start = next(i for i in range(place, len(row)) if row[i] in self.pads)
            out[:, place:start] = np.arange(current, current + start - place)
            current += start - place
            t, h, w = item.grid[0], item.grid[1] // MERGE, item.grid[2] // MERGE
            step = TOKENS_PER_SECOND * item.seconds_per_grid if item.motion is not None else 1
            ticks = (np.arange(t, dtype=np.float32) * np.float32(step)).astype(np.int64)
            cells = np.stack(np.meshgrid(ticks, np.arange(h), np.arange(w), indexing="ij")).reshape(3, -1)
            place = start + cells.shape[1]
            out[:, start:place] = cells + current
            current += max(h, w)
        out[:, place:] = np.arange(current, current + len(row) - place)
        return out


def _reworded(text: str, rng: np.random.Generator) -> str:
    """A question as it is most of the time, else lower-cased, bare, or with a polite word."""
    choice = rng.uniform()
    if choice < 0.7:
        return text
    if choice < 0.8:
        return text.lower()
    if choice < 0.9:
        return text.rstrip("?.")
    return f"{text} {rng.choice(['Answer briefly.', 'Thanks!', 'Please answer in one sentence.', 'Be exact.'])}"
