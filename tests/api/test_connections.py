"""Clients that keep a connection waiting, send what is no HTTP, or come in numbers, as the server bears them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from mini_engine.api import connection, http_server
from mini_engine.api.admission import BodyAdmission
from mini_engine.api.errors import ApiError
from mini_engine.media.processor import MediaProcessor
from tests.api.patience import PATIENCE, PatientLoop, run_patiently
from tests.api.peers import eventually
from tests.api.serving import MAX_REQUEST_BYTES, Served, chat_body, hang_up, serve, words
from tests.shortages import no_descriptors

SOON = {"timeout_client": 0.25, "timeout_keep_alive": 1}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def with_server(
    processor: MediaProcessor, directory: Path, test: Callable[[Served], Awaitable[None]], **settings: Any
) -> None:
    async def scenario() -> None:
        async with serve(processor, directory, words(processor, "a red"), settings=settings) as served:
            await test(served)
            assert (await served.ask()).choices[0].message.content == "a red"

    run_patiently(scenario())


async def say(served: Served, text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(text)
    return reader, writer


async def end_of(served: Served, text: bytes) -> bytes:
    """What comes back for `text` until the server closes the connection, or resets it, not having read all of it."""
    reader, writer = await say(served, text)
    answer = b""
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionResetError):
            while block := await reader.read(1 << 16):
                answer += block
    await hang_up(writer)
    return answer


def error_in(answer: bytes) -> tuple[bytes, str]:
    """Status and code of an error response."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return head.split()[1], error["code"]


HALVES = [
    (b"", None),
    (b"POST /v1/ch", (b"408", "request_timeout")),
    (HEAD + b"a: b\r\n", (b"408", "request_timeout")),
    (HEAD + b"content-length: 20\r\n\r\n{", (b"408", "request_timeout")),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", (b"408", "request_timeout")),
    (HEAD.replace(b"v1/chat/completions", b"detokenize") + b"content-length: 20\r\n\r\n{", (b"408", "request_timeout")),
]


