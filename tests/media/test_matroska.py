"""What FFmpeg is given of a Matroska file: all frames of a real one, as they stand there; nothing of a hostile one."""

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.media import matroska
from mini_engine.media.containers import container_of, element
from mini_engine.media.errors import MediaError
from mini_engine.media.limits import Damage, DecodeLimits
from mini_engine.media.matroska import PlainFile, plain_file
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.video import decode_video
from tests.media import broken, clips, hostile
from tests.media.matroska_files import (
    KINDS,
    SOUND,
    TAGS,
    all_blocks,
    also,
    as_written,
    blocks,
    clip,
    cluster,
    in_entry,
    info,
    inside,
    segment,
    simple,
    stripped,
    tracks,
)

ALL = VideoSampling(num_frames=1000)


class Readable:
    """As the decoder hands a file to FFmpeg."""

    def __init__(self, file: PlainFile) -> None:
        self.read = file.read


def plain(data: bytes, lost: list[str] | None = None) -> PlainFile:
    """What FFmpeg reads instead of `data`, of which nothing may be missing unless `lost` takes it."""

    def lose(what: str) -> None:
        assert lost is not None, what
        lost.append(what)

    return plain_file(data, "video 1", lambda: None, lambda _: None, lose)


def told(make: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
    """All that the decoder uses of what FFmpeg says of a file."""
    with av.open(make(), format="matroska") as container:
        first = next(container.decode(video=0))
    with av.open(make(), format="matroska") as container:
        stream = container.streams.video[0]
        codec = stream.codec_context
        facts = [stream.average_rate, stream.guessed_rate, stream.time_base, stream.disposition, codec.name]
        facts += [codec.width, codec.height, codec.extradata, codec.pix_fmt, codec.color_range, codec.colorspace]
        facts += [codec.sample_aspect_ratio, codec.color_primaries, codec.color_trc]
        facts += [first.pts, first.rotation, first.color_range, first.colorspace]
        packets = [(p.pts, p.dts, p.duration, p.is_keyframe, p.is_discard, bytes(p)) for p in container.demux(stream)]
    return facts, packets


def with_sound(codec: str = "libx264", sound: str = "aac") -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska", options={"cluster_time_limit": "500"}) as output:
        audio = output.add_stream(sound, rate=8000, layout="mono")
        stream = clips.video_stream(output, codec, 64, 48, 10, {"g": "10"})
        clips.write_sound(output, audio, 40)
        clips.write_frames(output, stream, range(40))
    return buffer.getvalue()


REAL = {
    **{
        f"{codec} in {container}": (clips.cached, codec, container)
        for codec, container in clips.ALL
        if container in ("matroska", "webm")
    },
    **{
        f"live {codec} in {container}": (clips.encode_live, 21, codec, container)
        for codec, container in [("libx264", "matroska"), ("libvpx-vp9", "webm"), ("libvpx", "webm")]
    },
    "with sound": (with_sound,),
}


@pytest.mark.parametrize("which", REAL)
def test_ffmpeg_tells_the_same_of_it_as_of_the_file(which: str) -> None:
    make, *args = REAL[which]
    if args and clips.lacks(next(arg for arg in args if isinstance(arg, str))):
        pytest.skip("no encoder here")
    data = make(*args)
    assert told(lambda: Readable(plain(data))) == told(lambda: io.BytesIO(data))


def frames(data: bytes) -> np.ndarray:
    return decode_video(data, ALL).frames


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_is_read(kind: str) -> None:
    data = KINDS[kind]()
    assert container_of(data) == "matroska"
    got = frames(data)
    assert len(got) >= 3
    if kind == "colours, a turn and a rate":
        assert got.shape[1:] == (64, 48, 3)
    elif "begin with" not in kind:
        np.testing.assert_array_equal(got, clips.decode_all(clip()))
    if kind != "tracks behind the frames":  # which FFmpeg does not look for there
        assert told(lambda: Readable(plain(data))) == told(lambda: io.BytesIO(data))


def test_what_is_stripped_comes_back() -> None:
    tracks_then, cluster_then = stripped()
    with av.open(Readable(plain(segment(info(), tracks_then, cluster_then)))) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    assert set(packets) < {block[4:] for block in blocks()}


def test_of_two_recordings_in_one_file_both_are_read() -> None:
    """FFmpeg goes on where another begins; so does what it is given."""
    data = as_written(info(), tracks(), all_blocks())
    assert len(told(lambda: Readable(plain(data * 2)))[1]) == 2 * len(blocks()) + 1


def test_frames_that_are_packed_are_refused() -> None:
    for packing in (broken.element("4254", b"\0"), b""):
        packed = in_entry(broken.element("6D80", broken.element("6240", broken.element("5034", packing))))
        with pytest.raises(MediaError, match="video 1: its frames are packed .zlib. or encrypted; mux it again"):
            decode_video(segment(info(), packed, all_blocks()), ALL, item="video 1")


def test_frames_that_are_packed_twice_are_refused() -> None:
    encoding = broken.element("6240", broken.element("5034", broken.element("4254", b"\3")))
    decode_video(segment(info(), in_entry(broken.element("6D80", encoding)), all_blocks()), ALL)
    with pytest.raises(MediaError, match="its frames are packed"):
        decode_video(segment(info(), in_entry(broken.element("6D80", encoding * 2)), all_blocks()), ALL)


def test_of_tracks_with_one_number_the_first_is_read() -> None:
    data = segment(info(), also(inside(tracks()), tracks()), all_blocks())
    with av.open(Readable(plain(data))) as container:
        assert len(container.streams) == 1


def test_more_frames_than_may_be_are_refused_before_ffmpeg_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "open", lambda *_, **__: pytest.fail("opened"))
    data = segment(info(), tracks(), cluster(simple(blocks()[0][:5]) * 1001))
    with pytest.raises(MediaError, match="more than 1000 frames, the limit of --max-video-frames; send a shorter"):
        decode_video(data, ALL, DecodeLimits(max_video_frames=1000))


