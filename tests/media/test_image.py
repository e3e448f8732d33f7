import io
import itertools
import struct
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageOps

from mini_engine.media.errors import DecodeCancelled, MediaError
from mini_engine.media.image import decode_image
from mini_engine.media.jpeg import count_scans
from mini_engine.media.limits import MOST_IMAGE_PIXELS, ImageLimits
from tests.media import broken

RED, WHITE = (255, 0, 0), (255, 255, 255)


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def halves(mode: str = "RGB") -> Image.Image:
    """8 wide, 4 high: the left half red, the right half white."""
    image = Image.new("RGB", (8, 4), WHITE)
    image.paste(RED, (0, 0, 4, 4))
    return image.convert(mode)


@pytest.mark.parametrize("format", ["PNG", "GIF", "BMP", "WEBP"])
def test_lossless_formats(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    pixels = decode_image(saved(halves(), format, **options))
    assert (pixels.dtype, pixels.shape, pixels.flags.c_contiguous) == (np.uint8, (4, 8, 3), True)
    np.testing.assert_array_equal(pixels, np.asarray(halves()))


def test_jpeg() -> None:
    picture = Image.new("RGB", (40, 24), (10, 120, 200))
    np.testing.assert_allclose(decode_image(saved(picture, "JPEG")).astype(int), np.asarray(picture), atol=4)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "CMYK", "I;16"])
def test_modes(mode: str) -> None:
    if mode == "I;16":
        image, format = Image.fromarray(np.full((4, 8), 0x8040, np.uint16)), "PNG"
        expected = np.full((4, 8, 3), 0x80)
    else:
        image, format = halves(mode), "JPEG" if mode == "CMYK" else "PNG"
        expected = np.asarray(image.convert("RGB"))
    atol = 8 if format == "JPEG" else 0
    np.testing.assert_allclose(decode_image(saved(image, format, quality=100)).astype(int), expected, atol=atol)


def test_alpha_over_white() -> None:
    image = halves("RGBA")
    image.putalpha(Image.fromarray(np.repeat([[255, 255, 0, 0, 128, 0, 0, 0]], 4, axis=0).astype(np.uint8)))
    pixels = decode_image(saved(image, "PNG"))
    assert pixels[0, 0].tolist() == list(RED)
    assert pixels[0, 2].tolist() == list(WHITE)  # red, but quite transparent


def test_palette_with_a_transparent_colour() -> None:
    image = halves().quantize(2)
    red = image.getpixel((0, 0))
    pixels = decode_image(saved(image, "GIF", transparency=red))
    assert pixels[0, 0].tolist() == list(WHITE)


def test_first_frame_of_an_animation() -> None:
    data = saved(halves(), "GIF", save_all=True, append_images=[Image.new("RGB", (8, 4), "blue")])
    assert decode_image(data)[0, 0].tolist() == list(RED)


def test_exif_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    pixels = decode_image(saved(halves(), "PNG", exif=exif))
    assert pixels.shape == (8, 4, 3)
    assert pixels[0, 0].tolist() == list(RED)
    assert pixels[7, 0].tolist() == list(WHITE)


def test_too_many_pixels() -> None:
    data = saved(Image.new("L", (200, 100)), "PNG")
    assert decode_image(data, ImageLimits(max_image_pixels=20_000)).shape == (100, 200, 3)
    hint = "^image 2: 200x100 is more than 19999 pixels, the limit of --max-image-pixels; send"
    with pytest.raises(MediaError, match=hint):
        decode_image(data, ImageLimits(max_image_pixels=19_999), item="image 2")


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_decode_past_its_time_ends_and_the_next_one_is_not_affected(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 600, 3), np.uint8))
    data = saved(noise, format)
    whole = decode_image(data)
    clock = itertools.count(0, 0.2)  # a fifth of a second goes by between two looks
    with monkeypatch.context() as patch:
        patch.setattr("mini_engine.media.image.time.monotonic", lambda: next(clock))
        hint = r"^image 1: decoding takes more than 0\.3 s, the limit of --media-decode-timeout"
        with pytest.raises(MediaError, match=hint):
            decode_image(data, ImageLimits(media_decode_timeout=0.3), item="image 1")
    np.testing.assert_array_equal(decode_image(data, ImageLimits(media_decode_timeout=30)), whole)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP"])
