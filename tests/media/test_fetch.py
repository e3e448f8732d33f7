import base64
import contextlib
import os
import random
import socket
import threading
import tracemalloc
from collections import Counter
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

import pytest

from mini_engine.media.data_urls import BLOCK_CHARACTERS
from mini_engine.media.errors import FetchCancelled, MediaError
from mini_engine.media.fetch import LONGEST_URL, MediaPolicy, declared_size, fetch

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
    directory = os.open(root, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:  # whose address has room for 107 bytes
        listener.bind(f"/proc/self/fd/{directory}/socket.mp4")
    os.close(directory)
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
    "url",
    [
        "data:video/mp4;base64",
        "data:,",
        "data:;base64,",
        "data:,é",
        "data:;base64,é",
        "data:;base64,\ud800",
        "data:;base64,ab*d",
        "data:;base64,ab-_",
        "data:;base64,QUJD!",
        "data:;base64,QUJD\0QUJD",
        "data:;base64,a",
        "data:;base64,QUJDa",
        "data:;base64,QQ=",
        "data:;base64,QQ===",
        "data:;base64,QQ====",
        "data:;base64,Q===",
        "data:;base64,====",
        "data:;base64,=QQQ",
        "data:;base64,QQ==QUJD",
        "data:;base64,QQ==QQ==",
        "data:;base64,QQ%3D%3DQQ%3D%3D",
        "data:" + "x" * 2000 + ";base64,QUJD",
    ],
)
def test_bad_data_urls(url: str, policy: MediaPolicy) -> None:
    with pytest.raises(MediaError, match="^video 2: "):
        fetch(url, policy, "video 2")


@pytest.mark.parametrize("extra", [0, 1, 2, 3])
@pytest.mark.parametrize("form", ["plain", "unpadded", "lines", "escaped", "percent"])
def test_data_urls_of_several_blocks(form: str, extra: int) -> None:
    """Whatever the place at which a block ends."""
    data = os.urandom(BLOCK_CHARACTERS * 3 + extra)
    text = b64(data)
    if form == "lines":
        text = "\r\n".join(text[start : start + 77] for start in range(0, len(text), 77))
    elif form == "escaped":
        text = quote(text, safe="")
    url = "data:," + quote(data) if form == "percent" else "data:;base64," + text.rstrip("=" * (form == "unpadded"))
    policy = MediaPolicy(None, len(data))
    assert fetch(url, policy) == data
    size = declared_size(url, policy)
    assert size is not None and size >= len(data)


def test_whatever_percent_signs_stand_for() -> None:
    rng = random.Random(0)
    for length in [*range(1, 60)] * 20:
        text = "".join(rng.choices(["%", "%4", "%41", "%fF", "0", "g", "A", " "], k=length))
        assert fetch(f"data:,{text}", MediaPolicy(None, LIMIT)) == unquote_to_bytes(text)


@pytest.mark.parametrize("form", ["%41", "%", "%%4"])
def test_percent_encoding_costs_no_multiple_of_its_length(form: str) -> None:
    url = "data:," + form * (1 << 18)
    tracemalloc.start()
    try:
        assert fetch(url, MediaPolicy(None, len(url)))
        assert tracemalloc.get_traced_memory()[1] < 2 * len(url) + 30 * BLOCK_CHARACTERS
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", ["base64", "percent"])
def test_a_long_data_url_is_decoded_in_small_steps(form: str) -> None:
    """So that no step of it holds the interpreter for long: between two of them other threads may run."""

    class Looks(threading.Event):
        count = 0

        def is_set(self) -> bool:
            self.count += 1
            return super().is_set()

    looks, data = Looks(), bytes(8 << 20)
    url = "data:;base64," + b64(data) if form == "base64" else "data:," + "%00" * len(data)
    assert fetch(url, MediaPolicy(None, len(data)), cancelled=looks) == data
    assert looks.count >= len(url) // BLOCK_CHARACTERS


def test_a_cancelled_fetch(root: Path, policy: MediaPolicy) -> None:
    cancelled = threading.Event()
    cancelled.set()
    for url in ("data:,x", "data:;base64,QUJD", f"file://{root}/clip.mp4"):
        with pytest.raises(FetchCancelled):
            fetch(url, policy, cancelled=cancelled)


