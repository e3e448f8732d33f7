"""A request at its engine, and the text of each of its samples, incrementally.

Only `Generation` decides whether a request is finished: `responses.py` iterates over it, and `Engine` calls the rest.
Shared by chat and legacy completions. Belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mini_engine.api.detokenizer import Piece, SampleText
from mini_engine.api.errors import EngineError
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
        self.over = False  # there are no more pieces
        self.num_cached_tokens = 0
        self.times: EngineTimes | None = None  # of the first sample, once its first token arrived
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
        """There are no more pieces; outputs that were not taken are dropped."""
        self.over, self._outputs = True, []
        if self.times is not None and not self._ended:  # its last token is the one that was taken now
            self.times = msgspec.structs.replace(self.times, last_token=time.monotonic())


class Generation:
    """One request, as an asynchronous iterator over the pieces of its choices. As a context it aborts, when it is left,
    what has not ended.

    Tokens that arrive faster than they are taken are one piece; no sample is taken twice while another waits.

    Args:
        request: with its siblings; the first sample has the request's own id.
        texts: of its samples, in order.
        media: what the response says of the images and videos, in the order of the prompt.
        warnings: what the answer does not rest on, such as the missing part of a video.
    """

    def __init__(
        self,
        request: NewRequest,
        texts: Sequence[SampleText],
        clock: RequestClock,
        media: Sequence[dict[str, Any]] = (),
        warnings: Sequence[str] = (),
    ):
        ids = [request.request_id, *(sibling.request_id for sibling in request.siblings)]
        # Not the request itself: its tensors would stay in memory until the last token.
        self.request_id, self.num_prompt_tokens = request.request_id, len(request.prompt_token_ids)
        self.clock = clock
        self.samples = [Sample(self, request_id, text) for request_id, text in zip(ids, texts, strict=True)]
        self.finish_at_engine: FinishAtEngine | None = None  # of the engine that has the request
        self.media = media
        self.warnings = warnings
        self._error: EngineError | None = None
        self._waiting: collections.deque[Sample] = collections.deque()  # samples with outputs, each once
        self._accepted: asyncio.Future[bool] | None = None
        self._arrival: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """Whether every sample has ended: there are no more pieces."""
        return all(sample.over for sample in self.samples)

    @property
    def completion_tokens(self) -> int:
        """Delivered so far."""
        return sum(sample.text.completion_tokens for sample in self.samples)

    # --- for the HTTP side -------------------------------------------------------------------------------------------

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Piece:
        """Wait for tokens of any sample. Raises EngineError: the engine has failed at the request, or is down."""
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
        """The engine accepted the request, or rejected it and has no state of it."""
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
        """The engine sends no more outputs: fail the request with `error`."""
        self._error = error
        self._wake()

    def abort(self) -> None:
        """End every sample that has not ended, at the engine too."""
        for sample in self.samples:
            self._finish(sample, "abort")

    def _end(self, reason: FinishReason) -> None:
        self.abort()
        self.clock.end(reason, None if reason in ("abort", "error") else self.samples[0].times)
        request_id, tokens = self.request_id, self.completion_tokens
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
