"""What a program makes of a server that is busy or dies, and of the log of its own. The server is a web server or
another process here."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from mini_engine.batch import server_handle
from mini_engine.batch.server_handle import REPEATS, ServerError, ServerHandle, forward_log


async def start(answer: Callable[[web.Request], Awaitable[web.Response]], port: int = 0) -> web.AppRunner:
    app = web.Application()
    app.add_routes([web.post("/", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


@pytest.mark.parametrize(
    ("status", "says"),
    [(2, "no space is left"), (1, "its log:\nmodel.safetensors:     99999|\nserve.py: start failed: no space is left")],
)
async def test_a_progress_bar_of_any_length_does_not_end_the_log(status: int, says: str) -> None:
    ended = asyncio.get_running_loop().create_future()
    download = (
        r"import sys; sys.stderr.write(''.join(f'\rmodel.safetensors: {number:9}|' for number in range(100_000))); "
        r"sys.stderr.write('\nserve.py: start failed: no space is left\n'); sys.exit(int(sys.argv[1]))"
    )
    command = sys.executable, "-c", download, str(status)
    await forward_log(await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE), ended)
    assert str(ended.result()).endswith(says)


async def test_a_request_is_sent_again_after_each_status_as_often_as_after_that_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that was busy for long may die once, and is busy again while it starts: then a proxy answers 502."""
    monkeypatch.setattr(server_handle, "LONGEST_PAUSE_SECONDS", 0.0)
    statuses = iter(
        [429] * REPEATS[429] + [0] * REPEATS[0] + [503] * REPEATS[503] + [200] + [502] * REPEATS[503] + [400]
    )

    async def answer(request: web.Request) -> web.Response:
        if (status := next(statuses)) == 0:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({}, status=status or 200)

    runner = await start(answer)
    with contextlib.closing(ServerHandle(f"http://127.0.0.1:{runner.addresses[0][1]}")) as server:
        for status in (200, 400):
            assert (await asyncio.wrap_future(server.run(server.post("/", b"")))).status == status
    await runner.cleanup()


async def test_a_restart_is_waited_for_longer_than_a_connection_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not a server that was never reached."""
    monkeypatch.setattr(server_handle, "LONGEST_PAUSE_SECONDS", 0.01)

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({})

    runner = await start(answer)
    port = runner.addresses[0][1]
    url = f"http://127.0.0.1:{port}"
    with contextlib.closing(ServerHandle(url)) as server, contextlib.closing(ServerHandle(url)) as other:

        async def post(handle: ServerHandle) -> int:
            return (await asyncio.wrap_future(handle.run(handle.post("/", b"")))).status

        assert await post(server) == 200
        await runner.cleanup()
        for handle in (server, other):
            with pytest.raises(ServerError, match="Cannot connect"):
                await post(handle)
        monkeypatch.setitem(REPEATS, 503, 10_000)
        posting = asyncio.create_task(post(server))
        with pytest.raises(ServerError, match="Cannot connect"):  # of a server that it never reached
            await post(other)
        assert not posting.done()
        runner = await start(answer, port)
        assert await posting == 200
    await runner.cleanup()
