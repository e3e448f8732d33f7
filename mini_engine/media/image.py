"""Bytes of an image file -> RGB, with Pillow. The first frame of an animation counts. Knows nothing of models."""

import io
import struct
import time
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401 - see below

from mini_engine.media.errors import DecodeCancelled, MediaError
from mini_engine.media.jpeg import MOST_SCANS, count_scans
from mini_engine.media.limits import (
    MOST_IMAGE_PIXELS,
    CancelSignal,
    ImageLimits,
    check_aspect_ratio,
    decode_overdue,
    flag_of,
)
from mini_engine.media.shortage import raise_if_short

# Pillow knows dozens of formats, some of which start other programs (EPS) or are rarely fuzzed.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_BLOCK_BYTES = 4096  # how much Pillow reads between two looks at the clock, while it decodes
_UNREADABLE = "cannot be read as an image, or is damaged; send a whole PNG, JPEG, WebP, GIF or BMP file"
_TURNS = {  # how what is stored with an orientation, of EXIF 2.3, is set upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# The formats are imported now, and not at their first file, when the host may have no more to give.
Image.preinit()
# Pillow refuses twice as many. It looks at them before it hands out the size, and must: a WebP's canvas and what a GIF
# puts in its first frame's place are allocated by then.
Image.MAX_IMAGE_PIXELS = MOST_IMAGE_PIXELS // 2
# Pillow warns of large images, which have a limit here, and of each thing that it finds wrong in EXIF: a client could
# fill the log with them.
warnings.filterwarnings("ignore", module=r"PIL\.")


def decode_image(
    data: bytes, limits: ImageLimits | None = None, *, item: str = "image", cancelled: CancelSignal | None = None
) -> NDArray[np.uint8]:
    """Returns [H, W, 3], RGB, contiguous: upright as EXIF says, transparency laid over white.

    The size is checked against the header before any pixel is decoded. Raises MediaError, Shortage or MemoryError where
    the host has too little for it, and DecodeCancelled soon after `cancelled` is set: a WebP or what is done with the
    pixels is not broken off.
    """
    limits = limits or ImageLimits()
    source = _Source(data, item, limits, cancelled)
    try:
        with Image.open(source, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > limits.max_image_pixels:
                raise _too_large(item, f"{width}x{height} is", limits)
            check_aspect_ratio(width, height, item)
            if count_scans(data, source.tick) > MOST_SCANS:
                raise MediaError(item, f"its JPEG has more than {MOST_SCANS} scans; save it anew, as a baseline JPEG")
            image.decodermaxblock = _BLOCK_BYTES
            image.load()
            return np.array(_to_rgb(_upright(image)))
    except Image.DecompressionBombError as error:
        raise _too_large(item, "it has", limits) from error
    except MediaError:
        raise
    # What Pillow raises for a damaged file depends on the format and on the damage.
    except (EOFError, OSError, ValueError, SyntaxError, LookupError, TypeError, OverflowError, struct.error) as error:
        raise_if_short(error)  # Pillow imports its formats at the first file
        raise MediaError(item, _UNREADABLE) from error


class _Source(io.BytesIO):
    """The file, which Pillow reads bit by bit as it decodes, while there is time and somebody wants it."""

    def __init__(self, data: bytes, item: str, limits: ImageLimits, cancelled: CancelSignal | None) -> None:
        super().__init__(data)
        self._item, self._seconds, self._cancelled = item, limits.media_decode_timeout, cancelled
        self._started = time.monotonic()

    def read(self, size: int | None = -1) -> bytes:
        self.tick()
        return super().read(size)

    def tick(self) -> None:
        """Raises MediaError when the time is up, DecodeCancelled when nobody waits any more."""
        if self._cancelled is not None and self._cancelled.is_set():
            raise DecodeCancelled
        if time.monotonic() - self._started > self._seconds:
            raise decode_overdue(self._item, self._seconds, "a smaller image")


def _upright(image: Image.Image) -> Image.Image:
    """A decoded image, turned as EXIF or XMP says. Neither is written back, which fails for much that can be read."""
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    # What Pillow raises depends on the damage. The pixels are there, and nothing is read of the file any more.
    except Exception:  # noqa: BLE001
        return image
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow would clip 16-bit grey to white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layered = Image.new("RGBA", image.size, "white")
    layered.alpha_composite(image.convert("RGBA"))
    return layered.convert("RGB")


def _too_large(item: str, what: str, limits: ImageLimits) -> MediaError:
    problem = f"{what} more than {limits.max_image_pixels} pixels, the limit of {flag_of('max_image_pixels')}"
    return MediaError(item, f"{problem}; send a smaller image")
