"""Truncated and damaged videos: each is refused, or its rest is served where that is allowed."""

import contextlib
import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest

from mini_engine.media.decode.containers import declared_size
from mini_engine.media.frame_sampling import VideoSampling
from mini_engine.media.media_errors import MediaError
from tests.support import clips
from tests.support.decoding import decode_video

ALL = VideoSampling(num_frames=1000)
TRUNCATED = "^video 1: the file is truncated or damaged: .*; send the whole file$"
FORMATS = [("libx264", "mp4"), ("libx264", "matroska"), ("mpeg4", "avi"), ("libvpx-vp9", "webm"), ("gif", "gif")]
LIVE = [("libx264", "mp4"), ("libvpx-vp9", "webm"), ("libx264", "matroska")]


def places_to_cut(data: bytes) -> list[int]:
    return sorted({*range(1, 80, 5), *range(80, len(data), max(1, len(data) // 75)), *range(len(data) - 9, len(data))})


@pytest.mark.parametrize(("codec", "container"), [*FORMATS, ("libx264", "mp4 with its index first")])
def test_a_truncated_file_is_refused_unless_all_its_frames_are_there(
    codec: str, container: str, tmp_path: Path
) -> None:
    """They are in an mp4 that lacks no more than the tags at its end."""
    is_index_first = container.endswith("first")
    data = clips.encode_with_index_first(21, tmp_path / "clip") if is_index_first else clips.cached(codec, container)
    every = clips.decode_all(data)
    for place in places_to_cut(data):
        try:
            frames = decode_video(data[:place], ALL).frames
        except MediaError:
            continue
        assert container == "mp4" and place > len(data) - 100
        np.testing.assert_array_equal(frames, every)


@pytest.mark.parametrize(("codec", "container"), LIVE)
def test_of_a_truncated_live_recording_the_first_frames_are_served(codec: str, container: str) -> None:
    """But for the last, of which a part may be missing. Or it is refused, where a fragment says how long it is."""
    data = clips.encode_live(21, codec, container)
    every, served = clips.decode_all(data), 0
    for place in places_to_cut(data):
        with contextlib.suppress(MediaError):
            frames = decode_video(data[:place], ALL).frames
            np.testing.assert_array_equal(frames[:-1], every[: len(frames) - 1])
            served += 1
    assert served


@pytest.mark.parametrize(("codec", "container"), [LIVE[0], ("mpeg4", "avi"), ("libsvtav1", "webm"), ("gif", "gif")])
def test_allow_partial_serves_the_rest(codec: str, container: str) -> None:
    is_live = container == "mp4"
    data = clips.encode_live(31, codec, container) if is_live else clips.cached(codec, container, 31)
    cut = data[: int(len(data) * 0.8)]
    with pytest.raises(MediaError, match=TRUNCATED):
        decode_video(cut, ALL)
    decoded = decode_video(cut, ALL, allow_partial=True)
    total = decoded.facts.total_frames
    assert 3 < total < 31
    assert decoded.facts.missing is not None and f"; {total} " in decoded.facts.missing
    # The last frames may lack their end, or those that they refer to.
    np.testing.assert_array_equal(decoded.frames[: total - 4], clips.decode_all(data)[: total - 4])
    assert len(decode_video(cut, VideoSampling(num_frames=3), allow_partial=True).frames) == 3
    assert decode_video(data, ALL, allow_partial=True).facts.missing is None


def test_a_damaged_frame() -> None:
    whole = clips.cached("libx264", "mp4", 31, 128, 96, g="10")
    with av.open(io.BytesIO(whole)) as container:
        packets = [packet for packet in container.demux(video=0) if 12 <= (packet.pts or 0) / 1024 < 20]
        largest = max(packets, key=lambda packet: packet.size)
        begin, end = largest.pos + 5, largest.pos + largest.size
    data = whole[:begin] + b"\x55" * (end - begin) + whole[end:]
    with pytest.raises(MediaError, match=TRUNCATED):
        decode_video(data, ALL)
    decoded = decode_video(data, ALL, allow_partial=True)
    assert 10 < decoded.facts.total_frames <= 31 and decoded.facts.missing is not None
    np.testing.assert_array_equal(decoded.frames[:8], clips.decode_all(whole)[:8])


@pytest.mark.parametrize("trailer", [b"TAG" + bytes(125), b"\0\1\0\0gps0" + bytes(30)], ids=["ID3v1", "truncated box"])
def test_bytes_behind_an_mp4_are_ignored(trailer: bytes) -> None:
    for data in (clips.cached("libx264", "mp4"), clips.encode_live(21)):
        np.testing.assert_array_equal(decode_video(data + trailer, ALL).frames, clips.decode_all(data))


def riff(size: int, content: bytes = b"AVI ") -> bytes:
    return b"RIFF" + struct.pack("<I", size) + content


HEADER = b"\x1a\x45\xdf\xa3\x80"  # empty


@pytest.mark.parametrize(("data", "size"), [
    # AVI: several lists, their padding, and sizes that the writer could not fill in.
    (riff(4), 12), (riff(5), 13), (riff(5) + b"\0\0" + riff(4), 26), (riff(4) + riff(100), 120), (riff(4) + b"xx", 12),
    (riff(0), 0), (riff(0xFFFFFFFF), 0), (riff(4) + riff(0), 12),
    # Matroska: a segment with a size in one byte or two, or without one, cut before its size, and what is none.
    (HEADER + b"\x18\x53\x80\x67\x83", 13), (HEADER + b"\x18\x53\x80\x67\x40\x83", 142),
    (HEADER + b"\x18\x53\x80\x67\xff", 5), (HEADER + b"\x18\x53\x80\x67", 5), (HEADER + b"\xec\x85", 5),
])  # fmt: skip
def test_declared_size(data: bytes, size: int) -> None:
    assert declared_size(data) == size
