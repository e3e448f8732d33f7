"""POST /v1/responses: the path of a chat request, in OpenAI's newer form."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from mini_engine.http.body import read_body, takes
from mini_engine.http.context import context_of, state_of
from mini_engine.http.model_response import ModelResponder
from mini_engine.http.routes.chat_completions import start
from mini_engine.protocol.response_bodies import ResponsesRequest, with_own_names

router = APIRouter()


@router.post("/v1/responses", openapi_extra=takes(ResponsesRequest))
async def responses(request: Request) -> Response:
    """Answer a conversation, as OpenAI's responses. Nothing is stored."""
    context, state = context_of(request), state_of(request)
    body = await read_body(request, ResponsesRequest, context)
    responder, chat = ModelResponder(body, state, context.config.served_names[0]), body.chat_request
    with with_own_names():
        context.sampling.check(chat)
        prompt = await context.run_sized(partial(context.renderer.render, chat), chat.num_characters, state.client)
        del body, chat  # see `chat_completions`
        answer = await start(context, prompt, state)
        del prompt
        return await responder.respond(answer)
