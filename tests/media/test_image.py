import io
import itertools

import numpy as np
import pytest
from PIL import Image

from mini_engine.media.errors import DecodeCancelled, MediaError
from mini_engine.media.image import decode_image
from mini_engine.media.jpeg import count_scans
from mini_engine.media.limits import ImageLimits
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
