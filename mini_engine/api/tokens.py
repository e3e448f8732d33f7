"""POST /tokenize and /detokenize: text or a conversation to token ids, and back, in vLLM's form. No engine is asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from mini_engine.api.body import Body, BodyT, parse_body
from mini_engine.api.chat import ChatError
from mini_engine.api.context import AppContext, context_of, in_thread_if_large, read_body
from mini_engine.api.errors import bad_request
from mini_engine.api.openapi import refuses, takes
from mini_engine.api.protocol import INNER_FIELDS, TEMPLATE_NEUTRAL, Messages, TokenId, plain

REFUSALS = refuses(400, 401, 404, 408, 413, 415, 429, 503)

router = APIRouter()


class TokenizeRequest(Body):
    """The supported fields of a tokenize request: a text, or a conversation."""

    neutral = TEMPLATE_NEUTRAL | {"mm_processor_kwargs": ({},)}
    inner = INNER_FIELDS

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """See `Body.check`."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("Send either 'prompt' or 'messages'.", "prompt", "missing_required_parameter")
        if self.messages is not None and self.add_special_tokens:
            text = "'add_special_tokens' is only allowed with 'prompt': a chat template writes its own."
            raise bad_request(text, "add_special_tokens")


class DetokenizeRequest(Body):
    """The supported fields of a detokenize request."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class Tokens(msgspec.Struct, frozen=True):
    """The answer to a tokenize request. `token_strs`: the tokens as the vocabulary writes them, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct, frozen=True):
    """The answer to a detokenize request, special tokens included."""

    prompt: str


@router.post("/tokenize", openapi_extra=takes(TokenizeRequest), responses=REFUSALS)
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation with a place for each image and video, which are not loaded."""
    context = context_of(request)

    def work(asked: TokenizeRequest) -> Tokens:
        tokens = _tokens(context, asked)
        names = context.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
        return Tokens(len(tokens), context.sampling.max_model_len, tokens, names)

    return await _respond(request, TokenizeRequest, work)


@router.post("/detokenize", openapi_extra=takes(DetokenizeRequest), responses=REFUSALS)
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    context = context_of(request)

    def work(asked: DetokenizeRequest) -> Text:
        context.sampling.check_tokens("tokens", asked.tokens)
        return Text(context.tokenizer.backend_tokenizer.decode(asked.tokens, skip_special_tokens=False))

    return await _respond(request, DetokenizeRequest, work)


def _tokens(context: AppContext, asked: TokenizeRequest) -> list[int]:
    try:
        if asked.prompt is not None:
            special = asked.add_special_tokens is not False
            return context.renderer.encode(asked.prompt, special, allow_placeholders=True)
        messages = plain(asked.messages or [])
        context.renderer.collect(messages, context.item_limits)
        return context.renderer.render(messages)
    except ChatError as error:
        raise bad_request(str(error), "messages" if asked.prompt is None else "prompt") from None


async def _respond(request: Request, kind: type[BodyT], work: Callable[[BodyT], msgspec.Struct]) -> Response:
    body = await read_body(request)
    asked = parse_body(body, kind, context_of(request).model_names)
    answer = await in_thread_if_large(partial(work, asked), len(body))
    return Response(msgspec.json.encode(answer), media_type="application/json")
