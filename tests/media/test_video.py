import os
import threading
from pathlib import Path

import numpy as np
import pytest

from mini_engine.media.errors import DecodeCancelled, MediaError
from mini_engine.media.limits import DecodeLimits, flag_of
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.video import decode_video
from tests.media import clips

EIGHT = VideoSampling(num_frames=8)


@pytest.mark.parametrize(("width", "height"), [(64, 48), (98, 62), (126, 34)])
def test_lines_that_ffmpeg_pads(width: int, height: int) -> None:
    data = clips.encode(3, width=width, height=height)
    np.testing.assert_array_equal(decode_video(data, EIGHT).frames, clips.decode_all(data))


def test_a_wrong_prediction_is_mended_by_a_second_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the packets had promised twice the frames that come out."""
    data = clips.encode(21, codec="mpeg4", container="avi")
    monkeypatch.setattr(VideoSampling, "indices", _first_call_gets_it_wrong(VideoSampling.indices))
    decoded = decode_video(data, EIGHT)
    expected = np.linspace(0, 20, 8).astype(int)
    np.testing.assert_array_equal(decoded.frames_indices, expected)
    np.testing.assert_array_equal(decoded.frames, clips.decode_all(data)[expected])


def _first_call_gets_it_wrong(indices):
    calls = []

    def wrapped(self, times):
        calls.append(times)
        return indices(self, [*times, *times] if len(calls) == 1 else times)

    return wrapped


def test_threads_decode_at_once_with_the_same_result() -> None:
    data = clips.encode(20)
    alone = decode_video(data, EIGHT).frames
    results: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: results.append(decode_video(data, EIGHT).frames)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        np.testing.assert_array_equal(result, alone)


def test_decoding_starts_no_threads() -> None:
    data = clips.encode(20, width=320, height=240)
    before = set(os.listdir("/proc/self/task"))
    during: list[set[str]] = []

    class Watch:
        def is_set(self) -> bool:
            during.append(set(os.listdir("/proc/self/task")))
            return False

    decode_video(data, EIGHT, cancelled=Watch())
    assert set().union(*during) <= before  # one that others had started may end meanwhile
    assert len(during) >= 20  # asked for each frame


def test_cancel() -> None:
    class AfterTenFrames:
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 10

    signal = AfterTenFrames()
    with pytest.raises(DecodeCancelled):
        decode_video(clips.encode(20), EIGHT, cancelled=signal)
    assert signal.asked == 11
    event = threading.Event()
    event.set()
    with pytest.raises(DecodeCancelled):
        decode_video(clips.encode(2), EIGHT, cancelled=event)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (DecodeLimits(max_video_frames=19), "max_video_frames"),
        (DecodeLimits(max_video_seconds=1.8), "max_video_seconds"),
        (DecodeLimits(max_video_frames_kept=7), "max_video_frames_kept"),
        (DecodeLimits(max_frame_pixels=64 * 48 - 1), "max_frame_pixels"),
        (DecodeLimits(max_video_pixels_kept=8 * 64 * 48 - 1), "max_video_pixels_kept"),
        (DecodeLimits(media_decode_timeout=0), "media_decode_timeout"),
    ],
)
def test_limits(limits: DecodeLimits, name: str) -> None:
    with pytest.raises(MediaError, match=rf"^video 3: .*, the limit of {flag_of(name)}; send"):
        decode_video(clips.encode(20), EIGHT, limits, item="video 3")


def test_just_within_the_limits() -> None:
    limits = DecodeLimits(20, 8, 1.9, 64 * 48, 8 * 64 * 48, 60.0)
    assert len(decode_video(clips.encode(20), EIGHT, limits).frames) == 8


def _playlist(path: Path) -> bytes:
    return f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{path}\n#EXT-X-ENDLIST\n".encode()


def test_files_that_are_no_video(tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(clips.encode(2))
    corpus = [
        b"",
        b"\0" * 4096,
        b"this is text, named .mp4 by its owner\n" * 100,
        b"\x1a\x45\xdf\xa3",
        b"\x1a\x45\xdf\xa3" + b"\xff" * 100,
        b"\0\0\0\x18ftypisom" + bytes(100),
        _playlist(clip),
        b"ffconcat version 1.0\nfile " + str(clip).encode() + b"\n",
    ]
    for data in corpus:
        with pytest.raises(MediaError, match="^video 1: cannot be read as a video") as caught:
            decode_video(data, EIGHT, item="video 1")
        assert "/" not in str(caught.value)


def test_a_file_without_video() -> None:
    import io

    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=8000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 8000
        output.mux(stream.encode(sound))
        output.mux(stream.encode(None))
    with pytest.raises(MediaError, match="holds no video stream"):
        decode_video(buffer.getvalue(), EIGHT)
