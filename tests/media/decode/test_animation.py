"""Which frames come out of an animated WebP, and which files are refused. The reference is what was encoded."""

import io

import numpy as np
import pytest
from PIL import Image

from mini_engine.config import EngineConfig, flag_of
from mini_engine.media.decode.item_limits import DecodeLimits
from mini_engine.media.frame_sampling import VideoSampling
from mini_engine.protocol.api_errors import MediaError
from tests.support import clips
from tests.support.decoding import decode_image, decode_video

ALL = VideoSampling(num_frames=-1)
FRAMES = np.stack([clips.frame(index, 64, 48) for index in range(21)])


def animation(
    frames: np.ndarray = FRAMES, duration: int | list[int] = 100, format: str = "WEBP", **options: object
) -> bytes:
    first, *others = map(Image.fromarray, frames)
    buffer = io.BytesIO()
    options = options or {"lossless": True}
    first.save(buffer, format, save_all=True, append_images=others, duration=duration, **options)
    return buffer.getvalue()


DATA = animation()


@pytest.mark.parametrize("duration", [100, [40, 200, 300] * 7, 0])
def test_sampled_frames(duration: int | list[int]) -> None:
    """Which have the sampling of any video. A frame of no time is shown for 0.1 s."""
    data = animation(duration=duration)
    spans = duration if isinstance(duration, list) else [100] * len(FRAMES)
    times = np.cumsum([0, *spans[:-1]]) / 1000
    samplings = [VideoSampling(num_frames=count) for count in (1, 3, 8, -1)] + [VideoSampling(fps=4)]
    for sampling in (*samplings, VideoSampling(fps=2, start=1), VideoSampling(num_frames=2, start=0.5, end=1.05)):
        decoded = decode_video(data, sampling)
        expected = sampling.indices(times, decoded.facts.fps, 768)
        np.testing.assert_array_equal(decoded.frames, FRAMES[expected])
        np.testing.assert_allclose(decoded.facts.timestamps, times[expected])
        assert decoded.facts.fps == pytest.approx(20 / times[-1])
        assert (decoded.facts.total_frames, decoded.facts.window_frames) == (21, len(sampling.window(times)))


def test_transparency_is_laid_over_white() -> None:
    frames = np.zeros((2, 48, 64, 4), np.uint8)
    frames[0, :, :32] = frames[1, :, 32:] = (255, 0, 0, 255)
    frames = decode_video(animation(frames), ALL).frames
    assert frames[:, 0, [0, 63]].tolist() == [[[255, 0, 0], [255] * 3], [[255] * 3, [255, 0, 0]]]


def test_as_an_image_it_is_its_first_frame() -> None:
    np.testing.assert_array_equal(decode_image(DATA), FRAMES[0])
    np.testing.assert_array_equal(decode_video(animation(FRAMES[:1]), ALL).frames, FRAMES[:1])


def test_an_animated_avif_is_a_video_to_ffmpeg() -> None:
    data = animation(format="AVIF", quality=100, subsampling="4:4:4")
    np.testing.assert_allclose(decode_video(data, ALL).frames.astype(int), FRAMES, atol=6)


def test_limits_name_their_flag() -> None:
    limits = {"max_video_frames": 20, "max_video_seconds": 1.9, "max_video_frames_kept": 20}
    for name, limit in (limits | {"max_frame_pixels": 64 * 48 - 1, "max_video_pixels_kept": 21 * 3}).items():
        with pytest.raises(MediaError, match=rf"^video 1: it has .* more than .*, the limit of {flag_of(name)}; send"):
            decode_video(DATA, ALL, DecodeLimits.of(EngineConfig(**{name: limit})))


@pytest.mark.parametrize("allow_partial", [False, True])
def test_a_truncated_or_damaged_animation_is_refused(allow_partial: bool) -> None:
    parts = DATA.split(b"ANMF")
    parts[6] = parts[6][:40] + b"\x55" * len(parts[6][40:])
    for data in (*(DATA[:place] for place in range(60, len(DATA), 40)), DATA[:-1], b"ANMF".join(parts)):
        with pytest.raises(MediaError, match="^video 1: .* damaged"):
            decode_video(data, ALL, allow_partial=allow_partial)


def test_an_animation_without_a_frame_is_refused() -> None:
    with pytest.raises(MediaError, match="no frame can be decoded"):
        decode_video(DATA[:4] + (44 - 8).to_bytes(4, "little") + DATA[8:44], ALL)


def test_a_stop_ends_the_decode() -> None:
    calls = iter([False] * 30 + [True])
    with pytest.raises(MediaError, match="stopped"):
        decode_video(DATA, ALL, should_stop=lambda: next(calls))