def test_a_file_of_sound_alone_holds_no_video() -> None:
    with pytest.raises(MediaError, match="holds no video stream"):
        decode_video(segment(info(), broken.element("1654AE6B", SOUND), cluster(simple(b"\x82\0\0\0a"))), ALL)


def test_the_main_one_of_several_tracks_of_video_is_read() -> None:
    """The one that is marked as default, as before; and no more than four are looked at."""
    _, start, _ = element(tracks(), 0) or (b"", 0, None)
    entry = tracks()[start:]
    assert entry[:1] == b"\xae" and b"\xd7\x81\x01" in entry

    def numbered(number: int, default: int) -> bytes:
        _, inner, _ = element(entry, 0) or (b"", 0, None)
        content = entry[inner:].replace(b"\xd7\x81\x01", b"\xd7\x81" + bytes([number]))
        return broken.element("AE", content + broken.element("88", bytes([default])))

    entries = b"".join(numbered(number, number == 3) for number in range(1, 7))
    first = blocks()[0]  # of all others, for as long as the third has frames
    frames_of_all = [bytes([0x80 | n]) + (block if n == 3 else first)[1:] for block in blocks() for n in range(1, 7)]
    data = segment(info(), broken.element("1654AE6B", entries), cluster(*map(simple, frames_of_all)))
    np.testing.assert_array_equal(frames(data), clips.decode_all(clip()))
    with av.open(Readable(plain(data))) as container:
        assert len(container.streams) == 4


@pytest.mark.parametrize("where", ["a track", "a block", "a block's end", "a group", "between clusters", "a time"])
def test_what_cannot_be_read_is_told_and_passed_over(where: str) -> None:
    beyond = broken.element("A3", b"", size=99)
    bad = {
        "a track": segment(info(), also(broken.element("AE", beyond), tracks()), all_blocks()),
        "a block": segment(info(), tracks(), cluster(simple(b"\0" * 20)), all_blocks()),
        "a block's end": segment(info(), tracks(), cluster(beyond), all_blocks()),
        "a group": segment(info(), tracks(), cluster(broken.element("A0", beyond)), all_blocks()),
        "between clusters": segment(info(), tracks(), b"\0", all_blocks()),
        "a time": segment(info(), tracks(), broken.element("1F43B675", b"\xe7\xff"), all_blocks()),
    }[where]
    with pytest.raises(MediaError, match="cut short or damaged: .* at byte [0-9]+ cannot be read; send the whole file"):
        decode_video(bad, ALL)
    decoded = decode_video(bad, ALL, allow_partial=True)
    assert decoded.missing is not None
    np.testing.assert_array_equal(decoded.frames, clips.decode_all(clip()))


def test_frames_that_share_a_block_are_not_taken() -> None:
    """FFmpeg makes up to 256 of one, each with a copy of what is added to it. Only sound is written so."""
    laced = simple(b"\x81\0\0\x06\xff" + bytes(300))
    with pytest.raises(MediaError, match="shares its place with others"):
        decode_video(segment(info(), tracks(), cluster(laced), all_blocks()), ALL)


