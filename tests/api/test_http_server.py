"""Connections whose clients are slow, leave, or do not send HTTP: over a real socket, with a scripted engine core."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from mini_engine.api.admission import ByteBudget
from mini_engine.api.errors import ApiError
from mini_engine.api.middleware import LEAST_BYTES, receive_body
from mini_engine.media.processor import MediaProcessor
from tests.api.patience import PATIENCE, PatientLoop, run_patiently
from tests.api.peers import eventually
from tests.api.serving import MAX_REQUEST_BYTES, Served, hang_up, serve, words

SHORT = {"timeout_client": 0.25, "timeout_keep_alive": 1}
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LIVE = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"


def with_server(
    processor: MediaProcessor, directory: Path, test: Callable[[Served], Awaitable[None]], **settings: Any
) -> None:
    async def scenario() -> None:
        async with serve(processor, directory, words(processor, "a red"), settings=settings) as served:
            await test(served)
            assert (await served.ask()).choices[0].message.content == "a red"

    run_patiently(scenario())


async def until_closed(served: Served, data: bytes, drip: bytes = b"") -> bytes:
    """The response to `data`, after which `drip` is sent again and again, until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(data)
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
    await hang_up(writer)
    return response


HALF = CHAT + b"content-length: 900\r\n\r\n{"
CLOSED = [
    ("nothing is sent", b"", b"", b""),
    ("half a request line", b"POST /v1/ch", b"", b""),
    ("half the headers", CHAT + b"a: b\r\n", b"", b""),
    ("dripping headers", CHAT, b"a", b""),
    ("idle after a response", LIVE, b"", b"200"),
    ("dripping headers after a response", LIVE, b"a", b"200"),
    ("half a body", HALF, b"", b"408"),
    ("half a chunk", CHAT + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"", b"408"),
    ("dripping body", HALF, b"a", b"408"),
    ("dripping body of another endpoint", HALF.replace(b"v1/chat/completions", b"detokenize"), b"a", b"408"),
    ("dripping body after its response", CHAT + b"content-length: %d\r\n\r\n" % (MAX_REQUEST_BYTES + 1), b"a", b"413"),
    ("invalid body after its response", CHAT[:5] + b"nowhere" + CHAT[24:] + b"transfer-encoding: chunked\r\n\r\n", b"z",
     b"404"),
    ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"", b"400"),
    ("headers too large", LIVE[:-2] + b"a: " + b"a" * 20_000, b"", b"400"),
    ("two lengths", CHAT + b"content-length: 5\r\ncontent-length: 6\r\n\r\n", b"", b"400"),
]  # fmt: skip


def test_slow_and_invalid_requests_are_closed(
    processor: MediaProcessor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(served: Served) -> None:
        responses = await asyncio.gather(*(until_closed(served, data, drip) for _, data, drip, _ in CLOSED))
        for (case, _, _, status), response in zip(CLOSED, responses, strict=True):
            assert response[9:12] == status, case
            if status == b"408":
                assert json.loads(response.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout", case

    with_server(processor, tmp_path, scenario, **SHORT)
    assert not caplog.records, "clients can fill the log"


@pytest.mark.parametrize(("nbytes", "status"), [(2 << 20, None), (LEAST_BYTES, 408)])
def test_a_body_must_grow_by_a_share_of_what_has_arrived(nbytes: int, status: int | None) -> None:
    """20 s for each block of a body of 1 MiB and nine blocks; the time-out is 30 s."""

    async def scenario() -> None:
        loop, room = asyncio.get_running_loop(), ByteBudget(1 << 30, "inflight_bodies")
        assert isinstance(loop, PatientLoop)
        blocks = [bytes(1 << 20), *[bytes(nbytes)] * 9]

        async def receive() -> dict[str, Any]:
            loop.skip(20)
            await asyncio.sleep(0.01)  # for what is due by now
            return {"type": "http.request", "body": blocks.pop(0), "more_body": bool(blocks)}

        headers = Headers({"content-type": "application/json"})
        if status is None:
            assert len(await receive_body(headers, receive, room, 1 << 30, 30.0)) == (1 << 20) + 9 * nbytes
        else:
            with pytest.raises(ApiError, match="nor grown to 1187840 bytes within the 30 s") as refusal:
                await receive_body(headers, receive, room, 1 << 30, 30.0)
            assert refusal.value.status == status
        assert room.inflight_bytes == 0

    run_patiently(scenario())


def test_a_long_answer_outlasts_every_time_out(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.core.hold = True
        reader, writer = await served.connect()
        await served.core.until(lambda: bool(served.core.requests))
        assert await until_closed(served, LIVE)  # an idle connection is closed first
        served.core.hold = False
        await served.core.end(served.core.requests[0], "length")
        assert b" 200 " in await reader.readline()
        await hang_up(writer)

    with_server(processor, tmp_path, scenario, **SHORT)


def test_a_client_that_does_not_read_aborts_its_request(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.core.hold = True
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", served.port))
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True, "logprobs": True}).encode()
        client.sendall(CHAT + b"content-length: %d\r\n\r\n" % len(body) + body)
        await served.core.until(lambda: bool(served.core.requests))
        async with asyncio.timeout(PATIENCE):
            while served.context.requests.unfinished:  # until the system's buffers are full, and then for the time-out
                await served.core.output(served.core.requests[0], [65] * 3000)
                await asyncio.sleep(0.01)
        await served.core.until(lambda: [finish.reason for finish in served.core.finishes] == ["abort"])
        client.close()
        served.core.hold = False

    with_server(processor, tmp_path, scenario, **SHORT)


@pytest.mark.parametrize("reset", [False, True])
def test_clients_that_leave_at_any_stage(processor: MediaProcessor, tmp_path: Path, reset: bool) -> None:
    """With a body on its way, before the first token of a whole answer and of a stream, and in the stream."""

    async def scenario(served: Served) -> None:
        room = served.context.bodies
        _, uploading = await asyncio.open_connection("127.0.0.1", served.port)
        uploading.write(HALF)
        await eventually(lambda: room.inflight_bytes == 1)
        served.core.hold = True
        reader, streaming = await served.connect(stream=True)
        await reader.readuntil(b"\n\n\r\n")
        served.core.script = lambda request: []
        pending = [(await served.connect(stream=stream))[1] for stream in (False, True)]
        await served.core.until(lambda: len(served.core.requests) == 3)
        for writer in (uploading, streaming, *pending):
            if reset:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()
        await served.core.until(lambda: [one.reason for one in served.core.finishes] == ["abort"] * 3)
        await eventually(lambda: not room.inflight_bytes and not served.context.requests.unfinished)
        served.core.hold, served.core.script = False, words(processor, "a red")

    with_server(processor, tmp_path, scenario)


def test_above_max_connections_requests_get_a_503(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(4)]
        assert b" 503 " in await until_closed(served, LIVE)
        idle += [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(2)]
        assert await until_closed(served, b"") == b"", "half as many more are closed at once"
        for _, writer in idle:
            await hang_up(writer)

    with_server(processor, tmp_path, scenario, max_connections=4)
