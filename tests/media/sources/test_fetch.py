"""`data:` and `file://` URLs: which bytes they are, and which are refused."""

import base64
import os
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mini_engine.config import EngineConfig
from mini_engine.media.decode.item_limits import DecodeLimits
from mini_engine.media.frame_sampling import VideoSampling
from mini_engine.media.hashing import content_digest
from mini_engine.media.sources.fetch import Frames, declared_size, fetch_data, fetch_frames, is_http_url, is_local_file
from mini_engine.media.sources.local_files import SETTLED_NS, read_file
from mini_engine.media.sources.policy import MediaPolicy
from mini_engine.protocol.api_errors import MediaError
from mini_engine.protocol.body_split import DataUrl
from tests.support.media_directory import make_root

POLICY = MediaPolicy(None, 1000)


def test_data_url_is_decoded() -> None:
    text = "//4xMj8+"
    for url in (f"data:video/mp4;base64,{text}", f"DATA:;x=y;BASE64,{text}", "data:;base64," + "\r\n".join(text)):
        assert fetch_data(url, POLICY) == b"\xff\xfe12?>"


def test_invalid_or_disabled_url_is_refused() -> None:
    urls = ["data:video/mp4;base64", "data:,", "data:;base64,", "data:,YQ==", "data:;base64,ab*d", "data:;base64,a"]
    urls += ["data:;base64,=QQQ", "data:;base64,\ud800", "data:;base64,QUJD\0QUJD", "data:;base64,%2F%2F4x", "clip.mp4"]
    urls += [
        "ftp://a/",
        r"data:;base64,\\u0041QUJ",
        "file:///etc/passwd",
        " data:;base64,YQ==",
        "",
        "data:" + "x" * 2000 + ";base64,YQ==",
    ]
    for url in urls:
        with pytest.raises(MediaError, match="^video 2: "):
            fetch_data(url, POLICY, "video 2")


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("lines", [False, True])
def test_data_url_of_several_slices(lines: bool, extra: int) -> None:
    data = os.urandom(400_000 + extra)
    text = base64.b64encode(data).decode().rstrip("=")
    url = "data:;base64," + "\r\n".join(textwrap.wrap(text, 77) if lines else [text])
    policy = MediaPolicy(None, 2 * len(data))
    assert fetch_data(url, policy) == data
    assert (declared_size(url, policy) or 0) >= len(data)
    for slash, plus in ((r"\/", "+"), (r"\u002F", r"\u002b")):
        escaped = text.replace("/", slash).replace("+", plus).encode()
        assert fetch_data(DataUrl("data:;base64,", escaped, 0, len(escaped)), policy) == data


def test_data_url_above_the_limit_is_refused() -> None:
    for call, size in ((fetch_data, 1001), (fetch_data, 100_000), (declared_size, 100_000)):
        with pytest.raises(MediaError, match="--max-media-bytes"):
            call("data:;base64," + base64.b64encode(bytes(size)).decode(), POLICY)


def test_declared_size(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"clip")
    policy = MediaPolicy(tmp_path, 1000, ["media.test"])
    urls = ["data:;base64,QUJDRA==", f"File://{tmp_path}/clip.mp4", "Http://media.test/a.mp4"]
    assert [declared_size(url, policy) for url in urls] == [6, 4, None]
    (tmp_path / "clip.mp4").write_bytes(bytes(1001))
    for url, flag in (("http://other.test/", "--allowed-media-domains"), (urls[1], "--max-media-bytes")):
        for allowed in (policy, replace(policy, allowed_media_domains=())):
            with pytest.raises(MediaError, match=flag):
                declared_size(url, allowed)
    assert [is_local_file(url) for url in urls] == [False, True, False]
    assert [is_http_url(url) for url in urls] == [False, False, True]


# --- local files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def policy(tmp_path: Path) -> MediaPolicy:
    return MediaPolicy(make_root(tmp_path, b"clip"), 1000)


def test_file_below_the_root_is_read(policy: MediaPolicy) -> None:
    for path in ("/clip", "/inner/../%63lip", "/link", "/inner/%C3%A4%20%3F%23", "//inner//clip"):
        for start in ("file://", "FILE://localhost"):
            url = f"{start}{policy.allowed_local_media_path}{path}"
            assert read_file(url, policy, "image 1")[0] == b"clip"


