"""One answer as text: the tokens of each of its samples detokenised as they come, up to a stop string, with what they
amount to.

Knows nothing of HTTP or of how text is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mini_engine.api.detokenizer import Detokenizer
from mini_engine.api.errors import EngineError
from mini_engine.api.generation import Generation, NewTokens
from mini_engine.api.logprobs import LogprobList
from mini_engine.api.responses import FinishedBy, ListedToken, MediaUsage, Usage, usage
from mini_engine.api.timings import RequestClock
from mini_engine.log import about
from mini_engine.messages import EngineTimes, FinishReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of one of an answer's samples, perhaps none. `finish_reason` is set with the sample's last."""

    index: int
    text: str
    finish_reason: FinishedBy | None
    logprobs: list[ListedToken] | None  # of the tokens that `text` is made of; None: not asked for


class SampleText:
    """The text of one sample."""

    def __init__(self, detokenizer: Detokenizer, logprobs: LogprobList | None, hidden_ends: Collection[int]):
        """The text of a token of `hidden_ends` is left out where the token ends the sample, even if it has one."""
        self.completion_tokens = 0  # delivered: up to the one that completes a stop string
        self._detokenizer = detokenizer
        self._logprobs = logprobs
        self._hidden_ends = hidden_ends

    def push(self, tokens: NewTokens) -> Piece:
        """Take the next tokens; none may follow a piece with a `finish_reason`."""
        token_ids = tokens.token_ids
        hidden = tokens.finish_reason == "stop" and bool(token_ids) and token_ids[-1] in self._hidden_ends
        if hidden:
            token_ids = token_ids[:-1]
        text = self._push(token_ids, tokens)
        reason: FinishedBy | None = None
        if tokens.finish_reason is not None:
            text += self._detokenizer.finish()
            reason = "length" if tokens.finish_reason == "length" else "stop"
        if self._detokenizer.stopped_by is not None:
            reason = "stop"
        elif hidden:
            self.completion_tokens += 1
        return Piece(tokens.index, text, reason, None if self._logprobs is None else self._logprobs.send(text))

    def _push(self, token_ids: Sequence[int], tokens: NewTokens) -> str:
        if self._logprobs is None:
            delta = self._detokenizer.push(token_ids)
            self.completion_tokens += delta.tokens_used
            return delta.text
        text = ""
        for token_id, logprobs in zip(token_ids, tokens.logprobs[: len(token_ids)], strict=True):
            start = self._detokenizer.decoded_length
            delta = self._detokenizer.push([token_id])
            if delta.tokens_used:
                self._logprobs.add(start, logprobs)
                self.completion_tokens += 1
            text += delta.text
        return text


class Answer:
    """An iterator over an answer's text, the samples' pieces as they come.

    Leaving it as a context before its end aborts the request.
    """

    def __init__(
        self,
        generation: Generation,
        samples: Sequence[SampleText],
        clock: RequestClock,
        prompt_tokens: int,
        warnings: Sequence[str] = (),
        media: Sequence[MediaUsage] = (),
    ):
        """`samples` are `generation`'s, in its order. `warnings` say what the answer does not rest on."""
        self.prompt_tokens, self.media = prompt_tokens, media
        self.warnings = warnings
        self.samples = samples
        self._generation = generation
        self._clock = clock
        self._unfinished = len(samples)

    @property
    def over(self) -> bool:
        """Whether every sample has brought its last piece, or the request has ended otherwise."""
        return self._unfinished == 0

    @property
    def usage(self) -> Usage:
        """Tokens so far: the prompt's once, and those of all samples."""
        completion_tokens = sum(sample.completion_tokens for sample in self.samples)
        return usage(self.prompt_tokens, completion_tokens, self._generation.num_cached_tokens, self.media)

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Piece:
        """Wait for the next tokens.

        Raises:
            EngineError: the engine has given the request up, or is gone.
        """
        if self.over:
            raise StopAsyncIteration
        try:
            tokens = await anext(self._generation)
        except EngineError:
            self._end("error")
            raise
        sample = self.samples[tokens.index]
        before = sample.completion_tokens
        piece = sample.push(tokens)
        self._clock.tokens(self.prompt_tokens, sample.completion_tokens - before, piece.index)
        if piece.finish_reason is not None:
            self._generation.stop(piece.index)  # of a stop string its engine does not know
            self._unfinished -= 1
            if self.over:
                self._end(piece.finish_reason, self._generation.times)
        return piece

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.over:
            self._generation.abort()
            self._end("abort")

    def _end(self, reason: FinishReason, times: EngineTimes | None = None) -> None:
        self._unfinished = 0
        self._clock.end(reason, times)
        request_id, tokens = self._generation.samples[0].request_id, self.usage.completion_tokens
        logger.debug("%s finished: %s, %d tokens", request_id, reason, tokens, extra=about(request_id))
