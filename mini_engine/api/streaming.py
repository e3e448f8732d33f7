"""From generations to an HTTP response, whole or as server-sent events. Shared by chat and legacy completions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_engine.api.error_responses import explain
from mini_engine.api.generation import Generation
from mini_engine.api.protocol import ChatRequest, GenerationRequest
from mini_engine.api.responses import DONE, NO_REMARKS, Piece, PromptTokensDetails, Usage, Writer, error_event


class Responder:
    """Makes the response to one request. Keeps nothing of the request but what it asks of the response."""

    def __init__(self, asked: GenerationRequest, writer: Writer):
        self._writer = writer
        self._stream = bool(asked.stream)
        self._include_usage = asked.include_usage
        self._with_timings = isinstance(asked, ChatRequest) and bool(asked.return_timings)

    async def respond(self, generations: Sequence[Generation]) -> Response:
        """The response, once all of `generations` have ended, or as events from their first piece on. The choices of a
        generation follow those of the one before it.

        Whatever ends this early, or the response when it is a stream, aborts what is not over.

        Raises:
            EngineError: an engine has failed at the request before the first event.
        """
        if self._stream:
            events = self._events(generations)
            return EventStream(await anext(events), events)
        choices: dict[int, list[Piece]] = {}
        with contextlib.ExitStack() as running:
            async with contextlib.aclosing(_pieces(generations, running)) as pieces:
                async for piece in pieces:
                    choices.setdefault(piece.index, []).append(piece)
        remarks = generations[0].remarks(self._with_timings)
        body = self._writer.whole([choices[index] for index in sorted(choices)], _usage(generations), remarks)
        return Response(body, media_type="application/json")

    async def _events(self, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
        """The events, of which the last leave together. What fails after the first is an event too."""
        first, started = generations[0], False
        unfinished = sum(len(generation.samples) for generation in generations)
        with contextlib.ExitStack() as running:
            try:
                async with contextlib.aclosing(_pieces(generations, running)) as pieces:
                    async for piece in pieces:
                        unfinished -= piece.finish_reason is not None
                        remarks = NO_REMARKS if unfinished else first.remarks(self._with_timings)
                        event = self._writer.event(piece, NO_REMARKS if self._include_usage else remarks)
                        if not unfinished and self._include_usage:
                            event += self._writer.usage_event(_usage(generations), remarks)
                        if not unfinished:
                            event += DONE
                        if event:
                            started = True
                            yield event
            except Exception as error:  # noqa: BLE001 - explain() logs what it does not know
                if not started:
                    raise
                yield error_event(explain(error, first.request.request_id, first.clock))


class EventStream(Response):
    """A response of server-sent events. The headers leave with `first`, then each of `events` as it comes.

    `events` is closed however the response ends.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]):
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


async def _pieces(generations: Sequence[Generation], running: contextlib.ExitStack) -> AsyncGenerator[Piece, None]:
    """The pieces of all generations as they come; `running` aborts them when it is left early."""
    for generation in generations:
        running.enter_context(generation)
    if len(generations) == 1:
        async for piece in generations[0]:
            yield piece
        return
    coming = {asyncio.ensure_future(anext(generation)): generation for generation in generations}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                generation = coming.pop(task)
                piece = task.result()
                if not generation.over:
                    coming[asyncio.ensure_future(anext(generation))] = generation
                yield piece
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)


def _usage(generations: Sequence[Generation]) -> Usage:
    """The tokens of all generations."""
    each = [generation.usage for generation in generations]
    if len(each) == 1:
        return each[0]
    prompt, completion = sum(one.prompt_tokens for one in each), sum(one.completion_tokens for one in each)
    cached = PromptTokensDetails(sum(one.prompt_tokens_details.cached_tokens for one in each))
    return Usage(prompt, completion, prompt + completion, cached)
