"""POST /v1/chat/completions, and the path of a request through this process: `start_answer`.

Each step of the path is a line there and a file of its own. Knows nothing of sockets or processes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mini_engine.api import responses
from mini_engine.api.answer import Answer, Piece, SampleText
from mini_engine.api.body import parse_body
from mini_engine.api.context import AppContext, context_of, in_thread_if_large, read_body, respond
from mini_engine.api.detokenizer import Detokenizer
from mini_engine.api.error_responses import explain
from mini_engine.api.logprobs import LogprobList
from mini_engine.api.media_settings import video_tokens
from mini_engine.api.openapi import FOR_TEXT, takes
from mini_engine.api.prompt_media import check_budget, place, placeholders, prompt_items
from mini_engine.api.protocol import ChatRequest, GenerationRequest
from mini_engine.api.timings import RequestClock
from mini_engine.log import about
from mini_engine.messages import SamplingParams

logger = logging.getLogger(__name__)

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest), responses=FOR_TEXT)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, as OpenAI's chat completions."""
    context = context_of(request)
    chat = parse_body(await read_body(request), ChatRequest, context.model_names)
    work = (stream if chat.stream else complete)(context, chat, request.state.request_id, request.state.clock)
    del chat  # which `work` drops when the engine has its media
    return await respond(work)


async def start_answer(context: AppContext, chat: ChatRequest, request_id: str, clock: RequestClock) -> Answer:
    """Rows 2 to 8 of docs/request-path.md; the answer's tokens are on their way when this returns.

    The prompt is rendered before any media are loaded: a conversation that cannot be rendered costs no decoding.
    All of it ends when the engines do.

    Raises:
        ApiError, ChatError, MediaError, EngineError: see `errors.as_api_error`.
    """
    async with context.engines.while_running(), contextlib.AsyncExitStack() as held:
        # Row 2: what is asked for, and the prompt with a place for each item.
        context.sampling.check(chat)
        messages = chat.plain_messages()
        refs = context.renderer.collect(messages, context.item_limits)
        token_ids = await in_thread_if_large(
            partial(context.renderer.render, messages), sum(map(_text_length, messages))
        )
        budget = video_tokens(context.limits, len(token_ids), chat.asked_tokens or 1, len(refs))
        keyed = context.media_settings.resolve(chat, budget, refs)
        # Row 3: room for the bytes, those that other servers have, a place in line.
        reservation = held.enter_context(context.admission.reserve(await context.media.sizes(refs)))
        clock.enter("fetch")
        downloads = await context.media.download(refs, reservation.receive)
        clock.enter("admission")  # not before: another server that hangs would keep others out of the line
        await held.enter_async_context(context.admission.in_line(len(refs)))
        logger.debug(
            "%s admitted: %d tokens, and %d media of up to %d bytes",
            request_id, len(token_ids), len(refs), reservation.nbytes, extra=about(request_id),
        )  # fmt: skip
        # Row 4: the other bytes, and the hashes of all.
        clock.enter("fetch")
        fetched = await context.media.fetch(refs, keyed, downloads)
        reservation.correct(sum(len(item.data) for item in fetched))
        clock.enter("other")
        hashes = list(dict.fromkeys(item.media_hash for item in fetched))
        with context.engines.choose(hashes[0] if hashes else None, chat.num_choices) as engine:  # row 5
            held.enter_context(engine.media.holding(request_id))
            found = await engine.media.look_up(request_id, hashes)
            # Row 6: decode and process what its ranks cannot read.
            lacking = [item for item in fetched if item.media_hash not in found]
            items = prompt_items(
                [item.media_hash for item in fetched], await context.media.process(lacking, clock, request_id), found
            )
            # Row 7: the placeholders at their length, and the sampling.
            check_budget(items, context.limits)
            prompt = context.renderer.expand(token_ids, placeholders(items))
            request = context.sampling.new_request(chat, request_id, prompt.token_ids, place(prompt, items))
            samples = sample_texts(context, chat, request.sampling)
        # Row 8.
        clock.enter("transport")
        generation = await engine.submit(request)
        clock.enter("other")
    missing = [f"{ref.name}: {item.missing}" for ref, item in zip(refs, items, strict=True) if item.missing]
    used = [item.usage(context.media.processor) for item in items]
    return Answer(generation, samples, clock, len(prompt.token_ids), missing, used)


def sample_texts(context: AppContext, asked: GenerationRequest, sampling: SamplingParams) -> list[SampleText]:
    """What makes the text of each sample of the answer to `asked`, which was resolved to `sampling`."""
    include_stop = bool(asked.include_stop_str_in_output)
    skip_special = asked.skip_special_tokens is not False

    def sample_text() -> SampleText:
        detokenizer = Detokenizer(
            context.vocabulary, asked.stop_strings, include_stop, skip_special, min_tokens=sampling.min_tokens
        )
        logprobs = None if sampling.logprobs is None else LogprobList(context.vocabulary, skip_special)
        return SampleText(detokenizer, logprobs, () if include_stop else sampling.stop_token_ids)

    return [sample_text() for _ in range(asked.num_choices)]


async def complete(context: AppContext, chat: ChatRequest, request_id: str, clock: RequestClock) -> bytes:
    """The whole answer as a response's body."""
    with await start_answer(context, chat, request_id, clock) as answer:
        pieces: list[list[Piece]] = [[] for _ in answer.samples]
        timings = chat.return_timings
        del chat  # its media are as large as text as they are themselves
        async for piece in answer:
            pieces[piece.index].append(piece)
    choices = [_choice(index, theirs) for index, theirs in enumerate(pieces)]
    return responses.completion(
        request_id, context.model_names[0], choices, answer.usage, _remarks(timings, answer, clock)
    )


async def stream(
    context: AppContext, chat: ChatRequest, request_id: str, clock: RequestClock
) -> AsyncGenerator[bytes, None]:
    """The answer as events, the first of them with the first token. The last ones leave together.

    What fails before the first event is raised; afterwards an error event ends the stream.
    """
    include_usage, timings = chat.include_usage, chat.return_timings
    writer = responses.EventWriter(request_id, context.model_names[0], include_usage)
    started = False
    with await start_answer(context, chat, request_id, clock) as answer:
        del chat  # as above
        try:
            async for piece in answer:
                remarks = _remarks(timings, answer, clock) if answer.over else responses.Remarks()
                with_text = responses.Remarks() if include_usage else remarks
                event = writer.delta(piece.index, piece.text, piece.finish_reason, piece.logprobs, with_text)
                if answer.over:
                    event += (writer.usage(answer.usage, remarks) if include_usage else b"") + responses.DONE
                if event:
                    yield event
                started = True
        except Exception as error:  # noqa: BLE001 - explain() logs what it does not know
            if not started:
                raise
            yield responses.error_event(explain(error, request_id, clock))


def _choice(index: int, pieces: list[Piece]) -> responses.Choice:
    """A sample's pieces as one choice."""
    finish_reason = pieces[-1].finish_reason
    assert finish_reason is not None
    listed = [token for piece in pieces for token in piece.logprobs or ()]
    logprobs = None if pieces[-1].logprobs is None else responses.ChoiceLogprobs(listed)
    text = "".join(piece.text for piece in pieces)
    return responses.Choice(index, responses.AnswerMessage(text), finish_reason, logprobs)


def _remarks(timings: bool | None, answer: Answer, clock: RequestClock) -> responses.Remarks:
    """What there is to say of a request whose answer is over; with `timings` where its time went."""
    return responses.Remarks(clock.timings() if timings else None, answer.warnings)


def _text_length(message: Mapping[str, Any]) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)
