"""What web servers answer, and how long they take."""

import socket
import threading
import time
import tracemalloc
from dataclasses import replace

import pytest

from mini_engine.media import http_fetch
from mini_engine.media.errors import FetchCancelled
from mini_engine.media.fetch import MediaPolicy, fetch
from mini_engine.media.policy import BLOCK_BYTES
from tests.media.fetching import BODY, LIMIT, Names, refusal
from tests.media.web import WebServer, chunked, response


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
        (response(BODY, Content_Length="-5"), "Content-Length"),
        (response(BODY, Content_Length="5, 6"), "Content-Length"),
        (response(BODY, Content_Length="0x10"), "Content-Length"),
        (response(BODY, Content_Length="\u0663"), "Content-Length"),
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


def test_blocks_are_told_of_before_they_are_kept(policy: MediaPolicy) -> None:
    told: list[int] = []
    with WebServer(response(BODY)) as server:
        assert fetch(f"http://media.test:{server.port}/", policy, received=told.append) == BODY
    assert sum(told) == len(BODY) and max(told) <= BLOCK_BYTES
    told.clear()

    def refuse(nbytes: int) -> None:
        told.append(nbytes)
        raise LookupError

    for answer in (response(BODY), response(chunked(BODY), Transfer_Encoding="chunked")):
        with WebServer(answer) as server, pytest.raises(LookupError):
            fetch(f"http://media.test:{server.port}/", policy, received=refuse)
    assert len(told) == 2


DRIPPING = 20  # seconds at least


def drip(connection: socket.socket, head: bytes, one: bytes) -> None:
    connection.sendall(head)
    for _ in range(20 * DRIPPING):
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
        impatient = replace(policy, allowed_media_domains=["127.0.0.1"], media_fetch_timeout=0.4)
        text = refusal(f"http://127.0.0.1:{server.port}/", impatient)
        assert 0.3 < time.monotonic() - start < DRIPPING
    assert "within 0.4 seconds, the limit of --media-fetch-timeout" in text


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"])
def test_a_silent_server(head: bytes, policy: MediaPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fetch, "QUIET_SECONDS", 0.3)
    monkeypatch.setattr(http_fetch, "_POLL_SECONDS", 0.1)
    done = threading.Event()

    def silent(connection: socket.socket, _: str) -> None:
        connection.sendall(head)
        done.wait(60)

    with WebServer(silent) as server:
        by_address = replace(policy, allowed_media_domains=["127.0.0.1"])  # a name may take 0.3 seconds too
        assert "sent nothing for 0.3 seconds" in refusal(f"http://127.0.0.1:{server.port}/", by_address)
        done.set()


def test_a_cancelled_fetch_ends_soon(policy: MediaPolicy) -> None:
    """Before it would for want of bytes, which is another error."""
    cancelled, done = threading.Event(), threading.Event()

    def silent(connection: socket.socket, _: str) -> None:
        cancelled.set()
        done.wait(60)

    with WebServer(silent) as server:
        with pytest.raises(FetchCancelled):
            fetch(f"http://media.test:{server.port}/", policy, cancelled=cancelled)
        done.set()
