"""Connections whose clients are slow, leave, or do not send HTTP."""

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import re
import socket
import struct
from collections.abc import AsyncIterator
from functools import partial

import h11
import pytest

from mini_engine.config import EngineConfig
from mini_engine.http.connections import HEADER_BYTES, Connection, Http, HttpParser
from mini_engine.metrics import REGISTRY
from tests.support.patience import PATIENCE, eventually, settle, skip
from tests.support.serving import CHAT_HEAD, MAX_REQUEST_BYTES, Counted, Serve, Served, hang_up

SHORT = {"timeout_client": 0.25, "timeout_keep_alive": 1}
LIVE = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"


async def until_closed(served: Served, data: bytes, drip: bytes = b"") -> bytes:
    """The response to `data`, after which `drip` is sent again and again, until the server closes the connection."""
    reader, writer = await served.connect(data)
    response = b""

    async def read() -> None:
        nonlocal response
        with contextlib.suppress(ConnectionResetError):
            while block := await reader.read(1 << 16):
                response += block

    reading = asyncio.create_task(read())
    async with asyncio.timeout(PATIENCE):
        while not reading.done():
            writer.write(drip)
            await asyncio.wait([reading], timeout=0.05)
    return response


@pytest.mark.parametrize(
    ("target", "status"), [(b"http://a/live", b"200"), (b"HTTPS://a:1/live?b", b"200"), (b"http://a?/live", b"200"),
                           (b"http:/live", b"404"), (b"/http://a/live", b"404")])  # fmt: skip
async def test_a_target_may_be_a_whole_url(served: Served, target: bytes, status: bytes) -> None:
    response = await until_closed(served, LIVE.replace(b"/live", target).replace(b"host", b"connection: close\r\nhost"))
    assert response.startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        (b"http://evil.test/version", b"a", b"421"),
        (b"http://a@evil.test/version", b"a", b"421"),
        (b"http:///version", b"a", b"421"),
        (b"http://a/version", b"evil.test", b"200"),
    ],
)
async def test_the_host_of_a_whole_url_counts(served: Served, target: bytes, host: bytes, status: bytes) -> None:
    request = b"GET %s HTTP/1.1\r\nconnection: close\r\nhost: %s\r\n\r\n" % (target, host)
    assert (await until_closed(served, request)).startswith(b"HTTP/1.1 " + status)


