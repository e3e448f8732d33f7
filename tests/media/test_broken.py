"""Files that are cut, damaged or lie: each gets its error in little time and memory, and the next is read right."""

import io
import subprocess
import sys
import time
from pathlib import Path

import av
import numpy as np
import pytest

from mini_engine.media.containers import declared_size
from mini_engine.media.errors import MediaError
from mini_engine.media.limits import DecodeLimits, Guard
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.video import DecodedVideo, decode_video
from tests.media import broken, clips

EIGHT = VideoSampling(num_frames=8)
ALL = VideoSampling(num_frames=1000)
WHOLE = [("libx264", "mp4"), ("libx264", "matroska"), ("mpeg4", "avi"), ("libvpx-vp9", "webm"), ("gif", "gif")]
LIVE = [("libx264", "mp4"), ("libvpx-vp9", "webm"), ("libx264", "matroska")]


@pytest.fixture(autouse=True)
def a_good_file_is_read_right_afterwards():
    yield
    data = clips.cached("libx264", "mp4")
    np.testing.assert_array_equal(decode_video(data, ALL).frames, clips.decode_all(data))


def refused(data: bytes, hint: str = "", limits: DecodeLimits | None = None) -> None:
    started = time.thread_time()
    with pytest.raises(MediaError, match=f"^video 1: .*{hint}"):
        decode_video(data, EIGHT, limits, item="video 1")
    assert time.thread_time() - started < 10


