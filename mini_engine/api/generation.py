"""A request at its engine, the text of each of its samples as it comes, and the HTTP response made of it.

`Generation` alone decides whether a request is over: it is an iterator for `Responder`, and `Engine` calls the rest.
Shared by chat and legacy completions. Belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_engine.api.detokenizer import SampleText
from mini_engine.api.errors import EngineError, error_event, explain
from mini_engine.api.protocol import ChatRequest, GenerationRequest
from mini_engine.api.responses import DONE, NO_REMARKS, MediaUsage, Piece, PromptTokensDetails, Remarks, Usage, Writer
from mini_engine.api.timings import RequestClock
from mini_engine.log import about
from mini_engine.messages import EngineTimes, FinishReason, NewRequest, RequestOutput

logger = logging.getLogger(__name__)


FinishAtEngine = Callable[[str, FinishReason], None]  # ends a sample, by its id


class Sample:
    """One sample of a request: its outputs that are not taken yet, and its text."""

    def __init__(self, generation: Generation, request_id: str, text: SampleText):
        self.generation = generation
        self.request_id = request_id
        self.text = text
        self.over = False  # no more pieces come
        self.num_cached_tokens = 0
        self.times: EngineTimes | None = None  # of the first sample, once its first token came
        self._ended = False  # by the engine
        self._outputs: list[RequestOutput] = []

    @property
    def is_waiting(self) -> bool:
        """Whether outputs wait to be taken."""
        return bool(self._outputs)

    def add(self, output: RequestOutput) -> None:
        """Keep `output` until the next `take`."""
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
        self.times = output.times or self.times
        self._ended = output.finish_reason is not None
        self._outputs.append(output)

    def take(self) -> Piece:
        """The text of the outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        if len(outputs) == 1:
            token_ids, logprobs = outputs[0].token_ids, outputs[0].logprobs
        else:
            token_ids = [token for output in outputs for token in output.token_ids]
            logprobs = [listed for output in outputs for listed in output.logprobs]
        return self.text.push(token_ids, outputs[-1].finish_reason, logprobs)

    def end(self) -> None:
        """No more pieces come; outputs that were not taken are dropped."""
        self.over, self._outputs = True, []
        if self.times is not None and not self._ended:  # its last token is the one that was taken now
            self.times = msgspec.structs.replace(self.times, last_token=time.monotonic())


