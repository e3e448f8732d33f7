"""POST /v1/chat/completions and /v1/responses, and the path of a request through this process: `start`.

Each step of the path is a function here, which calls a file of its own. Knows nothing of sockets or processes.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from mini_engine import metrics
from mini_engine.engine_client.engines import EngineHandle
from mini_engine.http.body import read_body, takes
from mini_engine.http.context import AppContext, RequestState, context_of, state_of
from mini_engine.http.known_media import DownloadAgain, bind_names, find_media, items_to_decode, resolve_names
from mini_engine.http.model_response import ModelResponder
from mini_engine.http.responses import ChatResponder, Responder
from mini_engine.log import about
from mini_engine.media.loader import Candidates, SettingsPair
from mini_engine.media.processor import ProcessedItem
from mini_engine.media.settings import INLINE_ITEMS, video_token_limit
from mini_engine.messages import MediaItem
from mini_engine.prompt.answer import Answer
from mini_engine.prompt.renderer import Prompt, check_budget, media_usage
from mini_engine.protocol.bodies import ChatRequest
from mini_engine.protocol.parts import MediaRef
from mini_engine.protocol.response_bodies import ResponsesRequest, with_own_names

logger = logging.getLogger(__name__)

router = APIRouter()

BodyT = TypeVar("BodyT", ChatRequest, ResponsesRequest)


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, as OpenAI's chat completions."""
    return await _answer_conversation(request, ChatRequest, ChatResponder)


@router.post("/v1/responses", openapi_extra=takes(ResponsesRequest))
async def responses(request: Request) -> Response:
    """Answer a conversation, as OpenAI's responses. Nothing is stored."""
    return await _answer_conversation(request, ResponsesRequest, ModelResponder)


async def _answer_conversation(
    request: Request, kind: type[BodyT], make_responder: Callable[[BodyT, RequestState, str], Responder]
) -> Response:
    context, state = context_of(request), state_of(request)
    body = await read_body(request, kind, context)
    chat = body if isinstance(body, ChatRequest) else body.chat_request
    state.choices.receive(chat.num_choices - 1)
    with contextlib.nullcontext() if chat is body else with_own_names():
        context.sampling.check(chat)
        # Before any media: what cannot be rendered costs no decoding.
        prompt = await context.run_sized(partial(context.renderer.render, chat), chat.num_characters, state.client)
        answer = await start(context, prompt, state)
        responder = make_responder(body, state, context.config.served_names[0])
        del body, chat, prompt  # their media are as large as text as they are themselves
        return await responder.respond([answer])


async def start(context: AppContext, prompt: Prompt, state: RequestState) -> Answer:
    """Rows 3 to 8 of docs/request-path.md, for a rendered prompt. When this returns the engine has the request, and its
    media for good: if it relied on embeddings that have been evicted, it is sent again with all data, which are kept
    until then.

    What the request holds until then, `held` releases; also if it fails or is cancelled. Raises ApiError;
    OSError: see `out_of`.
    """
    async with contextlib.AsyncExitStack() as held:
        with context.engines.end_if_none_runs(state.end):
            items = await load_media(context, prompt, await resolve_names(context, prompt.body, state), state, held)
        digest = items[0].content.digest if items else b""
        # What was named is found at one engine, so at any load.
        choose = context.engines.preferred if any(item.ref.key for item in items) else context.engines.choose
        engine: EngineHandle | None = None
        arrival: int | None = None  # the request's place in the queue of `engine`, once that needs the request again
        trusts_embeddings = True  # until an engine has evicted some that the request relied on
        while True:
            with context.engines.end_if_none_runs(state.end):
                try:
                    async with context.media_permits.hold(len(items), state.clock, state.client):
                        engine = engine or choose(digest)
                        with engine.holding(state.request_id, prompt.body.num_choices):
                            answer = await send(context, engine, prompt, items, state, arrival, trusts_embeddings)
                except DownloadAgain as again:  # without permits: a web server that hangs must block no queue
                    items = await load_media(context, prompt, again.refs, state, held)
                    # Another content may be there now: then the engine is the one at which later names look for it.
                    before, engine = engine, context.engines.preferred(items[0].content.digest)
                    arrival = arrival if engine is before else None
                    continue
            if await answer.is_admitted():
                metrics.media_named_hits_total.inc(len({item.largest for item in items if item.content.is_absent}))
                return answer
            arrival, trusts_embeddings = answer.arrival, False


