"""Bytes of an image file -> RGB, with Pillow. The first frame of an animation counts.

Runs in a decoder process, which bounds its memory and time. Knows nothing of models.
"""

import mmap
import struct
import warnings
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401 - see below

from mini_engine.media.errors import MediaError
from mini_engine.media.frames import Allocate
from mini_engine.media.limits import Guard

# Pillow knows dozens of formats, some of which start other programs (EPS) or are rarely fuzzed.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_UNREADABLE = "cannot be read as an image, or is damaged; send a whole PNG, JPEG, WebP, GIF or BMP file"
_STRIP_ROWS = 512  # converted to RGB at once
_TURNS = {  # how an image that is stored with an orientation of EXIF 2.3 is set upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Import the formats now and not at their first file: a decoder process has few descriptors.
Image.preinit()
Image.MAX_IMAGE_PIXELS = None  # the limit here is a flag, and memory has one of its own
# Pillow warns of all that it finds wrong in EXIF: a client could fill the log with it.
warnings.filterwarnings("ignore", module=r"PIL\.")


def decode_image(file: mmap.mmap, guard: Guard, allocate: Allocate) -> NDArray[np.uint8]:
    """Returns [H, W, 3], RGB, contiguous: upright as EXIF says, transparency laid over white.

    The size is checked against the header before any pixel is decoded. Raises MediaError and MemoryError.
    """
    try:
        with Image.open(cast(BinaryIO, file), formats=_FORMATS) as image:
            guard.check_size("max_image_pixels", *image.size)
            image.load()
            upright = _upright(image)
            width, height = upright.size
            pixels = allocate((1, height, width))[0]
            for top in range(0, height, _STRIP_ROWS):
                bottom = min(top + _STRIP_ROWS, height)
                pixels[top:bottom] = np.asarray(_to_rgb(upright.crop((0, top, width, bottom))))
            return pixels
    except MediaError:
        raise
    # What Pillow raises for a damaged file depends on the format and on the damage.
    except (EOFError, OSError, ValueError, SyntaxError, LookupError, TypeError, OverflowError, struct.error) as error:
        raise MediaError(guard.item, _UNREADABLE) from error


def _upright(image: Image.Image) -> Image.Image:
    """A decoded image, turned as EXIF or XMP says. Neither is written back, which fails for much that can be read."""
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    # What Pillow raises depends on the damage. The pixels are decoded, and nothing more is read of the file.
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
