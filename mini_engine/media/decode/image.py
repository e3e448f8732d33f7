"""Bytes of an image file -> sRGB, with Pillow, or else with FFmpeg. The first frame of an animation counts.

Runs in a decoder process, which bounds its memory and time. Knows nothing of models.
"""

import contextlib
import mmap
import warnings
from collections.abc import Sequence
from typing import BinaryIO, cast

import numpy as np
import pillow_heif
from numpy.typing import NDArray
from PIL import AvifImagePlugin, ExifTags, Image, PngImagePlugin, TiffImagePlugin, UnidentifiedImageError

from mini_engine.media.decode.colour import UNKNOWN, to_srgb
from mini_engine.media.decode.frame_array import Allocate
from mini_engine.media.decode.item_limits import UNREADABLE, Guard
from mini_engine.media.decode.video import decode_video
from mini_engine.media.frame_sampling import VideoSampling
from mini_engine.protocol.api_errors import MediaError

_STRIP_ROWS = 512  # converted to RGB at once
# How an image that is stored with an orientation of 2 to 8 (EXIF 2.3) is set upright.
_TURNS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90"
_TURN_OF = {2 + index: Image.Transpose[name] for index, name in enumerate(_TURNS.split())}
_TIFF = (b"II*\0", b"MM\0*")
_JPEG2000_SIZE = b"\xff\x4f\xff\x51"  # the first two markers of a code stream

# Import the formats now and not at their first file: a decoder process has few descriptors.
Image.init()
pillow_heif.register_heif_opener(decode_threads=1)
AvifImagePlugin.DEFAULT_MAX_THREADS = 1
# EPS starts a program, IPTC opens what it holds in any format, the next are only identified, the rest are guessed.
_DENIED = {"EPS", "IPTC", "BUFR", "GRIB", "HDF5", "MPEG", "WMF", "IM", "IMT", "PCD", "SPIDER"}
_FORMATS = sorted(set(Image.ID) - _DENIED, key=lambda name: name == "TGA")  # it has no mark at its start: tried last
Image.MAX_IMAGE_PIXELS = None  # the limit here is a flag, and memory has one of its own
# Pillow warns of all that it finds wrong in EXIF: a client could fill the log with it.
warnings.filterwarnings("ignore", module=r"PIL\.")


