"""POST /tokenize and /detokenize, in vLLM's form: text or a conversation to token ids, and back, without an engine."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from mini_engine.api.body import INLINE_CHARACTERS, read_body, run_sized
from mini_engine.api.chat import collect_media, text_length
from mini_engine.api.context import AppContext, context_of
from mini_engine.api.errors import ChatError, bad_request
from mini_engine.api.openapi import answers, refuses, takes
from mini_engine.api.protocol import DetokenizeRequest, TokenizeRequest
from mini_engine.api.responses import Text, Tokens, json_response

ERRORS = refuses(400, 401, 404, 408, 413, 415, 429, 503)

router = APIRouter()


@router.post("/tokenize", openapi_extra=takes(TokenizeRequest), responses=answers(Tokens) | ERRORS)
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation with one placeholder for each image and video."""
    context = context_of(request)
    asked = await read_body(request, TokenizeRequest, context.model_names)
    size = len(asked.prompt or "") + text_length(asked.messages or [])
    return json_response(await run_sized(partial(_tokens, context, asked), size, INLINE_CHARACTERS))


@router.post("/detokenize", openapi_extra=takes(DetokenizeRequest), responses=answers(Text) | ERRORS)
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    context = context_of(request)
    asked = await read_body(request, DetokenizeRequest, context.model_names)
    context.sampling.check_tokens("tokens", asked.tokens)
    decode = partial(context.tokenizer.backend_tokenizer.decode, asked.tokens, skip_special_tokens=False)
    return json_response(Text(await run_sized(decode, len(asked.tokens), INLINE_CHARACTERS)))


def _tokens(context: AppContext, asked: TokenizeRequest) -> Tokens:
    try:
        if asked.prompt is not None:
            special = asked.add_special_tokens is not False
            tokens = context.renderer.encode(asked.prompt, special, allow_placeholders=True)
        else:
            messages = asked.messages or []
            collect_media(messages, context.item_limits)
            tokens = context.renderer.render(messages)
    except ChatError as error:
        raise bad_request(str(error), "messages" if asked.prompt is None else "prompt") from None
    names = context.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
    return Tokens(len(tokens), context.sampling.max_model_len, tokens, names)
