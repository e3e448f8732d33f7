"""`data:` and `file://` URLs: which bytes they are, and which are refused."""

import base64
import os
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mini_engine.config.decode_limits import DecodeLimits
from mini_engine.media.frame_sampling import VideoSampling
from mini_engine.media.media_errors import MediaError
from mini_engine.media.sources.fetch import Frames, declared_size, fetch, fetch_frames, is_elsewhere, is_local_file
from mini_engine.media.sources.policy import MediaPolicy
from mini_engine.protocol.inline_data import DataUrl

POLICY = MediaPolicy(None, 1000)
BASE64 = "//4xMj8+"
DATA_URLS = [f"data:video/mp4;base64,{BASE64}", f"DATA:;x=y;BASE64,{BASE64}", "data:;base64," + "\r\n".join(BASE64)]
BAD_URLS = ["data:video/mp4;base64", "data:,", "data:;base64,", "data:,YQ==", "data:;base64,ab*d", "data:;base64,a"]
BAD_URLS += ["data:;base64,=QQQ", "data:;base64,\ud800", "data:;base64,QUJD\0QUJD", "data:;base64,%2F%2F4x", "clip.mp4"]
BAD_URLS += ["ftp://a/", "file:///etc/passwd", " data:;base64,YQ==", "", "data:" + "x" * 2000 + ";base64,YQ=="]


@pytest.mark.parametrize("url", DATA_URLS)
def test_data_url_is_decoded(url: str) -> None:
    assert fetch(url, POLICY) == b"\xff\xfe12?>"


@pytest.mark.parametrize("url", BAD_URLS)
def test_invalid_or_disabled_url_is_refused(url: str) -> None:
    with pytest.raises(MediaError, match="^video 2: "):
        fetch(url, POLICY, "video 2")


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("lines", [False, True])
def test_data_url_of_several_slices(lines: bool, extra: int) -> None:
    data = os.urandom(400_000 + extra)
    text = base64.b64encode(data).decode().rstrip("=")
    url = "data:;base64," + "\r\n".join(textwrap.wrap(text, 77) if lines else [text])
    policy = MediaPolicy(None, 2 * len(data))
    assert fetch(url, policy) == data
    assert (declared_size(url, policy) or 0) >= len(data)
    for slash, plus in ((r"\/", "+"), (r"\u002F", r"\u002b")):
        escaped = text.replace("/", slash).replace("+", plus).encode()
        assert fetch(DataUrl("data:;base64,", escaped, 0, len(escaped)), policy) == data


@pytest.mark.parametrize(("ask", "size"), [(fetch, 1001), (fetch, 100_000), (declared_size, 100_000)])
def test_data_url_above_the_limit_is_refused(ask: Callable, size: int) -> None:
    with pytest.raises(MediaError, match="--max-media-bytes"):
        ask("data:;base64," + base64.b64encode(bytes(size)).decode(), POLICY)


def test_declared_size(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"clip")
    policy = MediaPolicy(tmp_path, 1000, ["media.test"])
    urls = ["data:;base64,QUJDRA==", f"File://{tmp_path}/clip.mp4", "Http://media.test/a.mp4"]
    assert [declared_size(url, policy) for url in urls] == [6, 4, None]
    (tmp_path / "clip.mp4").write_bytes(bytes(1001))
    for url, flag in (("http://other.test/", "--allowed-media-domains"), (urls[1], "--max-media-bytes")):
        for one in (policy, replace(policy, allowed_media_domains=())):
            with pytest.raises(MediaError, match=flag):
                declared_size(url, one)
    assert [is_local_file(url) for url in urls] == [False, True, False]
    assert [is_elsewhere(url) for url in urls] == [False, False, True]


# --- local files ------------------------------------------------------------------------------------------------------


def make_root(base: Path) -> Path:
    """A directory with regular and special files and links that lead outside, to `secret`."""
    root = base / "allowed"
    (root / "inner").mkdir(parents=True)
    for outside in ("secret", "allowed-too", "clip"):
        (base / outside).write_bytes(b"secret")
    for inside in ("clip", "inner/clip", "inner/ä ?#"):
        (root / inside).write_bytes(b"clip")
    (root / "big").write_bytes(bytes(1001))
    (root / "empty").touch()
    for link, target in {"link": "clip", "out": "../secret", "up": "..", "loop": "loop"}.items():
        (root / link).symlink_to(target)
    os.mkfifo(root / "pipe")
    return root