def decode_image(file: mmap.mmap, guard: Guard, allocate: Allocate) -> NDArray[np.uint8]:
    """Returns [H, W, 3], sRGB, contiguous: upright as EXIF says, transparency laid over white. The size is
    checked against the header before any pixel is decoded. Raises MediaError and MemoryError."""
    try:
        with Image.open(cast(BinaryIO, file), formats=_FORMATS) as image:
            guard.check_size("max_image_pixels", *image.size)
            if _is_misread(image, file):
                raise UnidentifiedImageError
            image.load()
            guard.check_size("max_image_pixels", *image.size)  # what an icon holds may have another size
            upright = _upright(image)
            width, height = upright.size
            # White of pixels of more than 8 bits. TIFF does not say it: a usual one that no pixel exceeds, or the peak.
            highest = np.fmax.reduce(np.asarray(image), axis=None) if image.mode in ("I", "F") else 65535
            peak = next((white for white in (1, 255) if highest <= white), highest)
            pixels = allocate((1, height, width))[0]
            for top in range(0, height, _STRIP_ROWS):
                bottom = min(top + _STRIP_ROWS, height)
                pixels[top:bottom] = np.asarray(to_rgb(upright.crop((0, top, width, bottom)), peak))
            to_srgb(pixels, *_colour_of(image, file))
            return pixels
    except UnidentifiedImageError:
        if file[:4] in _TIFF:  # of these FFmpeg makes other pixels, too
            raise MediaError(guard.item, UNREADABLE) from None
        file.seek(0)
        return decode_video(file, VideoSampling(num_frames=1), guard, allocate)[0][0]
    except (MediaError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - what Pillow raises depends on the format and on the damage
        raise MediaError(guard.item, UNREADABLE) from error


def decode_frames(data: mmap.mmap, sizes: Sequence[int], guard: Guard, allocate: Allocate) -> NDArray[np.uint8]:
    """Returns [T, H, W, 3]: the images of one height and width that lie in `data` one after another. `sizes` are their
    bytes. Errors as `decode_image`."""
    rows, start = np.empty((0, 0, 0, 3), np.uint8), 0
    for index, size in enumerate(sizes):
        guard.tick()
        try:
            with mmap.mmap(-1, size) as file:
                file[:] = data[start : start + size]
                pixels = decode_image(file, guard, lambda shape: np.empty((*shape, 3), np.uint8))
        except MediaError as error:
            raise MediaError(guard.item, f"frame {index + 1}: {error.problem}") from error
        height, width, _ = pixels.shape
        if index == 0:
            all_pixels = len(sizes) * height * width
            guard.check("max_video_pixels_kept", all_pixels, "pixels in all frames", "fewer or smaller frames")
            rows = allocate((len(sizes), height, width))
        elif pixels.shape != rows.shape[1:]:
            problem = f"frame {index + 1} has {width}x{height} pixels, the first {rows.shape[2]}x{rows.shape[1]}"
            raise MediaError(guard.item, f"{problem}; send frames of one size")
        rows[index] = pixels
        start += size
    return rows


def _is_misread(image: Image.Image, file: mmap.mmap) -> bool:
    """Whether Pillow reads wrong samples without an error, as it does of more than 8 bits: in TIFF one plane for each
    colour, grey of which 0 is white, 12 bits, of which it does not say the white, and unsigned 32; in JPEG 2000 white
    as black; in PNG the transparent colour."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        tags, bits = image.tag_v2, image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))
        has_planes = len(bits) > 1 and tags.get(TiffImagePlugin.PLANAR_CONFIGURATION) == 2
        is_inverse = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
        is_unsigned = tags.get(TiffImagePlugin.SAMPLEFORMAT, (1,))[0] == 1
        return max(bits) > 8 and (has_planes or is_inverse or max(bits) == 12 or (max(bits) == 32 and is_unsigned))
    if isinstance(image, PngImagePlugin.PngImageFile):
        return "transparency" in image.info and ";16" in str(image.tile)
    if image.format == "JPEG2000" and image.mode in ("LA", "RGB", "RGBA"):
        start = file.find(_JPEG2000_SIZE, 0)
        return file[start + 42 : start + 43] > b"\x07"  # bits - 1 of the first component (ISO/IEC 15444-1, A.5.1)
    return False


def _colour_of(image: Image.Image, file: mmap.mmap) -> tuple[int, int]:
    """Primaries and transfer by the numbers of ITU-T H.273. Only AVIF and HEIC are read for them."""
    info = image.info
    if image.format == "AVIF":  # Pillow does not report them; libheif also reads the boxes of AVIF
        file.seek(0)
        with contextlib.suppress(Exception):
            info = pillow_heif.open_heif(cast(BinaryIO, file)).info
    colour = info.get("nclx_profile") or {}
    return colour.get("color_primaries", UNKNOWN), colour.get("transfer_characteristics", UNKNOWN)


def _upright(image: Image.Image) -> Image.Image:
    """A decoded image, turned as EXIF or XMP says. Neither is written back, which fails for much that can be read."""
    try:
        turn = _TURN_OF.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    # What Pillow raises depends on the damage. The pixels are decoded, and nothing more is read of the file.
    except Exception:  # noqa: BLE001
        return image
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image, peak: float = 255) -> Image.Image:
    """As RGB, transparency laid over white. `peak` is the white of an image of more than 8 bits."""
    if image.mode.startswith(("I", "F")):  # Pillow would clip it to white
        grey = np.nan_to_num(np.asarray(image) * np.float32(255 / peak))
        return Image.fromarray(grey.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layered = Image.new("RGBA", image.size, "white")
    layered.alpha_composite(image.convert("RGBA"))
    return layered.convert("RGB")
