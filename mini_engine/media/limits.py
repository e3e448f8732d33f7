"""Limits on decoding one image or video, and the checks that hold a decode to them. The flags take their defaults here.

Time and memory are bounded from outside, see `decoder_pool.py`. Knows nothing of decoders.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from mini_engine.media.errors import DecodeCancelled, MediaError

MOST_IMAGE_PIXELS = 178_956_970
"""Upper bound of --max-image-pixels: Pillow refuses larger images before it allocates them."""

MOST_FRAMES_KEPT = 10_000
"""Upper bound of --max-video-frames-kept: a decoder process lists the frames in one datagram of at most 200 kB."""

CUT_SHORT = "the file is cut short or damaged: {}; send the whole file"
_MAX_ASPECT_RATIO = 200  # where the Qwen-VL processors refuse


@dataclass(frozen=True)
class DecodeLimits:
    """Limits on one item, each named like its flag. Exceeding one is a MediaError that names the flag."""

    max_image_pixels: int = 64 << 20
    max_video_frames: int = 54_000  # in the file: half an hour at 30 frames per second
    max_video_frames_kept: int = 768  # by the sampling: as many as the Qwen-VL processors take
    max_video_seconds: float = 3600.0  # from the first frame to the last
    max_frame_pixels: int = 4096 * 4096
    max_video_pixels_kept: int = 512 << 20  # over all kept frames: 1.5 GiB of RGB
    media_decode_timeout: float = 30.0  # seconds of wall time
    media_decoder_memory: int = 1 << 30  # bytes of a decoder process, beside itself, the encoded item and the frames

    @property
    def most_output_bytes(self) -> int:
        """Of the frames of one item."""
        return 3 * max(self.max_image_pixels, self.max_video_pixels_kept)


def flag_of(limit: str) -> str:
    """The flag that sets a limit: its field's name as a command line writes it."""
    return "--" + limit.replace("_", "-")


@dataclass
class Guard:
    """Holds one decode to its limits. Its methods raise MediaError, and `tick` DecodeCancelled."""

    item: str
    limits: DecodeLimits
    should_stop: Callable[[], bool]

    def tick(self) -> None:
        """Called for each packet and frame."""
        if self.should_stop():
            raise DecodeCancelled

    def check_frames(self, frames: int) -> None:
        """Called for each frame that the file turns out to have."""
        most = self.limits.max_video_frames
        if frames > most:
            self._exceeded("max_video_frames", f"more than {most} frames", "a shorter video")

    def check_seconds(self, seconds: float) -> None:
        """Called before anything is decoded."""
        most = self.limits.max_video_seconds
        if seconds > most:
            self._exceeded("max_video_seconds", f"{seconds:.6g} s is longer than {most:g} s", "a shorter video")

    def check_image(self, width: int, height: int) -> None:
        """Called before any pixel of an image is decoded."""
        most = self.limits.max_image_pixels
        if width * height > most:
            self._exceeded("max_image_pixels", f"{width}x{height} is more than {most} pixels", "a smaller image")
        self._check_aspect_ratio(width, height)

    def check_size(self, width: int, height: int) -> None:
        """Called before a frame of this size is allocated."""
        most = self.limits.max_frame_pixels
        if width * height > most:
            problem = f"{width}x{height} is more than {most} pixels per frame"
            self._exceeded("max_frame_pixels", problem, "a smaller video")
        self._check_aspect_ratio(width, height)

    def check_kept(self, frames: int, width: int, height: int) -> None:
        """Called before the frames of a sampling are kept."""
        most = self.limits.max_video_frames_kept
        if frames > most:
            problem = f"its sampling keeps {frames} frames, more than {most}"
            self._exceeded("max_video_frames_kept", problem, "fewer frames")
        if frames * width * height > (most := self.limits.max_video_pixels_kept):
            problem = f"{frames} frames of {width}x{height} are more than {most} pixels in all"
            self._exceeded("max_video_pixels_kept", problem, "fewer or smaller frames")

    def _check_aspect_ratio(self, width: int, height: int) -> None:
        if max(height, width) > _MAX_ASPECT_RATIO * min(height, width):
            problem = f"{width}x{height} is longer than {_MAX_ASPECT_RATIO} times its width; crop it"
            raise MediaError(self.item, problem)

    def _exceeded(self, limit: str, problem: str, remedy: str) -> NoReturn:
        raise MediaError(self.item, f"{problem}, the limit of {flag_of(limit)}; send {remedy}")


@dataclass
class Damage:
    """What is missing from a file. The first damage found is a MediaError, unless part of a video is good enough."""

    item: str
    allow_partial: bool
    found: str | None = None

    def add(self, what: str) -> None:
        """Record damage; `what` continues the sentence of CUT_SHORT. Only the first is kept."""
        if not self.allow_partial:
            raise MediaError(self.item, CUT_SHORT.format(what))
        self.found = self.found or what

    def summary(self, read: int, promised: int) -> str | None:
        """What to report of a file of which `read` of at least `promised` frames were read; None if it is whole."""
        if self.found is None:
            return None
        of = f" of {promised}" if promised > read else ""
        return f"{self.found}; {read}{of} frames were read"