async def load_media(
    context: AppContext, prompt: Prompt, refs: Sequence[MediaRef], state: RequestState, held: contextlib.AsyncExitStack
) -> list[Candidates]:
    """Rows 2 and 3 for the media `refs` of a prompt, which have room until `held` is closed.

    An item has settings as if there was no text; and where these leave too little room for the text, smaller ones. So a
    conversation that gets longer goes on with the videos that its engine has. Raises as `start`.
    """
    chat, limits, clock = prompt.body, context.limits, state.clock
    if not isinstance(chat, ChatRequest) or not (refs or chat.mm_processor_kwargs or chat.media_io_kwargs):
        return []
    # Clients that mean no limit send the model's length, or more.
    answer_tokens = min(chat.token_limit or 1, limits.max_model_len // 2)
    alone = video_token_limit(limits, 0, 1, 1)
    beside_text = video_token_limit(limits, len(prompt.token_ids), answer_tokens, len(refs))
    resolve = partial(context.media_settings.resolve, chat, refs)

    def resolve_both() -> list[SettingsPair]:
        largest = resolve(alone)
        return [*zip(largest, largest if alone == beside_text else resolve(beside_text), strict=True)]

    settings = await context.run_sized(resolve_both, len(refs), state.client, INLINE_ITEMS)
    # Row 3: room for the media's bytes, the bytes, and their hashes.
    share = held.enter_context(context.media_bytes.reserve())
    clock.enter("fetch")
    items = await context.media_loader.fetch(refs, settings, share.receive, state.client)
    request_id, size = state.request_id, share.amount
    logger.debug("%s fetched: %d media items of %d bytes", request_id, len(refs), size, extra=about(request_id))
    clock.enter("other")
    return items


async def send(
    context: AppContext,
    engine: EngineHandle,
    prompt: Prompt,
    items: Sequence[Candidates],
    state: RequestState,
    arrival: int | None,
    trusts_embeddings: bool,
) -> Answer:
    """Rows 5 to 8: ask the engine which items it has; decode and process the rest; placeholders at their length,
    sampling parameters; then tensors and request, which the answer aborts at the latest at the end of `state.cleanup`.
    Raises as `start` and `find_media`."""
    clock, request_id = state.clock, state.request_id
    media, usage, warnings = list[MediaItem](), list[dict[str, Any]](), list[str]()
    if items:
        chosen, found = await find_media(engine, items, request_id)
        new = items_to_decode(chosen, found, trusts_embeddings)
        processed = await context.media_loader.process(new, clock, request_id)
        bind_names(context.engines, chosen, processed)
        warnings = [f"{item.ref.name}: {text}" for item in new if (text := processed[item.media_hash].missing)]
        hashes = [item.media_hash for item in chosen]
        used = [processed.get(key) or ProcessedItem(found[key].facts, None) for key in hashes]
        token_ids, media = context.renderer.expand(prompt.token_ids, used)
        prompt = replace(prompt, token_ids=token_ids)
        check_budget(media, context.limits)
        for key, item in zip(hashes, media, strict=True):
            # What the engine had: "embeddings", which it may evict, are without patches; "facts" were no help.
            cached = None if key not in found else "facts" if key in processed else found[key].held
            usage.append(media_usage(item, context.media_loader.processor) | {"cached": cached})
    request = context.sampling.new_request(prompt, request_id, media, state.client, arrival)
    answer = Answer(prompt, request, context.vocabulary, clock, engine.finish, usage, warnings)
    clock.enter("transport")
    await engine.submit(answer, request)
    state.cleanup.enter_context(answer)
    clock.enter("other")
    return answer
