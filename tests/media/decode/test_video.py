"""Which frames come out of a video, also of a truncated or damaged one, and which are refused. The reference is a plain
PyAV decode."""

import contextlib
import io
import re
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest
from av.stream import Disposition
from PIL import Image

from mini_engine.config import EngineConfig, flag_of
from mini_engine.media.decode.item_limits import DecodeLimits
from mini_engine.media.decode.video import declared_size
from mini_engine.media.frame_sampling import VideoSampling
from mini_engine.protocol.api_errors import MediaError
from tests.support import clips, corpus
from tests.support.decoding import decode_video

EIGHT = VideoSampling(num_frames=8)
SAMPLINGS = [
    *[VideoSampling(num_frames=count) for count in (1, 2, 8, 100)],
    *[VideoSampling(fps=fps) for fps in (1, 4)],
    *[VideoSampling(num_frames=1, start=index / 10) for index in range(0, 41, 7)],  # a frame by itself
]


def with_sound(codec: str, coding: str, container: str, is_cover: bool = False) -> bytes:
    """A video of 31 frames behind a track of sound, or a cover of it; without a codec, sound alone."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        audio = output.add_stream(coding, rate=48000 if coding == "libopus" else 8000, layout="mono")
        stream = clips.video_stream(output, codec, 64, 48, 10, {"g": "5"}) if codec else None
        if is_cover:
            stream.disposition = Disposition.attached_pic
        for block in range(30):
            sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            sound.sample_rate, sound.pts = 8000, block * 1024
            output.mux(audio.encode(sound))
        output.mux(audio.encode(None))
        if stream is not None:
            clips.write_frames(output, stream, range(1 if is_cover else 31))
    return buffer.getvalue()


def check(data: bytes, samplings: Sequence[VideoSampling] = SAMPLINGS, *, stream: int = 0, times=None, fps=10) -> None:
    """Compares the result of each sampling with the plain decode, whose frames have `times`, or else 0, 1/`fps`, ..."""
    every = clips.decode_all(data, stream)
    times = np.arange(len(every)) / fps if times is None else np.asarray(times)
    for sampling in samplings:
        if (sampling.start or 0) > times[-1]:
            continue
        decoded = decode_video(data, sampling)
        facts = decoded.facts
        expected = sampling.indices(times, facts.fps, 768)
        np.testing.assert_array_equal(decoded.frames, every[expected])
        np.testing.assert_allclose(decoded.facts.timestamps, times[expected], atol=1e-3)
        assert (facts.total_frames, facts.missing) == (len(every), None)
        assert facts.fps == pytest.approx(fps, 0.02) or len(every) == 1
        assert decoded.frames.flags.c_contiguous


@pytest.mark.parametrize(("codec", "container"), clips.ALL)
def test_sampled_frames_equal_those_of_a_plain_decode(codec: str, container: str) -> None:
    check(clips.cached(codec, container, 31, g="5"))


# Of each container the first codec.
@pytest.mark.parametrize(("container", "codec"), {container: codec for codec, container in reversed(clips.ALL)}.items())
def test_videos_of_one_frame_or_with_few_key_frames(container: str, codec: str) -> None:
    for frames in (1, 31):
        check(clips.cached(codec, container, frames))


@pytest.mark.parametrize(
    ("codec", "container", "options"),
    [
        ("libx264", "mp4", {"x264-params": "open-gop=1:keyint=10:min-keyint=10:bframes=3:b-adapt=0:scenecut=0"}),
        ("libx264", "matroska", {"x264-params": "intra-refresh=1:keyint=10:bframes=0"}),
        ("libx264", "mp4", {"x264-params": "interlaced=1:keyint=10"}),
        ("libx265", "mp4", {"x265-params": "log-level=none:open-gop=1:keyint=10:min-keyint=10:bframes=4:scenecut=0"}),
        ("libx265", "matroska", {"x265-params": "log-level=none:intra-refresh=1:keyint=10:bframes=0"}),
        ("libsvtav1", "mp4", {"svtav1-params": "irefresh-type=1:keyint=10"}),
        ("libvpx-vp9", "webm", {"g": "10", "lag-in-frames": "16", "auto-alt-ref": "1"}),
        ("mpeg4", "matroska", {"bf": "2", "g": "10"}),
        ("mpeg4", "avi", {"bf": "2", "g": "10"}),
    ],
)
def test_key_frames_from_which_decoding_can_start_or_cannot(codec: str, container: str, options: dict) -> None:
    """Open groups, stripes, fields, forward key frames, hidden frames, B-frames, packets without times."""
    check(clips.cached(codec, container, 41, **options))


@pytest.mark.parametrize("codec", ["libx265", "mpeg4"])
def test_mp4_that_does_not_list_its_key_frames(codec: str) -> None:
    check(clips.cached(codec, "mp4", 31, g="10").replace(b"stss", b"free"))


def test_recording_that_begins_within_a_group() -> None:
    check(clips.cached("libx264", "mpegts", 60, g="10")[188 * 11 :])


def test_joined_files_of_mpegts_lack_nothing() -> None:
    """Each counts its packets from 0, as segments of HLS may. A lost packet is damage, also at the end of a file that
    says how long its frames are."""
    data = 2 * clips.cached("libx264", "mpegts", 31, 320, 240, g="10", bf="2")
    check(data)
    packets = [data[place : place + 188] for place in range(0, len(data), 188)]
    check(b"".join(bytes(4) + packet for packet in packets), [EIGHT])  # .m2ts, of cameras
    check(b"".join(packet + bytes(16) for packet in packets), [EIGHT])
    # The first that does not begin a frame, of the video's number 256.
    lost = next(place for place in range(0, len(data), 188) if data[place + 1 : place + 3] == b"\x01\0")
    with pytest.raises(MediaError, match="^video 1: the file is truncated or damaged: frame .* is incomplete"):
        decode_video(data[:lost] + data[lost + 188 :], EIGHT)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mpegts", options={"omit_video_pes_length": "0"}) as output:
        clips.write_frames(output, clips.video_stream(output, "mpeg2video", 320, 240, 10, {"g": "1"}), range(5))
    with pytest.raises(MediaError, match="frame .* is incomplete"):
        decode_video(buffer.getvalue()[:-188], EIGHT)


def test_edit_lists() -> None:
    """One plays one second, from frame 8 on, as a phone trims a recording. For the other, FFmpeg decodes from the only
    key frame on for each of five edits, and drops the frames outside of it."""
    data = bytearray(clips.cached("libx264", "mp4", 31, g="10"))
    place = data.index(b"elst") + 4
    media_time = struct.unpack_from(">i", data, place + 12)[0]
    struct.pack_into(">Ii", data, place + 8, 1000, media_time + 8 * 1024)
    check(bytes(data))
    edits = [(40, 3), (10, 2), (50, 4), (20, 1), (55, 2)]  # begin and length, in frames of 100 ms or 1024 ticks
    table = b"".join(struct.pack(">IIHH", 100 * length, 1024 * start, 1, 0) for start, length in edits)
    data = clips.cached("libx264", "mp4", 60, g="60", bf="0")
    check(corpus.changed(data, "moov/trak/edts/elst", lambda _: struct.pack(">II", 0, len(edits)) + table))


@pytest.mark.parametrize(
    ("codec", "container"), [*[("libx264", kind) for kind in ("mp4", "mov", "matroska")], ("libvpx-vp9", "webm")]
)
def test_live_recordings(codec: str, container: str) -> None:
    check(clips.encode_live(31, codec, container))


@pytest.mark.parametrize(
    ("codec", "sound", "container"),
    [
        ("libx264", "aac", "mp4"),
        ("libx264", "pcm_s16le", "mov"),
        ("mpeg4", "pcm_s16le", "avi"),
        ("libvpx-vp9", "libopus", "webm"),
        ("libx264", "aac", "matroska"),
    ],
)
def test_sound_is_ignored(codec: str, sound: str, container: str) -> None:
    check(with_sound(codec, sound, container))


@pytest.mark.parametrize("size", [(63, 47), (9, 121)])
@pytest.mark.parametrize(("codec", "container"), [("libx264", "mp4"), ("libvpx-vp9", "webm"), ("mpeg4", "avi")])
def test_odd_sizes(codec: str, container: str, size: tuple[int, int]) -> None:
    check(clips.encode(5, *size, codec=codec, container=container))


@pytest.mark.parametrize(
    ("codec", "container", "size"),
    [
        ("mpeg1video", "mpeg", (64, 48)),
        *[("mpeg2video", container, (64, 48)) for container in ("mpegts", "mpeg", "mov")],
        ("dnxhd", "mxf", (256, 128)),
    ],
)
def test_codecs_of_25_hz(codec: str, container: str, size: tuple[int, int]) -> None:
    options = {"profile": "dnxhr_lb"} if codec == "dnxhd" else {}
    data = clips.encode(31, *size, 25, codec, container, options=options)
    check(data, fps=25)
    if container == "mpeg":
        check(2 * data, fps=25)


def test_h263() -> None:
    check(clips.encode(31, 128, 96, codec="h263", container="3gp"))


@pytest.mark.parametrize("container", ["avi", "mp4"])
def test_packets_without_a_frame_count_for_none(container: str) -> None:
    def drop_frame(index: int, packet: bytes) -> bytes:
        """MPEG-4: a VOP with vop_coded 0 (ISO/IEC 14496-2, section 6.2.5), of which no frame comes, for each fifth."""
        return b"\0\0\1\xb6\x50\x9f" if index % 5 == 4 else packet

    data = clips.remuxed(clips.cached("mpeg4", container, 31, g="5"), container, drop_frame)
    check(data, times=[index / 10 for index in range(31) if index % 5 < 4], fps=8)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_frames_of_a_variable_rate_have_their_own_times(container: str) -> None:
    stamps = [0, 1, 2, 10, 11, 20]
    data = clips.encode(6, container=container, stamps=stamps)
    samplings = [VideoSampling(fps=1), VideoSampling(num_frames=9), VideoSampling(num_frames=9, start=0.5, end=1.05)]
    check(data, samplings, times=np.array(stamps) / 10, fps=2.5)
    assert decode_video(data, samplings[-1]).facts.window_frames == 2


@pytest.mark.parametrize(
    ("codec", "container"),
    [
        *[("libx264", container) for container in ("mp4", "mpegts", "3gp")],
        *[("libx265", container) for container in ("mov", "flv")],
        ("libsvtav1", "matroska"),
        ("libvpx-vp9", "webm"),
        ("mjpeg", "mov"),
    ],
)
def test_frames_that_are_not_needed_are_not_decoded(codec: str, container: str) -> None:
    """Packets read, packets decoded and frames decoded are counted together: `should_stop` is called for each."""
    data = clips.cached(codec, container, 31, g="5")
    read, whole = 32, 95  # and 31 packets, one flush and 31 frames
    for sampling, most in (
        (VideoSampling(num_frames=31), whole),
        (VideoSampling(num_frames=3), read + 40),
        (VideoSampling(num_frames=2, end=0.4), read + 40),
    ):
        calls: list[None] = []
        decode_video(data, sampling, should_stop=lambda calls=calls: bool(calls.append(None)))
        assert len(calls) <= most


@pytest.mark.parametrize("is_mirrored", [False, True])
def test_frames_are_upright(is_mirrored: bool) -> None:
    for degrees in (0, 90, 180, 270):
        data = clips.remuxed(clips.cached("libx264", "mp4", 3), "mp4", degrees=degrees, is_mirrored=is_mirrored)
        upright = np.rot90(clips.decode_all(data), degrees // 90, axes=(1, 2))
        np.testing.assert_array_equal(decode_video(data, EIGHT).frames, upright[:, :, ::-1] if is_mirrored else upright)


def test_frames_of_another_size_are_scaled_to_the_first() -> None:
    """VP9 carries the size in each key frame. The limit holds for each."""
    small, large = (clips.cached("libvpx-vp9", "webm", 5, *size, g="1") for size in ((64, 48), (320, 240)))
    with av.open(io.BytesIO(large)) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    data = clips.remuxed(small, "webm", lambda index, packet: packets[index] if index > 2 else packet)
    decoded = decode_video(data, EIGHT)
    assert decoded.frames.shape == (5, 48, 64, 3)
    scaled = clips.decode_all(small)
    assert np.abs(decoded.frames.astype(int) - scaled).mean() < 40
    limits = DecodeLimits.of(EngineConfig(max_frame_pixels=64 * 48))
    with pytest.raises(MediaError):
        decode_video(data, EIGHT, limits)
    assert len(decode_video(data, VideoSampling(num_frames=2, end=0.3), limits).frames) == 2


@pytest.mark.parametrize("default", [0, 1])
def test_the_default_of_two_videos_is_decoded(default: int) -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        tracks = [clips.video_stream(output, "libx264", side, side, 10, {}) for side in (64, 32)]
        for place, track in enumerate(tracks):
            track.disposition = Disposition.default if place == default else 0
        for track, frames in zip(tracks, (9, 14), strict=True):
            clips.write_frames(output, track, range(frames))
    check(buffer.getvalue(), [EIGHT], stream=default)


def test_frames_are_scaled_to_fit_the_limit_of_their_pixels() -> None:
    most, height, width = 8 * 101 * 75, 74, 100
    data = clips.cached("libx264", "mp4", 20, 320, 240)
    decoded = decode_video(data, EIGHT, DecodeLimits.of(EngineConfig(max_video_pixels_kept=most)))
    assert decoded.frames.shape == (8, height, width, 3)
    every = clips.decode_all(data)[np.rint(np.array(decoded.facts.timestamps) * 10).astype(int)]
    scaled = [np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)) for frame in every]
    assert np.abs(decoded.frames - np.array(scaled, int)).mean() < 2


def test_limits_name_their_flag() -> None:
    data = clips.cached("libx264", "mp4", 20)
    limits: dict[str, float] = {"max_video_frames": 20, "max_video_seconds": 1.9, "max_video_frames_kept": 8}
    limits["max_frame_pixels"] = 64 * 48
    assert len(decode_video(data, EIGHT, DecodeLimits.of(EngineConfig(**limits))).frames) == 8
    below = {name: limit - (0.1 if name == "max_video_seconds" else 1) for name, limit in limits.items()}
    for name, limit in (below | {"max_video_pixels_kept": 8 * 3}).items():
        with pytest.raises(MediaError, match=rf"^video 1: it has .* more than .*, the limit of {flag_of(name)}; send"):
            decode_video(data, EIGHT, DecodeLimits.of(EngineConfig(**limits | {name: limit})))


UNREADABLE = "cannot be read, or is damaged; send a whole file"


def test_what_is_no_video_is_refused() -> None:
    buffer, key = io.BytesIO(), {"encryption_key": "0" * 32, "encryption_kid": "1" * 32}
    Image.new("RGB", (320, 240)).save(pdf := io.BytesIO(), "PDF")  # FFmpeg would decode its JPEG
    with av.open(buffer, "w", format="mp4", options={"encryption_scheme": "cenc-aes-ctr"} | key) as output:
        clips.write_frames(output, clips.video_stream(output, "libx264", 64, 48, 10, {}), range(3))
    encrypted = buffer.getvalue()  # frames by ISO/IEC 23001-7
    elongated = clips.encode(3, 4000, 16, codec="mpeg4", container="avi")
    contents = {b"", bytes(4096), b"this is text\n" * 100, b"\x1a\x45\xdf\xa3" + b"\xff" * 100, b"RIFF\4\0\0\0WAVE"}
    contents.add(b"\0\0\0\x10ftypisom\0\0\2\0" + bytes(100))
    for data, problem in (
        (with_sound("", "aac", "mp4"), "the file contains no image or video$"),
        (with_sound("mjpeg", "aac", "mp4", is_cover=True), "the file contains no image or video$"),
        (elongated, "of 4000x16 one side is"),
        (encrypted, "its video is encrypted; send it without encryption$"),
        (encrypted.replace(b"frma", b"free"), "its video is encrypted; send"),
        (clips.encode(3).replace(b"avc1", b"avs3"), "it is coded as avs3, for which"),
        (pdf.getvalue(), "the file is no image or video, but has a JPEG in it, as a PDF may; send"),
        *((content, UNREADABLE) for content in contents),
    ):
        with pytest.raises(MediaError, match=f"^video 1: {problem}"):
            decode_video(data, EIGHT)


@pytest.mark.parametrize("playlist", corpus.PLAYLISTS)
@pytest.mark.parametrize("address", ["file://{path}", "http://127.0.0.1:{port}/"])
def test_a_playlist_opens_no_file_and_no_address(playlist: str, address: str, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(clips.encode(2))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        data = corpus.PLAYLISTS[playlist].format(address.format(path=path, port=listener.getsockname()[1])).encode()
        with pytest.raises(MediaError, match=UNREADABLE) as caught:
            decode_video(data, EIGHT)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert not re.search("clip|/", str(caught.value))


def test_a_stop_ends_the_decode_at_the_next_packet_or_frame() -> None:
    data = clips.cached("libx264", "mp4", 20)
    for count in (0, 10, 30):
        calls = iter([False] * count + [True])  # another call would raise StopIteration
        with pytest.raises(MediaError, match="stopped"):
            decode_video(data, EIGHT, should_stop=lambda calls=calls: next(calls))


# --- truncated and damaged files --------------------------------------------------------------------------------------

ALL = VideoSampling(num_frames=1000)
TRUNCATED = "^video 1: the file is truncated or damaged: .*; send the whole file$"
LIVE = [("libx264", "mp4"), ("libvpx-vp9", "webm"), ("libx264", "matroska")]


def places_to_cut(data: bytes) -> list[int]:
    return sorted({*range(1, 80, 5), *range(80, len(data), max(1, len(data) // 75)), *range(len(data) - 9, len(data))})


@pytest.mark.parametrize(("codec", "container"), [*LIVE, ("mpeg4", "avi"), ("gif", "gif"), ("libx264", "index first")])
def test_a_truncated_file_is_refused_unless_it_has_all_frames(codec: str, container: str, tmp_path: Path) -> None:
    """They are in an mp4 that lacks no more than the tags at its end."""
    if container == "index first":  # through a file: FFmpeg must read it again to put its index before the frames
        with av.open(path := str(tmp_path / "clip"), "w", format="mp4", options={"movflags": "faststart"}) as output:
            clips.write_frames(output, clips.video_stream(output, codec, 64, 48, 10, {}), range(21))
        data = Path(path).read_bytes()
    else:
        data = clips.cached(codec, container)
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


def test_a_damaged_frame_refuses_the_file_or_is_reported() -> None:
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


def test_bytes_behind_an_mp4_are_ignored() -> None:
    for data in (clips.cached("libx264", "mp4"), clips.encode_live(21)):
        for trailer in (b"TAG" + bytes(125), b"\0\1\0\0gps0" + bytes(30)):  # ID3v1, a truncated box
            np.testing.assert_array_equal(decode_video(data + trailer, ALL).frames, clips.decode_all(data))


def test_declared_size() -> None:
    def riff(size: int) -> bytes:
        return b"RIFF" + struct.pack("<I", size) + b"AVI "

    # AVI: several lists, their padding, and sizes that the writer could not fill in.
    lists = {riff(4): 12, riff(5): 13, riff(5) + b"\0\0" + riff(4): 26, riff(4) + riff(100): 120, riff(4) + b"xx": 12}
    lists |= {riff(0): 0, riff(0xFFFFFFFF): 0, riff(4) + riff(0): 12}
    # Matroska: a segment with a size in one byte or two, or without one, cut before its size, and what is none.
    header, segment = b"\x1a\x45\xdf\xa3\x80", b"\x18\x53\x80\x67"
    segments = {segment + b"\x83": 13, segment + b"\x40\x83": 142, segment + b"\xff": 5, segment: 5, b"\xec\x85": 5}
    for data, size in (lists | {header + part: size for part, size in segments.items()}).items():
        assert declared_size(data) == size, data
