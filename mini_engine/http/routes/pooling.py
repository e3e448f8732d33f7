"""POST /v1/embeddings, /rerank and /score: what the model says of whole prompts, without a text.

The path of each input is that of a chat request, and each is a request of its own to an engine. The first that fails
ends the others.
"""

import asyncio
import base64
import contextlib
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from mini_engine.http.body import read_body, takes
from mini_engine.http.context import AppContext, RequestState, context_of, state_of
from mini_engine.http.json_parts import json_response
from mini_engine.http.known_media import DownloadAgain, find_media, resolve_names
from mini_engine.http.responses import usage_of
from mini_engine.http.routes.chat_completions import load_media, start
from mini_engine.media.loader import download_url_of
from mini_engine.prompt.answer import Answer, pieces
from mini_engine.prompt.pooling_prompts import (
    InputPrompts,
    embedding,
    embedding_prompts,
    paired,
    ranking_prompts,
    score,
)
from mini_engine.prompt.renderer import Prompt
from mini_engine.protocol.api_errors import ApiError, bad_request
from mini_engine.protocol.bodies import ChatMessage, ChatRequest
from mini_engine.protocol.pooling_bodies import (
    Content,
    EmbeddingRequest,
    PoolingRequest,
    RankingRequest,
    RerankRequest,
    ScoreRequest,
)