async def test_slow_and_invalid_requests_are_closed(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    half, chunked = CHAT_HEAD + b"content-length: 900\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n"
    large = b"a: a\r\n" * 4_000  # 24 KB
    closed = [
        ("nothing is sent", b"", b"", b""),
        ("half of pipelined headers", LIVE + CHAT_HEAD, b"", b"200"),
        ("half a request line", b"POST /v1/ch", b"", b""),
        ("dripping headers", CHAT_HEAD, b"a", b""),
        ("idle after a response", LIVE, b"", b"200"),
        ("empty lines between requests", b"\r\n" + LIVE + b"\r\n" + LIVE + b"\r\n", b"", b"200 200"),
        ("dripping headers after a response", LIVE, b"a", b"200"),
        ("half a body", half, b"", b"408"),
        ("dripping body", half, b"a", b"408"),
        ("dripping body of another endpoint", half.replace(b"v1/chat/completions", b"detokenize"), b"a", b"408"),
        ("dripping body after its response", CHAT_HEAD + b"content-length: %d\r\n\r\n" % (1 << 40), b"a", b"413"),
        ("invalid body after its response", CHAT_HEAD.replace(b"chat", b"x") + chunked, b"z", b"404"),
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"", b"400"),
        ("incomplete headers too large", LIVE[:-2] + b"a: " + b"a" * 20_000, b"", b"400"),
        ("headers too large in one packet", LIVE[:-2] + large + b"\r\n", b"", b"400"),
        ("large headers of a pipelined request", LIVE + LIVE[:-2] + large + b"\r\n", b"", b"200 400"),
        ("large line of a chunk", CHAT_HEAD + chunked + b"1;" + b"a" * 24_000 + b"\r\n{\r\n", b"", b"400"),
        ("tiny chunks", CHAT_HEAD + chunked + b"1\r\n{\r\n" * 300, b"", b"400"),
        ("tiny chunks of a body that is not read", LIVE[:-2] + chunked + b"1\r\n{\r\n" * 300, b"", b"400"),
        ("large trailers", CHAT_HEAD + chunked + b"0\r\n" + large + b"\r\n", b"", b"400"),
        ("a space before the colon", LIVE[:-2] + b"Authorization : Bearer secret\r\n\r\n", b"", b"400"),
        ("two lengths", CHAT_HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n", b"", b"400"),
        ("a length and chunks", CHAT_HEAD + b"content-length: 5\r\n" + chunked + b"0\r\n\r\n", b"", b"400"),
        ("another coding", CHAT_HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", b"", b"400"),
    ]
    labels = {"handler": "none", "method": "other", "status": "4xx"}
    invalid = partial(REGISTRY.get_sample_value, "http_requests_total", labels)
    before = invalid() or 0
    caplog.set_level(logging.INFO, "mini_engine.http.error_responses")
    async with serve(**SHORT) as served:
        responses = await asyncio.gather(*(until_closed(served, data, drip) for _, data, drip, _ in closed))
        for (case, _, _, status), response in zip(closed, responses, strict=True):
            assert b" ".join(re.findall(rb"HTTP/1.1 (\d+) ", response)) == status, case
            if status == b"408":
                assert json.loads(response.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout", case
        assert (await served.ask()).choices
    lines = [record for record in caplog.records if "400 invalid_http" in record.getMessage()]
    assert len(lines) == sum(b"400" in status for *_, status in closed) == invalid() - before
    assert all(record.caller == {"client": "127.0.0.1"} for record in lines) and "secret" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert any(record.getMessage().endswith("(too many chunks; send larger ones)") for record in lines)


def test_an_empty_line_after_a_request_is_ignored() -> None:
    """Whether another request may follow it or not, and also if it arrives in two packets."""
    for options, packets in itertools.product([b"", b"connection: close\r\n"], [[b"\r\n"], [b"\r", b"\n"]]):
        parser = HttpParser(h11.SERVER, HEADER_BYTES)
        for packet in (LIVE[:-2] + options + b"\r\n", *packets):
            parser.receive_data(packet)
            while (event := parser.next_event()) is not h11.NEED_DATA:
                assert event is not h11.PAUSED, "no more is read before the request is answered"
        assert not parser.trailing_data[0]


async def test_body_that_grows_steadily_outlasts_the_time_out(serve: Serve) -> None:
    async def blocks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield bytes(1 << 20).replace(b"\0", b" ")
            await asyncio.sleep(0.1)
        yield b'{"prompt": "x"}'

    async with serve(**SHORT, max_text_bytes=8 << 20) as served:
        headers = {"content-type": "application/json"}
        assert (await served.http.post("/tokenize", content=blocks(), headers=headers)).status_code == 200


async def test_idle_connections_outlast_the_pools_of_clients(serve: Serve) -> None:
    """Before a first request, after a response, and after a body that ended later than its response."""
    limit, nbytes = EngineConfig().timeout_keep_alive, MAX_REQUEST_BYTES + 1
    sent = (b"", LIVE, CHAT_HEAD + b"content-length: %d\r\n\r\n" % nbytes)
    async with serve(timeout_keep_alive=limit, timeout_client=5) as served:
        connections = [await served.connect(data) for data in sent]
        for (reader, _), status in zip(connections[1:], (b" 200 ", b" 413 "), strict=True):
            response = await reader.readuntil(b"\r\n\r\n")
            assert status in response and b"\r\nkeep-alive: timeout=%d\r\n" % limit in response
        connections[2][1].write(bytes(nbytes))
        await connections[2][1].drain()
        await settle()
        skip(limit - 1)
        for reader, writer in connections:
            await settle()
            writer.write(LIVE)
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        skip(limit)
        assert [await reader.read() for reader, _ in connections] == [b""] * 3


@pytest.mark.parametrize("requests", [[b""] * 9, [b"connection: close\r\n"]], ids=["pipelined", "last"])
async def test_client_that_does_not_read_is_disconnected(serve: Serve, requests: list[bytes]) -> None:
    async with serve(timeout_client=5) as served:
        (listener,), connections = served.server.servers[0].sockets, served.server.server_state.connections
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", served.port))
            for headers in requests:
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n")
            await eventually(lambda: any(http.transport.get_write_buffer_size() for http in connections))
            await settle()
            skip(6)
            await eventually(lambda: not connections)


async def test_long_answer_outlasts_every_time_out(serve: Serve) -> None:
    async with serve(**SHORT) as served:
        served.core.hold = True
        reader, _ = await served.connect_chat()
        request = await served.core.has_requests()
        assert await until_closed(served, LIVE)  # an idle connection is closed first
        await served.core.end(request, "length")
        assert b" 200 " in await reader.readline()


async def test_above_max_connections_requests_get_a_503(serve: Serve) -> None:
    async with serve(max_connections=4) as served:
        for _ in range(4):
            reader, writer = await served.connect()
        refused, last = Counted("requests_rejected_total{reason=connections}"), LIVE[:-2] + b"connection: close\r\n\r\n"
        response = await until_closed(served, LIVE.replace(b"live", b"health"))
        assert b" 503 " in response and b"--max-connections" in response and refused.since() == [1]
        assert b" 200 " in await until_closed(served, last)
        for _ in range(2):  # idle: those from before have their places
            await served.connect()
        writer.write(LIVE.replace(b"live", b"health"))
        assert b" 200 " in await reader.readline()
        assert await until_closed(served, b"") == b"", "half as many more are closed at once"


async def test_request_that_has_arrived_when_the_server_stops_is_answered(serve: Serve) -> None:
    async with serve() as served:
        reader, writer = await served.connect(LIVE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(LIVE)  # arrives at once: the event loop has not read it
        await served.server.shutdown()
        assert b" 200 " in await reader.read()


@pytest.mark.parametrize(
    "request_",
    [b"", LIVE, LIVE.replace(b"live", b"nope"), LIVE.replace(b"live", b"v1/models"), CHAT_HEAD],
    ids=["no request", "answered", "refused", "routed", "half of the headers"],
)
@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_closed_connection_is_freed_without_a_collection(
    served: Served, request_: bytes, is_reset: bool
) -> None:
    """uvloop has 256 KiB for each TLS connection: clients that leave together would keep their memory until the next
    full collection, which on an idle server does not come."""

    def connections() -> int:
        return sum(isinstance(each, Connection | Http) for each in gc.get_objects())

    gc.collect()
    gc.freeze()  # what is there by now is in no list of objects
    gc.disable()
    try:
        reader, writer = await served.connect(request_)
        if request_.endswith(b"\r\n\r\n"):
            await reader.readuntil(b"\r\n\r\n")
        await eventually(lambda: connections() == 2)
        if is_reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await hang_up(writer)
        await eventually(lambda: connections() == 0)
    finally:
        gc.enable()
        gc.unfreeze()
