"""What the routes of the HTTP application share: the parts of the server, reading a body, making a response."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_engine.api.admission import MediaAdmission, RequestAdmission
from mini_engine.api.chat import ChatRenderer
from mini_engine.api.engine_client import EngineClient
from mini_engine.api.media_loader import MediaLoader
from mini_engine.api.media_settings import MediaSettingsResolver
from mini_engine.api.request_body import BodyLimits
from mini_engine.api.sampling import SamplingResolver
from mini_engine.api.vocabulary import Vocabulary
from mini_engine.messages import EngineLimits

INLINE_SIZE = 16_384  # shorter texts and bodies are processed faster than a thread could answer

T = TypeVar("T")


@dataclass(frozen=True)
class AppContext:
    """The parts of an API server that the routes use."""

    model_names: list[str]  # the first is the one in responses
    item_limits: Mapping[str, int]  # --limit-mm-per-prompt
    renderer: ChatRenderer
    tokenizer: Any  # Hugging Face's
    vocabulary: Vocabulary
    body_limits: BodyLimits
    requests: RequestAdmission
    admission: MediaAdmission
    media_settings: MediaSettingsResolver
    media: MediaLoader
    sampling: SamplingResolver
    engines: EngineClient
    limits: EngineLimits


def context_of(request: Request) -> AppContext:
    """The context of the application that serves `request`."""
    return request.app.state.context


async def read_body(request: Request) -> bytes:
    """The body, once: unlike `Request.body` it does not stay in memory until the response has ended.

    Raises:
        ApiError, EngineError, ClientDisconnect: see `middleware.Exchange.receive`.
    """
    return (await request.receive())["body"]


async def respond(work: Coroutine[Any, Any, bytes] | AsyncGenerator[bytes, None]) -> Response:
    """The JSON of `work` as a response, or its events. What fails before the first event is raised."""
    if isinstance(work, AsyncGenerator):
        return EventStream(await anext(work), work)
    return Response(await work, media_type="application/json")


class EventStream(Response):
    """Server-sent events. The headers leave with `first`. `events` is closed however the response ends."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]):
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def in_thread_if_large(work: Callable[[], T], size: int) -> T:
    """The result of `work`, computed in a thread if it is about a text or a body of more than INLINE_SIZE."""
    return work() if size <= INLINE_SIZE else await asyncio.to_thread(work)
