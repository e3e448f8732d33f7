"""POST /v1/chat/completions, and the path of a request through this process: `start`.

Each step of the path is a line there and a file of its own. Knows nothing of sockets or processes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from functools import partial

from fastapi import APIRouter, Request
from starlette.datastructures import State
from starlette.responses import Response

from mini_engine.http.body import INLINE_CHARACTERS, read_body, run_sized, takes
from mini_engine.http.context import AppContext, context_of
from mini_engine.http.responses import ChatResponder
from mini_engine.log import about
from mini_engine.media.loader import FetchedItem, missing_parts
from mini_engine.media.settings import prompt_tokens, video_tokens
from mini_engine.messages import CachedMedia
from mini_engine.prompt.answer import Generation
from mini_engine.prompt.renderer import check_budget, collect_media, media_usage, prompt_sources
from mini_engine.protocol.bodies import ChatRequest

logger = logging.getLogger(__name__)

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, as OpenAI's chat completions."""
    context, state = context_of(request), request.state
    chat = await read_body(request, ChatRequest, context)
    state.choices.receive(chat.num_choices - 1)
    generation = await start(context, chat, state)
    state.cleanup.enter_context(generation)
    responder = ChatResponder(chat, state.request_id, context.config.served_names[0])
    del chat  # its media are as large as text as they are themselves
    return await responder.respond([generation])


async def start(context: AppContext, chat: ChatRequest, state: State) -> Generation:
    """Rows 2 to 8 of docs/request-path.md. When this returns the engine has the request.

    The prompt is rendered before any media are loaded: a conversation that cannot be rendered costs no decoding. Raises
    ApiError, MediaError, DecoderUnavailable, Shortage: see `errors.explain`.
    """
    request_id, clock = state.request_id, state.clock
    async with contextlib.AsyncExitStack() as held:
        context.engines.preparing.add(state.end)
        held.callback(context.engines.preparing.discard, state.end)
        token_ids = await render(context, chat)
        in_thought = context.renderer.opens_thought(token_ids)
        constrain = partial(context.renderer.constrain, chat, in_thought)
        chat = await run_sized(constrain, chat.num_characters, INLINE_CHARACTERS)
        context.sampling.check(chat)
        fetched = await prepare(context, chat, state, held)
        hashes = dict.fromkeys(item.media_hash for item in fetched)
        with context.engines.choose(next(iter(hashes), None), chat.num_choices) as engine:  # row 5
            held.enter_context(engine.media.holding(request_id))
            found = await engine.media.look_up(request_id, hashes)
            fetched = await fit(context, chat, token_ids, fetched, found)
            if smaller := dict.fromkeys(item.media_hash for item in fetched if item.media_hash not in hashes):
                found |= await engine.media.look_up(request_id, smaller)
            # Row 6: decode and process what is not cached.
            lacking = [item for item in fetched if item.media_hash not in found]
            processed = await context.media.process(lacking, clock, request_id)
            # Row 7: the placeholders at their length, and the sampling parameters.
            sources = prompt_sources([item.media_hash for item in fetched], processed, found)
            prompt, media = context.renderer.expand(token_ids, sources)
            check_budget(media, context.limits)
            request = context.sampling.new_request(chat, request_id, prompt, media, client=state.client)
            used = [media_usage(item, context.media.processor) for item in media]
            missing = missing_parts(fetched, processed)
            parser = context.renderer.thought_parser(in_thought)
            generation = Generation(
                chat, request, context.vocabulary, clock, media=used, warnings=missing, make_thoughts=parser
            )
        # Row 8: the tensors, then the request.
        clock.enter("transport")
        await engine.submit(generation, request)
        clock.enter("other")
    return generation


async def render(context: AppContext, chat: ChatRequest) -> list[int]:
    """The prompt's token ids, with one placeholder for each item."""
    return await run_sized(partial(context.renderer.render, chat), chat.num_characters, INLINE_CHARACTERS)


async def prepare(
    context: AppContext, chat: ChatRequest, state: State, held: contextlib.AsyncExitStack
) -> list[FetchedItem]:
    """Rows 2 to 4 of docs/request-path.md for the media of a prompt, which have room and places until `held` is
    closed; with settings as if there was no text. Raises as `start`."""
    request_id, clock = state.request_id, state.clock
    refs = collect_media(chat.messages, context.config.item_limits)
    settings = await context.media_settings.resolved(chat, refs, video_tokens(context.limits, 0, 1, 1))
    # Row 3: room for the media's bytes, the bytes, and their hashes.
    reservation = held.enter_context(context.media_bytes.reserve(await context.media.known_bytes(refs)))
    clock.enter("fetch")
    fetched = await context.media.fetch(refs, settings, reservation.receive)
    clock.enter("admission")  # row 4: not before, since a web server that hangs would block the queue
    await held.enter_async_context(context.places.hold(len(refs)))
    logger.debug(
        "%s admitted: %d media items of %d bytes", request_id, len(refs), reservation.amount, extra=about(request_id)
    )
    clock.enter("other")
    return fetched


async def fit(
    context: AppContext, chat: ChatRequest, token_ids: list[int], fetched: list[FetchedItem],
    found: Mapping[bytes, CachedMedia],
) -> list[FetchedItem]:  # fmt: skip
    """The items with settings by which they fit beside the text. Those of a video that was `found` stay if it fits: so
    a conversation that gets longer goes on with the same. Raises ApiError: 400 as `resolve`."""
    # Clients that mean no limit send the model's length, or more.
    answer_tokens = min(chat.token_limit or 1, context.limits.max_model_len // 2)
    budget = video_tokens(context.limits, len(token_ids), answer_tokens, len(fetched))

    def fits(item: FetchedItem) -> bool:
        return item.media_hash in found and prompt_tokens(found[item.media_hash]) <= budget

    if all(item.settings.video_tokens == budget or fits(item) for item in fetched):
        return fetched
    settings = await context.media_settings.resolved(chat, collect_media(chat.messages, {}), budget)
    items = zip(fetched, settings, strict=True)
    return [item if fits(item) else await context.media.rehash(item, own) for item, own in items]