def test_a_decode_that_nobody_waits_for_any_more_ends_within_a_small_block(format: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 600, 3), np.uint8))
    data = saved(noise, format, **({"progressive": True} if format == "JPEG" else {}))
    looks = Cancelled(10**9)
    decode_image(data, cancelled=looks)
    assert looks.looked >= len(data) // 4096
    for after in (0, looks.looked // 2, looks.looked - 1):
        cancelled = Cancelled(after)
        with pytest.raises(DecodeCancelled):
            decode_image(data, cancelled=cancelled)
        assert cancelled.looked == after + 1


class Cancelled:
    """Set after so many looks at it."""

    def __init__(self, after: int) -> None:
        self.after, self.looked = after, 0

    def is_set(self) -> bool:
        self.looked += 1
        return self.looked > self.after


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    """Of 62 KB, which took 18 seconds."""
    assert decode_image(broken.jpeg_of_scans(64, 48, 100)).shape == (48, 64, 3)
    for size, scans in ((64, 101), (8192, 5600)):
        hint = "^image 1: its JPEG has more than 100 scans; save it anew, as a baseline JPEG$"
        with pytest.raises(MediaError, match=hint):
            decode_image(broken.jpeg_of_scans(size, size, scans), item="image 1")


def test_scans_are_counted_as_a_decoder_finds_them() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 600, 3), np.uint8))
    looks = Cancelled(10**9)
    assert count_scans(saved(noise, "JPEG"), looks.is_set) == 1
    assert count_scans(saved(noise, "JPEG", restart_marker_rows=1), looks.is_set) == 1
    assert count_scans(saved(noise, "JPEG", progressive=True), looks.is_set) == 10
    commented = saved(noise, "JPEG", comment=b"\xff\xda\0\2" * 1000)  # as a thumbnail within a segment has them
    assert count_scans(commented, looks.is_set) == 1
    assert looks.looked < 100
    looks.looked = 0
    assert count_scans(b"\xff\xd8" + b"\xff\0" * (1 << 20), looks.is_set) == 0
    assert looks.looked >= 32  # not one search through all of a file that may be large
    for length in range(65530, 65550):  # a marker across the end of what is searched at once
        assert count_scans(b"\xff\xd8" + bytes(length) + b"\xff\xda\0\2", looks.is_set) == 1
    filled = broken.jpeg_of_scans(64, 48, 7).replace(b"\xff\xda", b"\xff\xff\xff\xda")
    assert count_scans(filled, looks.is_set) == 7
    assert count_scans(filled + broken.jpeg_of_scans(64, 48, 7), looks.is_set) == 7
    for data in (
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xda",
        b"\xff\xd8" + b"\xff" * 9,
        saved(noise, "PNG"),
    ):
        assert count_scans(data, looks.is_set) == data.startswith(b"\xff\xd8\xff\xda")


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_strip_is_refused_by_its_header(format: str) -> None:
    assert decode_image(saved(Image.new("L", (600, 3)), format)).shape == (3, 600, 3)
    data = saved(Image.new("L", (603, 3)), format)
    with pytest.raises(MediaError, match="^image 1: 603x3 is longer than 200 times its width; crop it$"):
        # Cut short, which decoding would find; Pillow reads a WebP whole.
        decode_image(data if format == "WEBP" else data[:-9], item="image 1")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_exif_orientations(orientation: int) -> None:
    """What each of the eight means, as EXIF 2.3 has it: the side at which the stored row 0 and column 0 belong."""
    stored = np.zeros((4, 8, 3), np.uint8)
    stored[0, :, 0] = 255  # the first row red
    stored[:, 0, 2] = 255  # the first column blue
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decode_image(saved(Image.fromarray(stored), "PNG", exif=exif))
    sides = {"top": pixels[0], "bottom": pixels[-1], "left": pixels[:, 0], "right": pixels[:, -1]}
    row, column = [
        ("top", "left"), ("top", "right"), ("bottom", "right"), ("bottom", "left"),
        ("left", "top"), ("right", "top"), ("right", "bottom"), ("left", "bottom"),
    ][orientation - 1]  # fmt: skip
    assert pixels.shape == ((4, 8, 3) if orientation < 5 else (8, 4, 3))
    assert (sides[row][:, 0] == 255).all()
    assert (sides[column][:, 2] == 255).all()
    assert (pixels[..., 0] == 255).sum() == 8


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", [*range(10), 65535])
def test_orientations_as_pillow_turns_them(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 9, 3), np.uint8))
    data = saved(noise, format, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(decode_image(data), expected)


def test_orientation_in_xmp() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    assert decode_image(saved(halves(), "JPEG", xmp=xmp)).shape == (8, 4, 3)


Entry = tuple[int, int, int, bytes]  # an EXIF tag, its type, how many values, and these or where they stand
UPSIDE_DOWN: Entry = (0x0112, 3, 1, b"\0\3\0\0")


def with_exif(*entries: Entry, end: bytes = bytes(4)) -> bytes:
    """A JPEG, the left half red, with these entries in its EXIF."""
    directory = b"".join(struct.pack(">HHI4s", *entry) for entry in entries)
    exif = b"Exif\0\0MM\0*" + struct.pack(">IH", 8, len(entries)) + directory + end
    data = saved(halves().resize((64, 32)), "JPEG")
    return data[:2] + struct.pack(">HH", 0xFFE1, len(exif) + 2) + exif + data[2:]


@pytest.mark.parametrize(
    "odd",
    [
        (0x0131, 5, 1, struct.pack(">I", 38)),  # the software's name: a fraction, 72/1, which stands behind
        (0x011A, 2, 3, b"72\0\0"),  # a resolution, its unit, the width: text
        (0x0128, 2, 2, b"2\0\0\0"),
        (0x0213, 2, 2, b"1\0\0\0"),
        (0x0100, 2, 3, b"64\0\0"),
        (0x8769, 2, 2, b"2\0\0\0"),
    ],
)
def test_exif_that_can_be_read_and_not_written(odd: Entry) -> None:
    pixels = decode_image(with_exif(UPSIDE_DOWN, odd, end=struct.pack(">III", 0, 72, 1)))
    np.testing.assert_allclose(pixels[16, [8, 56]].astype(int), [WHITE, RED], atol=8)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL.TiffImagePlugin")
@pytest.mark.parametrize(
    "data",
    [
        with_exif((0x0112, 2, 2, b"3\0\0\0")),
        with_exif((0x0112, 3, 9, struct.pack(">I", 1 << 30))),
        with_exif((0x0112, 5, 1, struct.pack(">I", 22)), end=struct.pack(">III", 0, 3, 0)),
        with_exif(UPSIDE_DOWN).replace(b"MM\0*", b"XX\0*"),
        with_exif(UPSIDE_DOWN).replace(b"MM\0*" + struct.pack(">I", 8), b"MM\0*" + struct.pack(">I", 1 << 31)),
    ],
    ids=["text", "beyond the end", "3/0", "no EXIF", "directory beyond the end"],
)
def test_broken_exif_turns_nothing(data: bytes) -> None:
    pixels = decode_image(data)
    np.testing.assert_allclose(pixels[16, [8, 56]].astype(int), [RED, WHITE], atol=8)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, MemoryError])
