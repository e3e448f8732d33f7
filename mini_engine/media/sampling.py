"""Which frames of a video are kept. Knows frame times, nothing of files or decoders."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Options = TypeVar("Options", bound=msgspec.Struct)

_SLACK = 0.0015  # seconds that a frame may start after a tick and count at it: Matroska rounds times to 1 ms


def parse_options(owner: str, given: Mapping[str, Any], kind: type[Options]) -> Options:
    """The options `given` to `owner`, as JSON values; null is as good as none. Raises ValueError, whose text is safe
    for a client."""
    try:
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{owner}: {error}; it takes {', '.join(kind.__struct_fields__)}") from None


class VideoFacts(msgspec.Struct, frozen=True):
    """What a processor must know of a video beside the frames that are kept of it."""

    timestamps: list[Seconds]  # of these frames: seconds after the video's first
    fps: Rate  # of the source, not of the sampling
    total_frames: Count  # that the file really has, whatever its header says
    window_frames: Count  # of these, within the start and end of the sampling
    missing: str | None = None  # what of the file could not be read; None: nothing


class VideoSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either `num_frames` frames, evenly spread, or one frame for each 1/`fps` seconds (at most `max_frames`, and at
    least `min_frames` of a video that has so many), of those displayed from `start` up to `end` (seconds after the
    first frame). `repr` enters media hashes."""

    num_frames: Count | None = None
    fps: Rate | None = None
    max_frames: Count | None = None
    min_frames: Count | None = None
    start: Seconds | None = None
    end: Seconds | None = None

    def __post_init__(self) -> None:
        least, most, start, end = self.min_frames, self.max_frames, self.start or 0.0, self.end
        if (self.num_frames is None) == (self.fps is None):
            raise ValueError("exactly one of num_frames and fps is needed")
        if self.num_frames is not None and (least or most):
            raise ValueError("max_frames and min_frames go with fps, not with num_frames")
        if least is not None and most is not None and least > most:
            raise ValueError(f"min_frames is {least}, more than the {most} of max_frames")
        if end is not None and end <= start:
            raise ValueError(f"end is {end:g}, not more than the {start:g} of start")

    def updated(self, owner: str, asked: Mapping[str, Any]) -> "VideoSampling":
        """This sampling with the fields `asked` for. Raises ValueError as `parse_options`."""
        own = msgspec.structs.asdict(self)
        if asked.get("num_frames") is not None:
            own |= {"fps": None, "max_frames": None, "min_frames": None}
        elif asked.get("fps") is not None:
            own["num_frames"] = None
        if own["min_frames"] and isinstance(most := asked.get("max_frames"), int):
            own["min_frames"] = min(own["min_frames"], most)
        return parse_options(
            owner, own | {name: value for name, value in asked.items() if value is not None}, type(self)
        )

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

    def indices(self, times: Sequence[float], most_frames: int) -> NDArray[np.int64]:
        """Returns the ascending indices of the frames to keep, int64 [T], T >= 1; `times` and errors as in `window`.
        `most_frames` stands in for a `max_frames` that is not set.

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
        return _spread(places, least) if len(kept) < least else _spread(kept, self.max_frames or most_frames)


def _edges(times: Sequence[float]) -> NDArray[np.float64]:
    """When each frame begins, and the last one ends, after the mean time between frames; seconds after the first."""
    starts = np.asarray(times, np.float64) - times[0]
    return np.append(starts, starts[-1] + starts[-1] / max(len(times) - 1, 1))


def _spread(indices: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """`count` of `indices`, evenly spread, first and last included; all of them when there are no more."""
    return indices if len(indices) <= count else indices[np.linspace(0, len(indices) - 1, count).astype(int)]