def places_to_cut(data: bytes) -> list[int]:
    return sorted({*range(1, 80), *range(80, len(data), max(1, len(data) // 200)), *range(len(data) - 9, len(data))})


@pytest.mark.parametrize(("codec", "container"), WHOLE)
def test_cut_anywhere(codec: str, container: str) -> None:
    data = clips.cached(codec, container)
    for place in places_to_cut(data):
        refused(data[:place])


def test_an_mp4_cut_at_every_box(tmp_path: Path) -> None:
    for data in (clips.encode(30), clips.encode_with_index_first(30, tmp_path / "clip.mp4")):
        cuts = {place for _, begin, end in broken.boxes(data) for place in (begin, begin + 4, begin + 8, end - 1)}
        assert len(cuts) > 60
        for place in cuts - {0}:
            refused(data[:place])


@pytest.mark.parametrize(("codec", "container"), LIVE)
def test_a_live_recording_cut_anywhere(codec: str, container: str) -> None:
    """Between two elements nothing tells that there should be more; what is there is read right."""
    data = clips.encode_live(21, codec, container)
    every = clips.decode_all(data)
    served = 0
    cuts = {*places_to_cut(data)}
    if container == "mp4":
        cuts |= {begin for _, begin, _ in broken.boxes(data)}
    for place in cuts - {0}:
        try:
            decoded = decode_video(data[:place], ALL)
        except MediaError:
            continue
        served += 1
        np.testing.assert_array_equal(decoded.frames, every[: len(decoded.frames)])
    assert served < len(cuts) / 4


def partial(data: bytes, sampling: VideoSampling = ALL) -> DecodedVideo:
    decoded = decode_video(data, sampling, allow_partial=True)
    assert decoded.missing is not None
    assert f"; {decoded.total_frames} " in decoded.missing
    return decoded


@pytest.mark.parametrize(("codec", "container"), [*LIVE, ("mpeg4", "avi"), ("libsvtav1", "webm"), ("gif", "gif")])
def test_part_of_a_file_is_served_if_that_is_wanted(codec: str, container: str) -> None:
    if clips.lacks(codec):
        pytest.skip(f"no encoder {codec} here")
    live = (codec, container) in LIVE
    data = clips.encode_live(31, codec, container) if live else clips.cached(codec, container, 31)
    every = clips.decode_all(data)
    cut = data[: int(len(data) * 0.8)]
    refused(cut, "the file is cut short or damaged: ")
    decoded = partial(cut)
    assert 3 < decoded.total_frames < 31
    sure = decoded.total_frames - 4  # the last ones may be half drawn, or wait for one that is not there
    np.testing.assert_array_equal(decoded.frames[:sure], every[:sure])
    assert len(partial(cut, VideoSampling(num_frames=3)).frames) == 3
    assert decode_video(data, ALL, allow_partial=True).missing is None


@pytest.mark.parametrize("codec", ["libx264", "libx265", "libsvtav1"])
def test_a_damaged_frame(codec: str) -> None:
    if clips.lacks(codec):
        pytest.skip(f"no encoder {codec} here")
    data = bytearray(clips.encode(31, 128, 96, codec=codec, options={"g": "10"}))
    with av.open(io.BytesIO(bytes(data))) as container:
        packet = max((p for p in container.demux(video=0) if 12 <= (p.pts or 0) / 1024 < 20), key=lambda p: p.size)
        begin, size = packet.pos, packet.size
    data[begin + 5 : begin + size] = bytes(0x55 for _ in range(size - 5))
    with pytest.raises(MediaError, match="cannot be decoded"):
        decode_video(bytes(data), ALL)
    decoded = partial(bytes(data))
    assert 10 < decoded.total_frames <= 31
    every = clips.decode_all(clips.encode(31, 128, 96, codec=codec, options={"g": "10"}))
    np.testing.assert_array_equal(decoded.frames[:8], every[:8])


@pytest.mark.parametrize(("codec", "container"), clips.ALL)
def test_flipped_bytes(codec: str, container: str) -> None:
    if clips.lacks(codec):
        pytest.skip(f"no encoder {codec} here")
    data = clips.cached(codec, container)
    for seed in range(40):
        for allow in (False, True):
            try:
                decoded = decode_video(broken.flipped(data, 1 + seed % 8, seed), EIGHT, allow_partial=allow)
            except MediaError as error:
                assert len(str(error)) < 200
                continue
            assert 1 <= len(decoded.frames) <= 8
            assert allow or decoded.missing is None


def test_an_index_that_claims_more_than_there_is() -> None:
    plain, live = clips.cached("mpeg4", "mp4"), clips.encode_live(21, "mpeg4")
    for count in (2 << 20, 1 << 30, 2**32 - 1):
        refused(broken.with_samples(plain, count, 1), f"claims {count} frames .* limit of --max-video-frames;")
        refused(broken.run_of_fragments(live, count), "limit of --max-video-frames;")
    refused(broken.with_samples(plain, 100, 1000), "of 100 frames are there|incomplete")
    refused(broken.with_samples(plain, 60_000, 0))


def test_a_million_tiny_frames() -> None:
    refused(broken.gif(1_000_000), "more than 54000 frames, the limit of --max-video-frames; send a shorter video")
    many = broken.with_samples(clips.cached("mpeg4", "mp4"), 1_000_000, 1)
    start = many.index(b"mdat")
    room = (1_000_000).to_bytes(4, "big") + b"free" + bytes(1_000_000 - 8)
    refused(many[: start - 4] + room + many[start - 4 :], "more than 54000 frames, the limit of --max-video-frames")


def test_frames_that_share_their_bytes() -> None:
    """A file of 3 MB whose thousand frames are 3 MB each."""
    clip = clips.cached("mpeg4", "mp4")
    place = clip.index(b"mdat") - 4
    data = clip[:place] + (3_000_000).to_bytes(4, "big") + b"free" + bytes(3_000_000 - 8) + clip[place:]
    refused(broken.with_overlapping_samples(data, 1000), "its frames together are larger than the file")


def test_gigantic_dimensions() -> None:
    refused(broken.gif(3, side=65535), "65535x65535 is more than 16777216 pixels per frame, .*--max-frame-pixels")
    vp8 = clips.cached("libvpx", "webm")
    refused(broken.vp8_of_size(vp8, 16383, 16383))
    small = DecodeLimits(max_frame_pixels=64 * 48)
    assert decode_video(vp8, EIGHT, small).frames.shape == (8, 48, 64, 3)
    refused(broken.vp8_of_size(vp8, 64, 64), limits=small)


def test_a_strip_is_refused_before_it_is_decoded() -> None:
    refused(broken.gif(3, side=300)[:8] + b"\1\0" + broken.gif(3, side=300)[10:], "300x1 is longer than 200 times its")
    refused(clips.encode(3, 4000, 16, codec="mpeg4", container="avi"), "4000x16 is longer than 200 times its width")


def test_a_decode_past_its_time_ends_and_the_next_one_is_not_affected() -> None:
    data = clips.encode(400, 640, 480, options={"preset": "ultrafast", "tune": "zerolatency"})
    started = time.thread_time()
    with pytest.raises(MediaError, match=r"more than 0\.05 s, the limit of --media-decode-timeout; send"):
        decode_video(data, VideoSampling(num_frames=300), DecodeLimits(media_decode_timeout=0.05))
    assert time.thread_time() - started < 1.0


@pytest.mark.parametrize(("codec", "container"), WHOLE)
def test_time_may_run_out_anywhere(codec: str, container: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While FFmpeg opens a file too, which ends for it then: that is never taken for damage of the file."""
    data = clips.cached(codec, container)
    left = [10**9]  # looks at the clock until the time is up

    def is_up(self: Guard) -> bool:
        left[0] -= 1
        return left[0] < 0

    monkeypatch.setattr(Guard, "time_is_up", property(is_up))
    decode_video(data, EIGHT)
    looks = 10**9 - left[0]
    assert looks > 40
    for count in range(looks):
        left[0] = count
        refused(data, "--media-decode-timeout")
    left[0] = 10**9  # for the good file


def test_what_a_file_says_of_its_size(tmp_path: Path) -> None:
    files = [clips.cached(*which) for which in WHOLE] + [clips.encode_live(9, *which) for which in LIVE]
    files.append(clips.encode_with_index_first(9, tmp_path / "clip.mp4"))
    for data in files:
        assert declared_size(data) == len(data)
        assert declared_size(data[: len(data) * 3 // 4] or b"") != len(data) * 3 // 4
        for length in range(60):  # cut anywhere in the headers: no answer, or one that does not fail
            declared_size(data[:length])
    assert declared_size(b"text" * 9) is None
    assert declared_size(clips.cached("libx264", "mp4") + b"\0" * 100) == len(clips.cached("libx264", "mp4"))


PROBE = """
import sys
sys.path.insert(0, ".")
from mini_engine.media.errors import MediaError
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.video import decode_video
from tests.media import broken, clips

def peak():  # unlike getrusage's, not that of who has started this process
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))

plain = clips.encode(21, codec="mpeg4")
live = clips.encode_live(21, "mpeg4")
place = plain.index(b"mdat") - 4
wide = plain[:place] + (3_000_000).to_bytes(4, "big") + b"free" + bytes(3_000_000 - 8) + plain[place:]
files = [
    broken.with_samples(plain, 170_000_000, 1),
    broken.run_of_fragments(live, 170_000_000),
    broken.with_overlapping_samples(wide, 1000),
    broken.gif(3, side=65535),
    broken.gif(100_000),
    broken.vp8_of_size(clips.encode(5, codec="libvpx", container="webm"), 16383, 16383),
]
decode_video(plain, VideoSampling(num_frames=8))
before = peak()
for data in files:
    try:
        decode_video(data, VideoSampling(num_frames=8))
    except MediaError:
        continue
    raise SystemExit("read")
print((peak() - before) >> 10)
"""


def test_memory_stays_bounded() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=600)
    assert int(done.stdout) < 120  # MiB
