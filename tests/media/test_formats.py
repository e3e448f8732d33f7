"""Every codec in every container, and what files in the world are like: the frames are those of a plain full decode."""

import io
import struct
from collections.abc import Iterator

import av
import numpy as np
import pytest

from mini_engine.media import video
from mini_engine.media.errors import MediaError
from mini_engine.media.limits import DecodeLimits
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.video import DecodedVideo, decode_video
from tests.media import clips

FORMATS = [
    pytest.param(codec, container, marks=pytest.mark.skipif(clips.lacks(codec), reason=f"no encoder {codec} here"))
    for codec, container in clips.ALL
]
SEEKABLE = [param for param in FORMATS if param.values[1] in ("mp4", "mov", "matroska", "webm")]


@pytest.fixture
def decoded_packets(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many packets each run of a decode held."""
    runs: list[int] = []
    original = video._Decode._frames_of

    def counted(self, packets, tolerant=False):
        runs.append(len(packets))
        return original(self, packets, tolerant)

    monkeypatch.setattr(video._Decode, "_frames_of", counted)
    yield runs


def check(data: bytes, sampling: VideoSampling, stream: int = 0) -> DecodedVideo:
    """Decodes, and compares the frames with those of the full decode."""
    decoded = decode_video(data, sampling)
    every = clips.decode_all(data, stream)
    assert decoded.total_frames == len(every)
    np.testing.assert_array_equal(decoded.frames, every[decoded.frames_indices])
    return decoded


@pytest.mark.parametrize(("codec", "container"), FORMATS)
def test_both_ways_of_decoding_take_the_same_frames(codec: str, container: str) -> None:
    for data in (clips.cached(codec, container), clips.cached(codec, container, 31, g="5")):
        total = 21 if data is clips.cached(codec, container) else 31
        for count in (1, 2, 3, 8, 20, total, 50):
            decoded = check(data, VideoSampling(num_frames=count))
            expected = np.arange(total) if count >= total else np.linspace(0, total - 1, count).astype(int)
            np.testing.assert_array_equal(decoded.frames_indices, expected)
            np.testing.assert_allclose(decoded.timestamps, expected / 10, atol=1e-3)
        assert check(data, VideoSampling(fps=1)).frames_indices.tolist() == list(range(0, total, 10))
        assert (decoded.fps, decoded.total_frames, decoded.missing) == (10.0, total, None)


@pytest.mark.parametrize(("codec", "container"), FORMATS)
def test_each_frame_by_itself(codec: str, container: str) -> None:
    """Those too that are shown before a key frame and refer to what lies before it."""
    data = clips.cached(codec, container, 31, g="5")
    every = clips.decode_all(data)
    for index in range(31):
        decoded = decode_video(data, VideoSampling(num_frames=1, start=index / 10 + 0.01))
        assert (decoded.frames_indices.tolist(), decoded.total_frames) == ([index], 31)
        np.testing.assert_array_equal(decoded.frames[0], every[index])


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
def test_key_frames_of_every_kind(codec: str, container: str, options: dict[str, str]) -> None:
    """Open groups, pictures refreshed stripe by stripe, forward key frames: some can be started from, some cannot."""
    if clips.lacks(codec):
        pytest.skip(f"no encoder {codec} here")
    data = clips.encode(41, codec=codec, container=container, options=options)
    every = clips.decode_all(data)
    for index in range(41):
        decoded = decode_video(data, VideoSampling(num_frames=1, start=index / 10 + 0.01))
        assert (decoded.frames_indices.tolist(), decoded.total_frames) == ([index], 41)
        np.testing.assert_array_equal(decoded.frames[0], every[index])


@pytest.mark.parametrize(("codec", "container"), SEEKABLE)
def test_what_is_not_needed_is_not_decoded(codec: str, container: str, decoded_packets: list[int]) -> None:
    data = clips.cached(codec, container, 31, g="5")
    decode_video(data, VideoSampling(num_frames=3))
    assert len(decoded_packets) >= 2
    assert sum(decoded_packets) < 20
    decoded_packets.clear()
    decode_video(data, VideoSampling(num_frames=2, end=0.4))
    assert sum(decoded_packets) <= 10
    decoded_packets.clear()
    decode_video(data, VideoSampling(num_frames=31))
    assert decoded_packets == [31]


def test_key_frames_that_are_none(decoded_packets: list[int]) -> None:
    """An mp4 without the table of key frames says that each frame is one."""
    for codec in ("mpeg4", "libx265"):
        data = clips.encode(31, codec=codec, options={"g": "10"}).replace(b"stss", b"free")
        decoded_packets.clear()
        check(data, VideoSampling(num_frames=5))
        assert decoded_packets[-1] == 31  # tried, seen to be wrong, and done in full


def test_vp8_with_hidden_frames(decoded_packets: list[int]) -> None:
    """Some frames are there only to be referred to. Here each seventh becomes one: the bit that shows it is cleared."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(clips.encode(60, codec="libvpx", container="webm", options={"g": "20"}))) as source:
        with av.open(buffer, "w", format="webm") as output:
            stream = output.add_stream_from_template(source.streams.video[0])
            for index, packet in enumerate(packet for packet in source.demux(video=0) if packet.size):
                content = bytearray(packet)
                content[0] &= 0xFF if index % 7 < 6 else 0xEF
                hidden = av.Packet(bytes(content))
                hidden.pts, hidden.dts, hidden.time_base = packet.pts, packet.dts, packet.time_base
                hidden.is_keyframe, hidden.stream = packet.is_keyframe, stream
                output.mux(hidden)
    data = buffer.getvalue()
    for count in (2, 5, 52):
        assert check(data, VideoSampling(num_frames=count)).total_frames == 52
    assert decoded_packets[0] < 60  # they were told apart without decoding all


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska"])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("mirrored", [False, True])
def test_frames_are_upright(container: str, degrees: int, mirrored: bool) -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = clips.video_stream(output, "libx264", 64, 48, 10, {})
        stream.set_display_rotation(degrees, hflip=mirrored)
        clips.write_frames(output, stream, range(3))
    stored = clips.decode_all(buffer.getvalue())
    expected = np.rot90(stored, degrees // 90, axes=(1, 2))
    if mirrored:
        expected = expected[:, :, ::-1]
    decoded = decode_video(buffer.getvalue(), VideoSampling(num_frames=3))
    assert decoded.frames.flags.c_contiguous
    np.testing.assert_array_equal(decoded.frames, expected)


def test_a_turn_of_the_picture_as_a_phone_writes_it() -> None:
    """A quarter clockwise: the matrix of ISO/IEC 14496-12 with b = 1, c = -1. What was left is then on top."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = clips.video_stream(output, "libx264", 64, 48, 10, {})
        stream.set_display_matrix([0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30])
        clips.write_frames(output, stream, [0])
    frame = decode_video(buffer.getvalue(), VideoSampling(num_frames=1)).frames[0]
    assert frame.shape == (64, 48, 3)
    assert (frame[:7, :, 0] > 200).all()  # the bar at the left edge of picture 0
    assert (frame[12:, :, 0] < 160).all()


@pytest.mark.parametrize(("codec", "container"), [("libx264", "mp4"), ("libvpx-vp9", "webm"), ("mpeg4", "avi")])
@pytest.mark.parametrize(("width", "height"), [(63, 47), (17, 33), (9, 121)])
def test_odd_sizes(codec: str, container: str, width: int, height: int) -> None:
    decoded = check(clips.encode(5, width, height, codec=codec, container=container), VideoSampling(num_frames=3))
    assert decoded.frames.shape == (3, height, width, 3)


@pytest.mark.parametrize(("codec", "container"), FORMATS)
def test_one_frame(codec: str, container: str) -> None:
    data = clips.cached(codec, container, 1)
    for sampling in (VideoSampling(num_frames=8), VideoSampling(fps=2), VideoSampling(fps=1, start=0.0, end=0.5)):
        assert check(data, sampling).timestamps.tolist() == [0.0]


@pytest.mark.parametrize(
    ("codec", "container"), [("libx264", "mp4"), ("libx264", "mov"), ("libx264", "matroska"), ("libvpx-vp9", "webm")]
)
def test_files_that_do_not_say_how_long_they_are(codec: str, container: str) -> None:
    data = clips.encode_live(21, codec, container)
    with av.open(io.BytesIO(data)) as opened:
        assert opened.streams.video[0].frames == 0
        assert opened.duration is None or container in ("mp4", "mov")
    assert check(data, VideoSampling(num_frames=4)).frames_indices.tolist() == [0, 6, 13, 20]


@pytest.mark.parametrize("claim", [0, 7, 1000])
def test_wrong_durations_and_counts_in_the_header(claim: int) -> None:
    mp4 = clips.encode(21)
    for box, place in ((b"mvhd", 20), (b"mdhd", 20), (b"tkhd", 24)):
        start = mp4.index(box) + place
        changed = mp4[:start] + struct.pack(">I", claim) + mp4[start + 4 :]
        assert check(changed, VideoSampling(num_frames=4)).frames_indices.tolist() == [0, 6, 13, 20]
    avi = clips.encode(21, codec="mpeg4", container="avi")
    for chunk, place in ((b"avih", 24), (b"strh", 40)):
        start = avi.index(chunk) + place
        assert struct.unpack_from("<I", avi, start) == (21,)
        changed = avi[:start] + struct.pack("<I", claim) + avi[start + 4 :]
        assert check(changed, VideoSampling(num_frames=4)).frames_indices.tolist() == [0, 6, 13, 20]
    webm = clips.encode(21, codec="libvpx-vp9", container="webm")
    start = webm.index(b"\x44\x89\x88") + 3  # Duration, a double
    changed = webm[:start] + struct.pack(">d", float(claim)) + webm[start + 8 :]
    assert check(changed, VideoSampling(num_frames=4)).frames_indices.tolist() == [0, 6, 13, 20]


@pytest.mark.parametrize(("codec", "sound", "container"), [
    ("libx264", "aac", "mp4"), ("libx264", "pcm_s16le", "mov"), ("mpeg4", "pcm_s16le", "avi"),
    ("libvpx-vp9", "libopus", "webm"), ("libx264", "aac", "matroska"),
])  # fmt: skip
def test_a_track_of_sound(codec: str, sound: str, container: str) -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        audio = output.add_stream(sound, rate=48000 if sound == "libopus" else 8000, layout="mono")
        stream = clips.video_stream(output, codec, 64, 48, 10, {"g": "5"})
        clips.write_sound(output, audio, 30)
        clips.write_frames(output, stream, range(21))
    for sampling in (VideoSampling(num_frames=4), VideoSampling(fps=5)):
        check(buffer.getvalue(), sampling)


def two_streams(default: int, cover: bool = False) -> bytes:
    """Matroska with two tracks of video, of 9 and of 14 frames."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        tracks = [
            clips.video_stream(output, "libx264", 64, 48, 10, {}),
            clips.video_stream(output, "libx264", 32, 32, 10, {}),
        ]
        for place, track in enumerate(tracks):
            track.disposition = av.stream.Disposition.default if place == default else 0
        clips.write_frames(output, tracks[0], range(9))
        clips.write_frames(output, tracks[1], range(14))
    return buffer.getvalue()


@pytest.mark.parametrize("default", [0, 1])
def test_of_two_videos_in_a_file_the_default_is_taken(default: int) -> None:
    decoded = check(two_streams(default), VideoSampling(num_frames=3), stream=default)
    assert decoded.total_frames == (9, 14)[default]


def test_the_cover_of_a_song_is_no_video() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        audio = output.add_stream("aac", rate=8000, layout="mono")
        cover = output.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 64, 48, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        clips.write_frames(output, cover, [0])
        clips.write_sound(output, audio, 30)
    with av.open(io.BytesIO(buffer.getvalue())) as container:
        assert len(container.streams.video) == 1
    with pytest.raises(MediaError, match="holds no video stream"):
        decode_video(buffer.getvalue(), VideoSampling(num_frames=3))


def test_frames_that_an_edit_list_cuts_away_do_not_count() -> None:
    """As a phone trims a clip: the frames stay, the list of what is played gets shorter at both ends."""
    data = clips.encode(30, options={"g": "10"})
    place = data.index(b"elst") + 4
    _, entries, _, media_time, _ = struct.unpack_from(">IIIii", data, place)
    assert entries == 1
    changed = bytearray(data)
    struct.pack_into(">Ii", changed, place + 8, 1000, media_time + 8 * 1024)  # one second, from frame 8 on
    every = clips.decode_all(bytes(changed))
    assert 10 <= len(every) <= 12
    decoded = decode_video(bytes(changed), VideoSampling(num_frames=4))
    assert (decoded.total_frames, decoded.missing) == (len(every), None)
    np.testing.assert_array_equal(decoded.frames, every[decoded.frames_indices])


def test_variable_frame_rate() -> None:
    stamps = [0, 1, 2, 10, 11, 20]
    for container in ("mp4", "matroska"):
        data = clips.encode(6, container=container, stamps=stamps)
        decoded = check(data, VideoSampling(fps=1))
        assert decoded.frames_indices.tolist() == [0, 3, 5]
        np.testing.assert_allclose(decoded.timestamps, [0.0, 1.0, 2.0], atol=1e-3)
        assert decoded.fps == pytest.approx(5 / 2)
        middle = check(data, VideoSampling(num_frames=9, start=0.5, end=1.05))
        assert middle.frames_indices.tolist() == [2, 3]  # the one on show at the start, and one that begins within
        assert middle.window_frames == 2


def test_a_picture_that_grows_on_the_way() -> None:
    """VP9 carries the size in each key frame: frames are scaled to the first, and held to the limit."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="webm") as output:
        stream = clips.video_stream(output, "libvpx-vp9", 64, 48, 10, {})
        clips.write_frames(output, stream, range(5))
        large = av.CodecContext.create("libvpx-vp9", "w")
        large.width, large.height, large.pix_fmt, large.time_base = 320, 240, "yuv420p", stream.time_base
        for index in range(5):
            picture = av.VideoFrame.from_ndarray(clips.frame(index, 320, 240), format="rgb24").reformat(
                format="yuv420p"
            )
            picture.pts = (5 + index) * 100
            for packet in large.encode(picture):
                packet.stream = stream
                output.mux(packet)
        for packet in large.encode(None):
            packet.stream = stream
            output.mux(packet)
    decoded = decode_video(buffer.getvalue(), VideoSampling(num_frames=10))
    assert decoded.frames.shape == (10, 48, 64, 3)
    with pytest.raises(MediaError):
        decode_video(buffer.getvalue(), VideoSampling(num_frames=10), DecodeLimits(max_frame_pixels=64 * 48))
    assert decode_video(buffer.getvalue(), VideoSampling(num_frames=2, end=0.3)).frames.shape == (2, 48, 64, 3)


@pytest.mark.parametrize(("codec", "container", "pixels"), [
    ("mjpeg", "avi", "yuvj420p"), ("mjpeg", "mov", "yuvj420p"), ("png", "mov", "rgb24"), ("rawvideo", "avi", "yuv420p"),
    ("ffv1", "matroska", "yuv420p"), ("huffyuv", "avi", "rgb24"), ("flv", "avi", "yuv420p"),
    ("prores_ks", "mov", "yuv422p10le"), ("qtrle", "mov", "rgb24"), ("mpeg2video", "matroska", "yuv420p"),
])  # fmt: skip
def test_other_codecs_are_refused_and_not_even_tried(
    codec: str, container: str, pixels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if clips.lacks(codec):
        pytest.skip(f"no encoder {codec} here")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pixels
        clips.write_frames(output, stream, range(5))
    learnt = []
    original = video._video_stream

    def seen(container, guard):
        learnt.append(container.streams.video[0].codec_context.pix_fmt)
        return original(container, guard)

    monkeypatch.setattr(video, "_video_stream", seen)
    with pytest.raises(
        MediaError, match=r"^video: its video is coded as \w+, which is not taken; send a GIF, or H.264"
    ):
        decode_video(buffer.getvalue(), VideoSampling(num_frames=3))
    if codec in ("mjpeg", "flv", "mpeg2video"):  # the header does not say: who knows has decoded a frame
        assert learnt == [None]
