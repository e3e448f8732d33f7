"""Decoded frames -> one sRGB array, upright and of one size, by `colour.py`; transparency is laid over white. Knows
nothing of files or sampling."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import av
import numpy as np
from av.sidedata.sidedata import Type
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from mini_engine.media.decode.colour import BT2020, UNKNOWN, to_srgb
from mini_engine.media.decode.item_limits import Guard

# Makes the array of an item's frames, given their number, height and width: uint8 [T, H, W, 3]. The next call may reuse
# the memory.
Allocate = Callable[[tuple[int, int, int]], NDArray[np.uint8]]

# PyAV reads no side data of a frame with any of a kind that it does not know (EXIF, view ids): here they are one kind.
Type._missing_ = classmethod(lambda cls, _: cls.VIDEO_HINT)  # type: ignore[assignment]
_STRIP_ROWS = 64  # laid over white at once, in twice the bytes
_Turn = tuple[bool, bool, bool]  # whether to swap the axes, then to mirror left and right, then top and bottom


class FrameArray:
    """Keeps the frames at the given indices, each as uint8 [H, W, 3], in one array that is made for the first. Turn and
    size are those of the first, which is smaller where all together would exceed the limit; frames of another size are
    scaled to it. Memory: the array, and one frame while it is converted."""

    def __init__(self, indices: Collection[int], guard: Guard, allocate: Allocate) -> None:
        self._indices, self._guard, self._allocate = frozenset(indices), guard, allocate
        self._reformatter = VideoReformatter()
        self._rows: NDArray[np.uint8] | None = None
        self._row_of: dict[int, int] = {}
        self._clear_rows: list[int] = []  # of frames that are transparent everywhere
        self._has_alpha = False  # a frame that is not
        self._size = (0, 0)
        self._turn: _Turn = (False, False, False)

    def offer(self, index: int, frame: av.VideoFrame) -> None:
        """Keeps `frame` if its index is asked for. Raises MediaError for a size above the limits."""
        if index not in self._indices:
            return
        self._guard.check_size("max_frame_pixels", frame.width, frame.height)
        if self._rows is None:
            self._size = self._guard.fitting_size(len(self._indices), frame.width, frame.height)
            self._read_side_data(frame)
            height, width = self._size if self._turn[0] else self._size[::-1]
            self._rows = self._allocate((len(self._indices), height, width))
        width, height = self._size
        pixels = _pixels(self._to_rgb(frame, width, height))
        swaps, left_right, top_bottom = self._turn
        if swaps:
            pixels = pixels.transpose(1, 0, 2)
        pixels = pixels[:: -1 if top_bottom else 1, :: -1 if left_right else 1]
        row = self._rows[len(self._row_of)]
        row[...] = pixels[..., :3]
        if pixels.shape[2] > 3:
            self._lay_over_white(row, pixels[..., 3:])
        to_srgb(row, frame.color_primaries, frame.color_trc)
        self._row_of[index] = len(self._row_of)

    def holds(self, indices: Collection[int]) -> bool:
        """Whether the frames at all of `indices` are kept."""
        return self._row_of.keys() >= set(indices)

    def select(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """The frames at `indices`, all kept, as the first rows of the array: [T, H, W, 3], contiguous."""
        assert self._rows is not None
        if self._has_alpha:
            self._rows[self._clear_rows] = 255
        rows = [self._row_of[index] for index in indices]
        if rows != list(range(len(rows))):
            self._rows[: len(rows)] = self._rows[rows]
        return self._rows[: len(rows)]

    def _read_side_data(self, frame: av.VideoFrame) -> None:
        """Of the first frame alone: it then refers to itself, so that only the garbage collector frees its picture."""
        side_data: Any = frame.side_data
        # Dolby Vision without a base layer (profile 5): only its own metadata say what the samples mean.
        self._guard.wrong_colours |= frame.colorspace == UNKNOWN and Type.DOVI_RPU_BUFFER in side_data
        if Type.DISPLAYMATRIX in side_data:  # to the nearest quarter turn
            # It takes column x and row y to a*x + c*y and b*x + d*y (ISO/IEC 14496-12, section 6.2.2).
            a, b, _, c, d = np.frombuffer(memoryview(side_data[Type.DISPLAYMATRIX]), np.int32)[:5].tolist()
            self._turn = (True, c < 0, b < 0) if abs(b) + abs(c) > abs(a) + abs(d) else (False, a < 0, d < 0)

    def _to_rgb(self, frame: av.VideoFrame, width: int, height: int) -> av.VideoFrame:
        """As RGB, or RGBA, of this size, with the transfer and the primaries that it has."""
        how = None if (width, height) == (frame.width, frame.height) else "BICUBIC"
        parts = frame.format.components
        kind = "rgba" if frame.format.has_palette or any(part.is_alpha for part in parts) else "rgb24"
        convert = partial(self._reformatter.reformat, frame, width, height, kind, interpolation=how, threads=1)
        try:
            return convert()
        except av.error.OSError:  # swscale does not know the matrix
            self._guard.wrong_colours = True
            return convert(src_colorspace=BT2020)  # the matrix has the same number

    def _lay_over_white(self, row: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> None:
        """The next row, but where all of all frames is transparent: many writers of four bytes for a pixel leave the
        fourth at 0."""
        if alpha.max() == 0:
            self._clear_rows.append(len(self._row_of))
            return
        self._has_alpha = True
        for top in range(0, len(row) if alpha.min() < 255 else 0, _STRIP_ROWS):
            strip = slice(top, top + _STRIP_ROWS)
            darkness = (255 - row[strip]).astype(np.uint16)
            darkness *= alpha[strip]
            darkness += 127
            darkness //= 255
            row[strip] = 255 - darkness


def _pixels(frame: av.VideoFrame) -> NDArray[np.uint8]:
    """Of a frame that is RGB or RGBA: [H, W, 3 or 4], in its own memory. Not to be written: it may be the decoder's,
    which makes the next frame of it."""
    plane, depth = frame.planes[0], len(frame.format.components)
    lines = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)  # FFmpeg pads them
    return lines[: frame.height, : frame.width * depth].reshape(frame.height, frame.width, depth)
