"""How much of a track's index FFmpeg copies for the edit list of an mp4 or mov.

It makes a new index, of what each edit shows: from the last key frame before the edit, of sound from a second earlier
still, up to the second key frame after it, for behind the first may come frames that are shown before it. So edits that
have little in common cost hardly more than one; but where key frames are few, each may cost the whole index.

Knows nothing of boxes but what stands in these tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOST_EDITS, _MOST_ENTRIES = 1 << 13, 1 << 20  # more are not worth the room that they would take here
_MOST_TIME = 1 << 50  # so that no float is off by as much as 1
_SHORT_EDIT = np.dtype([("lasts", ">u4"), ("start", ">i4"), ("rate", ">u4")])
_LONG_EDIT = np.dtype([("lasts", ">i8"), ("start", ">i8"), ("rate", ">u4")])

Numbers = NDArray[np.int64]


def copied_frames(
    data: memoryview, places: Mapping[bytes, int], frames: int, edits: int, movie_scale: int
) -> int | None:
    """Returns at least as many as FFmpeg copies for all `edits` of a track of `frames` frames. None: unknown.

    `places` are those of the names of the track's tables, of which it has one each. `movie_scale` is how many of the
    units that an edit's length is told in are a second.
    """
    track = _Track.read(data, places, frames)
    if track is None or edits > _MOST_EDITS or not 0 < movie_scale < 1 << 31:
        return None
    scale = max(time_scale(data, places[b"mdhd"]), movie_scale)  # FFmpeg takes the movie's if this is none
    listed = _LONG_EDIT if data[places[b"elst"] + 4] == 1 else _SHORT_EDIT
    shown = np.frombuffer(data, listed, edits, places[b"elst"] + 12)
    begin = shown["start"].astype(float)
    if np.abs(begin).max() > _MOST_TIME:  # FFmpeg does not mind how far its sums may go
        return None
    end = begin + shown["lasts"].astype(float) * scale / movie_scale + 2  # it rounds
    first = track.last_key(track.frames_before(begin - scale - track.latest) - 1)
    return int((track.second_key(np.maximum(track.frames_before(end - track.earliest), first)) - first).sum())


def time_scale(data: bytes | memoryview, place: int) -> int:
    """Of the movie or a track: what stands in the box whose name, `mvhd` or `mdhd`, is at `place`."""
    at = place + (24 if data[place + 4 : place + 5] == b"\1" else 16)
    return int.from_bytes(data[at : at + 4], "big")


@dataclass(frozen=True)
class _Track:
    """When the frames of a track are shown, and which are key frames. Runs are frames that all last as long."""

    frames: int
    counts: Numbers  # [R], frames in each run
    lasts: Numbers  # [R], what each of them lasts
    firsts: Numbers  # [R], the number of the first
    starts: Numbers  # [R], its time
    keys: Numbers | None  # [K], ascending; None: each frame is one
    earliest: int  # at most 0: how much earlier than by its run a frame may be shown
    latest: int  # at least 0

    @classmethod
    def read(cls, data: memoryview, places: Mapping[bytes, int], frames: int) -> "_Track | None":
        """None for tables that are missing, or not what FFmpeg goes by as they stand."""
        runs, chunks = _entries(data, places, b"stts", ">u4", 2), _entries(data, places, b"stsc", ">u4", 3)
        if runs is None or chunks is None or b"mdhd" not in places:
            return None
        counts, lasts = runs[runs[:, 0] > 0].T
        if counts.sum() != frames or not frames or lasts.max() >= 1 << 31 or (counts * 1.0 * lasts).sum() > _MOST_TIME:
            return None
        at_once = counts[lasts == 0].sum() - (lasts[-1] == 0)  # the last frame may last nothing
        # Frames that last 1 may be plain PCM, which has an index of its own. Of frames of several kinds FFmpeg may keep
        # those of one, with or without the key frames.
        if at_once or lasts.max() == 1 or (chunks[:, 2] != 1).any():
            return None
        shifts = keys = None
        if b"ctts" in places and (shifts := _entries(data, places, b"ctts", ">i4", 2)) is None:
            return None
        if b"stss" in places:
            listed = _entries(data, places, b"stss", ">u4", 1)
            if listed is None or not (np.diff(listed[:, 0], prepend=0) > 0).all():
                return None
            keys = listed[:, 0] - 1
        earliest, latest = (0, 0) if shifts is None else (min(0, shifts[:, 1].min()), max(0, shifts[:, 1].max()))
        return cls(
            frames, counts, lasts, counts.cumsum() - counts, (counts * lasts).cumsum() - counts * lasts, keys,
            int(earliest), int(latest),
        )  # fmt: skip

    def frames_before(self, time: NDArray[np.float64]) -> Numbers:
        """How many frames begin before each `time`."""
        run = np.maximum(np.searchsorted(self.starts, time) - 1, 0)
        in_run = np.ceil((time - self.starts[run]) / np.maximum(self.lasts[run], 1))
        return self.firsts[run] + np.clip(in_run, 0, self.counts[run]).astype(np.int64)

    def last_key(self, frame: Numbers) -> Numbers:
        """The last key frame up to each `frame`; 0 if there is none."""
        if self.keys is None:
            return np.maximum(frame, 0)
        return np.append(0, self.keys)[np.searchsorted(self.keys, frame, "right")]

    def second_key(self, frame: Numbers) -> Numbers:
        """The number behind the second key frame from each `frame` on; that of all frames if there is none."""
        if self.keys is None:
            return np.minimum(frame + 2, self.frames)
        place = np.searchsorted(self.keys, frame) + 1
        return np.minimum(np.append(self.keys + 1, [self.frames] * 2)[place], self.frames)


def _entries(data: memoryview, places: Mapping[bytes, int], name: bytes, kind: str, width: int) -> Numbers | None:
    """The table of this name, [N, width], N >= 1. None: there is none, or not all of it."""
    place = places.get(name, len(data))
    count = int.from_bytes(data[place + 8 : place + 12], "big")
    if not 0 < count <= _MOST_ENTRIES or place + 12 + 4 * width * count > len(data):
        return None
    return np.frombuffer(data, kind, width * count, place + 12).reshape(-1, width).astype(np.int64)
