"""Who may come in: those with a key (`--api-key`), and nobody once the server drains. Knows nothing of what is asked
for inside."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.api.error_responses import error_response
from mini_engine.api.errors import ApiError, shutting_down

OPEN_PATHS = ("/health", "/live")  # for those who only look whether the server is well
UNCOUNTED_PATHS = ("/metrics",)  # for those who watch how it ends
WRONG_KEY = "This server asks for an API key: send one that it knows in the header 'Authorization: Bearer KEY'."


class Work:
    """How many requests are inside, and whether more may come."""

    def __init__(self) -> None:
        self.draining = False
        self._unread: set[asyncio.Task[Any]] = set()  # requests whose bodies are not there yet
        self._inside = 0
        self._none_inside = asyncio.Event()
        self._none_inside.set()

    def __enter__(self) -> None:
        self._inside += 1
        self._none_inside.clear()

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._none_inside.set()

    async def read(self, receive: Receive) -> Message:
        """The next part of the body of the calling task's request. The task is cancelled if draining begins first: a
        client that sends half a body could hold up the end as long as it likes.
        """
        task = asyncio.current_task()
        assert task is not None
        self._unread.add(task)
        try:
            return await receive()
        finally:
            self._unread.discard(task)

    async def drain(self) -> None:
        """Let nobody in any more; returns when the last request that was there whole has its answer."""
        self.draining = True
        for task in self._unread:
            task.cancel()
        await self._none_inside.wait()


class Door:
    """ASGI middleware before all endpoints but `OPEN_PATHS`.

    It refuses with 401 who brings none of `api_keys`, if there are any, and with 503 who asks for more than figures
    while `work` drains. Whether a proxy has taken `root_path` away from the path or not, all inside know of it.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], root_path: str, work: Work):
        self._app = app
        self._known = [_digest(key.encode()) for key in api_keys]
        self._root_path = root_path
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root_path
        path = route_of(scope) if scope["type"] == "http" else None
        if path is None or path in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif self._known and not self._knows(scope):
            error = ApiError(401, WRONG_KEY, code="invalid_api_key")
            await error_response(error, headers={"www-authenticate": "Bearer"})(scope, receive, send)
        elif path in UNCOUNTED_PATHS:
            await self._app(scope, receive, send)
        elif self._work.draining:
            await error_response(shutting_down())(scope, receive, send)
        else:
            with self._work:
                await self._let_in(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that is cut off from outside, because the server ends, is told so if it has no response yet."""
        answered = whole = False

        async def sending(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        async def receiving() -> Message:
            nonlocal whole
            if whole:
                return await receive()
            message = await self._work.read(receive)
            whole = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, receiving, sending)
        except asyncio.CancelledError:
            if answered:
                raise
            await error_response(shutting_down())(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        """Takes as long for a key that is nearly right as for any other, whichever of them it is."""
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                given = key.strip() if scheme.lower() == b"bearer" else b""
        digest = _digest(given)
        return any([hmac.compare_digest(digest, known) for known in self._known])


def route_of(scope: Scope) -> str:
    """The path below `--root-path`, whether a proxy has taken that away or not."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _digest(key: bytes) -> bytes:
    """As long for each key, so that the length of the right one does not show either."""
    return hashlib.sha256(key).digest()
