"""Which pixels come out of an image, and which images are refused. The reference is Pillow."""

import io
import struct
import zlib
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from mini_engine.config.decode_limits import DecodeLimits
from mini_engine.media.media_errors import MediaError
from tests.support import clips
from tests.support.corpus import png_of_size
from tests.support.decoding import decode_frames, decode_image

FORMATS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF", "JPEG2000", "PPM", "TGA"]
EXACT = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}}
EXACT["HEIF"] = {"quality": -1, "chroma": 444, "tile_size": 64}
RED, WHITE = [255, 0, 0], [255, 255, 255]


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def tall() -> Image.Image:
    """30 wide, 1100 high: no two rows of one colour. It is converted to RGB in several strips."""
    return Image.fromarray(np.concatenate([clips.frame(index, 30, 22) for index in range(50)]))


def halves(mode: str = "RGB") -> Image.Image:
    """64 wide, 32 high: the left half red, the right half white."""
    image = Image.new("RGB", (64, 32), "white")
    image.paste("red", (0, 0, 32, 32))
    return image.convert(mode)


@pytest.mark.parametrize(
    ("mode", "format"),
    [
        *[("RGB", format) for format in (*EXACT, *"PNG BMP TIFF JPEG2000 PPM QOI DDS PCX SGI JPEG".split())],
        *[(mode, "PNG") for mode in ("L", "LA", "P", "1")],
        *[("L", "JPEG"), ("CMYK", "JPEG"), ("CMYK", "TIFF"), ("P", "GIF"), ("RGBA", "WEBP"), ("P", "TGA")],
    ],
)
def test_modes_and_formats(mode: str, format: str) -> None:
    image, atol = tall().convert(mode), 6 if format in ("JPEG", "AVIF", "HEIF") else 0
    data = saved(image, format, **EXACT.get(format, {"quality": 100, "subsampling": 0}))
    pixels = decode_image(data)
    assert (pixels.dtype, pixels.shape, pixels.flags.c_contiguous) == (np.uint8, (1100, 30, 3), True)
    np.testing.assert_allclose(pixels.astype(int), np.asarray(image.convert("RGB")), atol=atol)


def test_grey_of_more_than_8_bits_is_scaled_to_white() -> None:
    for pixels, format in (
        (np.uint16([0, 0x8040, 0xFFFF]), "PNG"),
        (np.int32([0, 128, 255]), "TIFF"),
        (np.int32([0, 64240, 128e3]), "TIFF"),
        (np.float32([0, 0.502, 1]), "TIFF"),
        (np.float32([np.nan, 502, 1e3]), "TIFF"),
    ):
        image = Image.fromarray(np.atleast_2d(pixels))
        np.testing.assert_array_equal(decode_image(saved(image, format))[0, :, 0], [0, 128, 255])


def tiff_of_planes(photometric: int, *planes: np.ndarray, depth: int = 16) -> bytes:
    """A TIFF of the planes' type with so many bits, uncompressed, one strip for each plane."""
    (height, width), count, dtype = planes[0].shape, len(planes), planes[0].dtype
    strips = [plane.tobytes() for plane in planes]
    lists = struct.pack(f"<{count}H", *[depth] * count)
    lists += struct.pack(f"<{2 * count}I", *(200 + len(strips[0]) * n for n in range(count)), *map(len, strips))
    bits, offsets, sizes = (150, 150 + 2 * count, 150 + 6 * count) if count > 1 else (depth, 200, len(strips[0]))
    tags = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, count, bits), (259, 3, 1, 1), (262, 3, 1, photometric)]
    tags += [(273, 4, count, offsets), (277, 3, 1, count), (278, 3, 1, height), (279, 4, count, sizes)]
    tags += [(284, 3, 1, 1 + (count > 1)), (339, 3, 1, "uif".index(dtype.kind) + 1)]
    head = struct.pack("<2sHIH", b"II", 42, 8, 11) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(8)
    return (head + lists).ljust(200, b"\0") + b"".join(strips)