@pytest.fixture
def policy(tmp_path: Path) -> MediaPolicy:
    return MediaPolicy(make_root(tmp_path), 1000)


@pytest.mark.parametrize("path", ["/clip", "/inner/../%63lip", "/link", "/inner/%C3%A4%20%3F%23", "//inner//clip"])
def test_file_below_the_root_is_read(path: str, policy: MediaPolicy) -> None:
    for start in ("file://", "FILE://localhost"):
        assert fetch(f"{start}{policy.allowed_local_media_path}{path}", policy) == b"clip"


REFUSED_PATHS = r"""
/../secret /%2e%2e/secret /%2e%2e%2fsecret /%252e%252e/secret /..%5csecret /..\secret /./../secret //../../secret -too
/%c0%ae%c0%ae/secret /inner/../../secret /../allowed-too /out /up/secret /up/allowed/../secret /clip%00 /%00 /loop /pipe
/inner / /missing /clip/x""".split()
REFUSED_PATHS += ["", "/" + "x" * 5000]


@pytest.mark.parametrize("path", REFUSED_PATHS)
def test_every_other_path_gets_the_same_error(path: str, policy: MediaPolicy) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MediaError) as caught:
        fetch(f"file://{policy.allowed_local_media_path}{path}", policy, "image 1")
    problem = "no such regular file under the directory that --allowed-local-media-path names"
    assert str(caught.value) == f"image 1: {problem}"
    assert len(os.listdir("/proc/self/fd")) <= before


BAD_FILE_URLS = "file://a.test/a file:a file:/a file://[ file:///a?x file:///a\t/../b".split(" ")
BAD_FILE_URLS += ["file:///" + "x" * 16384]


@pytest.mark.parametrize("url", BAD_FILE_URLS)
def test_malformed_file_url_is_refused(url: str) -> None:
    with pytest.raises(MediaError, match="has the form file:///path/to/file"):
        fetch(url, MediaPolicy(Path("/"), 1000))


SIZES = {"allowed/big": "--max-media-bytes", "allowed/empty": "is empty", "/dev/zero": "no such regular file"}
SIZES["/proc/self/maps"] = "--max-media-bytes"  # stat() reports a size of 0


@pytest.mark.parametrize(("path", "hint"), SIZES.items())
def test_size_and_kind_of_file(path: str, hint: str, policy: MediaPolicy, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=hint):
        fetch(f"file://{tmp_path / path}", MediaPolicy(Path("/"), 1000))


FRAMES = [bytes([number]) * number for number in range(1, 5)]  # frame n has n bytes
UNEVEN = [10.0, 10.5, 12.0, 16.0]


def fetched_frames(
    sampling: VideoSampling, frames: list[bytes] = FRAMES, timestamps: list[float] | None = None, **limits: Any
) -> tuple[bytes, Frames]:
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    return fetch_frames(url, MediaPolicy(None, 60), DecodeLimits(**limits), sampling, "video 1", timestamps)


@pytest.mark.parametrize(("sampling", "given", "times", "seconds"), [
    (VideoSampling(fps=4, max_frames=4), None, [0, 0.25, 0.5, 0.75], 1),
    (VideoSampling(fps=1), UNEVEN, UNEVEN, 8),
    (VideoSampling(num_frames=3), None, [0, 0.5, 1, 1.5], 2),  # at two per second
])  # fmt: skip
def test_all_frames_count_at_their_times(
    sampling: VideoSampling, given: list[float] | None, times: list[float], seconds: float
) -> None:
    data, sent = fetched_frames(sampling, timestamps=given)
    assert (data, sent.sizes, sent.facts.timestamps) == (b"".join(FRAMES), [1, 2, 3, 4], times)
    assert sent.facts.total_frames / sent.facts.fps == seconds


@pytest.mark.parametrize(("sampling", "more", "problem"), [
    ({"fps": 4}, {"frames": [b"a", b"", b"c"]}, "frame 2: is empty"),
    ({"fps": 2}, {"timestamps": UNEVEN[:3]}, "it has 4 frames and 3 timestamps; send one for each frame"),
    ({"fps": 4, "start": 1}, {}, "start and end are for a video that is sent as a file"),
    ({"fps": 2}, {"max_video_frames_kept": 3}, "it has 4 frames, .*--max-video-frames-kept"),
])  # fmt: skip
def test_frames_that_are_refused(sampling: dict[str, Any], more: Any, problem: str) -> None:
    with pytest.raises(MediaError, match=f"^video 1: {problem}"):
        fetched_frames(VideoSampling(**sampling), **more)
