"""Colours of HDR and wide-gamut videos: they come out as sRGB. Others come out as a plain decode gives them."""

import numpy as np
import pytest

from mini_engine.config import EngineConfig
from mini_engine.media.decode.item_limits import WRONG_COLOURS, DecodeLimits
from mini_engine.media.frame_sampling import VideoSampling
from tests.support import clips
from tests.support.decoding import decode_video

ALL = VideoSampling(num_frames=-1)
PQ, HLG, BT709, BT2020 = 16, 18, 1, 14  # transfers
RED, GREY = (220, 25, 30), 40
RPU = b"\0\0\0\x0a\x7c\1\x19" + b"\x80" * 7  # a NAL unit of Dolby Vision, type 62, after its length


def clip(transfer: int, *args: object, width: int = 64, height: int = 48) -> bytes:
    """Six frames: the left half red, the right one grey."""
    pixels = np.full((6, height, width, 3), GREY, np.uint8)
    pixels[:, :, : width // 2] = RED
    return clips.encode_in(transfer, pixels, *args)


def colours(frames: np.ndarray) -> tuple[list[float], list[float]]:
    """The mean of what was red, and of what was grey."""
    middle = frames.shape[2] // 2
    red, grey = frames[:, :, 2 : middle - 4], frames[:, :, middle + 4 : -2]
    return red.mean((0, 1, 2)).tolist(), grey.mean((0, 1, 2)).tolist()


def assert_is_srgb(frames: np.ndarray) -> None:
    (red, green, blue), grey = colours(frames)
    assert red > 150 and green < 60 and blue < 60
    assert all(20 < value < 45 for value in grey)


@pytest.mark.parametrize("transfer", [PQ, HLG])
@pytest.mark.parametrize("codec", ["libx265", "libx264", "libsvtav1", "ffv1"])
def test_hdr_comes_out_as_srgb(transfer: int, codec: str) -> None:
    # FFV1 says it nowhere but in the container.
    container = {"libx265": "mp4", "libx264": "mpegts", "libsvtav1": "webm", "ffv1": "matroska"}[codec]
    for primaries in (9, 12, 1) if codec == "libx265" else (9,):
        data = clip(transfer, codec, container, primaries)
        decoded = decode_video(data, ALL)
        assert decoded.facts.missing is None
        assert_is_srgb(decoded.frames)
        np.testing.assert_array_equal(decode_video(data, VideoSampling(num_frames=2)).frames, decoded.frames[::5])


@pytest.mark.parametrize("transfer", [BT2020, BT709, 2])
def test_sdr_of_wide_gamut_keeps_its_colours(transfer: int) -> None:
    red, grey = colours(decode_video(clip(transfer), ALL).frames)
    np.testing.assert_allclose((red, grey), (RED, (GREY,) * 3), atol=5)


@pytest.mark.parametrize("tags", [(BT709, "libx265", "mp4", 1), (2, "libx265", "mp4", 2), (2, "ffv1", "matroska", 2)])
def test_sdr_of_10_bits_is_that_of_a_plain_decode(tags: tuple[int, str, str, int]) -> None:
    np.testing.assert_array_equal(decode_video(clip(*tags), ALL).frames, clips.decode_all(clip(*tags)))


def test_hdr_that_is_turned_or_of_odd_or_smaller_size() -> None:
    for turn in ({"container": "mp4", "degrees": 180}, {"container": "mov", "is_mirrored": True}):
        assert_is_srgb(decode_video(clips.remuxed(clip(HLG), **turn), ALL).frames[:, :, ::-1])
    assert_is_srgb(decode_video(clip(PQ, "ffv1", "matroska", width=63, height=47), ALL).frames)
    decoded = decode_video(clip(PQ), ALL, DecodeLimits.of(EngineConfig(max_video_pixels_kept=6 * 32 * 24)))
    assert decoded.frames.shape == (6, 24, 32, 3)
    assert_is_srgb(decoded.frames)


def test_each_frame_has_its_own_transfer() -> None:
    data = b"".join(clip(transfer, "libx265", "mpegts", primaries) for transfer, primaries in ((PQ, 9), (BT709, 1)))
    frames = decode_video(data, ALL).frames
    assert len(frames) == 12
    for part in (frames[:6], frames[6:]):
        assert_is_srgb(part)


def test_dolby_vision_is_shown_as_its_base_layer() -> None:
    decoded = decode_video(clips.remuxed(clip(HLG), "mp4", lambda _, packet: packet + RPU), ALL)
    np.testing.assert_array_equal(decoded.frames, decode_video(clip(HLG), ALL).frames)
    assert decoded.facts.missing is None


def test_colours_that_cannot_be_converted_are_reported() -> None:
    ictcp = {"x265-params": "log-level=none:colormatrix=ictcp"}
    for data in (
        clips.remuxed(clip(2, "libx265", "mp4", 2), "mp4", lambda _, packet: packet + RPU),
        clip(PQ, "libx265", "mp4", 9, ictcp),
    ):
        decoded = decode_video(data, ALL)
        assert decoded.facts.missing == WRONG_COLOURS and decoded.frames.shape == (6, 48, 64, 3)