def png_of_16_bits(pixels: np.ndarray, transparent: np.ndarray) -> bytes:
    """Grey [H, W] or RGB [H, W, 3], with a colour that is transparent."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width, rows = *pixels.shape[:2], b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 16, 2 * (pixels.ndim > 2), 0, 0, 0)
    parts = (
        (b"IHDR", head),
        (b"tRNS", transparent.astype(">u2").tobytes()),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def jpeg2000(pixels: np.ndarray, kind: str | None = None) -> bytes:
    """JPEG 2000 of uint16 [H, W, 3 or 4], of FFmpeg's `kind` of pixels."""
    encoder: Any = av.CodecContext.create("jpeg2000", "w")
    frame = av.VideoFrame.from_ndarray(pixels, "rgba64le" if pixels.shape[2] == 4 else "rgb48le").reformat(format=kind)
    encoder.height, encoder.width, encoder.pix_fmt = frame.height, frame.width, frame.format.name
    encoder.time_base = Fraction(1)
    return b"".join(map(bytes, (*encoder.encode(frame), *encoder.encode(None))))


def test_more_than_8_bits_that_pillow_misreads_are_decoded_by_ffmpeg() -> None:
    pixels = np.concatenate([clips.frame(0, 64, 32), np.full((32, 64, 3), 255, np.uint8)])
    deep = pixels.astype(np.uint16) * 257
    np.testing.assert_allclose(decode_image(jpeg2000(deep)).astype(int), pixels, atol=4)
    white = decode_image(jpeg2000(np.full((32, 64, 4), 65535, np.uint16), "ya16le"))
    np.testing.assert_allclose(white.astype(int), 255, atol=4)
    clear = np.dstack([deep, np.repeat([[0, 65535]], 32, axis=1).repeat(64, axis=0).astype(np.uint16)])
    pixels[:, :32] = 255
    np.testing.assert_allclose(decode_image(jpeg2000(clear))[:, 34:].astype(int), pixels[:, 34:], atol=4)
    assert decode_image(jpeg2000(clear))[:, :30].min() == 255


def test_tiffs_that_pillow_misreads_are_refused() -> None:
    """Planes, grey of which 0 is white, 12 bits, 32 unsigned ones, half floats, and the start of one. FFmpeg misreads
    many of them, too."""
    plane = np.full((32, 64), 0x3800, np.uint16)
    for data in (
        tiff_of_planes(2, plane, plane, plane),
        tiff_of_planes(0, plane),
        tiff_of_planes(1, plane, depth=12),
        tiff_of_planes(1, plane.astype(np.uint32), depth=32),
        tiff_of_planes(1, plane.view(np.float16)),
        b"II*\0",
    ):
        with pytest.raises(MediaError, match="cannot be read"):
            decode_image(data)


@pytest.mark.parametrize("colour", [[0x1234], [0x1234, 0x4567, 0x8000]], ids=["grey", "RGB"])
def test_transparent_colour_of_16_bits_is_white(colour: list[int]) -> None:
    """Not one that differs from it in the lower byte."""
    pixels = np.tile(np.uint16(colour), (16, 64, 1))
    pixels[:, 32:, 0] += 1
    shown = decode_image(png_of_16_bits(pixels.squeeze(), pixels[0, 0]))[0, [0, 40]]
    np.testing.assert_array_equal(shown[0], 255)
    np.testing.assert_allclose(shown[1].astype(int), np.broadcast_to(np.uint16(colour) >> 8, 3), atol=1)


def test_what_pillow_cannot_open_is_decoded_by_ffmpeg() -> None:
    data = clips.encode(1, codec="dpx", container="image2pipe")
    np.testing.assert_array_equal(decode_image(data), clips.frame(0, 64, 48))


def test_transparency_is_laid_over_white() -> None:
    image = halves("RGBA")
    image.putalpha(Image.fromarray(np.repeat(np.repeat([[255, 0, 128, 0]], 16, axis=1), 32, axis=0).astype(np.uint8)))
    assert decode_image(saved(image, "PNG"))[0, [0, 16]].tolist() == [RED, WHITE]
    image.putalpha(128)
    assert decode_image(saved(image, "PNG"))[0, 0].tolist() == [255, 127, 127]
    palette = halves().quantize(2)
    pixels = decode_image(saved(palette, "GIF", transparency=palette.getpixel((0, 0))))
    assert pixels[0, 0].tolist() == WHITE


