"""The answer to a request: what its engine sends becomes text, sample by sample and piece by piece.

Only `Answer` decides whether a request is finished: `pieces` takes its pieces, and `EngineHandle` calls the rest.
Shared by all endpoints that engines answer. Belongs to the event loop's thread.
"""

import asyncio
import collections
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import msgspec

from mini_engine.log import about
from mini_engine.messages import EngineTimes, FinishReason, NewRequest, Problem, RequestOutput, SamplingParams
from mini_engine.prompt.detokenizer import Detokenizer, ListedToken, Vocabulary
from mini_engine.prompt.prompt_echo import LogprobTables, PromptEcho
from mini_engine.prompt.renderer import Prompt
from mini_engine.prompt.stop_strings import StopSearch, stop_strings
from mini_engine.prompt.tool_calls import Kind
from mini_engine.protocol.api_errors import ApiError, EngineError, MediaNotSent, bad_request
from mini_engine.protocol.request_clock import RequestClock

logger = logging.getLogger(__name__)

PIECE_OUTPUTS = 16  # most that one piece is made of: with 20 logprobs each, some milliseconds
TURN_SECONDS = 0.002  # that one request may take and use its pieces before it yields to the event loop

FinishedBy = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What the next tokens add to one choice. The last one has a `finish_reason`."""

    index: int
    num_tokens: int
    fragments: list[tuple[Kind, str]]
    finish_reason: FinishedBy | None
    logprobs: list[ListedToken] | None  # of each of the tokens, and of an echoed prompt's; None: not asked for


class Sample:
    """One sample of a request, its choice `index`, and the text of its outputs."""

    def __init__(
        self,
        index: int,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        vocabulary: Vocabulary,
        echo: PromptEcho | None,
    ):
        """The thought is split from the text, in which stop strings act before calls are split off; `echo` comes before
        both."""
        body = prompt.body
        include_stop = bool(body.include_stop_str_in_output)
        self.index = index
        self.request_id = request_id
        self.over = False  # there are no more pieces
        self.completion_tokens = 0  # delivered, up to the one that completes a stop string
        self.reasoning_tokens = 0  # of these, in the thought
        self.num_cached_tokens = 0
        self.times: EngineTimes | None = None  # of the first sample, once its first token arrived
        self.pooled = b""
        self._detokenizer = Detokenizer(vocabulary, body.skip_special_tokens is not False)
        self._thoughts = prompt.thought_parser()
        self._stops = StopSearch(stop_strings(tuple(body.stop_strings)), include_stop)
        self._calls = prompt.call_parser()
        self._min_tokens = sampling.min_tokens  # no stop string counts that these complete, as in vLLM
        self._with_logprobs = sampling.logprobs is not None
        self._hidden_ends = () if include_stop else sampling.stop_token_ids  # without text where they end the sample
        self._echoed = iter(()) if echo is None else echo.pieces(self._detokenizer)
        self._is_empty = body.token_limit == 0
        self._ended = False  # by the engine
        self.outputs: list[RequestOutput] = []  # not taken yet

    def add(self, output: RequestOutput) -> None:
        """Keep `output` until the next `take`."""
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
        self.times = output.times or self.times
        self.pooled = output.pooled
        self._ended = output.finish_reason is not None
        if self._is_empty:  # the engine has sampled a token all the same
            output = msgspec.structs.replace(output, token_ids=[], logprobs=[], finish_reason="length")
        self.outputs.append(output)

    def take(self) -> Piece:
        """The piece that the next outputs make, at most `PIECE_OUTPUTS`; before the first the pieces of the prompt. One
        with a finish reason, which may be that of a stop string, is the last."""
        if (echoed := next(self._echoed, None)) is not None:
            text, listed = echoed
            return Piece(self.index, 0, [("content", text)] if text else [], None, listed)
        outputs, self.outputs = self.outputs[:PIECE_OUTPUTS], self.outputs[PIECE_OUTPUTS:]
        reason, before = outputs[-1].finish_reason, self.completion_tokens
        parts: list[tuple[str, str]] = []
        listed = [] if self._with_logprobs else None
        token_ids = [token for output in outputs for token in output.token_ids]
        logprobs = [each for output in outputs for each in output.logprobs]
        hidden = reason == "stop" and bool(token_ids) and token_ids[-1] in self._hidden_ends
        for position, token_id in enumerate(token_ids, 1):
            if self._stops.found:
                break
            self.completion_tokens += 1
            if listed is not None:
                listed.append(self._detokenizer.list_token(logprobs[position - 1]))
            if not (hidden and position == len(token_ids)):
                parts.append(self._split(self._detokenizer.push(token_id)))
                self.reasoning_tokens += self._thoughts.in_thought
        if reason is not None and not self._stops.found:
            parts.append(self._split(self._detokenizer.finish(), last=True))
        finished: FinishedBy | None = None
        if self._stops.found or reason is not None:
            finished = "length" if reason == "length" and not self._stops.found else "stop"
        thought, text = ("".join(texts) for texts in zip(("", ""), *parts, strict=True))
        fragments: list[tuple[Kind, str]] = [("reasoning_content", thought)] if thought else []
        fragments += self._calls.push(text, last=finished is not None)
        return Piece(self.index, self.completion_tokens - before, fragments, finished, listed)

    def _split(self, decoded: str, last: bool = False) -> tuple[str, str]:
        """What `decoded` adds to the thought, and to the text, where stop strings count."""
        parts: dict[str, str] = dict(self._thoughts.push(decoded, last))
        text = self._stops.push(parts.get("content", ""), self.completion_tokens <= self._min_tokens, last)
        return parts.get("reasoning_content", ""), text

    def end(self) -> None:
        """There are no more pieces; outputs that were not taken are dropped."""
        self.over, self.outputs = True, []
        if self.times is not None and not self._ended:  # its last token is the one that was taken now
            self.times = msgspec.structs.replace(self.times, last_token=time.monotonic())


class Answer:
    """One request, and the pieces of its choices. As a context it aborts, when it is left, what has not ended.

    Args:
        request: what the engine gets of `prompt`, with its children.
        finish_at_engine: ends a sample, by its id; without effect if the engine has ended it.
        media: what the response says of the images and videos, in order.
        warnings: what the answer does not rest on, such as the missing part of a video.
    """

    def __init__(
        self,
        prompt: Prompt,
        request: NewRequest,
        vocabulary: Vocabulary,
        clock: RequestClock,
        finish_at_engine: Callable[[str, FinishReason], None],
        media: Sequence[dict[str, Any]],
        warnings: Sequence[str],
    ):
        body = prompt.body
        ids = [request.request_id, *(child.request_id for child in request.children)]
        # Not the request itself: its tensors would stay in memory until the last token.
        self.request_id, self.num_prompt_tokens = request.request_id, len(request.prompt_token_ids)
        self.clock, self.media, self.warnings = clock, media, warnings
        self._finish_at_engine = finish_at_engine
        clock.max_tokens = request.sampling.max_tokens
        self._prompt: PromptEcho | None = None
        if body.echo or request.sampling.prompt_logprobs is not None:
            self._prompt = PromptEcho(body, request, vocabulary)
        echoed = self._prompt if body.echo else None
        self.samples = {
            sample_id: Sample(index, sample_id, prompt, request.sampling, vocabulary, echoed)
            for index, sample_id in enumerate(ids, prompt.first_index)
        }
        self.arrival: int | None = None  # of the request when it is sent again
        self._error: ApiError | None = None
        self._grammar_field = body.grammar_field if request.sampling.grammar else None
        self._ready: collections.deque[Sample] = collections.deque()  # samples with outputs, each once
        self.arrived = asyncio.Event()  # set when there is something to take
        self._unfinished = len(ids)  # samples

    @property
    def over(self) -> bool:
        """Whether every sample has ended: there are no more pieces."""
        return not self._unfinished

    @property
    def completion_tokens(self) -> int:
        """Delivered so far."""
        return sum(sample.completion_tokens for sample in self.samples.values())

    @property
    def reasoning_tokens(self) -> int:
        """Of these, in thoughts."""
        return sum(sample.reasoning_tokens for sample in self.samples.values())

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt in the prefix cache; the other samples find there what the first has computed."""
        return self.samples[self.request_id].num_cached_tokens

    @property
    def pooled(self) -> bytes:
        """What a request with `pooling` is for, once it is over; see `RequestOutput`."""
        return self.samples[self.request_id].pooled

    def prompt_tables(self) -> Iterator[LogprobTables]:
        """See `PromptEcho.tables`; once the request is over."""
        return self._prompt.tables() if self._prompt is not None else iter(())

    # --- for the HTTP side -------------------------------------------------------------------------------------------

    async def is_admitted(self) -> bool:
        """Whether the engine keeps the request. If it was sent without the patches of items whose embeddings the engine
        had, this waits for the first output or a failure. False: they have been evicted, so it has to be sent again, as
        another answer; this one is over, and uncounted."""
        if any(item["cached"] == "embeddings" for item in self.media):
            await self.arrived.wait()
        if isinstance(self._error, MediaNotSent) and self._error.arrival is not None:
            self.arrival, self._unfinished = self._error.arrival, 0
        return self.arrival is None

    @property
    def has_piece(self) -> bool:
        """Whether there is something to take."""
        return bool(self._ready or self._error)

    def take(self) -> Piece:
        """The next piece; no sample is taken twice while another waits. Raises EngineError: the engine has failed at
        the request, or is down; and ApiError, a 400: its grammar cannot be followed."""
        if self._error is not None:
            self._end("error" if self._error.status >= 500 else None)
            raise self._error
        sample = self._ready.popleft()
        piece = sample.take()
        if sample.outputs:
            self._ready.append(sample)
        self.clock.count_tokens(self.num_prompt_tokens, piece.num_tokens, piece.index)
        if piece.finish_reason is not None:
            self._finish(sample, "stop")  # without effect unless a stop string ended it
            if self.over:
                self._end(piece.finish_reason)
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.over:
            self._end("abort")

    # --- for the engine ----------------------------------------------------------------------------------------------

    def receive(self, output: RequestOutput) -> None:
        """The engine's `output` for a sample."""
        sample = self.samples[output.request_id]
        if sample.over:
            return
        if output.finish_reason in ("error", "abort"):
            self.fail(self._failure(output.error))
            return
        if output.prompt_logprobs and self._prompt is not None:
            self._prompt.add(output.prompt_logprobs)
            self.arrived.set()
            return
        if not sample.outputs:
            self._ready.append(sample)
        sample.add(output)
        self.arrived.set()

    def _failure(self, problem: Problem | None) -> ApiError:
        if problem is None:
            return EngineError("The engine has aborted this request.", 500, "internal_error")
        if problem.retry:
            return EngineError(problem.text, code="overloaded")
        return bad_request(problem.text, self._grammar_field)

    def fail(self, error: ApiError) -> None:
        """The engine sends no more outputs: fail the request with `error`."""
        self._error = error
        self.arrived.set()

    def _end(self, reason: FinishReason | None) -> None:
        for sample in self.samples.values():
            self._finish(sample, "abort")
        self.clock.end(reason, self.samples[self.request_id].times)
        request_id, tokens = self.request_id, self.completion_tokens
        logger.debug("%s finished: %s, %d tokens", request_id, reason, tokens, extra=about(request_id))

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        if sample.over:
            return
        if sample.outputs:
            self._ready.remove(sample)
        sample.end()
        self._unfinished -= 1
        self._finish_at_engine(sample.request_id, reason)