class Generation:
    """One request, as an asynchronous iterator over the pieces of its choices. As a context it aborts, when it is left,
    what has not ended.

    Tokens that come faster than they are taken are one piece; no sample is taken twice while another waits.

    Args:
        request: with its siblings; the first sample has the request's own id.
        texts: of its samples, in order.
        media, warnings: for `usage` and `remarks`.
    """

    def __init__(
        self,
        request: NewRequest,
        texts: Sequence[SampleText],
        clock: RequestClock,
        media: Sequence[MediaUsage] = (),
        warnings: Sequence[str] = (),
    ):
        ids = [request.request_id, *(sibling.request_id for sibling in request.siblings)]
        # Not the request itself: its tensors would stay in memory until the last token.
        self.request_id, self.num_prompt_tokens = request.request_id, len(request.prompt_token_ids)
        self.clock = clock
        self.samples = [Sample(self, request_id, text) for request_id, text in zip(ids, texts, strict=True)]
        self.finish_at_engine: FinishAtEngine | None = None  # of the engine that has the request
        self._media = media
        self._warnings = warnings
        self._error: EngineError | None = None
        self._waiting: collections.deque[Sample] = collections.deque()  # samples with outputs, each once
        self._accepted: asyncio.Future[bool] | None = None
        self._arrival: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """Whether every sample has ended: no more pieces come."""
        return all(sample.over for sample in self.samples)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompt, first = self.num_prompt_tokens, self.samples[0]
        completion = sum(sample.text.completion_tokens for sample in self.samples)
        cached = PromptTokensDetails(first.num_cached_tokens)  # the other samples find what the first has computed
        return Usage(prompt, completion, prompt + completion, cached, self._media or msgspec.UNSET)

    def remarks(self, with_timings: bool) -> Remarks:
        """What the response says of the request at its end."""
        return Remarks(self.clock.timings() if with_timings else None, self._warnings)

    # --- for the HTTP side -------------------------------------------------------------------------------------------

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Piece:
        """Wait for tokens of any sample. Raises EngineError: the engine has failed at the request, or is gone."""
        if self.over:
            raise StopAsyncIteration
        while not (self._waiting or self._error):
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        if self._error is not None:
            self._end("error")
            raise self._error
        sample = self._waiting.popleft()
        before = sample.text.completion_tokens
        piece = sample.take()
        delivered = sample.text.completion_tokens - before
        self.clock.tokens(self.num_prompt_tokens, delivered, piece.index)
        if piece.finish_reason is not None:
            self._finish(sample, "stop")  # without effect unless a stop string ended it
            if self.over:
                self._end(piece.finish_reason)
        return piece

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.over:
            self._end("abort")

    # --- for the engine ----------------------------------------------------------------------------------------------

    def sent(self, finish_at_engine: FinishAtEngine) -> asyncio.Future[bool]:
        """An engine was sent the request. The future is True once it has accepted or ended it, False if it turned the
        request down."""
        self.finish_at_engine = finish_at_engine
        self._accepted = asyncio.get_running_loop().create_future()
        if self._waiting or self._error:
            self._accepted.set_result(True)
        return self._accepted

    def answer(self, accepted: bool) -> None:
        """The engine has accepted the request, or turned it down: then it knows nothing of it any more."""
        if not accepted:
            self.finish_at_engine = None
        if self._accepted is not None and not self._accepted.done():
            self._accepted.set_result(accepted)

    def receive(self, sample: Sample, output: RequestOutput) -> None:
        """The engine's `output` for `sample`."""
        if sample.over:
            return
        if output.finish_reason in ("error", "abort"):
            self.fail(EngineError(output.error or "The engine has aborted this request.", 500, "internal_error"))
            return
        if not sample.is_waiting:
            self._waiting.append(sample)
        sample.add(output)
        self._wake()

    def fail(self, error: EngineError) -> None:
        """The engine sends no more: the request ends with `error`."""
        self._error = error
        self._wake()

    def abort(self) -> None:
        """End every sample that has not ended, at the engine too."""
        for sample in self.samples:
            self._finish(sample, "abort")

    def _end(self, reason: FinishReason) -> None:
        self.abort()
        self.clock.end(reason, None if reason in ("abort", "error") else self.samples[0].times)
        request_id, tokens = self.request_id, self.usage.completion_tokens
        logger.debug("%s finished: %s, %d tokens", request_id, reason, tokens, extra=about(request_id))

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        if sample.over:
            return
        if sample.is_waiting:
            self._waiting.remove(sample)
        sample.end()
        if self.finish_at_engine is not None:
            self.finish_at_engine(sample.request_id, reason)  # without effect if the engine has ended it

    def _wake(self) -> None:
        self.answer(True)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


# --- responses --------------------------------------------------------------------------------------------------------


class Responder:
    """Makes the response to one request. Keeps nothing of the request but what it asks of the response."""

    def __init__(self, asked: GenerationRequest, writer: Writer):
        self._writer = writer
        self._stream = bool(asked.stream)
        self._include_usage = asked.include_usage
        self._with_timings = isinstance(asked, ChatRequest) and bool(asked.return_timings)

    async def respond(self, generations: Sequence[Generation]) -> Response:
        """The response, once all of `generations` have ended, or as events from their first piece on. The choices of a
        generation follow those of the one before it. Raises EngineError: an engine has failed at the request before the
        first event."""
        if self._stream:
            events = self._events(generations)
            return EventStream(await anext(events), events)
        choices: dict[int, list[Piece]] = {}
        async with contextlib.aclosing(_pieces(generations)) as pieces:
            async for piece in pieces:
                choices.setdefault(piece.index, []).append(piece)
        remarks = generations[0].remarks(self._with_timings)
        body = self._writer.whole([choices[index] for index in sorted(choices)], _usage(generations), remarks)
        return Response(body, media_type="application/json")

    async def _events(self, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
        """The events, of which the last leave together. What fails after the first is an event too."""
        first, started = generations[0], False
        unfinished = sum(len(generation.samples) for generation in generations)
        try:
            async with contextlib.aclosing(_pieces(generations)) as pieces:
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
            yield error_event(explain(error, first.request_id, first.clock))


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


async def _pieces(generations: Sequence[Generation]) -> AsyncGenerator[Piece, None]:
    """The pieces of all generations as they come."""
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