def test_declared_size(root: Path, policy: MediaPolicy) -> None:
    assert declared_size("data:;base64," + b64(bytes(999)), policy) == 999
    assert declared_size("data:;base64," + b64(bytes(998)), policy) == 999
    assert declared_size("data:;base64," + b64(bytes(LIMIT)).rstrip("="), policy) == LIMIT
    assert declared_size("data:,abc", policy) == 3
    assert declared_size(f"file://{root}/clip.mp4", policy) == 4
    for url in (
        "data:,",
        "data:;base64," + b64(bytes(LIMIT)) + "=" * 5,
    ):  # what is wrong inside is for fetch to find
        assert declared_size(url, policy) is not None
    for url in (
        "ftp://example.com/a",
        "http://example.com/a",
        "data:;base64," + b64(bytes(2 * LIMIT)),
        "data:;base64",
        f"file://{root}/big.mp4",
        f"file://{root}/out.mp4",
        f"file://{root}/pipe.mp4",
    ):
        with pytest.raises(MediaError, match="^video 2: "):
            declared_size(url, policy, "video 2")


@pytest.mark.parametrize("data", [bytes(LIMIT + 1), bytes(100 * LIMIT)])
@pytest.mark.parametrize("form", ["base64", "percent"])
def test_too_large_data_url(data: bytes, form: str, policy: MediaPolicy) -> None:
    url = "data:;base64," + b64(data) if form == "base64" else "data:," + quote(data)
    with pytest.raises(MediaError, match="--max-media-bytes"):
        fetch(url, policy)


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
        "/%2E./secret.mp4",
        "/%252e%252e/secret.mp4",
        "/%252e%252e%252fsecret.mp4",
        "/..%5csecret.mp4",
        "/..\\secret.mp4",
        "/inner/%2e%2e/%2e%2e/secret.mp4",
        "/./../secret.mp4",
        "//../../secret.mp4",
        "/%c0%ae%c0%ae/secret.mp4",
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
        "/socket.mp4",
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


def test_a_directory_swapped_for_a_symlink_after_the_check_is_not_followed(
    root: Path, policy: MediaPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "inner" / "secret.mp4").write_bytes(b"harmless")
    resolve = Path.resolve

    def resolve_then_swap(self: Path, strict: bool = False) -> Path:
        resolved = resolve(self, strict=strict)
        if self.name == "secret.mp4":
            (root / "inner").rename(root / "moved")
            (root / "inner").symlink_to(root.parent)
        return resolved

    monkeypatch.setattr(Path, "resolve", resolve_then_swap)
    with pytest.raises(MediaError, match="no such regular file"):
        fetch(f"file://{root}/inner/secret.mp4", policy)


@pytest.mark.parametrize("name", ["zero", "null", "urandom", "tty", "shm", "fd/0"])
def test_devices_are_no_files(name: str) -> None:
    with pytest.raises(MediaError, match="no such regular file"):
        fetch(f"file:///dev/{name}", MediaPolicy(Path("/dev"), LIMIT))


def test_a_file_that_grows_is_cut_at_the_limit(
    root: Path, policy: MediaPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size at the open was fine."""
    fstat = os.fstat

    def fstat_then_grow(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        (root / "clip.mp4").write_bytes(bytes(5 * LIMIT))
        return status

    monkeypatch.setattr(os, "fstat", fstat_then_grow)
    with pytest.raises(MediaError, match="--max-media-bytes"):
        fetch(f"file://{root}/clip.mp4", policy)


def test_size_of_files(root: Path, policy: MediaPolicy) -> None:
    with pytest.raises(MediaError, match="--max-media-bytes"):
        fetch(f"file://{root}/big.mp4", policy)
    with pytest.raises(MediaError, match="no bytes"):
        fetch(f"file://{root}/empty.mp4", policy)


def descriptors() -> Counter[str]:
    """What is open, by where it leads. What others have left open may be closed at any time."""
    open_ = Counter[str]()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            open_[os.readlink(link)] += 1
    return open_


def test_no_descriptor_is_left_open(root: Path, policy: MediaPolicy) -> None:
    before = descriptors()
    for name in ("clip.mp4", "inner", "pipe.mp4", "out.mp4", "inner/ä ?#.mp4", "big.mp4"):
        try:
            fetch(f"file://{quote(str(root / name))}", policy)
        except MediaError:
            continue
    assert not descriptors() - before


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