def test_half_a_request(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        answers = await asyncio.gather(*(end_of(served, text) for text, _ in HALVES))
        for answer, (text, expected) in zip(answers, HALVES, strict=True):
            assert (error_in(answer) if expected else answer or None) == expected, text

    with_server(processor, tmp_path, scenario, **SOON)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """The first line that comes, once the connection has ended: with a reset where a byte came after its end."""
    line = await reader.readline()
    with contextlib.suppress(ConnectionResetError):
        await reader.read()
    return line


def test_dripping(processor: MediaProcessor, tmp_path: Path) -> None:
    """A byte now and then is no progress, whatever it is a byte of."""

    async def scenario(served: Served) -> None:
        unread = b"content-length: %d\r\n\r\n" % (MAX_REQUEST_BYTES + 1)  # answered before it is there
        for start, status in ((HEAD, b"408"), (HEAD + b"content-length: 900\r\n\r\n", b"408"), (HEAD + unread, b"413")):
            reader, writer = await say(served, start)
            reading = asyncio.create_task(ended(reader))
            async with asyncio.timeout(PATIENCE):
                while not reading.done():
                    writer.write(b"a")
                    await asyncio.sleep(0.05)
            assert reading.result().split()[1] == status
            await hang_up(writer)

    with_server(processor, tmp_path, scenario, **SOON)


def test_a_body_that_makes_progress_may_take_its_time(
    processor: MediaProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LEAST_BYTES", 4)

    async def scenario(served: Served) -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
        reader, writer = await say(served, HEAD + b"content-length: %d\r\n\r\n" % len(body))
        for place in range(0, len(body), 8):
            writer.write(body[place : place + 8])
            await asyncio.sleep(0.1)
        assert b" 200 " in await reader.readline()
        await hang_up(writer)

    with_server(processor, tmp_path, scenario, **SOON)


def test_a_large_body_that_drips_is_ended_and_frees_its_room() -> None:
    """A small body may come as slowly as the end of this one."""

    async def scenario() -> None:
        loop, room = asyncio.get_running_loop(), BodyAdmission(1 << 30)
        assert isinstance(loop, PatientLoop)
        blocks = iter([bytes(1 << 20), *[bytes(connection.LEAST_BYTES)] * 9])

        async def receive() -> dict[str, Any]:
            loop.skip(20)
            await asyncio.sleep(0.01)  # for what is due by now
            return {"type": "http.request", "body": next(blocks), "more_body": True}

        request = Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)
        with pytest.raises(ApiError, match="nor grown to 1187840 bytes within the 30 s") as refusal:
            await connection.read_body(request, connection.BodyLimits(1 << 30, 30.0, room))
        assert (refusal.value.status, room.received_bytes) == (408, 0)

    run_patiently(scenario())


def test_an_idle_connection_is_closed_and_a_long_answer_is_not(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.core.hold = True
        reader, writer = await served.connect()
        await served.core.until(lambda: bool(served.core.requests))
        assert b" 200 " in await end_of(served, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")  # longer than any time-out
        served.core.hold = False
        await served.core.end(served.core.requests[0], "length")
        assert b" 200 " in await reader.readline()
        await hang_up(writer)

    with_server(processor, tmp_path, scenario, **SOON)


def test_a_client_that_does_not_take_its_answer(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.core.hold = True
        # A receive buffer of next to nothing, and then it does not read.
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", served.port))
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True, "logprobs": True}).encode()
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await served.core.until(lambda: bool(served.core.requests))
        (request,) = served.core.requests
        async with asyncio.timeout(PATIENCE):
            while served.context.requests.unfinished:  # until the system keeps no more for it, and then for its time
                await served.core.output(request, [65] * 3000)
                await asyncio.sleep(0.01)
        await served.core.until(lambda: [finish.reason for finish in served.core.finishes] == ["abort"])
        client.close()
        served.core.hold = False

    with_server(processor, tmp_path, scenario, **SOON)


LIVE = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
LEFTOVERS = [b"\r\n", b"GET /li", LIVE, LIVE + HEAD + b"content-length: 900000\r\n\r\n" + b" " * 600_000]


@pytest.mark.parametrize("headers", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n", b"connection: close\r\n"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_after_it_has_sent_more(
    processor: MediaProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, headers: bytes
) -> None:
    """With an end of the connection, and with a reset."""
    monkeypatch.setattr(http_server, "EARLY_SECONDS", 0.2)

    async def scenario(served: Served) -> None:
        served.core.hold = True
        body = json.dumps(chat_body(stream=stream)).encode()
        request = HEAD + headers + b"content-length: %d\r\n\r\n" % len(body) + body
        writers = [(await say(served, request))[1] for _ in LEFTOVERS]
        await served.core.until(lambda: len(served.core.requests) == len(writers))
        for writer, leftover in zip(writers, LEFTOVERS, strict=True):
            writer.write(leftover)
        await asyncio.sleep(0.05)
        assert not served.core.finishes
        for writer in writers:
            if stream:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()
        await served.core.until(lambda: [one.reason for one in served.core.finishes] == ["abort"] * len(writers))
        await eventually(lambda: not served.context.requests.unfinished)
        assert b" 200 " in await say_and_hear(served, LIVE)
        served.core.hold = False

    with_server(processor, tmp_path, scenario, max_connections=len(LEFTOVERS))


async def say_and_hear(served: Served, text: bytes) -> bytes:
    """The first line that comes for `text`."""
    reader, writer = await say(served, text)
    line = await asyncio.wait_for(reader.readline(), PATIENCE)
    await hang_up(writer)
    return line


def test_requests_that_come_before_the_last_is_answered(
    processor: MediaProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are answered in turn; empty lines between them are ignored."""
    monkeypatch.setattr(http_server, "EARLY_SECONDS", 30)  # on a slow machine

    async def scenario(served: Served) -> None:
        body = json.dumps(chat_body()).encode()
        body += b" " * (2 * http_server.EARLY_BYTES)
        asking = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        last = b"GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        answers = await end_of(served, b"\r\n" + LIVE + b"\r\n" + asking + b"\r\n\r\n" + asking + LIVE + last)
        assert [part.split()[0] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200"] * 4 + [b"404"]
        assert answers.count(b'"a red"') == 2

    with_server(processor, tmp_path, scenario)


def test_empty_lines_do_not_keep_a_connection(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        reader, writer = await say(served, LIVE)
        reading = asyncio.create_task(ended(reader))
        async with asyncio.timeout(PATIENCE):
            while not reading.done():
                writer.write(b"\r\n")
                await asyncio.sleep(0.05)
        assert b" 200 " in reading.result()
        await hang_up(writer)

    with_server(processor, tmp_path, scenario, **SOON)


NO_HTTP = [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (b"400", "invalid_http")),
    (b"GET /live HTTP/1.1\r\nhost: x\r\na b: c\r\n\r\n", (b"400", "invalid_http")),
    (b"GET /live HTTP/1.1\r\n\r\n", (b"400", "invalid_http")),  # without a host
    (b"GET /live HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000, (b"431", "invalid_http")),
    (b"GET /" + b"a" * 100_000, (b"431", "invalid_http")),
    (b"GET /live HTTP/1.1\r\nhost: x\r\na: " + b"a" * 20_000 + b"\r\n\r\n", (b"431", "invalid_http")),
    (b"GET /live HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 3000 + b"\r\n", (b"431", "invalid_http")),
    (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n", (b"400", "invalid_http")),
    (HEAD + b"content-length: -5\r\n\r\n", (b"400", "invalid_http")),
    # Two lengths of one body: a proxy that follows the other takes the GET for a part of it.
    (HEAD + b"content-length: 99\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + LIVE, (b"400", "invalid_http")),
    (HEAD + b"transfer-encoding: gzip\r\n\r\n", (b"501", "invalid_http")),
    (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", (b"400", "invalid_http")),
    # Chunks that are none, when the answer is there already: that is all that can be said.
    (b"POST /nowhere HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"404"),
]


def test_what_is_no_http(processor: MediaProcessor, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(served: Served) -> None:
        for text, expected in NO_HTTP:
            if isinstance(expected, tuple):
                assert error_in(await end_of(served, text)) == expected, text[:80]
                continue
            reader, writer = await say(served, text)
            assert (await reader.readline()).split()[1] == expected
            writer.write(b"zz\r\nzz\r\n")
            await asyncio.wait_for(ended(reader), PATIENCE)
            await hang_up(writer)
        upgrade = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
        assert b" 200 " in await end_of(served, upgrade)

    with_server(processor, tmp_path, scenario, **SOON)
    assert not caplog.records, "clients can fill the log"


def test_one_connection_too_many_waits(
    processor: MediaProcessor, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "QUIET_SECONDS", 3600)

    async def scenario(served: Served) -> None:
        held = [await say(served, b"") for _ in range(4)]
        await eventually(lambda: any("as many as may be" in record.message for record in caplog.records))
        reader, writer = await say(served, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        await hang_up(held.pop()[1])
        assert b" 200 " in await reader.readline()
        for _, other in [(reader, writer), *held]:
            await hang_up(other)

    with_server(processor, tmp_path, scenario, max_connections=4)
    assert len(caplog.records) == 1


def test_no_descriptor_for_a_connection(
    processor: MediaProcessor, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next cannot be accepted, until one can."""
    monkeypatch.setattr(http_server, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(http_server, "QUIET_SECONDS", 3600)

    async def scenario(served: Served) -> None:
        reader, writer = await say(served, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        client = socket.socket()
        client.setblocking(False)
        with no_descriptors():
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", served.port))
            await eventually(lambda: bool(caplog.records))
            await asyncio.sleep(0.2)
        await asyncio.get_running_loop().sock_sendall(client, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await asyncio.get_running_loop().sock_recv(client, 100)
        client.close()
        await hang_up(writer)

    with_server(processor, tmp_path, scenario)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "could not be accepted" in record.message
