"""Requests to a server, from any thread: to one that runs, or to one of this program's own.

Its own server is `serve.py` in a child process, behind a Unix socket in a directory that only this user can enter. It
ends with this program, however that ends. HTTP between the two costs a millisecond, and the program gets by without
torch, without the engine's event loop, and with the same checks and limits as any client.
"""

import asyncio
import codecs
import concurrent.futures
import contextlib
import functools
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from mini_engine.config import ConfigError, fields
from mini_engine.launch.cli import settle
from mini_engine.launch.process_setup import module_paths
from mini_engine.launch.runtime_directory import runtime_directory

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

MAX_CONCURRENCY = 64  # where nothing else is said: as many requests as a step on a CPU has sequences
OF_THE_PORT = ("Server", "Security")  # groups of settings that have no effect without a port
# How often a request is sent again after these statuses, 0 being a connection that ended: it may have been the request
# that ended the process at its other end. A proxy answers 502 or 503 as long as its server restarts.
REPEATS = {0: 4, 429: 12, 502: 12, 503: 12}
LONGEST_PAUSE_SECONDS = 30.0  # between two of them; the first is 1 s, and each is twice the one before
CONNECT_SECONDS = 0.05  # between attempts to connect to a server that starts
STOP_SECONDS = 20.0  # then it is killed
LOG_BYTES = 1 << 16  # of the log, read at a time
LAST_LINES, LAST_CHARACTERS = 20, 1 << 16  # of the log, in an error
OPEN_SESSIONS = set["aiohttp.ClientSession"]()


class ServerError(RuntimeError):
    """The program's own server did not start, or ended: the text has the end of its log. Or another is not reached."""


@dataclass(frozen=True)
class Reply:
    """A response of any status; without one the status is 0 and the body is an error in OpenAI's form."""

    status: int
    body: dict[str, Any]
    is_sent: bool = True  # the request; False: there was no connection

    @property
    def error(self) -> str | None:
        """Its message, None if the request was answered."""
        if self.status == 200:
            return None
        error = self.body.get("error")
        return str(error["message"] if isinstance(error, dict) and "message" in error else self.body)


class ServerHandle:
    """A server, and requests to it, which run in the event loop of this process.

    Args:
        root: of a running server, see `root_of`.
        flags: of `serve.py`, for a server of this program's own, instead; see `check_flags`.
        headers: of each request.
        max_concurrency: coroutines that `as_finished` runs at once.

    Raises:
        ConfigError: the server refuses its flags, or fewer than one at once.
        ServerError: the server did not start.
    """

    def __init__(
        self,
        root: str | None = None,
        flags: Sequence[str] = (),
        headers: dict[str, str] | None = None,
        max_concurrency: int = MAX_CONCURRENCY,
    ):
        self._root, self._headers = "http://localhost" if root is None else root, headers or {}
        self._max_concurrency = max_concurrency
        self._was_reached = False
        if max_concurrency < 1:
            raise ConfigError(f"max-concurrency is {max_concurrency}: it must be at least 1")
        self._pid = os.getpid()
        self._loop = loop_of(self._pid)
        self._ended: asyncio.Future[Exception] = self._loop.create_future()  # why there are no more answers
        self._resources = contextlib.AsyncExitStack()
        opening = self.run(self._open(flags if root is None else None))
        try:
            opening.result()
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine that may call `post`. Raises ServerError: this is a fork, which has no such thread."""
        if os.getpid() == self._pid:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise ServerError("a forked process cannot use the server of its parent; start one of its own")

    def as_finished(self, works: Iterable[Coroutine[Any, Any, T]]) -> Iterator[T]:
        """Run coroutines, `max_concurrency` at once; yields the results as they come. `works` is iterated in the
        caller's thread, one for each result: what it is made from may be endless. An end of the iteration cancels those
        that run."""
        finished: queue.SimpleQueue[concurrent.futures.Future[T]] = queue.SimpleQueue()
        running: set[concurrent.futures.Future[T]] = set()
        source = iter(works)
        try:
            while True:
                while len(running) < self._max_concurrency and (work := next(source, None)) is not None:
                    future = self.run(work)
                    running.add(future)
                    future.add_done_callback(finished.put)
                    if not finished.empty():  # a slow source delays no result by more than one item
                        break
                if not running:
                    return
                future = finished.get()
                running.remove(future)
                yield future.result()
        finally:
            for future in running:
                future.cancel()

    async def post(self, path: str, body: bytes) -> Reply:
        """Send a request, again if the server is busy, restarts or ends the connection. Raises ServerError."""
        replies, pause = Counter[int](), 0.0
        while True:
            await self._wait(pause)
            reply = await self._send(path, body)
            self._was_reached |= reply.is_sent
            # A server that was reached before restarts, which takes as long as loading its model.
            status = 503 if self._was_reached and not reply.is_sent else reply.status
            replies[status] += 1
            if replies[status] > REPEATS.get(status, 0):
                if not reply.is_sent:
                    raise ServerError(reply.error)
                return reply
            pause = min(2.0 ** (replies.total() - 1), LONGEST_PAUSE_SECONDS)

    def close(self) -> None:
        """End the requests, and the program's own server with all its processes. May be called again."""
        if os.getpid() == self._pid:  # not in a fork
            closing = self.run(self._close())
            if asyncio._get_running_loop() is not self._loop:  # in whose thread the garbage may be collected
                closing.result()

    async def _open(self, flags: Sequence[str] | None) -> None:
        self._opening = asyncio.current_task()
        async with contextlib.AsyncExitStack() as resources:
            path: str | None = None
            if flags is not None:
                path = str(resources.enter_context(runtime_directory()) / "http")
                await resources.enter_async_context(own_server(["--uds", path, *flags], self._ended))
            import aiohttp  # which takes as long as a tenth of the server's start, beside it

            connector = aiohttp.TCPConnector(limit=0) if path is None else aiohttp.UnixConnector(path, limit=0)
            headers = {"Content-Type": "application/json", **self._headers}
            timeout = aiohttp.ClientTimeout()  # none: a video may take minutes
            session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)
            self._session = await resources.enter_async_context(session)
            OPEN_SESSIONS.add(session)
            resources.callback(OPEN_SESSIONS.remove, session)
            # The socket listens from early on, but no process accepts connections before all are ready.
            while flags is not None and (await self._send("/tokenize", b'{"prompt": ""}')).status != 200:
                await self._wait(CONNECT_SECONDS)
            self._resources = resources.pop_all()

    async def _close(self) -> None:
        if not self._ended.done():
            self._ended.set_result(ServerError("closed"))
        assert self._opening is not None
        self._opening.cancel()
        await asyncio.wait([self._opening])
        await self._resources.aclose()  # the session is the first: its requests end, and find that `_ended` is done

    async def _wait(self, seconds: float) -> None:
        """Raises the error of `_ended`, once there is one."""
        if seconds:
            await asyncio.wait([self._ended], timeout=seconds)
        if self._ended.done():
            raise self._ended.result().with_traceback(None)

    async def _send(self, path: str, body: bytes) -> Reply:
        import aiohttp  # by `_open`

        try:
            async with self._session.post(self._root + path, data=body) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            text = f"no response: {error or type(error).__name__}"
            return Reply(0, {"error": {"message": text}}, is_sent=not isinstance(error, aiohttp.ClientConnectorError))
        try:
            return Reply(response.status, msgspec.json.decode(content, type=dict[str, Any]))
        except (ValueError, RecursionError):  # such as a page of a proxy
            status = 0 if response.status == 200 else response.status
            return Reply(status, {"error": {"message": f"status {response.status}, no JSON: {content[:200]!r}"}})


