"""Which hosts and addresses are asked: names, addresses, redirects, and the list of those that are allowed."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mini_engine.media.errors import MediaError
from mini_engine.media.fetch import MediaPolicy, declared_size, fetch
from tests.media.fetching import BODY, LIMIT, Names, refusal
from tests.media.web import WebServer, response


def test_a_name_that_takes_too_long_to_resolve(policy: MediaPolicy) -> None:
    done = threading.Event()

    def resolve(host: str, port: int) -> list[str]:
        done.wait(60)
        return []

    slow = replace(policy, resolve=resolve, media_fetch_timeout=0.2)
    assert "--media-fetch-timeout" in refusal("http://media.test/", slow)
    done.set()


def test_no_server_there(policy: MediaPolicy, names: Names) -> None:
    with socket.socket() as bound:  # which keeps the port from others, and does not listen
        bound.bind(("127.0.0.1", 0))
        url = f"http://media.test:{bound.getsockname()[1]}/"
        assert "takes no connection" in refusal(url, policy)
        del names.names["media.test"]
        assert "cannot be resolved" in refusal(url, policy)


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
    start = time.thread_time()
    refusal(url, policy)
    with pytest.raises(MediaError):
        declared_size(url, policy)
    assert not names.asked
    assert time.thread_time() - start < 1  # of work: the machine may be busy with other things


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
