import base64
import os
from pathlib import Path
from urllib.parse import quote

import pytest

from mini_engine.media.errors import MediaError
from mini_engine.media.fetch import LONGEST_URL, MediaPolicy, fetch

LIMIT = 1000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An allowed directory with a file, a directory and ways out; `secret.mp4` lies beside it."""
    root = tmp_path / "allowed"
    (root / "inner").mkdir(parents=True)
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (tmp_path / "allowed-too.mp4").write_bytes(b"secret")
    (root / "clip.mp4").write_bytes(b"clip")
    (root / "inner" / "ä ?#.mp4").write_bytes(b"odd name")
    (root / "big.mp4").write_bytes(bytes(LIMIT + 1))
    (root / "empty.mp4").touch()
    (root / "inside.mp4").symlink_to("clip.mp4")
    (root / "out.mp4").symlink_to(tmp_path / "secret.mp4")
    (root / "out").symlink_to(tmp_path)
    (root / "loop.mp4").symlink_to("loop.mp4")
    os.mkfifo(root / "pipe.mp4")
    return root


@pytest.fixture
def policy(root: Path) -> MediaPolicy:
    return MediaPolicy(allowed_local_media_path=root, max_media_bytes=LIMIT)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "url",
    [
        "data:video/mp4;base64," + b64(b"\xff\xfe12?>"),
        "DATA:video/mp4;charset=x;BASE64," + b64(b"\xff\xfe12?>"),
        "data:;base64," + quote(b64(b"\xff\xfe12?>"), safe=""),
        "data:;base64," + b64(b"\xff\xfe12?>").rstrip("="),
        "data:;base64," + "\r\n".join(b64(b"\xff\xfe12?>")),
        "data:video/mp4,%FF%fe12?>",
    ],
)
def test_data_urls(url: str, policy: MediaPolicy) -> None:
    assert fetch(url, policy) == b"\xff\xfe12?>"


@pytest.mark.parametrize(
    "url", ["data:video/mp4;base64", "data:;base64,ab*d", "data:;base64,é", "data:;base64,a", "data:,"]
)
def test_bad_data_urls(url: str, policy: MediaPolicy) -> None:
    with pytest.raises(MediaError, match="^video 2: "):
        fetch(url, policy, "video 2")


@pytest.mark.parametrize("data", [bytes(LIMIT + 1), bytes(100 * LIMIT)])
@pytest.mark.parametrize("form", ["base64", "percent"])
def test_too_large_data_url(data: bytes, form: str, policy: MediaPolicy) -> None:
    url = "data:;base64," + b64(data) if form == "base64" else "data:," + quote(data)
    with pytest.raises(MediaError, match="--max-media-bytes") as caught:
        fetch(url, policy)
    assert caught.value.limit == "max_media_bytes"


def test_a_data_url_of_just_the_limit(policy: MediaPolicy) -> None:
    assert len(fetch("data:;base64," + b64(bytes(LIMIT)), policy)) == LIMIT


def test_files_under_the_root(root: Path, policy: MediaPolicy) -> None:
    assert fetch(f"file://{root}/clip.mp4", policy) == b"clip"
    assert fetch(f"file://localhost{root}/clip.mp4", policy) == b"clip"
    assert fetch(f"FILE://{root}/inner/../%63lip.mp4", policy) == b"clip"
    assert fetch(f"file://{root}/inside.mp4", policy) == b"clip"
    assert fetch(f"file://{quote(str(root / 'inner' / 'ä ?#.mp4'))}", policy) == b"odd name"


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.mp4",
        "/%2e%2e/secret.mp4",
        "/%2e%2e%2fsecret.mp4",
        "/inner/../../secret.mp4",
        "/../allowed-too.mp4",
        "-too.mp4",
        "/out.mp4",
        "/out/secret.mp4",
        "/out/allowed/../secret.mp4",
        "/clip.mp4%00",
        "/%00",
        "/loop.mp4",
        "/pipe.mp4",
        "/inner",
        "",
        "/",
        "/missing.mp4",
        "/clip.mp4/x",
        "/" + "x" * 5000,
    ],
)
def test_everything_else_looks_the_same(path: str, root: Path, policy: MediaPolicy) -> None:
    """One sentence for all, so that a client cannot find out what exists outside the root."""
    with pytest.raises(MediaError) as caught:
        fetch(f"file://{root}{path}", policy, "image 1")
    assert str(caught.value) == (
        "image 1: no such regular file under the directory that --allowed-local-media-path names"
    )


def test_a_symlink_swapped_in_after_the_check_is_not_followed(
    root: Path, policy: MediaPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = Path.resolve

    def resolve_then_swap(self: Path, strict: bool = False) -> Path:
        resolved = resolve(self, strict=strict)
        if self.name == "clip.mp4" and strict:
            self.unlink()
            self.symlink_to(root.parent / "secret.mp4")
        return resolved

    monkeypatch.setattr(Path, "resolve", resolve_then_swap)
    with pytest.raises(MediaError, match="no such regular file"):
        fetch(f"file://{root}/clip.mp4", policy)


def test_size_of_files(root: Path, policy: MediaPolicy) -> None:
    with pytest.raises(MediaError, match="--max-media-bytes"):
        fetch(f"file://{root}/big.mp4", policy)
    with pytest.raises(MediaError, match="no bytes"):
        fetch(f"file://{root}/empty.mp4", policy)


def test_no_descriptor_is_left_open(root: Path, policy: MediaPolicy) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("clip.mp4", "inner", "pipe.mp4", "out.mp4", "inner/ä ?#.mp4", "big.mp4"):
        try:
            fetch(f"file://{quote(str(root / name))}", policy)
        except MediaError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("http://example.com/a.mp4", "not enabled"),
        ("HTTPS://example.com/a.mp4", "not enabled"),
        ("file://example.com/a.mp4", "file:///path"),
        ("file:a.mp4", "file:///path"),
        ("file:///a.mp4?x", "no query"),
        ("file://[", "cannot be parsed"),
        ("file:///a\0.mp4", "no control characters"),
        ("file:///a\t/../b.mp4", "no control characters"),
        ("file:///\ud800.mp4", "no control characters"),
        ("ftp://example.com/a", "must start with data:, file://"),
        ("clip.mp4", "must start with data:, file://"),
        (" file:///a.mp4", "must start with data:, file://"),
        ("", "must start with data:, file://"),
        ("file:///" + "x" * LONGEST_URL, "longer than 16384 characters"),
    ],
)
def test_other_urls(url: str, hint: str, policy: MediaPolicy) -> None:
    with pytest.raises(MediaError, match=hint):
        fetch(url, policy)


def test_policy() -> None:
    with pytest.raises(MediaError, match="start the server with --allowed-local-media-path"):
        fetch("file:///etc/passwd", MediaPolicy(None, LIMIT))
    with pytest.raises(ValueError, match="must name a directory"):
        MediaPolicy(Path("/no/such/directory"), LIMIT)
    with pytest.raises(ValueError, match="at least 1"):
        MediaPolicy(None, 0)
