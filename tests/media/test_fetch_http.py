import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mini_engine.media import http_fetch
from mini_engine.media.errors import FetchCancelled, MediaError
from mini_engine.media.fetch import MediaPolicy, declared_size, fetch
from tests.media.web import WebServer, chunked, response

LIMIT = 1 << 20
BODY = bytes(range(256)) * 2000


class Names:
    """A resolver that notes what it is asked. Names that it does not know do not exist."""

    def __init__(self, **names: list[str]):
        self.names = {name.replace("_", "."): found for name, found in names.items()}
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        if host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "secret detail 10.9.8.7")
        return self.names[host]


@pytest.fixture
def names() -> Names:
    return Names(media_test=["127.0.0.1"], other_test=["127.0.0.1"])


@pytest.fixture
def policy(names: Names) -> MediaPolicy:
    """media.test is allowed and stands for this machine. Nothing else is allowed."""
    return MediaPolicy(
        None,
        LIMIT,
        allowed_media_domains=["media.test"],
        media_fetch_timeout=20,
        resolve=names,
        is_allowed_address=lambda address: str(address) == "127.0.0.1",
    )


def refusal(url: str, policy: MediaPolicy, **kwargs: Any) -> str:
    """The error's text. It tells neither where the name leads to nor what the system said."""
    with pytest.raises(MediaError) as caught:
        fetch(url, policy, "video 1", **kwargs)
    text = str(caught.value)
    assert text.startswith("video 1: ")
    assert "127.0.0.1" not in text and "10." not in text and "secret" not in text and "Errno" not in text
    return text


def test_a_body_with_its_length(policy: MediaPolicy, names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    with WebServer(response(BODY)) as server:
        assert fetch(f"HTTP://Media.TEST:{server.port}/a%20b/ü?q=1&é#fragment", policy) == BODY
        assert names.asked == [("media.test", server.port)]
    head = server.requests[0].split("\r\n")
    assert head[0] == "GET /a%20b/%C3%BC?q=1&%C3%A9 HTTP/1.1"
    assert f"Host: media.test:{server.port}" in head
    assert "Accept-Encoding: identity" in head


@pytest.mark.parametrize(
    "answer",
    [
        response(chunked(BODY[:1], BODY[1:70000], BODY[70000:]), Transfer_Encoding="chunked"),
        b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
        b"HTTP/1.1 100 Continue\r\n\r\n" + response(BODY, Content_Encoding="Identity"),
        response(BODY + b"more than announced", Content_Length=str(len(BODY))),
    ],
    ids=["chunked", "to the end", "after 100", "more than announced"],
)
def test_bodies_of_other_forms(answer: bytes, policy: MediaPolicy) -> None:
    with WebServer(answer) as server:
        assert fetch(f"http://media.test:{server.port}", policy) == BODY
    assert server.requests[0].startswith("GET / HTTP/1.1")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (response(b"no", "404 Not Found"), "status 404"),
        (response(b"no", "500 Oops"), "status 500"),
        (response(b"part", "206 Partial Content"), "status 206"),
        (response(b"", "204 No Content"), "status 204"),
        (response(b""), "holds no bytes"),
        (response(chunked(), Transfer_Encoding="chunked"), "holds no bytes"),
        (response(BODY, Content_Length=str(len(BODY) + 1)), "less than it announced"),
        (response(chunked(BODY)[:-5], Transfer_Encoding="chunked"), "broke off"),
        (response(b"zz\r\nx", Transfer_Encoding="chunked"), "broke off"),
        (response(b"-5\r\nxxxxxxxxx", Transfer_Encoding="chunked"), "broke off"),
        (response(BODY, Content_Encoding="gzip"), "Content-Encoding"),
        (response(BODY, Content_Encoding="identity, br"), "Content-Encoding"),
        (response(BODY, Transfer_Encoding="gzip, chunked"), "Transfer-Encoding"),
        (response(b"x", Content_Length=str(LIMIT + 1)), "--max-media-bytes"),
        (response(b"x", Content_Length="9" * 30), "--max-media-bytes"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not speak HTTP"),
        (b"\x16\x03\x01\x00\xff" * 20000, "does not speak HTTP"),
        (b"HTTP/1.1 abc\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\nx", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"b" * 200_000 + b"\r\n\r\nx", "does not speak HTTP"),
        (b"", "does not speak HTTP"),
    ],
)
def test_answers_that_are_refused(answer: bytes, hint: str, policy: MediaPolicy) -> None:
    with WebServer(answer) as server:
        assert hint in refusal(f"http://media.test:{server.port}/a.mp4", policy)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7fffffffffff\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    ],
)
def test_an_endless_body_is_cut_at_the_limit(head: bytes, policy: MediaPolicy) -> None:
    def endless(connection: socket.socket, _: str) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(bytes(1 << 16))

    with WebServer(endless) as server:
        tracemalloc.start()
        try:
            assert "--max-media-bytes" in refusal(f"http://media.test:{server.port}/", policy)
            assert tracemalloc.get_traced_memory()[1] < 4 * LIMIT
        finally:
            tracemalloc.stop()


