import os
from pathlib import Path

import pytest

from mini_engine.media.errors import MediaError
from mini_engine.media.fetch import fetch
from mini_engine.media.policy import MediaPolicy


@pytest.fixture
def policy(tmp_path: Path) -> MediaPolicy:
    """Allows a directory with regular and special files and links that lead outside, to `secret`."""
    root = tmp_path / "allowed"
    (root / "inner").mkdir(parents=True)
    for outside in ("secret", "allowed-too", "clip"):
        (tmp_path / outside).write_bytes(b"secret")
    for inside in ("clip", "inner/clip", "inner/ä ?#"):
        (root / inside).write_bytes(b"clip")
    (root / "big").write_bytes(bytes(1001))
    (root / "empty").touch()
    for link, target in {"link": "clip", "out": "../secret", "up": "..", "loop": "loop"}.items():
        (root / link).symlink_to(target)
    os.mkfifo(root / "pipe")
    return MediaPolicy(root, 1000)


@pytest.mark.parametrize("path", ["/clip", "/inner/../%63lip", "/link", "/inner/%C3%A4%20%3F%23", "//inner//clip"])
def test_file_below_the_root_is_read(path: str, policy: MediaPolicy) -> None:
    for start in ("file://", "FILE://localhost"):
        assert fetch(f"{start}{policy.allowed_local_media_path}{path}", policy) == b"clip"


REFUSED_PATHS = r"""
/../secret /%2e%2e/secret /%2e%2e%2fsecret /%252e%252e/secret /..%5csecret /..\secret /./../secret //../../secret -too
/%c0%ae%c0%ae/secret /inner/../../secret /../allowed-too /out /up/secret /up/allowed/../secret /clip%00 /%00 /loop /pipe
/inner / /missing /clip/x""".split()


@pytest.mark.parametrize("path", [*REFUSED_PATHS, "", "/" + "x" * 5000])
def test_every_other_path_gets_the_same_error(path: str, policy: MediaPolicy) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MediaError) as caught:
        fetch(f"file://{policy.allowed_local_media_path}{path}", policy, "image 1")
    problem = "no such regular file under the directory that --allowed-local-media-path names"
    assert str(caught.value) == f"image 1: {problem}"
    assert len(os.listdir("/proc/self/fd")) <= before


BAD_URLS = "file://a.test/a file:a file:/a file://[ file:///a?x file:///a\t/../b".split(" ")


@pytest.mark.parametrize("url", [*BAD_URLS, "file:///" + "x" * 16384])
def test_malformed_file_url_is_refused(url: str) -> None:
    with pytest.raises(MediaError, match="has the form file:///path/to/file"):
        fetch(url, MediaPolicy(Path("/"), 1000))


SIZES = {"allowed/big": "--max-media-bytes", "allowed/empty": "is empty", "/dev/zero": "no such regular file"}
SIZES["/proc/self/maps"] = "--max-media-bytes"  # stat() reports a size of 0


@pytest.mark.parametrize(("path", "hint"), SIZES.items())
def test_size_and_kind_of_file(path: str, hint: str, policy: MediaPolicy, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=hint):
        fetch(f"file://{tmp_path / path}", MediaPolicy(Path("/"), 1000))
