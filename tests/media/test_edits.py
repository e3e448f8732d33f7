"""Edit lists: what FFmpeg copies for them is told beforehand, and each edit shows its frames.

What FFmpeg really copies is the reference.
"""

import io
import random
import struct
from collections.abc import Callable, Sequence

import av
import numpy as np
import pytest

from mini_engine.media import claims
from mini_engine.media.claims import claimed_samples
from mini_engine.media.errors import MediaError
from mini_engine.media.limits import DecodeLimits
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.video import decode_video
from tests.media import broken, clips
from tests.media.broken import box, table

LIMIT = 1 << 20
ALL = VideoSampling(num_frames=1000)
LASTS = 20  # units of which a frame of a film lasts
Edits = Sequence[tuple[int, int]]  # how long each is, in units of the movie, and where it begins, in units of the track


def edited(data: bytes, edits: Edits, wide: bool = False) -> bytes:
    """With these edits in every track. `wide`: in numbers of 64 bits."""
    entries = b"".join(struct.pack(">qqI" if wide else ">IiI", *edit, 1 << 16) for edit in edits)
    listed = box(b"elst", struct.pack(">II", wide << 24, len(edits)) + entries)
    return broken.rebuilt(data, {b"edts": lambda _: listed})


def film(
    frames: int,
    keys: Sequence[int] | None = None,
    runs: Sequence[int] | None = None,
    scales: Sequence[int] = (600, 600),
) -> bytes:
    """A track of frames of one byte each. `runs` are counts and what each frame lasts, `scales` of movie and track."""
    keys = range(1, frames + 1, 30) if keys is None else keys
    runs = [frames, LASTS] if runs is None else runs
    new = {
        b"stss": struct.pack(f">II{len(keys)}I", 0, len(keys), *keys),
        b"stts": struct.pack(f">II{len(runs)}I", 0, len(runs) // 2, *runs),
    }
    data = broken.with_samples(clips.cached("mpeg4", "mp4"), frames, 1)
    return broken.rebuilt(
        data,
        {name: lambda _, content=content: content for name, content in new.items()}
        | {
            name: lambda content, scale=scale: content[:12] + struct.pack(">I", scale) + content[16:]
            for name, scale in zip((b"mvhd", b"mdhd"), scales, strict=True)
        },
    )


def behind_the_sizes(data: bytes, *extra: bytes) -> bytes:
    return broken.rebuilt(data, {b"stbl": lambda content: content + b"".join(extra)})


def copied(data: bytes) -> int:
    """By FFmpeg."""
    with av.open(io.BytesIO(data)) as container:
        return sum(len(stream.index_entries) for stream in container.streams)


@pytest.mark.parametrize("minutes", [30, 120])
@pytest.mark.parametrize("edits", [2, 8, 50, 500])
def test_a_film_of_many_edits_claims_hardly_more_than_its_frames(minutes: int, edits: int) -> None:
    frames = minutes * 60 * 30
    length = frames * LASTS // edits
    data = edited(film(frames), [(length, place * length) for place in range(edits)])
    assert frames <= copied(data) <= claimed_samples(data) < 2 * frames + 100 * edits < LIMIT


@pytest.mark.parametrize("edits", [8, 40])
def test_sound_counts_its_edits_too(edits: int) -> None:
    sound = film(5000, range(1, 5001)).replace(b"vide", b"soun").replace(b"vmhd", b"smhd")
    length = 5000 * LASTS // edits
    data = edited(sound, [(length, place * length) for place in range(edits)])
    assert 5000 <= copied(data) <= claimed_samples(data) < 5000 + 40 * edits


def whole(data: bytes) -> bytes:
    return edited(data, [(1 << 31, 0)] * 8)


def short(data: bytes) -> bytes:
    return edited(data, [(1, place * 3000) for place in range(8)])


def of_two_kinds() -> bytes:
    """All key frames are in another codec than the rest, and FFmpeg leaves them out."""
    data = film(3000, range(1, 101))
    kinds = {
        b"stsd": lambda old: old[:4] + struct.pack(">I", 2) + old[8:] + old[8:].replace(b"mp4v", b"jpeg"),
        b"stsc": lambda _: struct.pack(">8I", 0, 2, 1, 100, 2, 2, 2900, 1),
        b"stco": lambda _: struct.pack(">4I", 0, 2, 40, 140),
    }
    return broken.rebuilt(data, kinds)


COSTLY: dict[str, Callable[[], bytes]] = {
    "each edit is for all": lambda: whole(film(3000)),
    "one key frame": lambda: short(film(3000, [1])),
    "no key frame": lambda: short(film(3000, [])),
    "all at once": lambda: whole(film(3000, runs=[3000, 0])),
    "key frames all at once": lambda: edited(film(3000, range(1, 3001), [1, 2000, 2997, 0, 2, 2000]), [(1, 3900)] * 8),
    "times of their own": lambda: short(behind_the_sizes(film(3000), table(b"ctts", 1, 3000, 1 << 30))),
    "times before": lambda: short(behind_the_sizes(film(3000), table(b"ctts", 1, 3000, (1 << 32) - (1 << 30)))),
    "key frames out of order": lambda: short(film(3000, [1, 3000, *range(31, 3000, 30)])),
    "key frames of another kind": lambda: edited(of_two_kinds(), [(1, place * LASTS) for place in range(8)]),
    "a second table of key frames": lambda: short(behind_the_sizes(film(3000), table(b"stss", 1, 1))),
    "a slow movie": lambda: edited(film(3000, scales=(1, 600)), [(100, 0)] * 8),
    "long edits": lambda: edited(film(3000), [(1 << 40, 0)] * 8, wide=True),
    "starts out of bounds": lambda: edited(
        behind_the_sizes(film(3000, [1, 2, 3]), table(b"ctts", 3, 1, (1 << 32) - 1, 2998, 0, 1, 0)),
        [(0, -(1 << 63))] * 8,
        wide=True,
    ),
}


@pytest.mark.parametrize("what", COSTLY)
def test_edits_that_are_costly_count(what: str) -> None:
    data = COSTLY[what]()
    assert claimed_samples(data) >= max(3000, copied(data))


def test_edits_that_are_for_all_are_refused() -> None:
    for data in (film(200_000), film(200_000, [1]), film(200_000, runs=[200_000, 0])):
        with pytest.raises(MediaError, match="its index claims 1600000 frames of picture and sound"):
            decode_video(whole(data), ALL)


def test_the_way_to_where_each_edit_begins_counts() -> None:
    """FFmpeg walks there, by a time for each frame if they have times of their own."""
    data = behind_the_sizes(film(500_000), table(b"ctts", 1, 500_000, 0))
    assert claimed_samples(edited(data, [(1, 499_000 * LASTS)] * 4000)) > LIMIT


def test_a_movie_whose_scale_is_uncertain() -> None:
    """FFmpeg may go by another `mvhd`, wherever it stands."""
    data = edited(film(3000, scales=(600, 600)), [(100, place * 3000) for place in range(8)])
    assert claimed_samples(data) < 3500
    assert claimed_samples(data + table(b"mvhd", 0, 0, 1)) == 8 * 3000
    assert claimed_samples(data.replace(b"mvhd", b"skip")) == 8 * 3000


def test_a_table_is_read_no_further_than_its_track() -> None:
    """Or the entries of one could be those of many tracks."""
    cut_short = box(b"stts", struct.pack(">4I", 0, 2, 2990, LASTS))
    data = broken.rebuilt(
        film(3000),
        {b"trak": lambda old: old.replace(b"stts", b"free") + cut_short, b"udta": lambda _: bytes(2)},
    )
    assert cut_short + struct.pack(">I", 10) + b"udta" in data  # another entry: ten frames
    assert claimed_samples(short(data)) == 8 * 3000


def any_film(chance: random.Random) -> bytes:
    frames = chance.randint(1, 100)
    keys = sorted(chance.sample(range(1, frames + 1), chance.randint(1, min(frames, chance.choice([1, 3, 50])))))
    lengths = [1, 2, 5, 20, 1000] if chance.random() < 0.8 else [0, 1, 2]
    runs: list[int] = []
    while (rest := frames - sum(runs[::2])) > 0:
        runs += [chance.randint(0, rest), chance.choice(lengths)]
    long = max(1, sum(count * lasts for count, lasts in zip(runs[::2], runs[1::2], strict=True)))
    movie, track = chance.choice([1, 10, 600]), chance.choice([1, 600, 90_000])
    data = film(frames, keys, runs, (movie, track))
    if chance.random() < 0.3:
        data = data.replace(b"stss", b"free")
    if chance.random() < 0.4:
        data = data.replace(b"vide", b"soun")
    if chance.random() < 0.6:
        most = chance.choice([2, 50, long, (1 << 31) - 1])
        least = chance.choice([0, -most])
        shifts = [number for _ in range(3) for number in (chance.randint(0, frames), chance.randint(least, most))]
        data = behind_the_sizes(data, table(b"ctts", 3, *(number & 0xFFFFFFFF for number in shifts)))
    starts = [-1, 0, *(chance.randint(-10, long + 10) for _ in range(4))]
    lengths = [0, 1, long, *(chance.randint(0, long) * movie // track for _ in range(3))]
    edits = [(chance.choice(lengths), chance.choice(starts)) for _ in range(chance.randint(2, 12))]
    return edited(data, edits, wide=chance.random() < 0.3)


def test_never_does_ffmpeg_copy_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_STEPS", LIMIT)  # which would hide a claim that is too small
    told = 0
    for seed in range(1000):
        data = any_film(random.Random(seed))
        try:
            entries = copied(data)
        except av.error.FFmpegError:
            continue
        assert entries <= claimed_samples(data), seed
        told += 0 < entries
    assert told > 400


def showing(data: bytes, shown: Edits) -> bytes:
    """An edit for each count of frames and the first of them, of a video with ten frames a second."""
    place = data.index(b"elst") + 16
    first = int.from_bytes(data[place : place + 4], "big")
    place = data.index(b"mdhd") + 16
    frame = int.from_bytes(data[place : place + 4], "big") // 10
    return edited(data, [(count * 100, first + begin * frame) for count, begin in shown])


OPEN = "keyint=12:min-keyint=12:scenecut=0:bframes=3:open-gop=1"


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libx264", {"g": "12"}),
        ("libx264", {"x264-params": OPEN}),
        ("libx265", {"x265-params": f"log-level=none:{OPEN}"}),
        ("libx265", {"x265-params": "log-level=none:keyint=12:bframes=0"}),
        ("mpeg4", {"g": "12", "bf": "2"}),
        ("libvpx-vp9", {"g": "12"}),
    ],
)
@pytest.mark.parametrize(
    "shown",
    [
        [(60, 0), (60, 60)],
        [(7, 12 * cut + 3) for cut in range(10)],
        [(4, 4 * cut) for cut in range(30)],
        [(30, 10)] * 3,
        [(20, 61), (20, 13)],
        [(9, 20 * cut + 5) for cut in range(5)],
    ],
    ids=["halves", "cuts", "all in pieces", "again and again", "backwards", "far apart"],
)
def test_each_edit_shows_its_frames(codec: str, options: dict[str, str], shown: list[tuple[int, int]]) -> None:
    """Also where a decoder that goes on from one edit to the next leaves out frames of open groups."""
    if clips.lacks(codec):
        pytest.skip(f"no encoder {codec} here")
    data = clips.cached(codec, "mp4", 120, **options)
    cut = showing(data, shown)
    every = decode_video(data, ALL).frames
    wanted = [begin + number for count, begin in shown for number in range(count)]
    np.testing.assert_array_equal(decode_video(cut, ALL).frames, every[wanted])
    few = decode_video(cut, VideoSampling(num_frames=5))
    np.testing.assert_array_equal(few.frames, every[np.array(wanted)[few.frames_indices]])


def test_frames_that_are_not_shown_do_not_count_as_frames() -> None:
    """But there may be no more of them than of others: FFmpeg hands out all from the one key frame on, for each."""
    data = clips.cached("libx264", "mp4", 120, **{"x264-params": "keyint=600:scenecut=0"})
    limits = DecodeLimits(max_video_frames=120)
    halves = [(60, 0), (60, 60)]
    assert copied(showing(data, halves)) == 240
    assert decode_video(showing(data, halves), VideoSampling(num_frames=8), limits).total_frames == 120
    with pytest.raises(MediaError, match="more than 120 frames, the limit of --max-video-frames"):
        decode_video(showing(data, [(40, 0), (40, 40), (40, 80)]), VideoSampling(num_frames=8), limits)
