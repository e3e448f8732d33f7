"""Which frames of a video are kept. Knows frame times, nothing of files or decoders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Containers round times, Matroska to 1 ms: a frame that starts at most this many seconds after a tick is on show at it.
_SLACK = 0.0015


@dataclass(frozen=True)
class VideoSampling:
    """Either `num_frames` frames, evenly spread, or one frame for each 1/`fps` seconds (at most `max_frames`, and at
    least `min_frames` of a video that has so many).

    Of the frames on show from `start` up to `end`, both in seconds after the first frame; None: from the beginning, to
    the end. Frozen and made of numbers only, so that `repr` can enter a media hash.
    """

    num_frames: int | None = None
    fps: float | None = None
    max_frames: int | None = None
    min_frames: int | None = None
    start: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        if (self.num_frames is None) == (self.fps is None):
            raise ValueError("video sampling takes exactly one of num_frames and fps")
        for name in ("num_frames", "max_frames", "min_frames"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"video sampling: {name} must be a whole number of at least 1")
        for name, least in (("fps", "greater than 0"), ("start", "of at least 0"), ("end", "greater than 0")):
            value = getattr(self, name)
            if value is None:
                continue
            if type(value) not in (int, float) or not 0 <= value <= 1e9 or (value == 0 and name != "start"):
                raise ValueError(f"video sampling: {name} must be a number {least}, and at most 1e9")
            object.__setattr__(self, name, float(value))  # 2 and 2.0 are one sampling, with one hash
        if self.end is not None and self.end <= (self.start or 0):
            raise ValueError(f"video sampling: end ({self.end:g}) must be greater than start ({self.start or 0:g})")
        for name in ("max_frames", "min_frames"):
            if getattr(self, name) is not None and self.fps is None:
                raise ValueError(f"video sampling: {name} goes with fps; with num_frames it would have no effect")
        if self.max_frames is not None and self.min_frames is not None and self.min_frames > self.max_frames:
            raise ValueError(f"video sampling: min_frames is {self.min_frames}, more than max_frames")

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> "VideoSampling":
        """Builds a sampling from the `video` part of --media-io-kwargs, such as {"num_frames": 8}.

        Raises ValueError, whose text is safe for a client.
        """
        known = [field.name for field in fields(cls)]
        unknown = [str(key)[:40] for key in kwargs if key not in known]
        if unknown:
            raise ValueError(f"video sampling has no {', '.join(unknown)}; it takes {', '.join(known)}")
        return cls(**kwargs)

    def narrowed(self, asked: Mapping[str, Any], most_frames: int) -> "VideoSampling":
        """Returns what a request asks for of a server that samples like this: less than the server, never more.

        `asked` has the same fields; what it leaves out or sets to None stays as it is. Where the server's sampling sets
        no count of its own, no request may keep more than `most_frames` frames. Raises ValueError, whose text names the
        field and is safe for a client.
        """
        asked = {name: value for name, value in asked.items() if value is not None}
        wanted = {field.name: getattr(self, field.name) for field in fields(self)}
        count = self.num_frames or self.max_frames or most_frames
        if "num_frames" in asked:
            wanted |= {"fps": None, "max_frames": None, "min_frames": None}
        elif "fps" in asked and self.num_frames is not None:
            wanted |= {"num_frames": None, "max_frames": count}
        wanted |= asked
        if "min_frames" not in asked and None not in (wanted["min_frames"], wanted["max_frames"]):
            wanted["min_frames"] = min(wanted["min_frames"], wanted["max_frames"])
        narrowed = VideoSampling.from_kwargs(wanted)
        least = self.min_frames or 1
        of_sampling = "its --media-io-kwargs, or else the model's default"
        of_count = of_sampling if self.num_frames or self.max_frames else "its --max-video-frames-kept"
        bounds = (
            ("num_frames", count, of_count), ("max_frames", count, of_count), ("min_frames", least, of_sampling),
            ("fps", self.fps, of_sampling), ("end", self.end, of_sampling),
        )  # fmt: skip
        for name, most, whose in bounds:
            if name in asked and most is not None and asked[name] > most:
                text = f"{name} is {asked[name]:g}, more than the {most:g} of this server"
                raise ValueError(f"video sampling: {text} (by {whose})")
        if self.start is not None and (narrowed.start or 0.0) < self.start:
            raise ValueError(f"video sampling: start is {narrowed.start:g}, before the {self.start:g} of this server")
        return narrowed

    def window(self, times: Sequence[float]) -> range:
        """Returns the places of the frames that are on show at some time from `start` up to `end`; never empty.

        Raises ValueError, whose text is safe for a client, when the video ends before `start`.
        """
        if len(times) < 1:
            raise ValueError("no frames to sample from")
        shown = np.maximum.accumulate(np.asarray(times, np.float64)) - times[0]
        first, last = 0, len(times)
        if self.start is not None:
            duration = shown[-1] + _period(times)
            if self.start > 0 and self.start >= duration:
                raise ValueError(f"its sampling has start {self.start:g}, but the video ends at {duration:.6g} s")
            first = int(np.searchsorted(shown, self.start + _SLACK, side="right")) - 1
        if self.end is not None:
            last = int(np.searchsorted(shown, self.end - _SLACK, side="left"))
        return range(first, max(last, first + 1))

    def indices(self, times: Sequence[float]) -> NDArray[np.int64]:
        """Returns the ascending indices of the frames to keep, int64 [T], T >= 1, given all frames' times in seconds.

        With `num_frames`, the indices are np.linspace(0, total - 1, num_frames) rounded down, or all frames when there
        are no more than that; `total` counts the frames of the window, from whose first one the indices go on. With
        `fps`, ticks go off every 1/fps seconds from `start` on (or the first frame), and the frame on show at a tick
        is kept; one that is on show at several ticks is kept once. Those kept are spread anew where they are more than
        `max_frames` or fewer than `min_frames`. Raises ValueError as `window` does.
        """
        window = self.window(times)
        places = np.arange(window.start, window.stop)
        if self.num_frames is not None:
            return _spread(places, self.num_frames)
        assert self.fps is not None
        starts = np.append(np.maximum.accumulate(np.asarray(times, np.float64)), times[-1] + _period(times)) - times[0]
        edges = starts[window.start : window.stop + 1]
        if self.end is not None:
            edges = np.minimum(edges, self.end)
        ticks = np.maximum((edges - (self.start or 0.0) - _SLACK) * self.fps, -0.5)
        # On show from its own time until the next frame's: kept if a whole tick lies in between.
        kept = places[np.ceil(ticks[:-1]) < ticks[1:]]
        if not kept.size:
            kept = places[:1]
        if len(kept) < (self.min_frames or 1):
            return _spread(places, self.min_frames or 1)
        return _spread(kept, self.max_frames or len(kept))


def _spread(indices: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """`count` of `indices`, evenly spread, first and last included; all of them when there are no more."""
    if len(indices) <= count:
        return indices
    return indices[np.linspace(0, len(indices) - 1, count).astype(int)]


def _period(times: Sequence[float]) -> float:
    """The mean time between frames, which the last frame is taken to last."""
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
