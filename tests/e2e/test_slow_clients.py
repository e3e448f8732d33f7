"""A server with 4096 file descriptors and thousands of slow connections: it closes them, and answers good requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import pytest

from tests.e2e.running_server import CHAT_HEAD, RunningServer

CLOSED_SECONDS = 35  # the default --timeout-client is 30, as is --timeout-keep-alive here
BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}).encode()
GOOD = CHAT_HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
SLOW = [(200, CHAT_HEAD), (200, CHAT_HEAD + b"Content-Length: 100000\r\n\r\n{"), (2000, b"")]  # sent before it drips


async def ask(port: int) -> None:
    """A good request on a new connection."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GOOD)
        response = await reader.read()
        writer.close()
    assert response.startswith(b"HTTP/1.1 200 "), response[:300]


async def be_slow(port: int, start: bytes) -> float:
    """Send `start` and then, unless it is empty, a byte per second; returns how long the connection was open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = time.monotonic()
    writer.write(start)
    reading = asyncio.create_task(reader.read())
    while not reading.done():
        await asyncio.wait([reading], timeout=1 if start else None)
        if start:
            writer.write(b"a")
    with contextlib.suppress(ConnectionError):
        await reading
    writer.close()
    return time.monotonic() - begun


async def attack(port: int) -> None:
    slow = [asyncio.create_task(be_slow(port, start)) for count, start in SLOW for _ in range(count)]
    end = time.monotonic() + CLOSED_SECONDS - 10
    while time.monotonic() < end:
        await ask(port)
    assert not any(client.done() for client in slow)
    assert max(await asyncio.gather(*slow)) < CLOSED_SECONDS


@pytest.mark.slow
def test_slow_clients_are_disconnected_and_others_are_answered():
    server = RunningServer("--max-connections", "3500", "--timeout-keep-alive", "30")
    server.command = ["sh", "-c", 'ulimit -n 4096; exec "$@"', "sh", *server.command]
    with server:
        asyncio.run(attack(server.address[1]))
        server.assert_at_rest()
        assert "Traceback" not in server.log
