"""Which frames of a video are kept. Knows frame times, nothing of files or decoders."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SLACK = 0.0015  # seconds that a frame may start after a tick and count at it: Matroska rounds times to 1 ms
# Type and least value of each number; the other fields are counts.
_NUMBERS = {"fps": (float, 1e-9), "start": (float, 0), "end": (float, 0)}


def check_number(name: str, value: Any, kind: type = int, least: float = 1) -> Any:
    """`value` as `kind`. Raises ValueError, whose text is safe for a client, unless it is from `least` to 1e9."""
    if type(value) not in (int, kind) or not least <= value <= 1e9:
        number = "whole number" if kind is int else "number"
        raise ValueError(f"{name} must be a {number} of at least {least:g} and at most 1e9, not {str(value)[:40]}")
    return kind(value)


def check_names(owner: str, given: Iterable[str], accepted: Iterable[str]) -> None:
    """Raises ValueError, whose text is safe for a client, if `accepted` lacks one of the names in `given`."""
    accepted = list(accepted)
    if unknown := [str(name)[:40] for name in given if name not in accepted]:
        raise ValueError(f"{owner} has no {', '.join(unknown)}; it takes {', '.join(accepted)}")


@dataclass(frozen=True, eq=False)
class DecodedVideo:
    """The sampled frames of a video, and what the processor must know of the whole."""

    frames: NDArray[np.uint8]  # [T, H, W, 3], RGB, contiguous, upright
    frames_indices: NDArray[np.int64]  # [T], places of `frames` among all frames
    timestamps: NDArray[np.float64]  # [T], seconds after the video's first frame
    fps: float  # of the source, not of the sampling
    total_frames: int  # that the file really has, whatever its header says
    window_frames: int  # of these, within the start and end of the sampling
    missing: str | None = None  # what of the file could not be read; None: nothing

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.total_frames / self.fps


@dataclass(frozen=True)
class VideoSampling:
    """Either `num_frames` frames, evenly spread, or one frame for each 1/`fps` seconds (at most `max_frames`, and at
    least `min_frames` of a video that has so many), of those displayed from `start` up to `end` (seconds after the
    first frame). `repr` enters media hashes."""

    num_frames: int | None = None
    fps: float | None = None
    max_frames: int | None = None
    min_frames: int | None = None
    start: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None:  # 2 and 2.0 become one sampling, with one hash
                number = check_number(f"video sampling: {name}", value, *_NUMBERS.get(name, ()))
                object.__setattr__(self, name, number)
        least, most, start, end = self.min_frames, self.max_frames, self.start or 0.0, self.end
        if (self.num_frames is None) == (self.fps is None):
            raise ValueError("video sampling takes exactly one of num_frames and fps")
        if self.num_frames is not None and (least or most):
            raise ValueError("video sampling takes max_frames and min_frames with fps, not with num_frames")
        if least is not None and most is not None and least > most:
            raise ValueError(f"video sampling: min_frames is {least}, more than the {most} of max_frames")
        if end is not None and end <= start:
            raise ValueError(f"video sampling: end is {end:g}, not more than the {start:g} of start")

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> "VideoSampling":
        """The `video` part of --media-io-kwargs, checked. Raises ValueError, whose text is safe for a client."""
        check_names("video sampling", kwargs, [field.name for field in fields(cls)])
        return cls(**kwargs)

    def narrowed(self, asked: Mapping[str, Any], most_frames: int) -> "VideoSampling":
        """Returns the sampling of a request that sets the fields `asked`, to a server that samples by `self`.

        A request can only keep fewer frames; None leaves a field as it is. Where `self` sets no count, `most_frames` is
        the bound. Raises ValueError, whose text names the field, the value and the bound and is safe for a client.
        """
        asked = {name: value for name, value in asked.items() if value is not None}
        own, count = asdict(self), self.num_frames or self.max_frames or most_frames
        if self.min_frames is not None and "max_frames" in asked:
            own["min_frames"] = min(self.min_frames, asked["max_frames"])
        if "num_frames" in asked:
            own |= {"fps": None, "max_frames": None, "min_frames": None}
        elif "fps" in asked and self.num_frames is not None:
            own |= {"num_frames": None, "max_frames": count}
        narrowed = VideoSampling.from_kwargs(own | asked)
        bounds = {"num_frames": count, "max_frames": count, "min_frames": self.min_frames or 1, "fps": self.fps}
        whose = "of this server (--media-io-kwargs, --max-video-frames-kept or the model's own sampling)"
        for name, bound in (bounds | {"end": self.end}).items():
            if name in asked and bound is not None and asked[name] > bound:
                raise ValueError(f"video sampling: {name} is {asked[name]}, more than the {bound:g} {whose}")
        if (narrowed.start or 0) < (self.start or 0):
            raise ValueError(f"video sampling: start is {narrowed.start:g}, less than the {self.start:g} {whose}")
        return narrowed

    def window(self, times: Sequence[float]) -> range:
        """Returns the indices of the frames displayed from `start` up to `end`; never empty.

        `times` are all frames' times in seconds, ascending, at least one. Raises ValueError, whose text is safe for a
        client, when the video ends before `start`.
        """
        edges = _edges(times)
        first, last = 0, len(times)
        if self.start is not None:
            if 0 < self.start >= edges[-1]:
                raise ValueError(f"its sampling has start {self.start:g}, but the video ends at {edges[-1]:.6g} s")
            first = int(np.searchsorted(edges[:-1], self.start + _SLACK, side="right")) - 1
        if self.end is not None:
            last = int(np.searchsorted(edges[:-1], self.end - _SLACK, side="left"))
        return range(first, max(last, first + 1))

    def indices(self, times: Sequence[float]) -> NDArray[np.int64]:
        """Returns the ascending indices of the frames to keep, int64 [T], T >= 1; `times` and errors as in `window`.

        With `num_frames`, they are np.linspace over the window, rounded down. With `fps`, ticks occur every 1/fps
        seconds from `start` on, and the frame displayed at a tick is kept, once; more than `max_frames` of these, or
        fewer than `min_frames`, are replaced by as many, evenly spread.
        """
        window = self.window(times)
        places = np.arange(window.start, window.stop)
        if self.num_frames is not None:
            return _spread(places, self.num_frames)
        assert self.fps is not None
        edges = _edges(times)[window.start : window.stop + 1]
        if self.end is not None:
            edges = np.minimum(edges, self.end)
        ticks = np.maximum((edges - (self.start or 0.0) - _SLACK) * self.fps, -0.5)
        # A frame is displayed from its own time until the next frame's: kept if a whole tick lies in between.
        kept = places[np.ceil(ticks[:-1]) < ticks[1:]]
        least = self.min_frames or 1
        return _spread(places, least) if len(kept) < least else _spread(kept, self.max_frames or len(kept))


def _edges(times: Sequence[float]) -> NDArray[np.float64]:
    """When each frame begins, and the last one ends, after the mean time between frames; seconds after the first."""
    starts = np.asarray(times, np.float64) - times[0]
    return np.append(starts, starts[-1] + starts[-1] / max(len(times) - 1, 1))


def _spread(indices: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """`count` of `indices`, evenly spread, first and last included; all of them when there are no more."""
    return indices if len(indices) <= count else indices[np.linspace(0, len(indices) - 1, count).astype(int)]