async def pieces(answers: Sequence[Answer]) -> AsyncGenerator[Piece, None]:
    """The pieces of all choices; tokens that arrive faster than pieces are taken make one piece. A caller that is slow,
    or takes many, does not block the event loop. Raises as `Answer.take`."""
    arrived = asyncio.Event()
    for answer in answers:
        answer.arrived = arrived
    turn = Turn()
    while unfinished := [answer for answer in answers if not answer.over]:
        arrived.clear()
        for answer in unfinished:
            if answer.has_piece:
                await turn.end_if_over()
                yield answer.take()
                arrived.set()  # there may be more
        if not arrived.is_set():
            await arrived.wait()
            turn = Turn()


class Turn:
    """The time that one request may use before it yields to the event loop."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    async def end_if_over(self) -> None:
        """Yield to the event loop, and begin the next turn, once `TURN_SECONDS` have been used."""
        if time.monotonic() - self._begun > TURN_SECONDS:
            async with _turns(asyncio.get_running_loop()):
                await asyncio.sleep(0)
            self._begun = time.monotonic()


@functools.lru_cache(maxsize=1)
def _turns(_: asyncio.AbstractEventLoop) -> asyncio.Lock:
    """Of the requests that have used up a turn, one continues in each iteration of the loop, in order of arrival."""
    return asyncio.Lock()
