"""The HTTP application: its routes and its middleware. Knows nothing of sockets or processes."""

import importlib.metadata
import time
from collections.abc import Set
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from mini_engine.http.body import ERRORS, REF, schema_types
from mini_engine.http.context import AppContext
from mini_engine.http.middleware import ActiveRequests, RequestMiddleware
from mini_engine.http.routes import chat_completions, completions, operations, playground, pooling
from mini_engine.protocol.api_errors import ApiError, Code

ROUTES = (chat_completions, completions, pooling, operations, playground)
ROUTERS = [module.router for module in ROUTES]
CHAT_OF_OTHER_APIS = ("/messages", "/api/chat")  # where Anthropic's and Ollama's take a conversation


class DescribedApp(FastAPI):
    """An application whose document has the schemas of all types that its routes refer to."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        if "components" not in document:
            kinds = sorted(schema_types, key=lambda kind: kind.__name__)
            _, schemas = msgspec.json.schema_components(kinds, ref_template=REF)
            document["components"] = {"schemas": schemas}
        return document


def create_app(context: AppContext) -> FastAPI:
    """The ASGI application over `context`. Its state has its `ActiveRequests` as `requests`."""
    app = DescribedApp(
        title="mini-engine",
        version=importlib.metadata.version("mini-engine"),
        redirect_slashes=False,  # to wherever the header `Host` says
        redoc_url=None,  # `/docs` is enough
    )
    app.state.context = context
    app.state.created = int(time.time())
    app.state.requests = ActiveRequests()
    app.add_middleware(RequestMiddleware, context=context, requests=app.state.requests)
    config = context.config
    if config.allowed_origins:  # the outer one: a browser's preflight has no key, and pages must read refusals
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["x-request-id", "retry-after"],
        )
    for router in ROUTERS:
        if router is not playground.router or not config.disable_playground:
            # What has GET has HEAD, which load balancers send: RFC 9110, section 9.1. The first route of a path answers
            # and fills `Allow` of a 405; the router's own is in the document.
            for route in router.routes:
                if isinstance(route, APIRoute) and route.methods == {"GET"}:
                    app.add_api_route(route.path, route.endpoint, methods=["GET", "HEAD"], include_in_schema=False)
            app.include_router(router, responses=ERRORS)
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors, an unknown path or method, for the middleware."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    near = _near(path, {route.path for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)})
    remedy = f"did you mean {near}?" if near else "/openapi.json lists the paths and their methods."
    if path.endswith(CHAT_OF_OTHER_APIS):
        remedy = "conversations go to /v1/chat/completions (openai SDK: chat.completions; AI SDK: openai.chat(MODEL))."
    text = f"{error.detail}: {request.method} {path}; {remedy}"
    code: Code = "unknown_url" if error.status_code == 404 else "method_not_allowed"
    raise ApiError(error.status_code, text, code=code, headers=error.headers)


def _near(path: str, known: Set[str]) -> str | None:
    """For an unknown path the known one that differs in `/v1`, which base URLs lack or have twice, or in a slash at the
    end."""
    end = path.rstrip("/").rpartition("/v1")[2]
    return None if path in known else next((near for near in (f"/v1{end}", end) if near in known), None)
