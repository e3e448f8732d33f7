"""One answer as text: an engine's tokens detokenised as they come, up to a stop string, with what they amount to.

Knows nothing of HTTP or of how text is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from mini_engine.api.detokenizer import Detokenizer
from mini_engine.api.engine_client import Generation
from mini_engine.api.errors import EngineError
from mini_engine.api.responses import FinishedBy, Usage, usage
from mini_engine.messages import FinishReason
from mini_engine.metrics import RequestClock


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer, perhaps none. `finish_reason` is set with the last."""

    text: str
    finish_reason: FinishedBy | None


class Answer:
    """An iterator over an answer's text. Leaving it as a context before its end aborts the request."""

    def __init__(self, generation: Generation, detokenizer: Detokenizer, clock: RequestClock, prompt_tokens: int):
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0  # delivered: up to the one that completes a stop string
        self._generation = generation
        self._detokenizer = detokenizer
        self._clock = clock
        self._over = False

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return usage(self.prompt_tokens, self.completion_tokens)

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Piece:
        """Wait for the next tokens.

        Raises:
            EngineError: the engine has given the request up, or is gone.
        """
        if self._over:
            raise StopAsyncIteration
        try:
            tokens = await anext(self._generation)
        except EngineError:
            self._end("error")
            raise
        delta = self._detokenizer.push(tokens.token_ids)
        self.completion_tokens += delta.tokens_used
        self._clock.tokens(self.prompt_tokens, delta.tokens_used)
        text = delta.text
        if tokens.finish_reason is not None:
            text += self._detokenizer.finish()
        if self._detokenizer.stopped_by is not None:
            self._generation.finish("stop")
            return self._last(text, "stop")
        if tokens.finish_reason is not None:
            return self._last(text, "length" if tokens.finish_reason == "length" else "stop")
        return Piece(text, None)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._over:
            self._generation.finish("abort")
            self._end("abort")

    def _last(self, text: str, reason: FinishedBy) -> Piece:
        self._end(reason)
        return Piece(text, reason)

    def _end(self, reason: FinishReason) -> None:
        self._over = True
        self._clock.end(reason)
