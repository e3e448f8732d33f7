"""A request at its engine: what comes back for each of its samples, until each has ended.

Knows nothing of sockets, text or HTTP. Belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from mini_engine.api.errors import EngineError
from mini_engine.messages import EngineTimes, FinishReason, RequestOutput, TokenLogprob


class Ender(Protocol):
    """Where a request runs."""

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End the request there."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What came for one sample since the last look. `finish_reason` is set with the last."""

    index: int  # which sample
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: Sequence[list[TokenLogprob]] = ()  # one for each token, if asked for


class Sample:
    """One sample of a request: what has come for it and was not taken yet."""

    def __init__(self, generation: Generation, index: int, request_id: str):
        self.index = index
        self.request_id = request_id
        self.over = False  # nobody waits for its tokens any more
        self.num_cached_tokens = 0
        self.times: EngineTimes | None = None  # the first sample's, once its first token came
        self.generation = generation
        self._new = NewTokens(index, [], None)

    def receive(self, output: RequestOutput) -> None:
        """Take what the engine has sent for this sample."""
        if self.over:
            return
        if output.finish_reason == "error":
            self.fail(EngineError(output.error or "The engine failed at this request."))
        elif output.finish_reason == "abort":
            self.fail(EngineError("The engine has aborted this request."))
        else:
            new = self._new
            self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
            self.times = output.times or self.times
            self._new = NewTokens(
                self.index,
                new.token_ids + output.token_ids if new.token_ids else output.token_ids,
                output.finish_reason,
                [*new.logprobs, *output.logprobs] if new.logprobs else output.logprobs,
            )
            self.generation.ready(self)

    def fail(self, error: EngineError) -> None:
        """The engine will send no more."""
        self.generation.fail(error)

    def cut(self) -> None:
        """Nobody waits for more of its tokens: the last is the one that came before now."""
        self.over = True
        if self.times is not None:
            self.times = msgspec.structs.replace(self.times, last_token=time.monotonic())

    def take(self) -> NewTokens:
        """What has come since the last call."""
        new, self._new = self._new, NewTokens(self.index, [], None)
        self.over = new.finish_reason is not None
        return new


class Generation:
    """One request at its engine: an iterator over its samples' new tokens. Who has it aborts it when leaving early.

    `samples` go by index: the first has the request's own id, the others their siblings'. Tokens of a sample that
    come faster than they are taken are handed over together; no sample is taken twice while another waits.
    """

    def __init__(self, engine: Ender, request_ids: Sequence[str]):
        self.samples = [Sample(self, index, request_id) for index, request_id in enumerate(request_ids)]
        self.at_engine = False  # the engine has been handed the request, and has not turned it down
        self._engine = engine
        self._accepted = False
        self._turned_down = False
        self._waiting: collections.deque[Sample] = collections.deque()  # each with something to take, once
        self._error: EngineError | None = None
        self._arrival: asyncio.Future[None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        """How many tokens of the prompt the engine's prefix cache held for the first sample, once its first token came.

        The others find what the first has computed.
        """
        return self.samples[0].num_cached_tokens

    @property
    def times(self) -> EngineTimes | None:
        """When the first sample came how far; None before its first token. Whole once the sample is over."""
        return self.samples[0].times

    @property
    def over(self) -> bool:
        """Whether nobody waits for any of its tokens any more."""
        return all(sample.over for sample in self.samples)

    async def is_accepted(self) -> bool:
        """Wait until the engine has taken the request, or ended it, as the next look at the tokens will tell; False: it
        has turned it down."""
        while not (self._accepted or self._turned_down or self._waiting or self._error):
            await self._next_arrival()
        turned_down, self._turned_down = self._turned_down, False
        return not turned_down or self._error is not None

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> NewTokens:
        """Wait for tokens of any sample.

        Raises:
            EngineError: the engine has given the request up, or is gone.
        """
        if self.over:
            raise StopAsyncIteration
        while not (self._waiting or self._error):
            await self._next_arrival()
        if self._error is not None:
            self.abort()  # the samples that did not fail
            raise self._error
        return self._waiting.popleft().take()

    def stop(self, index: int) -> None:
        """End a sample at its engine unless it has ended: its text is complete. No more tokens of it come."""
        self._finish(self.samples[index], "stop")

    def abort(self) -> None:
        """End every sample that has not ended."""
        for sample in self.samples:
            self._finish(sample, "abort")

    def accept(self) -> None:
        """The engine has all that the request is made of."""
        self._accepted = True
        self._wake()

    def turn_down(self) -> None:
        """The engine has turned the request down, since its tensors have not come; it knows nothing of the request."""
        self.at_engine = False
        self._turned_down = True
        self._wake()

    def ready(self, sample: Sample) -> None:
        """`sample` has something to take."""
        if sample not in self._waiting:
            self._waiting.append(sample)
        self._wake()

    def fail(self, error: EngineError) -> None:
        """One of the samples has failed, and with it the request."""
        self._error = error
        self._wake()

    def _finish(self, sample: Sample, reason: Literal["stop", "abort"]) -> None:
        if sample.over:
            return
        sample.cut()
        if sample in self._waiting:
            self._waiting.remove(sample)
        self._engine.finish(sample.request_id, reason)

    async def _next_arrival(self) -> None:
        self._arrival = asyncio.get_running_loop().create_future()
        try:
            await self._arrival
        finally:
            self._arrival = None

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
