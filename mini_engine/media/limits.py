"""What one decode may cost, and who holds it to that. The flags take their defaults from here.

Knows nothing of decoders.
"""

import time
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from mini_engine.media.errors import DecodeCancelled, MediaError

MOST_IMAGE_PIXELS = 178_956_970
"""No image may be allowed more: what is refused at this size is refused before a decoder sets memory aside for it."""

CUT_SHORT = "the file is cut short or damaged: {}; send the whole file"
_MAX_ASPECT_RATIO = 200  # where the Qwen-VL processors refuse
_MOST_INDEXED = 1 << 20  # frames of all tracks, sound too, in an index: FFmpeg keeps some 70 bytes of each


@dataclass(frozen=True)
class DecodeLimits:
    """What one video may cost. Exceeding a limit is a MediaError that names the limit by its flag."""

    max_video_frames: int = 54_000  # in the file: half an hour at 30 frames per second
    max_video_frames_kept: int = 768  # by the sampling: as many as the Qwen-VL processors take
    max_video_seconds: float = 3600.0  # from the first frame to the last
    max_frame_pixels: int = 4096 * 4096
    max_video_pixels_kept: int = 512 << 20  # over all kept frames: 1.5 GiB of RGB
    media_decode_timeout: float = 30.0  # seconds of wall time


@dataclass(frozen=True)
class ImageLimits:
    """What one image may cost. Exceeding a limit is a MediaError that names the limit by its flag."""

    max_image_pixels: int = 64 << 20
    media_decode_timeout: float = DecodeLimits.media_decode_timeout  # looked at whenever Pillow reads on


def decode_overdue(item: str, seconds: float, remedy: str) -> MediaError:
    """The error of an item whose decoding takes more than `seconds`."""
    problem = f"decoding takes more than {seconds:g} s, the limit of {flag_of('media_decode_timeout')}"
    return MediaError(item, f"{problem}; send {remedy}")


def check_aspect_ratio(width: int, height: int, item: str) -> None:
    """Raises MediaError for a picture that processors refuse."""
    if max(height, width) > _MAX_ASPECT_RATIO * min(height, width):
        raise MediaError(item, f"{width}x{height} is longer than {_MAX_ASPECT_RATIO} times its width; crop it")


def flag_of(limit: str) -> str:
    """The flag that sets a limit: its field's name as a command line writes it."""
    return "--" + limit.replace("_", "-")


class CancelSignal(Protocol):
    """What `threading.Event` offers of this is enough."""

    def is_set(self) -> bool: ...


@dataclass
class Guard:
    """Holds one decode to its limits. Its methods raise MediaError, and `tick` DecodeCancelled."""

    item: str
    limits: DecodeLimits
    cancelled: CancelSignal | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() - self.started > self.limits.media_decode_timeout

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled is not None and self.cancelled.is_set()

    def tick(self) -> None:
        """Called for each packet and frame."""
        if self.is_cancelled:
            raise DecodeCancelled
        if self.time_is_up:
            raise decode_overdue(self.item, self.limits.media_decode_timeout, "a shorter or smaller video")

    def check_frames(self, frames: int) -> None:
        """Called for each frame that the file turns out to have."""
        most = self.limits.max_video_frames
        if frames > most:
            self._exceeded("max_video_frames", f"more than {most} frames", "a shorter video")

    def check_index(self, samples: int) -> None:
        """Called before FFmpeg sets aside room for the index of a file. `samples` counts all tracks."""
        if samples > (most := max(_MOST_INDEXED, self.limits.max_video_frames)):
            problem = f"its index claims {samples} frames of picture and sound, more than {most}"
            self._exceeded("max_video_frames", problem, "a shorter video")

    def check_seconds(self, seconds: float) -> None:
        """Called before anything is decoded."""
        most = self.limits.max_video_seconds
        if seconds > most:
            self._exceeded("max_video_seconds", f"{seconds:.6g} s is longer than {most:g} s", "a shorter video")

    def check_size(self, width: int, height: int) -> None:
        """Called before anything of this size is allocated."""
        most = self.limits.max_frame_pixels
        if width * height > most:
            problem = f"{width}x{height} is more than {most} pixels per frame"
            self._exceeded("max_frame_pixels", problem, "a smaller video")
        check_aspect_ratio(width, height, self.item)

    def check_kept(self, frames: int, width: int, height: int) -> None:
        """Called before the frames of a sampling are kept."""
        most = self.limits.max_video_frames_kept
        if frames > most:
            problem = f"its sampling keeps {frames} frames, more than {most}"
            self._exceeded("max_video_frames_kept", problem, "fewer frames")
        if frames * width * height > (most := self.limits.max_video_pixels_kept):
            problem = f"{frames} frames of {width}x{height} are more than {most} pixels in all"
            self._exceeded("max_video_pixels_kept", problem, "fewer or smaller frames")

    def _exceeded(self, limit: str, problem: str, remedy: str) -> NoReturn:
        raise MediaError(self.item, f"{problem}, the limit of {flag_of(limit)}; send {remedy}")


@dataclass
class Damage:
    """What of a file is missing. Unless part of a video is good enough, the first thing found to be is a MediaError."""

    item: str
    allow_partial: bool
    found: list[str] = field(default_factory=list)

    def add(self, what: str) -> None:
        """`what` goes on from "the file is cut short or damaged". Of several frames that are lost, one is enough."""
        if not self.allow_partial:
            raise MediaError(self.item, CUT_SHORT.format(what))
        if not self.found:  # the first is told, and a file may be of nothing but damage
            self.found.append(what)

    def account(self, read: int, promised: int) -> str | None:
        """What is to be said of a file of which `read` of at least `promised` frames were read. None: all is well."""
        if not self.found:
            return None
        of = f" of {promised}" if promised > read else ""
        return f"{self.found[0]}; {read}{of} frames were read"