@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
@pytest.mark.parametrize("transfer", [16, 18, 14], ids=["PQ", "HLG", "SDR of BT.2020"])
def test_wide_gamut_comes_out_as_srgb(format: str, transfer: int) -> None:
    signal = clips.signal_of(transfer, np.full((48, 64, 3), (220, 25, 30)))
    image = Image.fromarray((signal * 255).round().astype(np.uint8))
    colour = {"color_primaries": 9, "transfer_characteristics": transfer, "matrix_coefficients": 6}
    data = saved(image, format, **EXACT[format], **(colour if format == "HEIF" else {}))
    if format == "AVIF":  # Pillow writes that it is sRGB
        data = data.replace(b"colrnclx\0\1\0\r", b"colrnclx\0\x09\0" + bytes([transfer]))
    red, green, blue = decode_image(data)[20, 30]
    assert red > 150 and green < 60 and blue < 60


def test_orientation() -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        data = saved(Image.fromarray(clips.frame(1, 96, 64)), "PNG", exif=exif)
        with Image.open(io.BytesIO(data)) as stored:
            np.testing.assert_array_equal(decode_image(data), ImageOps.exif_transpose(stored))


UNREADABLE = "(cannot be read, or is damaged|the file is truncated or damaged|the file contains no image)"


@pytest.mark.parametrize(
    "data",
    [
        *[png_of_size(10_000, 10_000), png_of_size(0, 100), b"", b"text", bytes(100), b"GIF89a", b"BM"],
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    ],
    ids=range(8),
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(MediaError, match=f"^image 1: {UNREADABLE}"):
        decode_image(data, DecodeLimits(max_image_pixels=10**8))


@pytest.mark.parametrize("format", FORMATS)
def test_truncated_and_elongated_images_are_refused(format: str) -> None:
    data = saved(tall(), format)
    for share in (0.1, 0.9):
        with pytest.raises(MediaError, match=f"^image 1: {UNREADABLE}"):
            decode_image(data[: int(len(data) * share)])
    with pytest.raises(MediaError, match="^image 1: of 603x3 one side is"):
        decode_image(saved(Image.new("L", (603, 3)), format))


def test_more_pixels_than_the_limit_are_refused_also_in_a_frame_beyond_the_canvas() -> None:
    gif = b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0x80, 0, 0) + bytes(6) + b"\x21\xf9\4\x08\0\0\0\0"
    gif += b"\x2c" + struct.pack("<HHHHB", 0, 0, 12000, 12000, 0) + b"\2\2\x44\1\0;"
    for data, pixels in (
        (png_of_size(10_001, 10_000), r"100010000 pixels \(10001x10000\)"),
        (gif, r"144000000 pixels \(12000x12000\)"),
    ):
        limit = "more than 100000000, the limit of --max-image-pixels; send a smaller one"
        with pytest.raises(MediaError, match=f"^image 1: it has {pixels}, {limit}$"):
            decode_image(data, DecodeLimits(max_image_pixels=10**8))


def test_just_within_the_limits() -> None:
    data = saved(Image.new("L", (600, 3)), "PNG")
    assert decode_image(data, DecodeLimits(max_image_pixels=1800)).shape == (3, 600, 3)


def test_frames_are_decoded_as_images_and_named_in_errors() -> None:
    jpegs = [saved(Image.fromarray(clips.frame(index, 64, 48)), "JPEG") for index in range(3)]
    np.testing.assert_array_equal(decode_frames(jpegs), [decode_image(jpeg) for jpeg in jpegs])
    for frame, limits, problem in (
        (jpegs[1][:-200], {}, f"frame 2: {UNREADABLE}"),
        (saved(halves(), "JPEG"), {}, "frame 2 has 64x32 pixels, the first 64x48; send"),
        (jpegs[1], {"max_video_pixels_kept": 64 * 48 * 3 - 1}, ".*pixels in all frames.*--max-video-pixels-kept"),
    ):
        with pytest.raises(MediaError, match=f"^video 1: {problem}"):
            decode_frames([jpegs[0], frame, jpegs[2]], DecodeLimits(**limits))
