"""What a program makes of a server that ends: of the log of its own, and of what it was asked. The server is another
process or a web server here."""

import asyncio
import contextlib
import subprocess
import sys

import pytest
from aiohttp import web

from mini_engine.batch import server_handle
from mini_engine.batch.server_handle import ServerHandle, forward_log

DOWNLOAD = r"""
import sys
sys.stderr.write("".join(f"\rmodel.safetensors: {number:9}|" for number in range(100_000)))
sys.stderr.write("\nserve.py: start failed: no space is left\n")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("status", "says"),
    [(2, "no space is left"), (1, "its log:\nmodel.safetensors:     99999|\nserve.py: start failed: no space is left")],
)
async def test_a_progress_bar_of_any_length_does_not_end_the_log(status: int, says: str) -> None:
    ended = asyncio.get_running_loop().create_future()
    command = sys.executable, "-c", DOWNLOAD, str(status)
    await forward_log(await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE), ended)
    assert str(ended.result()).endswith(says)


async def test_a_request_that_ends_the_server_makes_no_other_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs beside it does not come to its end."""
    for name in ("LONGEST_PAUSE_SECONDS", "ALONE_SECONDS"):
        monkeypatch.setattr(server_handle, name, 0.0)
    connected = set[asyncio.Transport]()

    async def answer(request: web.Request) -> web.Response:
        connected.add(request.transport)
        await asyncio.sleep(0.1 if request.path == "/fatal" else 0.3)
        if request.path == "/fatal":
            for transport in connected:
                transport.abort()
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/{name}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with contextlib.closing(ServerHandle(f"http://127.0.0.1:{runner.addresses[0][1]}")) as server:
        sent = [server.run(server.post(path, b"")) for path in ("/fatal", "/a", "/b")]
        replies = [await asyncio.wrap_future(reply) for reply in sent]
    assert [reply.status for reply in replies] == [0, 200, 200]
    await runner.cleanup()
