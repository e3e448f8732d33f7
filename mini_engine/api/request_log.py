"""`--enable-log-requests`: a line for each request when it has ended. Knows nothing of what it says."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.api.door import OPEN_PATHS, route_of
from mini_engine.api.timings import RequestClock
from mini_engine.log import about

logger = logging.getLogger(__name__)


class RequestLog:
    """ASGI middleware around all endpoints but those that only look whether the server is well."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        status, request_id, whole = 0, "-", False

        async def sending(message: Message) -> None:
            nonlocal status, request_id, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = dict(message["headers"]).get(b"x-request-id", b"-").decode()
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            if route_of(scope) not in OPEN_PATHS:  # the door knows the path's root by now
                # The path as it was sent: decoded, it could hold the end of a line.
                path = scope["raw_path"].decode("ascii", "backslashreplace")
                seconds = time.monotonic() - begun
                clock: RequestClock | None = scope["state"].get("clock")
                end = "" if whole else ", cut off"
                if status == 200 and clock is not None and clock.failed:
                    end = ", with an error in its stream"
                logger.info(
                    "%s %s %s: %d after %.3f s%s", request_id, scope["method"], path, status, seconds, end,
                    extra=about(request_id) if request_id != "-" else None,
                )  # fmt: skip