def test_whatever_reading_exif_raises(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def getexif(self: Image.Image) -> None:
        raise error

    data = saved(halves(), "PNG")
    monkeypatch.setattr(Image.Image, "getexif", getexif)
    np.testing.assert_array_equal(decode_image(data), np.asarray(halves()))


CHATTY = """
import sys
from mini_engine.media.errors import MediaError
from mini_engine.media.image import decode_image
from mini_engine.media.limits import ImageLimits
from tests.media import broken
from tests.media.test_image import UPSIDE_DOWN, with_exif

try:
    decode_image(broken.png_of_size(10_000, 10_000), ImageLimits(max_image_pixels=99_999_999))
except MediaError:
    decode_image(with_exif((0x0131, 2, 1 << 30, b"\\0\\0\\0\\1"), UPSIDE_DOWN))
    print("done")
"""


def test_nothing_that_pillow_finds_in_a_file_goes_to_the_log() -> None:
    done = subprocess.run([sys.executable, "-c", CHATTY], capture_output=True, text=True, check=True, timeout=600)
    assert (done.stdout, done.stderr) == ("done\n", "")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_greatest_limit_is_obeyed() -> None:
    """An image that Pillow would not open by its own limit is refused for what is wrong with it."""
    limits = ImageLimits(max_image_pixels=MOST_IMAGE_PIXELS)
    with pytest.raises(MediaError, match="cannot be read"):
        decode_image(broken.png_of_size(13_377, 13_377), limits)
    with pytest.raises(MediaError, match="more than 178956970 pixels"):
        decode_image(broken.png_of_size(13_378, 13_378), limits)


def test_what_a_gif_sets_aside_as_it_is_opened_is_bounded() -> None:
    """Four gigabytes, for a frame of 65535 by 65535 that is to be cleared afterwards."""
    head = b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0x80, 0, 0) + bytes(6) + b"\x21\xf9\4\x08\0\0\0\0"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\2\2\x44\1\0;"
    with pytest.raises(MediaError, match="it has more than"):
        decode_image(head + frame)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 12_000, 60_000])
def test_decompression_bombs_are_refused_before_they_are_decoded(side: int) -> None:
    """A header that promises many pixels; Pillow itself only warns of the middle one and refuses the last."""
    with pytest.raises(MediaError, match="more than"):
        decode_image(broken.png_of_size(side, side))


def test_unreadable() -> None:
    for format in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
        data = saved(halves().resize((64, 64)), format)
        for share in (0.1, 0.5, 0.7):
            with pytest.raises(MediaError, match="^image 1: cannot be read"):
                decode_image(data[: int(len(data) * share)], item="image 1")
    for data in (b"", b"text", b"\0" * 100, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"GIF89a", b"BM"):
        with pytest.raises(MediaError, match="cannot be read"):
            decode_image(data)


def test_flipped_bytes_end_in_pixels_or_a_media_error() -> None:
    random = np.random.default_rng(0)
    for format in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
        data = np.frombuffer(saved(halves().resize((64, 64)), format), np.uint8)
        for _ in range(60):
            changed = data.copy()
            changed[random.integers(0, len(data), 4)] = random.integers(0, 256, 4)
            try:
                assert decode_image(changed.tobytes()).shape[2] == 3
            except MediaError:
                continue
