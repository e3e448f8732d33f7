import base64
import os
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import quote

import pytest

from mini_engine.media.errors import FetchCancelled, MediaError
from mini_engine.media.fetch import MAX_URL_CHARACTERS, declared_size, fetch, is_elsewhere, is_local_file
from mini_engine.media.policy import MediaPolicy

POLICY = MediaPolicy(None, 1000)
BASE64 = "//4xMj8+"
DATA_URLS = [f"data:video/mp4;base64,{BASE64}", f"DATA:;x=y;BASE64,{BASE64}", "data:video/mp4,%FF%fe12?>"]
DATA_URLS += [f"data:;base64,{quote(BASE64, safe='')}", "data:;base64," + "\r\n".join(BASE64)]
BAD_URLS = ["data:video/mp4;base64", "data:,", "data:;base64,", "data:,é", "data:;base64,ab*d", "data:;base64,a"]
BAD_URLS += ["data:;base64,=QQQ", "data:;base64,\ud800", "data:;base64,QUJD\0QUJD", "http://a.example/", "ftp://a/"]
BAD_URLS += ["file:///etc/passwd", "clip.mp4", " data:,x", "", "file:///" + "x" * MAX_URL_CHARACTERS]


@pytest.mark.parametrize("url", DATA_URLS)
def test_data_url_is_decoded(url: str) -> None:
    assert fetch(url, POLICY) == b"\xff\xfe12?>"


@pytest.mark.parametrize("url", BAD_URLS)
def test_invalid_or_disabled_url_is_refused(url: str) -> None:
    with pytest.raises(MediaError, match="^video 2: "):
        fetch(url, POLICY, "video 2")


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("form", ["unpadded", "lines", "percent"])
def test_data_url_of_several_slices(form: str, extra: int) -> None:
    data = os.urandom(100_000 + extra)
    text = base64.b64encode(data).decode()
    url = {
        "unpadded": "data:;base64," + text.rstrip("="),
        "lines": "data:;base64," + "\r\n".join(text[start : start + 77] for start in range(0, len(text), 77)),
        "percent": "data:," + quote(data),
    }[form]
    policy = MediaPolicy(None, 3 * len(data))
    assert fetch(url, policy) == data
    assert (declared_size(url, policy) or 0) >= len(data)


@pytest.mark.parametrize("url", ["data:;base64," + "QUJD" * 250_000, "data:," + "%00" * 250_000])
def test_cancellation_ends_decoding_within_a_slice(url: str) -> None:
    cancelled = Mock(threading.Event())
    cancelled.is_set.side_effect = [False, False, True]
    with pytest.raises(FetchCancelled):
        fetch(url, MediaPolicy(None, 1 << 20), cancelled=cancelled)


@pytest.mark.parametrize(("ask", "size"), [(fetch, 1001), (fetch, 100_000), (declared_size, 100_000)])
def test_data_url_above_the_limit_is_refused(ask: Callable, size: int) -> None:
    for url in ("data:;base64," + base64.b64encode(bytes(size)).decode(), "data:," + "%00" * size):
        with pytest.raises(MediaError, match="--max-media-bytes"):
            ask(url, POLICY)


def test_declared_size(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"clip")
    policy = MediaPolicy(tmp_path, 1000, ["media.test"])
    urls = ["data:;base64,QUJDRA==", "data:,abc", f"File://{tmp_path}/clip.mp4", "Http://media.test/a.mp4"]
    assert [declared_size(url, policy) for url in urls] == [6, 3, 4, None]
    (tmp_path / "clip.mp4").write_bytes(bytes(1001))
    for url, flag in (("http://other.test/", "--allowed-media-domains"), (urls[2], "--max-media-bytes")):
        with pytest.raises(MediaError, match=flag):
            declared_size(url, policy)
    assert [is_local_file(url) for url in urls] == [False, False, True, False]
    assert [is_elsewhere(url) for url in urls] == [False, False, False, True]