def drip(connection: socket.socket, head: bytes, one: bytes) -> None:
    connection.sendall(head)
    for _ in range(400):
        connection.sendall(one)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("head", "one"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
        (b"HTTP/1.1 200 OK\r\n", b"A"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["body", "chunks", "chunk size", "header", "100"],
)
def test_dripping_answers_end_at_the_total_time_out(head: bytes, one: bytes, policy: MediaPolicy) -> None:
    with WebServer(lambda connection, _: drip(connection, head, one)) as server:
        start = time.monotonic()
        text = refusal(f"http://media.test:{server.port}/", replace(policy, media_fetch_timeout=0.4))
        assert 0.3 < time.monotonic() - start < 3
    assert "within 0.4 seconds, the limit of --media-fetch-timeout" in text


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"])
def test_a_silent_server(head: bytes, policy: MediaPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fetch, "QUIET_SECONDS", 0.3)
    monkeypatch.setattr(http_fetch, "_POLL_SECONDS", 0.1)
    done = threading.Event()

    def silent(connection: socket.socket, _: str) -> None:
        connection.sendall(head)
        done.wait(10)

    with WebServer(silent) as server:
        assert "sent nothing for 0.3 seconds" in refusal(f"http://media.test:{server.port}/", policy)
        done.set()


def test_a_cancelled_fetch_ends_soon(policy: MediaPolicy) -> None:
    cancelled, done = threading.Event(), threading.Event()

    def silent(connection: socket.socket, _: str) -> None:
        cancelled.set()
        done.wait(10)

    with WebServer(silent) as server:
        start = time.monotonic()
        with pytest.raises(FetchCancelled):
            fetch(f"http://media.test:{server.port}/", policy, cancelled=cancelled)
        assert time.monotonic() - start < 3
        done.set()


def test_a_name_that_takes_too_long_to_resolve(policy: MediaPolicy) -> None:
    done = threading.Event()

    def resolve(host: str, port: int) -> list[str]:
        done.wait(10)
        return []

    slow = replace(policy, resolve=resolve, media_fetch_timeout=0.2)
    assert "--media-fetch-timeout" in refusal("http://media.test/", slow)
    done.set()


def test_no_server_there(policy: MediaPolicy, names: Names) -> None:
    with WebServer(b"") as server:
        pass
    assert "takes no connection" in refusal(f"http://media.test:{server.port}/", policy)
    del names.names["media.test"]
    assert "cannot be resolved" in refusal(f"http://media.test:{server.port}/", policy)


def test_the_next_address_is_tried(policy: MediaPolicy, names: Names) -> None:
    names.names["media.test"] = ["127.0.0.2", "127.0.0.1"]
    anywhere = replace(policy, is_allowed_address=lambda _: True)
    with WebServer(response(BODY)) as server:  # it listens on the second address only
        assert fetch(f"http://media.test:{server.port}/", anywhere) == BODY


@pytest.mark.parametrize("found", [["127.0.0.1"], ["::ffff:127.0.0.1"], ["93.184.215.14", "127.0.0.1"], ["fe80::1%lo"]])
def test_names_of_this_machine_are_not_dialled(found: list[str], policy: MediaPolicy, names: Names) -> None:
    """By the default rule, which the other tests replace. One address that is not public is enough."""
    names.names["media.test"] = found
    strict = MediaPolicy(None, LIMIT, allowed_media_domains=["media.test", "127.0.0.1"], resolve=names)
    with WebServer(response(BODY)) as server:
        assert "not on the public internet" in refusal(f"http://media.test:{server.port}/", strict)
    assert server.dialled == 0


def test_the_systems_name_of_this_machine_is_not_dialled() -> None:
    with WebServer(response(BODY)) as server:
        text = refusal(f"http://localhost:{server.port}/", MediaPolicy(None, LIMIT, ["localhost"]))
    assert "not on the public internet" in text and server.dialled == 0


def test_the_checked_address_is_the_dialled_one(policy: MediaPolicy, names: Names) -> None:
    """A name that changes its mind after the check (DNS rebinding) is not asked again."""

    def resolve(host: str, port: int) -> list[str]:
        found = names(host, port)
        names.names["media.test"] = ["127.0.0.2"]
        return found

    with WebServer(response(BODY)) as server:
        assert fetch(f"http://media.test:{server.port}/", replace(policy, resolve=resolve)) == BODY
    assert len(names.asked) == 1


@pytest.mark.parametrize("with_port", [True, False])
def test_an_address_that_the_operator_named(with_port: bool) -> None:
    with WebServer(response(BODY)) as server:
        entry = f"127.0.0.1:{server.port}" if with_port else "127.0.0.1"
        policy = MediaPolicy(None, LIMIT, allowed_media_domains=[entry])
        assert fetch(f"http://127.0.0.1:{server.port}/a", policy) == BODY
        for url in (f"http://127.0.0.2:{server.port}/", f"http://[::ffff:127.0.0.1]:{server.port}/"):
            with pytest.raises(MediaError, match="none that --allowed-media-domains names"):
                fetch(url, policy)
        if with_port:
            with pytest.raises(MediaError, match="none that --allowed-media-domains names"):
                fetch(f"http://127.0.0.1:{server.port - 1}/", policy)
    assert server.dialled == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/",
        "http://sub.media.test/",
        "http://media.test.other.test/",
        "http://media.test./",
        "http://media.test:0/",
        "http://media.test:65536/",
        "http://media.test:/",
        "http://media.test:80x/",
        "http://media.test:\u0668\u0660/",
        "http://user@media.test/",
        "http://user:word@media.test/",
        "http://media.test@other.test/",
        "http://other.test#@media.test/",
        "http://other.test\\@media.test/",
        "http://media.test\\.other.test/",
        "http://media.test%2eother.test/",
        "http://med\tia.test/",
        "http://media.test/a\nb",
        "http://media.test/a\r\nHost: other.test",
        "http://media.test/a b",
        "http://media.test/\x00",
        "http://media.test/\ud800",
        "http://127.0.0.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://0/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:7f00:1]/",
        "http://[fe80::1%25lo]/",
        "http://[media.test]/",
        "http://[::1/",
        "http://\uff11\uff12\uff17.0.0.1/",
        "http://media\u3002test/",
        "http://\uff4dedia.test/",
        "http:///media.test/",
        "http:media.test/",
        "http://",
        "http://" + "a" * 10000 + "/",
        "http://" + "ü" * 10000 + "/",
    ],
)
def test_urls_that_are_refused_before_a_name_is_resolved(url: str, policy: MediaPolicy, names: Names) -> None:
    start = time.monotonic()
    refusal(url, policy)
    with pytest.raises(MediaError):
        declared_size(url, policy)
    assert not names.asked
    assert time.monotonic() - start < 1


