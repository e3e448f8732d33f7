"""Requests to a server, from any thread: to one that runs, or to one of this program's own.

Its own server is `serve.py` in a child process, behind a Unix socket in a directory that only this user can enter. It
ends with this program, however that ends. HTTP between the two costs a millisecond, and the program gets by without
torch, without the engine's event loop, and with the same checks and limits as any client.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import itertools
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from mini_engine.config import ConfigError, fields
from mini_engine.launch.cli import settle
from mini_engine.launch.host import runtime_directory
from mini_engine.launch.process_setup import module_paths

T = TypeVar("T")

SERVE = """
import sys
from mini_engine.launch.process_setup import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from mini_engine.launch.cli import serve
sys.exit(serve())
"""
MAX_CONCURRENCY = 64  # where nothing else is said: as many requests as a step on a CPU has sequences
OF_THE_PORT = ("Server", "Security")  # groups of settings that have no effect without a port
# How often a request is sent again after these statuses, 0 being a connection that ended: it may have been the request
# that ended the process at its other end.
REPEATS = {0: 4, 429: 12, 502: 4, 503: 12}
LONGEST_PAUSE_SECONDS = 30.0  # between two of them; the first is 1 s, and each is twice the one before
CONNECT_SECONDS = 0.05  # between attempts to connect to a server that starts
STOP_SECONDS = 20.0  # then it is killed
LINE_BYTES = 1 << 20  # of the log
LAST_LINES = 20  # of the log, in an error


class ServerError(RuntimeError):
    """The program's own server did not start, or ended. The text has the end of its log."""


@dataclass(frozen=True)
class Reply:
    """A response of any status; without one the status is 0 and the body is an error in OpenAI's form."""

    status: int
    body: dict[str, Any]

    @property
    def error(self) -> str | None:
        """Its message, None if the request was answered."""
        if self.status == 200:
            return None
        error = self.body.get("error")
        return str(error["message"] if isinstance(error, dict) and "message" in error else self.body)


