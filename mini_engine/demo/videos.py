"""Synthetic videos and images of one moving shape: drawing and encoding.

Everything follows from a seed. Tests, benchmarks and the training of the bundled model draw from here; this file knows
nothing of questions, tokenizers or models, and imports nothing heavier than numpy, PyAV and Pillow.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image

COLOURS = {  # RGB
    "red": (225, 30, 35),
    "green": (35, 190, 55),
    "blue": (30, 60, 225),
    "yellow": (245, 225, 25),
    "orange": (250, 135, 10),
    "purple": (150, 35, 200),
    "cyan": (20, 215, 225),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "cross")
MOTIONS = ("left", "right", "up", "down", "still")
FRAME_RATES = (8, 10, 12, 15, 20, 24, 25, 30)  # frames per second
ASPECTS = (1.0, 4 / 3, 3 / 2, 16 / 9, 2.0, 3 / 4, 2 / 3, 9 / 16, 0.5)  # width over height
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}

CODECS = {"h264": "libx264", "mpeg4": "mpeg4", "vp9": "libvpx-vp9"}  # our name -> FFmpeg's encoder
CONTAINERS = {"mp4": "mp4", "mkv": "matroska", "webm": "webm"}  # our name -> FFmpeg's muxer
PAIRS = tuple((c, k) for k in CODECS for c in CONTAINERS if c != "webm" or k == "vp9")  # every (container, codec)


@dataclass(frozen=True)
class Thing:
    """What a video or an image shows."""

    colour: str
    shape: str
    motion: str | None  # one of MOTIONS; None: an image


@dataclass(frozen=True)
class Scene(Thing):
    """What a clip shows, in numbers; lengths are fractions of the frame's short side unless said otherwise."""

    motion: str
    width: int  # pixels, even
    height: int  # pixels, even
    fps: int  # frames per second
    num_frames: int
    size: float  # extent of the shape
    start: tuple[float, float]  # centre in the first frame: x over width, y over height
    travel: float  # distance from first to last frame, as a fraction of the width or height it moves along
    angle: float  # rotation of the shape, radians
    rgb: tuple[int, int, int]
    backgrounds: tuple[tuple[int, int, int], tuple[int, int, int]]  # colours of two opposite ends
    noise: float  # standard deviation, in grey levels
    seed: int
    stout: float = 1.0  # width of a triangle or of a cross's arms over the usual one
    bowl: float = 0.0  # of a background: weight of the distance from the centre


@dataclass(frozen=True)
class Clip(Thing):
    """A video or image, rendered or decoded. `frames` is uint8 [T, height, width, 3], RGB, and belongs to the clip."""

    frames: np.ndarray  # of an image one
    fps: float = 0.0


def make_scene(seed: int, **fixed: object) -> Scene:
    """The scene of `seed`. Any field of `Scene` can be fixed by keyword; the other draws stay what they were."""
    rng = np.random.default_rng(seed)
    colour = str(rng.choice(list(COLOURS)))
    shape = str(rng.choice(SHAPES))
    motion = str(rng.choice(MOTIONS))
    short, aspect = int(rng.integers(96, 257)), float(rng.choice(ASPECTS))
    fps, seconds = int(rng.choice(FRAME_RATES)), rng.uniform(1.0, 3.0)
    size, travel, along, across = rng.uniform(0.32, 0.52), rng.uniform(0.3, 0.6), rng.uniform(), rng.uniform()
    base = rng.integers(15, 96)
    tints = rng.integers(-14, 15, (2, 3)) + base + np.array([[0], [1]]) * rng.integers(-25, 26)
    drawn: dict[str, object] = {
        "colour": colour,
        "shape": shape,
        "motion": motion,
        "width": 2 * round(short * max(aspect, 1.0) / 2),
        "height": 2 * round(short / min(aspect, 1.0) / 2),
        "fps": fps,
        "num_frames": max(8, round(fps * seconds)),
        "size": size,
        "travel": travel,
        "angle": rng.uniform(-0.2, 0.2),
        "backgrounds": tuple(tuple(int(v) for v in np.clip(t, 0, 120)) for t in tints),
        "noise": float(rng.choice([0.0, rng.uniform(0, 8)])),
        "seed": seed,
    }
    drawn.update(fixed)
    jitter = rng.integers(-12, 13, 3)
    drawn.setdefault("rgb", tuple(int(v) for v in np.clip(np.array(COLOURS[str(drawn["colour"])]) + jitter, 0, 255)))
    drawn.setdefault("start", _start(drawn, along, across))
    return Scene(**drawn)  # type: ignore[arg-type]


def _start(drawn: dict, along: float, across: float) -> tuple[float, float]:
    """Where the shape's centre starts, so that it stays inside the frame; `along` and `across` are in [0, 1]."""
    sides = (drawn["width"], drawn["height"])
    margins = [drawn["size"] / 2 * min(sides) / side for side in sides]
    position = []
    for axis, step in enumerate(DIRECTIONS[drawn["motion"]]):
        low, high = margins[axis], 1 - margins[axis]
        if step > 0:
            high = max(low, high - drawn["travel"])
        if step < 0:
            low = min(high, low + drawn["travel"])
        position.append(low + (along if step else across) * (high - low))
    return position[0], position[1]


def render(seed: int, **fixed: object) -> Clip:
    """The clip of `seed`; keywords as in `make_scene` (colour="red", width=320, height=240, num_frames=60, ...)."""
    scene = make_scene(seed, **fixed)
    frames = draw(scene, range(scene.num_frames))
    return Clip(scene.colour, scene.shape, scene.motion, frames, scene.fps)