def test_a_name_beyond_ascii(policy: MediaPolicy, names: Names) -> None:
    names.names["xn--bcher-kva.test"] = ["127.0.0.1"]
    german = replace(policy, allowed_media_domains=["Bücher.test"])
    with WebServer(response(BODY)) as server:
        for host in ("BÜCHER.test", "xn--bcher-KVA.test"):
            assert fetch(f"http://{host}:{server.port}/", german) == BODY
    assert all(f"Host: xn--bcher-kva.test:{server.port}\r\n" in request for request in server.requests)


@pytest.fixture
def redirecting() -> Iterator[WebServer]:
    """GET /?URL redirects to URL, GET /loop to itself, GET /<n> to /<n-1>, GET /0 is the body."""

    def answer(connection: socket.socket, request: str) -> None:
        path = request.split()[1]
        if path == "/0":
            return connection.sendall(response(BODY))
        if path == "/nowhere":
            return connection.sendall(response(b"", "302 Found"))
        to = path[2:] if path.startswith("/?") else path if path == "/loop" else f"{int(path[1:]) - 1}"
        return connection.sendall(response(b"elsewhere", "302 Found", Location=to))

    with WebServer(answer) as server:
        yield server


def test_redirects_are_off_by_default(redirecting: WebServer, policy: MediaPolicy) -> None:
    assert "--allow-media-redirects" in refusal(f"http://media.test:{redirecting.port}/1", policy)
    assert redirecting.dialled == 1