class ServerHandle:
    """A server, and a thread with the event loop of the requests to it.

    Args:
        root: URL of a running server, without `/v1`.
        flags: of `serve.py`, for a server of this program's own, instead. Settings of its port are refused.
        headers: of each request.
        max_concurrency: coroutines that `as_finished` runs at once.

    Raises:
        ConfigError: unusable flags, or fewer than one at once.
        ServerError: the server did not start.
    """

    def __init__(
        self,
        root: str | None = None,
        flags: Sequence[str] = (),
        headers: dict[str, str] | None = None,
        max_concurrency: int = MAX_CONCURRENCY,
    ):
        self._root, self._headers = root or "http://localhost", headers or {}
        self._max_concurrency = max_concurrency
        if max_concurrency < 1:
            raise ConfigError(f"max-concurrency is {max_concurrency}: it must be at least 1")
        if root is None:
            check_flags(flags)
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._running = set[asyncio.Task[Any]]()
        self._lock = threading.Lock()
        self._failure: Exception | None = None  # why there are no more answers
        self._ready = concurrent.futures.Future[None]()
        serving = self._serve() if root else self._serve_own(flags)
        # The kernel kills a child process when the thread that started it ends, so this one is not the caller's. A
        # daemon, since the interpreter waits for other threads before it runs what closes this.
        self._thread = threading.Thread(target=self._run_loop, args=(serving,), name="mini-engine", daemon=True)
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine that may call `post`. Raises ServerError: the server has ended, or this is a fork."""
        if os.getpid() != self._pid:  # which has no such thread, and maybe a lock that stays locked
            work.close()
            raise ServerError("a forked process cannot use the server of its parent; start one of its own")
        with self._lock:
            if self._failure is None:
                return asyncio.run_coroutine_threadsafe(self._run_work(work), self._loop)
        work.close()
        raise self._failure.with_traceback(None)

    def as_finished(self, works: Iterable[Coroutine[Any, Any, T]]) -> Iterator[T]:
        """Run coroutines, `max_concurrency` at once; yields the results as they come. `works` is iterated in the
        caller's thread, one for each result: what it is made from may be endless. An end of the iteration cancels those
        that run."""
        finished: queue.SimpleQueue[concurrent.futures.Future[T]] = queue.SimpleQueue()
        running: set[concurrent.futures.Future[T]] = set()
        source: Iterator[Coroutine[Any, Any, T] | None] = itertools.chain(works, itertools.repeat(None))
        try:
            while True:
                while len(running) < self._max_concurrency and (work := next(source)) is not None:
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
        """Send a request, again if the server is busy or the connection ended. Raises ServerError."""
        repeat = 0
        while True:
            reply = await self._send(path, body)
            if repeat >= REPEATS.get(reply.status, 0):
                return reply
            await asyncio.sleep(min(2.0**repeat, LONGEST_PAUSE_SECONDS))
            repeat += 1

    def close(self) -> None:
        """End the requests, and the program's own server with all its processes. May be called again."""
        if os.getpid() == self._pid:  # not in a fork
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._closing.set)
            if threading.current_thread() is not self._thread:  # in which the garbage may be collected
                self._thread.join()

    async def _run_work(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`, registered while it runs. Raises ServerError instead of CancelledError when the server has ended."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure.with_traceback(None) from None
            raise
        finally:
            self._running.remove(task)

    async def _send(self, path: str, body: bytes) -> Reply:
        try:
            async with self._session.post(self._root + path, data=body) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Reply(0, {"error": {"message": f"no response: {error or type(error).__name__}"}})
        try:
            return Reply(response.status, msgspec.json.decode(content, type=dict[str, Any]))
        except (ValueError, RecursionError):  # such as a page of a proxy
            status = 0 if response.status == 200 else response.status
            return Reply(status, {"error": {"message": f"status {response.status}, no JSON: {content[:200]!r}"}})

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run_loop(self, serving: Coroutine[Any, Any, None]) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(serving)
        except Exception as error:  # noqa: BLE001 - the other thread raises it
            self._ready.set_exception(error)

    async def _serve(self, connector: aiohttp.BaseConnector | None = None) -> None:
        is_own, connector = connector is not None, connector or aiohttp.TCPConnector(limit=0)
        headers = {"Content-Type": "application/json", **self._headers}
        timeout = aiohttp.ClientTimeout()  # none: a video may take minutes
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as self._session:
            # The socket listens from early on, but no process accepts connections before all are ready.
            while is_own and (await self._send("/tokenize", b'{"prompt": ""}')).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(CONNECT_SECONDS)
            self._ready.set_result(None)
            try:
                await self._closing.wait()
            finally:
                with self._lock:
                    self._failure = self._failure or ServerError("closed")
                for _ in range(2):  # what other threads have just run becomes tasks, and these begin
                    await asyncio.sleep(0)
                for task in self._running:
                    task.cancel()
                await asyncio.gather(*self._running, return_exceptions=True)

    async def _serve_own(self, flags: Sequence[str]) -> None:
        with runtime_directory() as directory:
            path = str(directory / "http")
            async with own_server(["--uds", path, *flags]) as exited:
                serving = asyncio.create_task(self._serve(aiohttp.UnixConnector(path, limit=0)))
                closing = asyncio.create_task(self._closing.wait())
                await asyncio.wait([serving, closing, exited], return_when=asyncio.FIRST_COMPLETED)
                if exited.done():
                    self._failure = exited.result()
                serving.cancel()
                await asyncio.wait([serving])
            if not self._ready.done():
                raise self._failure or ServerError("closed")


@contextlib.asynccontextmanager
async def own_server(flags: Sequence[str]) -> AsyncIterator[asyncio.Task[Exception]]:
    """Start a server, and stop it: running requests are aborted. It is killed when the calling thread ends. Yields what
    says why it has ended by itself."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVE, str(os.getpid()), *flags),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, limit=LINE_BYTES,
        env={**os.environ, **module_paths()},
        start_new_session=True,  # Ctrl-C is for this program, which may go on
    )  # fmt: skip
    exited = asyncio.create_task(_forward_log(process))
    try:
        yield exited
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        if not (await asyncio.wait([exited], timeout=STOP_SECONDS))[0]:
            process.kill()
            await exited


async def _forward_log(process: asyncio.subprocess.Process) -> Exception:
    """Write the server's log to this program's stderr, which in a notebook is no descriptor, until both end. Returns
    why it has ended."""
    assert process.stderr is not None
    last_lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
    async for line in process.stderr:
        last_lines.append(line.decode(errors="replace"))
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, or closed
            sys.stderr.write(last_lines[-1])
    if (status := await process.wait()) == 2:
        return ConfigError(re.sub("^serve.py: |.*start failed: ", "", last_lines[-1]).rstrip())
    return ServerError(f"the server exited with status {status}; the end of its log:\n{''.join(last_lines)}")


def check_flags(flags: Sequence[str]) -> None:
    """Raises ConfigError: unusable flags or variables, or settings of a port, which the program's own server does not
    have."""
    origins = settle(flags, os.environ).origins
    for setting in fields():
        if setting.group in OF_THE_PORT and setting.name in origins:
            raise ConfigError(f"{origins[setting.name]}: there is no port here; omit it")