def render_image(seed: int, **fixed: object) -> Clip:
    """The still image of `seed`; keywords as in `make_scene`."""
    scene = make_scene(seed, **{"motion": "still", **fixed})
    return Clip(scene.colour, scene.shape, None, draw(scene, [0]))


def draw(scene: Scene, indices: Sequence[int]) -> np.ndarray:
    """Draw the frames `indices` of a scene: uint8 [len(indices), height, width, 3], RGB."""
    height, width = scene.height, scene.width
    rng = np.random.default_rng([scene.seed, 1])
    ramp = np.linspace(0, 1, height)[:, None] * rng.uniform(0, 1) + np.linspace(0, 1, width) * rng.uniform(0, 1)
    first, last = np.array(scene.backgrounds, np.float32)
    ramp = ramp / 2 + scene.bowl * np.hypot(np.linspace(-0.5, 0.5, height)[:, None], np.linspace(-0.5, 0.5, width))
    backdrop = first + np.minimum(ramp, 1)[..., None].astype(np.float32) * (last - first)
    grain = rng.normal(0, scene.noise, (height + 32, width + 32, 1)).astype(np.float32) if scene.noise else None
    frames = np.empty((len(indices), height, width, 3), np.uint8)
    for number, index in enumerate(indices):
        frame = backdrop.copy()
        _stamp(frame, scene, index / max(1, scene.num_frames - 1))
        if grain is not None:
            y, x = np.random.default_rng([scene.seed, 2, index]).integers(0, 33, 2)
            frame += grain[y : y + height, x : x + width]
        frames[number] = np.clip(frame + 0.5, 0, 255)
    return frames


def _stamp(frame: np.ndarray, scene: Scene, when: float) -> None:
    """Blend the shape into `frame` (float32 [height, width, 3]) at the moment `when` in [0, 1]."""
    height, width = frame.shape[:2]
    step_x, step_y = DIRECTIONS[scene.motion]
    centre_x = (scene.start[0] + step_x * scene.travel * when) * width
    centre_y = (scene.start[1] + step_y * scene.travel * when) * height
    radius = scene.size * min(width, height) / 2
    reach = radius * 1.5 + 2
    left, right = max(0, int(centre_x - reach)), min(width, int(centre_x + reach) + 1)
    top, bottom = max(0, int(centre_y - reach)), min(height, int(centre_y + reach) + 1)
    x = (np.arange(left, right, dtype=np.float32) + 0.5 - centre_x)[None, :]
    y = (np.arange(top, bottom, dtype=np.float32) + 0.5 - centre_y)[:, None]
    cos, sin = math.cos(scene.angle), math.sin(scene.angle)
    distance = _distance(scene.shape, x * cos + y * sin, y * cos - x * sin, radius, scene.stout)
    cover = np.clip(0.5 - distance, 0, 1)[..., None]
    patch = frame[top:bottom, left:right]
    patch += cover * (np.array(scene.rgb, np.float32) - patch)


def _distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float, stout: float) -> np.ndarray:
    """Signed distance in pixels from each point to the shape's outline, negative inside (y grows downwards)."""
    if shape == "circle":
        return np.hypot(x, y) - radius
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - radius * 0.9
    if shape == "cross":
        arm = radius * 0.32 * stout
        upright = np.maximum(np.abs(x) - arm, np.abs(y) - radius)
        across = np.maximum(np.abs(x) - radius, np.abs(y) - arm)
        return np.minimum(upright, across)
    if shape == "triangle":  # corners at the top, bottom left and bottom right
        steep = 2 / stout
        return np.maximum(y - radius, (steep * np.abs(x) - y - radius) / np.hypot(steep, 1.0))
    raise ValueError(f"no shape is named {shape!r}: the shapes are {', '.join(SHAPES)}")


def encode(clip: Clip, container: str = "mp4", codec: str = "h264", quality: int | None = None) -> bytes:
    """The clip as the bytes of a video file. `container` is a key of CONTAINERS, `codec` a key of CODECS (WebM takes
    only "vp9"); `quality` is the codec's own scale, where smaller is better (h264 18-32, mpeg4 2-10, vp9 20-40). Width
    and height must be even."""
    options = {
        "h264": {"preset": "veryfast", "crf": str(quality or 23)},
        "mpeg4": {},
        "vp9": {"deadline": "realtime", "cpu-used": "8", "crf": str(quality or 32), "b": "0"},
    }.get(codec, {})
    sink = io.BytesIO()
    with av.open(sink, "w", format=CONTAINERS[container]) as output:
        stream: Any = output.add_stream(CODECS[codec], rate=Fraction(clip.fps), options=options)
        stream.height, stream.width, stream.pix_fmt = *clip.frames.shape[1:3], "yuv420p"
        stream.codec_context.thread_count = 1
        if codec == "mpeg4":
            stream.codec_context.qmin = stream.codec_context.qmax = quality or 4
        for frame in clip.frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        output.mux(stream.encode(None))
    return sink.getvalue()


def encode_image(picture: Clip, kind: str = "png") -> bytes:
    """The first frame as the bytes of an image file; `kind` is "png", "jpeg" or another format that Pillow writes."""
    sink = io.BytesIO()
    Image.fromarray(picture.frames[0]).save(sink, format=kind)
    return sink.getvalue()
