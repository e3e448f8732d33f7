"""The limits of decoding one image or video, enforced.

Time and memory are bounded from outside, see `decoder_pool.py`. Knows nothing of decoders.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from mini_engine.config import EngineConfig, flag_of
from mini_engine.protocol.api_errors import MediaError

UNREADABLE = "cannot be read, or is damaged; send a whole file in another format, such as PNG, or H.264 in mp4"
TRUNCATED = "the file is truncated or damaged: {}; send the whole file"
WRONG_COLOURS = "its colours may be wrong: they are coded as ICtCp, Dolby Vision profile 5, or in another rare form"
MAX_ASPECT_RATIO = 200  # where the Qwen-VL processors refuse


@dataclass(frozen=True)
class DecodeLimits:
    """The settings that a decoder process gets, each named like its flag. Exceeding one is a MediaError that names the
    flag."""

    max_image_pixels: int
    max_video_frames: int  # in the file
    max_video_frames_kept: int  # by the sampling
    max_video_seconds: float  # from the first frame to the last
    max_frame_pixels: int
    max_video_pixels_kept: int  # of all kept frames, which are scaled to fit
    media_decode_timeout: float  # seconds of wall time
    media_decoder_memory: int  # bytes of a decoder process, beside itself, the encoded item and the frames

    @classmethod
    def of(cls, config: EngineConfig) -> "DecodeLimits":
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    @property
    def most_output_bytes(self) -> int:
        """Of the frames of one item."""
        return 3 * max(self.max_image_pixels, self.max_video_pixels_kept)


@dataclass
class Guard:
    """Enforces the limits of one decode, and records what is missing from its file. The methods raise MediaError."""

    item: str  # its name in errors, such as "video 1"
    limits: DecodeLimits
    allow_partial: bool = False  # whether part of a video is good enough
    should_stop: Callable[[], bool] = lambda: False
    damage: str | None = None  # the first that was found
    wrong_colours: bool = False  # whether frames are kept whose colours were only guessed

    def tick(self) -> None:
        """Called for each packet and frame."""
        if self.should_stop():
            raise MediaError(self.item, "its decoding was stopped")

    def check(self, limit: str, amount: float, unit: str, remedy: str) -> None:
        """Called before that amount is read, decoded or allocated."""
        allowed = getattr(self.limits, limit)
        if amount > allowed:
            problem = f"it has {amount:.10g} {unit}, more than {allowed:.10g}, the limit of {flag_of(limit)}"
            raise MediaError(self.item, f"{problem}; send {remedy}")

    def check_size(self, limit: str, width: int, height: int) -> None:
        """Called before an image or a frame of this size is decoded."""
        self.check(limit, width * height, f"pixels ({width}x{height})", "a smaller one")
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            problem = f"of {width}x{height} one side is more than {MAX_ASPECT_RATIO} times the other; crop it"
            raise MediaError(self.item, problem)

    def fitting_size(self, frames: int, width: int, height: int) -> tuple[int, int]:
        """The size at which so many frames may be kept: theirs, or else one with even sides."""
        scale = math.sqrt(self.limits.max_video_pixels_kept / (frames * width * height))
        if scale < 1:
            width, height = (max(int(side * scale) // 2 * 2, 2) for side in (width, height))
            self.check_size("max_frame_pixels", width, height)
            self.check("max_video_pixels_kept", frames * width * height, "pixels at least", "fewer frames")
        return width, height

    def add_damage(self, damage: str) -> None:
        """`damage` continues the sentence of TRUNCATED, which is the error unless part of the video is good enough."""
        if not self.allow_partial:
            raise MediaError(self.item, TRUNCATED.format(damage))
        self.damage = self.damage or damage
