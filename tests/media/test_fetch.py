import base64
import os
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mini_engine.media.errors import MediaError
from mini_engine.media.fetch import declared_size, fetch, is_elsewhere, is_local_file
from mini_engine.media.policy import MediaPolicy

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