def test_redirects_where_they_are_allowed(redirecting: WebServer, policy: MediaPolicy, names: Names) -> None:
    follow = replace(policy, allow_media_redirects=True)
    base = f"http://media.test:{redirecting.port}"
    assert fetch(f"{base}/5", follow) == BODY
    assert names.asked == [("media.test", redirecting.port)] * 6  # anew at each step
    assert fetch(f"{base}/?//MEDIA.test:{redirecting.port}/0", follow) == BODY
    assert "more than 5 redirects" in refusal(f"{base}/6", follow)
    assert "more than 5 redirects" in refusal(f"{base}/loop", follow)
    assert "no valid URL" in refusal(f"{base}/nowhere", follow)


@pytest.mark.parametrize(
    "to",
    [
        "http://other.test:{port}/0",
        "//other.test:{port}/0",
        "http://127.0.0.1:{port}/0",
        "http://user@media.test:{port}/0",
        "file:///etc/passwd",
        "data:,x",
        "ftp://media.test/",
        "gopher://media.test:{port}/",
    ],
)
def test_redirects_to_where_no_url_may_lead(to: str, redirecting: WebServer, policy: MediaPolicy, names: Names) -> None:
    follow = replace(policy, allow_media_redirects=True, allowed_local_media_path=None)
    url = f"http://media.test:{redirecting.port}/?{to.format(port=redirecting.port)}"
    assert refusal(url, follow).startswith("video 1: after a redirect: ")
    assert redirecting.dialled == 1 and len(names.asked) == 1


def test_a_redirect_to_an_address_that_is_not_allowed(
    redirecting: WebServer, policy: MediaPolicy, names: Names
) -> None:
    names.names["other.test"] = ["127.0.0.2"]
    follow = replace(policy, allow_media_redirects=True, allowed_media_domains=["media.test", "other.test"])
    text = refusal(f"http://media.test:{redirecting.port}/?http://other.test:{redirecting.port}/0", follow)
    assert "after a redirect: the URL's host is not on the public internet" in text
    assert redirecting.dialled == 1


@pytest.mark.parametrize("location", [b"/a\tb", b"//other.test\\@media.test/", b"/\xff", b"http://[::1", b""])
def test_locations_that_are_no_urls(location: bytes, policy: MediaPolicy) -> None:
    answer = b"HTTP/1.1 307 x\r\nLocation: " + location + b"\r\n\r\n"
    with WebServer(answer) as server:
        text = refusal(f"http://media.test:{server.port}/", replace(policy, allow_media_redirects=True))
    assert "no valid URL" in text and server.dialled == 1


def test_http_is_off_without_a_list() -> None:
    for scheme in ("http", "https"):
        with pytest.raises(MediaError, match="not enabled; start the server with --allowed-media-domains"):
            fetch(f"{scheme}://example.com/a", MediaPolicy(None, LIMIT))


@pytest.mark.parametrize(
    "entry", ["", "*.example.com", "http://a.b", "a.b/c", "u@a.b", "a.b:0", "a.b:x", "a b", "a.b.", "127.1", "1::2::3"]
)
def test_entries_that_name_no_host(entry: str) -> None:
    with pytest.raises(ValueError, match="^--allowed-media-domains: .* is no exact host name"):
        MediaPolicy(None, LIMIT, allowed_media_domains=[entry])


def test_the_time_out_must_be_positive() -> None:
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="--media-fetch-timeout"):
            MediaPolicy(None, LIMIT, media_fetch_timeout=seconds)


def test_the_size_of_what_is_elsewhere_is_unknown(policy: MediaPolicy, names: Names) -> None:
    assert declared_size("http://media.test/a.mp4", policy) is None
    assert not names.asked