def test_of_a_header_nothing_is_handed_on_that_ffmpeg_could_not_read() -> None:
    """It would search for more where it cannot, byte by byte, and might come to a list of tags in a codec's data."""
    bad = [broken.element(name, bytes(size)) for name, size in [("D7", 9), ("23314F", 5), ("86", 5000), ("B0", 1)]]
    bad += [broken.element("63A2", bytes(1 << 20))]
    hidden = in_entry(broken.element("63A2", TAGS) + b"".join(bad) * 100 + broken.element("E0", b"".join(bad)))
    assert len(plain(segment(info(), hidden, all_blocks())).read()) < len(clip()) + len(TAGS) + 200
    long, block = broken.element("E7", bytes(9)), blocks()[0]
    group = broken.element("A0", broken.element("A1", block) + broken.element("9B", bytes(9)))
    info_of_bad = broken.element("1549A966", broken.element("4489", bytes(5)))
    given_on = plain(segment(info_of_bad, tracks(), cluster(long, simple(block), group))).read()
    assert given_on.count(block) == 2
    assert not any(name in given_on for name in (b"\x44\x89", long, b"\x9b"))
    data = segment(info(), in_entry(b"".join(bad)), all_blocks())
    np.testing.assert_array_equal(frames(data), clips.decode_all(clip()))


def test_a_frame_that_is_too_long_for_ffmpeg_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matroska, "_MOST_IN_BLOCK", 100)
    lost: list[str] = []
    plain(segment(info(), tracks(), cluster(simple(b"\x81" + bytes(100)), simple(b"\x81" + bytes(99)))), lost)
    assert len(lost) == 1


def elements(data: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(data):
        name, start, end = element(data, place) or (b"", 0, None)
        yield name
        place = start if end is None else end


@pytest.mark.parametrize("what", hostile.MATROSKA)
def test_nothing_of_a_hostile_file_is_handed_on(what: str) -> None:
    given_on = plain(hostile.MATROSKA[what](1 << 14), []).read()
    assert len(given_on) < 1 << 13
    assert {name.hex() for name in elements(given_on)} <= {
        "1a45dfa3", "18538067", "1549a966", "1654ae6b", "1f43b675", "e7", "a3", "a0",
    }  # fmt: skip


@pytest.mark.parametrize("size", [0, 1, 3, 4, 40])
@settings(deadline=None)
@given(st.data())
def test_garbage_is_refused_and_what_is_handed_on_is_sound(size: int, draw: st.DataObject) -> None:
    """What is made of what was handed on is the same again: nothing of it is lost."""
    data = bytearray(
        draw.draw(st.sampled_from([KINDS["groups"](), KINDS["live"](), KINDS["tracks behind the frames"]()]))
    )
    for _ in range(draw.draw(st.integers(0, 4))):
        place = draw.draw(st.integers(0, len(data)))
        data[place : place + draw.draw(st.integers(0, size))] = draw.draw(st.binary(max_size=size))
    data = data[: draw.draw(st.integers(0, len(data)))] if draw.draw(st.booleans()) else data
    try:
        given_on = plain(bytes(data), []).read()
    except MediaError as error:
        assert "packed" in str(error)
        return
    assert plain(given_on).read() == given_on


@settings(deadline=None)
@given(st.integers(1, 5000))
def test_it_is_the_same_however_much_is_read_at_once(size: int) -> None:
    whole, file = plain(KINDS["groups"]()).read(), plain(KINDS["groups"]())
    assert b"".join(iter(lambda: file.read(size), b"")) == whole


def test_a_file_of_nothing_but_damage_is_told_once() -> None:
    bad = segment(info(), tracks(), all_blocks(), b"\x1f\x43\xb6\x75\0" * 10_000)
    damage = Damage("video 1", allow_partial=True)
    plain_file(bad, "video 1", lambda: None, lambda _: None, damage.add)
    assert len(damage.found) == 1


def test_more_tracks_than_ffmpeg_may_set_up_are_told() -> None:
    with pytest.raises(
        MediaError, match="^video 1: has more than 100 tracks, or is damaged; send it with fewer tracks"
    ):
        decode_video(hostile.OTHERS["an mp4 of many tracks"](0), ALL, item="video 1")


PROBE = """
import sys
sys.path.insert(0, ".")
from mini_engine.media.errors import MediaError
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.video import decode_video
from tests.media import clips, hostile

def high_water():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) >> 10

for container in ("webm", "avi"):
    decode_video(clips.encode(5, codec="libvpx", container=container), VideoSampling(num_frames=2))
files = hostile.MATROSKA if sys.argv[1] == "matroska" else hostile.OTHERS
for what, make in files.items():
    data = make(4 << 20)
    open("/proc/self/clear_refs", "w").write("5")
    before = high_water()
    try:
        decode_video(data, VideoSampling(num_frames=2))
    except MediaError:
        pass
    print(high_water() - before, what)
"""


@pytest.mark.skipif(not hostile.CAN_MEASURE, reason="the kernel does not let a process reset its high-water mark")
@pytest.mark.parametrize(("which", "most"), [("matroska", 40), ("others", 170)])
def test_memory_stays_bounded(which: str, most: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, which], capture_output=True, text=True, check=True, timeout=200)
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert len(lines) == len(hostile.MATROSKA if which == "matroska" else hostile.OTHERS)
    assert [what for size, what in lines if int(size) > most] == []  # MiB
