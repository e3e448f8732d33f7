"""Which frames of a video are kept. Knows frame times, nothing of files or decoders."""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from mini_engine.protocol.parts import Count, Rate, Seconds

_SLACK = 0.0015  # seconds that a frame may start after a tick and count at it: Matroska rounds times to 1 ms


class VideoFacts(msgspec.Struct, frozen=True):
    """What a processor must know of a video beside the frames that are kept of it."""

    timestamps: list[Seconds]  # of these frames: seconds after the video's first
    fps: Annotated[float, msgspec.Meta(ge=1e-6, le=1e9)]  # of the source, not of the sampling
    total_frames: Count  # that the file really has, whatever its header says
    window_frames: Count  # of these, within the start and end of the sampling
    missing: str | None = None  # what could not be read, or whose colours may be wrong; None: nothing


class VideoSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either `num_frames` frames (-1: all), or `fps` frames per second (at most `max_frames`, and at least `min_frames`
    of a video that has so many), evenly spread over those displayed from `start` up to `end` (seconds after the first
    frame). `repr` enters media hashes."""

    num_frames: Annotated[int, msgspec.Meta(ge=-1, le=10**9)] | None = None
    fps: Rate | None = None
    max_frames: Count | None = None
    min_frames: Count | None = None
    start: Seconds | None = None
    end: Seconds | None = None
    frame_factor: Count = 1  # a count that follows from `fps` is rounded down to a multiple of it

    def __post_init__(self) -> None:
        lowest, highest, start, end = self.min_frames, self.max_frames, self.start or 0.0, self.end
        if self.num_frames == 0 or (self.num_frames is None) == (self.fps is None):
            raise ValueError("set exactly one of num_frames (not 0) and fps")
        if self.num_frames is not None and (lowest or highest):
            reason = f"num_frames is {self.num_frames}, perhaps by the model's files"
            raise ValueError(f"max_frames and min_frames need fps; {reason}")
        if lowest is not None and highest is not None and lowest > highest:
            raise ValueError(f"min_frames is {lowest}, more than the {highest} of max_frames")
        if end is not None and end <= start:
            raise ValueError(f"end is {end:g}, not more than the {start:g} of start")

    def limited(self, max_frames: int, unset: int) -> "VideoSampling":
        """This sampling with at most `max_frames` frames, at least one; and with `unset` where it sets no number."""
        if self.num_frames is not None:
            count = unset if self.num_frames == -1 else self.num_frames
            return msgspec.structs.replace(self, num_frames=min(count, max_frames))
        greatest, least = min(self.max_frames or unset, max_frames), min(self.min_frames or 1, max_frames)
        return msgspec.structs.replace(self, max_frames=greatest, min_frames=least)

    def window(self, times: Sequence[float]) -> range:
        """Returns the indices of the frames displayed from `start` up to `end`; never empty. `times` are all frames'
        times in seconds, ascending, at least one. Raises ValueError, whose text is safe for a client, when the video
        ends before `start`."""
        starts = np.asarray(times, np.float64) - times[0]
        duration = starts[-1] + starts[-1] / max(len(times) - 1, 1)  # the last frame lasts the mean time between frames
        first, last = 0, len(times)
        if self.start is not None:
            if 0 < self.start >= duration:
                raise ValueError(f"start is {self.start:g}, but the video ends at {duration:.6g} s")
            first = int(np.searchsorted(starts, self.start + _SLACK, side="right")) - 1
        if self.end is not None:
            last = int(np.searchsorted(starts, self.end - _SLACK, side="left"))
        return range(first, max(last, first + 1))

    def indices(self, times: Sequence[float], rate: float, max_frames: int) -> NDArray[np.int64]:
        """Returns the ascending indices of the frames to keep, int64 [T], T >= 1; `times` and errors as in `window`.
        `rate` is the source's, in frames per second. `max_frames` stands in for one that is not set. The frames are
        spread over the window by their number: rounded down for `num_frames` as vLLM does, to the nearest for `fps` as
        transformers' `sample_frames` and qwen_vl_utils do, whose counts these are, too."""
        window, count = self.window(times), self.num_frames
        if self.fps is not None:
            least = math.ceil((self.min_frames or 1) / self.frame_factor) * self.frame_factor
            count = max(int(len(window) / rate * self.fps), least)
            count = min(count, self.max_frames or max_frames, len(window))
            count = max(count // self.frame_factor * self.frame_factor, 1)
        if count is None or not 0 < count < len(window):
            return np.arange(window.start, window.stop)
        spread = np.linspace(window.start, window.stop - 1, count)
        return (spread.round() if self.fps is not None else spread).astype(np.int64)