@functools.cache
def loop_of(_pid: int) -> asyncio.AbstractEventLoop:
    """The event loop of the requests of the process `_pid`, which calls this, in a thread. It runs until the process
    ends: no request comes too late for it, and the kernel, which kills a child process when the thread that started it
    ends, kills no server before."""
    loop = asyncio.new_event_loop()
    # In a fork, which has no such thread, its frame keeps the sessions: to collect them would end the parent's, too.
    run = lambda _kept=OPEN_SESSIONS: loop.run_forever()  # noqa: E731
    threading.Thread(target=run, name="mini-engine", daemon=True).start()
    return loop


@contextlib.asynccontextmanager
async def own_server(flags: Sequence[str], ended: asyncio.Future[Exception]) -> AsyncIterator[None]:
    """Start a server, and stop it: running requests are aborted. It is killed when the calling thread ends. `ended`
    becomes what says why it has ended by itself."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mini_engine.launch", str(os.getpid()), *flags),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **module_paths()},
        start_new_session=True,  # Ctrl-C is for this program, which may go on
    )
    log = asyncio.create_task(forward_log(process, ended))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        if not (await asyncio.wait([log], timeout=STOP_SECONDS))[0]:
            process.kill()
            await log


async def forward_log(process: asyncio.subprocess.Process, ended: asyncio.Future[Exception]) -> None:
    """Write the server's log to this program's stderr, which in a notebook is no descriptor, until both end. Not by
    lines: the progress bar of a download is a single one, which grows for as long as that takes."""
    assert process.stderr is not None
    decode, end = codecs.getincrementaldecoder("utf-8")("replace").decode, ""
    while data := await process.stderr.read(LOG_BYTES):
        text = decode(data)
        end = (end + text)[-LAST_CHARACTERS:]
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, or closed
            sys.stderr.write(text)
    status = await process.wait()
    if ended.done():
        return
    last_lines = [line.rpartition("\r")[2] for line in end.rstrip().split("\n")[-LAST_LINES:]]  # bars as they ended
    if status == 2:
        ended.set_result(ConfigError(re.sub("^serve.py: |.*start failed: ", "", last_lines[-1])))
    else:
        log = "\n".join(last_lines)
        ended.set_result(ServerError(f"the server exited with status {status}; the end of its log:\n{log}"))


def root_of(url: str) -> str:
    """The URL of a running server without `/v1`. Raises ConfigError: it is none."""
    try:
        parts = urlsplit(url)
        is_root = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # such as a port above 65535
        is_root = False
    if not is_root:
        raise ConfigError(f"{url!r} is no URL of a server; write it as http://HOST:PORT/v1")
    return url.rstrip("/").removesuffix("/v1")


def check_flags(flags: Sequence[str]) -> Collection[str]:
    """The names of the settings that flags, variables and their file give for a server of this program's own. Raises
    ConfigError: they are unusable, or of a port, which it does not have."""
    origins = settle(flags, os.environ).origins
    for setting in fields():
        if setting.group in OF_THE_PORT and setting.name in origins:
            raise ConfigError(f"{origins[setting.name]}: there is no port here; omit it")
    return origins
