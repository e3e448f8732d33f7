"""A server with 4096 file descriptors and thousands of slow connections: it closes them, and answers good requests."""

import asyncio
import contextlib
import json
import time

import pytest

from tests.support.running_server import CHAT_HEAD, RunningServer


@pytest.mark.slow
def test_slow_clients_are_disconnected_and_others_are_answered():
    closed_seconds = 35  # the default --timeout-client is 30, as is --timeout-keep-alive here
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}).encode()
    good = CHAT_HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    # How many clients send what before they drip.
    slow = [(200, CHAT_HEAD), (200, CHAT_HEAD + b"Content-Length: 100000\r\n\r\n{"), (2000, b"")]
    server = RunningServer("--max-connections", "3500", "--timeout-keep-alive", "30")
    server.command = ["sh", "-c", 'ulimit -n 4096; exec "$@"', "sh", *server.command]

    async def be_slow(start: bytes) -> float:
        """Send `start` and then, unless it is empty, a byte per second; returns how long the connection was open."""
        reader, writer = await asyncio.open_connection(*server.address)
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

    async def attack() -> None:
        clients = [asyncio.create_task(be_slow(start)) for count, start in slow for _ in range(count)]
        end = time.monotonic() + closed_seconds - 10
        while time.monotonic() < end:
            async with asyncio.timeout(60):  # a good request on a new connection
                reader, writer = await asyncio.open_connection(*server.address)
                writer.write(good)
                response = await reader.read()
                writer.close()
            assert response.startswith(b"HTTP/1.1 200 "), response[:300]
        assert not any(client.done() for client in clients)
        assert max(await asyncio.gather(*clients)) < closed_seconds

    with server:
        asyncio.run(attack())
        server.assert_at_rest()
        assert "Traceback" not in server.log