def test_every_other_path_gets_the_same_error(policy: MediaPolicy) -> None:
    paths = r"""
/../secret /%2e%2e/secret /%2e%2e%2fsecret /%252e%252e/secret /..%5csecret /..\secret /./../secret //../../secret -too
/%c0%ae%c0%ae/secret /inner/../../secret /../allowed-too /out /up/secret /up/allowed/../secret /clip%00 /%00 /loop /pipe
/inner / /missing /clip/x""".split()
    paths += ["", "/" + "x" * 5000]
    before = len(os.listdir("/proc/self/fd"))
    for path in paths:
        with pytest.raises(MediaError) as caught:
            read_file(f"file://{policy.allowed_local_media_path}{path}", policy, "image 1")
        problem = "no such regular file under the directory that --allowed-local-media-path names"
        assert str(caught.value) == f"image 1: {problem}", path
    assert len(os.listdir("/proc/self/fd")) <= before


def test_malformed_file_url_is_refused() -> None:
    urls = "file://a.test/a file:a file:/a file://[ file:///a?x file:///a\t/../b".split(" ")
    for url in (*urls, "file:///" + "x" * 16384):
        with pytest.raises(MediaError, match="has the form file:///path/to/file"):
            read_file(url, MediaPolicy(Path("/"), 1000), "image 1")


@pytest.mark.usefixtures("policy")
def test_size_and_kind_of_file(tmp_path: Path) -> None:
    hints = {"allowed/big": "--max-media-bytes", "allowed/empty": "is empty", "/dev/zero": "no such regular file"}
    hints["/proc/self/maps"] = "--max-media-bytes"  # stat() reports a size of 0
    for path, hint in hints.items():
        with pytest.raises(MediaError, match=hint):
            read_file(f"file://{tmp_path / path}", MediaPolicy(Path("/"), 1000), "image 1")


def test_the_digest_of_a_file_is_known_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, policy = tmp_path / "clip", MediaPolicy(tmp_path, 1000)
    path.write_bytes(b"first")
    url, times = path.as_uri(), path.stat()
    for _ in range(2):  # it may change within the tick of its time stamps
        assert read_file(url, policy, "video 1") == (b"first", digest := content_digest(b"first"))
    now = time.time_ns() + 2 * SETTLED_NS
    monkeypatch.setattr(time, "time_ns", lambda: now)
    read_file(url, policy, "video 1")
    (tmp_path / "link").symlink_to("clip")
    for name in (path, tmp_path / "link"):
        assert read_file(name.as_uri(), policy, "video 1") == (None, digest)
        assert read_file(name.as_uri(), policy, "video 1", again=True) == (b"first", digest)
    while path.stat().st_ctime_ns == times.st_ctime_ns:
        path.write_bytes(b"other")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert read_file(url, policy, "video 1")[0] == b"other"


FRAMES = [bytes([number]) * number for number in range(1, 5)]  # frame n has n bytes
UNEVEN = [10.0, 10.5, 12.0, 16.0]


def fetched_frames(sampling: VideoSampling, frames=FRAMES, times=None, **limits: Any) -> tuple[bytes, Frames]:
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    return fetch_frames(url, MediaPolicy(None, 60), DecodeLimits.of(EngineConfig(**limits)), sampling, "video 1", times)


def test_all_frames_count_at_their_times() -> None:
    for sampling, given, times, seconds in (
        (VideoSampling(fps=4, max_frames=4), None, [0, 0.25, 0.5, 0.75], 1),
        (VideoSampling(fps=1), UNEVEN, UNEVEN, 8),
        (VideoSampling(num_frames=3), None, [0, 0.5, 1, 1.5], 2),  # at two per second
    ):
        data, sent = fetched_frames(sampling, times=given)
        assert (data, sent.sizes, sent.facts.timestamps) == (b"".join(FRAMES), [1, 2, 3, 4], times)
        assert sent.facts.total_frames / sent.facts.fps == seconds


def test_frames_that_are_refused() -> None:
    for problem, sampling, more in (
        ("frame 2: is empty", VideoSampling(fps=4), {"frames": [b"a", b"", b"c"]}),
        ("it has 4 frames and 3 timestamps; send one for each frame", VideoSampling(fps=2), {"times": UNEVEN[:3]}),
        ("start and end are for a video that is sent as a file", VideoSampling(fps=4, start=1), {}),
        ("it has 4 frames, .*--max-video-frames-kept", VideoSampling(fps=2), {"max_video_frames_kept": 3}),
    ):
        with pytest.raises(MediaError, match=f"^video 1: {problem}"):
            fetched_frames(sampling, **more)
