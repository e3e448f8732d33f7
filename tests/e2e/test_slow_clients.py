"""A server with 4096 file descriptors and thousands of slow connections: it closes them, and answers good requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from urllib.parse import urlsplit

import pytest

from tests.e2e.running_server import RunningServer

CLOSED_SECONDS = 35  # the default --timeout-client is 30
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}).encode()
GOOD = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
SLOW = [(200, HEAD), (200, HEAD + b"Content-Length: 100000\r\n\r\n{"), (2000, b"")]  # what is sent before it drips


class LimitedServer(RunningServer):
    def __init__(self, *flags: str):
        super().__init__(*flags)
        self.command = ["sh", "-c", 'ulimit -n 4096; exec "$@"', "sh", *self.command]


async def ask(port: int) -> float:
    """Latency of a good request on a new connection."""
    begun = time.monotonic()
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GOOD)
        response = await reader.read()
        writer.close()
    assert response.startswith(b"HTTP/1.1 200 "), response[:300]
    return time.monotonic() - begun


async def ask_for(port: int, seconds: float) -> float:
    """The median of good requests one after the other."""
    end, times = time.monotonic() + seconds, []
    while time.monotonic() < end:
        times.append(await ask(port))
    return statistics.median(times)


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


async def attack(port: int) -> tuple[float, float]:
    """The median of good requests without and with slow clients."""
    await asyncio.gather(*(ask(port) for _ in range(300)))
    before = await ask_for(port, 5)
    slow = [asyncio.create_task(be_slow(port, start)) for count, start in SLOW for _ in range(count)]
    during = await ask_for(port, CLOSED_SECONDS - 10)
    assert not any(client.done() for client in slow)
    open_seconds = await asyncio.gather(*slow)
    assert max(open_seconds) < CLOSED_SECONDS
    return before, during


@pytest.mark.slow
def test_slow_clients_are_disconnected_and_others_are_answered():
    with LimitedServer("--max-connections", "3500") as server:
        before, during = asyncio.run(attack(urlsplit(server.url).port))
        print(f"good requests: median {before * 1e3:.1f} ms, with slow clients {during * 1e3:.1f} ms", file=sys.stderr)
        server.assert_at_rest()
        assert "Traceback" not in server.log