PREPARED_AT_ONCE = 16  # inputs of a request; a text takes about a millisecond

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=takes(EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    """The embeddings of texts, token ids, or a conversation with images and videos, at length 1."""
    context = context_of(request)
    body = await read_body(request, EmbeddingRequest, context)
    if (body.dimensions or 1) > (limit := context.task.dimensions):
        raise bad_request(f"Invalid 'dimensions': an embedding of this model has {limit}; ask for fewer.", "dimensions")
    answers = await _pool(request, body, embedding_prompts(body))
    vectors = (embedding(answer.pooled, body.dimensions) for answer in answers)
    as_text = body.encoding_format == "base64"
    values = (base64.b64encode(vector.tobytes()).decode() if as_text else vector.tolist() for vector in vectors)
    items = ({"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(values))
    return await _respond(request, answers, "data", items)


@router.post("/rerank", openapi_extra=takes(RerankRequest))
@router.post("/v1/rerank", openapi_extra=takes(RerankRequest))
@router.post("/v2/rerank", openapi_extra=takes(RerankRequest))
async def rerank(request: Request) -> Response:
    """Documents by how well they answer a query, the best first."""
    body = await read_body(request, RerankRequest, context_of(request))
    answers, scores = await _score(request, body)
    ranked = sorted(enumerate(scores), key=lambda item: item[1], reverse=True)
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": value} for index, value in ranked]
    if body.return_documents is not False:
        texts = ["".join(part.text or "" for part in document) for document in body.sides[1]]
        results = [result | {"document": {"text": texts[result["index"]]}} for result in results]
    tokens = usage_of(answers)["prompt_tokens"]
    meta = {"tokens": {"input_tokens": tokens, "output_tokens": 0}}  # where Cohere's clients look for the usage
    return await _respond(request, answers, "results", results[: body.top_n or None], meta=meta)


@router.post("/score", openapi_extra=takes(ScoreRequest))
@router.post("/v1/score", openapi_extra=takes(ScoreRequest))
async def score_documents(request: Request) -> Response:
    """How well each document answers its query."""
    answers, scores = await _score(request, await read_body(request, ScoreRequest, context_of(request)))
    items = ({"index": index, "object": "score", "score": value} for index, value in enumerate(scores))
    return await _respond(request, answers, "data", items)


async def _score(request: Request, body: RankingRequest) -> tuple[list[Answer], list[float]]:
    """The score of each document, and the answers that it is made of. On a server of embeddings it is their cosine."""
    context, (queries, _) = context_of(request), body.sides
    if context.task.kind == "embed":
        answers = await _pool(request, body, embedding_prompts(body))
        vectors = [embedding(answer.pooled, None) for answer in answers]
        pairs = paired(vectors[: len(queries)], vectors[len(queries) :])
        return answers, [float(query @ document) for query, document in pairs]
    answers = await _pool(request, body, ranking_prompts(body), queries[0] if len(queries) == 1 else None)
    return answers, [score(answer.pooled) for answer in answers]


async def _fetch_query(
    context: AppContext, body: PoolingRequest, query: Content, state: RequestState, held: contextlib.AsyncExitStack
) -> None:
    """Fetch the media of a query once for all of its documents: its parts get them as `loader.ContentUrl`, which has
    room until `held` is closed. So do those that were downloaded before, if their engine has lost them. Raises as
    `start`."""
    parts = [part for part in query if part.modality]
    prompt = Prompt(body.chat([ChatMessage(role="user", content=parts)]), [])
    with context.engines.end_if_none_runs(state.end):
        try:
            items = await load_media(context, prompt, await resolve_names(context, prompt.body, state), state, held)
            if any(item.content.is_absent and download_url_of(item.content) for item in items):
                engine = context.engines.preferred(items[0].content.digest)  # as `start` chooses it for documents
                try:
                    # The documents fail, if they do: they may have room for less of a video.
                    with contextlib.suppress(ApiError):
                        await find_media(engine, items, state.request_id)
                except DownloadAgain as again:
                    items = await load_media(context, prompt, again.refs, state, held)
                finally:
                    engine.media_store.release_aborted(state.request_id)
        except ApiError as error:
            raise _located(error, "query") from None
    for part, item in zip(parts, items, strict=True):
        part.fill_in({part.location: item.ref.url})


async def _respond(
    request: Request, answers: Sequence[Answer], name: str, items: Iterable[dict[str, Any]], **more: Any
) -> Response:
    """The response with these items, of which there is one, in the list `name`, and `more` fields. Embeddings are made
    as the client reads: JSON is longer than what is kept."""
    model, state = context_of(request).config.served_names[0], state_of(request)
    head = {"id": state.request_id, "object": "list", "created": int(time.time()), "model": model}
    head |= {"usage": usage_of(answers)} | more
    encoded = (msgspec.json.encode(item) for item in items)
    return await json_response(head | {name: encoded}, as_read=True)


async def _pool(
    request: Request, body: PoolingRequest, prompts: InputPrompts, query: Content | None = None
) -> list[Answer]:
    """The answers to all prompts, in order; all are about `query`, if there is one. Raises as `start` and
    `Answer.take`, for the first that fails."""
    context, state = context_of(request), state_of(request)
    state.choices.receive(len(prompts) - 1)  # before anything is fetched
    preparing = asyncio.Semaphore(PREPARED_AT_ONCE)

    async def ask(number: int, name: str, prompt: ChatRequest | list[int]) -> Answer:
        try:
            async with preparing:
                await asyncio.sleep(0)
                # No name for the prompt: all would stay in memory until the last answer.
                answer = await start(
                    context, await _prompt(context, body, prompt, state.client), state_of(request, number)
                )
            async for _ in pieces([answer]):
                pass
        except ApiError as error:
            raise _located(error, name) if len(prompts) > 1 or name == "documents[0]" else error from None
        return answer

    async with contextlib.AsyncExitStack() as held:
        if query:
            await _fetch_query(context, body, query, state, held)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(number, *prompt)) for number, prompt in enumerate(prompts.items())]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _located(error: ApiError, name: str) -> ApiError:
    """`error` with the `name` of the input that is at fault, if one is."""
    if error.status not in (400, 404):
        return error
    return ApiError(error.status, f"{name}: {error}", code=error.body.code, param=name)


async def _prompt(context: AppContext, body: PoolingRequest, source: ChatRequest | list[int], client: bytes) -> Prompt:
    """What the engine gets of an input."""
    if isinstance(source, list):
        context.sampling.check_tokens("input", source)
        context.renderer.check_tokens("input", source)
        return Prompt(body.chat([]), source, pooling=context.task.pooling)
    prompt = await context.run_sized(partial(context.renderer.render, source), source.num_characters, client)
    after = context.renderer.after_text if body.add_special_tokens is not False else []
    return Prompt(prompt.body, prompt.token_ids + after, pooling=context.task.pooling)
