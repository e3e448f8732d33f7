"""The HTTP application: its routes, its middleware, and its errors. Knows nothing of sockets or processes."""

from __future__ import annotations

import importlib.metadata
import logging
import time

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match, Route

from mini_engine.api import chat_completions, completions, operation, responses, tokens
from mini_engine.api.body import check_model
from mini_engine.api.completion_protocol import CompletionRequest
from mini_engine.api.context import AppContext, context_of
from mini_engine.api.door import Door, Work
from mini_engine.api.error_responses import error_response, refuse_for, unknown_url
from mini_engine.api.errors import ApiError
from mini_engine.api.openapi import GUARDED, DescribedApp, in_path, refuses
from mini_engine.api.protocol import ChatRequest
from mini_engine.api.request_log import RequestLog
from mini_engine.api.tokens import DetokenizeRequest, TokenizeRequest
from mini_engine.config import EngineConfig
from mini_engine.shortage import shortage_in

logger = logging.getLogger(__name__)

router = APIRouter()


@router.get("/v1/models", responses=GUARDED)
async def models(request: Request) -> Response:
    """The names of the model that is served."""
    context = context_of(request)
    created = request.app.state.created
    body = responses.model_list(context.model_names, created, context.sampling.max_model_len)
    return Response(body, media_type="application/json")


@router.get("/v1/models/{name:path}", openapi_extra=in_path("name"), responses=GUARDED | refuses(404))
async def model(request: Request) -> Response:
    """One of these names."""
    context, name = context_of(request), request.path_params["name"]
    try:
        check_model(name, context.model_names)
    except ApiError as error:
        return error_response(error)
    body = responses.model(name, request.app.state.created, context.sampling.max_model_len)
    return Response(body, media_type="application/json")


ROUTERS = (chat_completions.router, router, completions.router, tokens.router, operation.router)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, an unknown path or method, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return unknown_url(request, ROUTERS)
    methods = {  # of all routes of this path, of which the error knows one
        method
        for part in ROUTERS
        for route in part.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    methods = methods or set((error.headers or {}).get("Allow", "").split(", "))
    allowed = ", ".join(sorted(methods))
    text = f"{error.detail}; this path takes {allowed}."
    return error_response(ApiError(405, text, code="method_not_allowed", headers={"Allow": allowed}))


async def _os_error(_: Request, error: Exception) -> Response:
    """What operators ask for reads files, for which there may be no descriptor."""
    shortage = shortage_in(error)
    if shortage is None:
        raise error
    return error_response(refuse_for(shortage))


def create_app(context: AppContext, config: EngineConfig) -> FastAPI:
    """The ASGI application over `context`."""
    app = DescribedApp(
        [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest],
        title="mini-engine",
        version=importlib.metadata.version("mini-engine"),
        redirect_slashes=False,  # to wherever the header `Host` says
    )
    app.state.work = Work()
    app.add_middleware(Door, api_keys=config.api_key, root_path=config.root_path, work=app.state.work)
    if config.enable_log_requests:
        app.add_middleware(RequestLog)
    if config.allowed_origins:  # before the door: a browser's preflight brings no key, and must read a refusal
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["x-request-id", "retry-after"],
        )
    app.state.context = context
    app.state.config = config
    app.state.created = int(time.time())
    for part in ROUTERS:
        app.include_router(part)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(OSError, _os_error)
    return app
