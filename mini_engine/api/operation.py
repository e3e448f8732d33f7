"""The endpoints for those who run the server: health, figures, caches, version. They know nothing of requests."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mini_engine import metrics
from mini_engine.api.error_responses import error_response
from mini_engine.api.errors import ApiError, EngineError, engine_unavailable, shutting_down
from mini_engine.api.openapi import GUARDED, refuses

if TYPE_CHECKING:
    from mini_engine.api.engine_client import EngineClient
    from mini_engine.config import EngineConfig

ENGINE_GONE = "An engine has stopped."
RESET_SECONDS = 30.0  # for the engines to answer; a step of theirs may run first

router = APIRouter()


def _engines(request: Request) -> EngineClient:
    return request.app.state.context.engines


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=refuses(503))
async def health(request: Request) -> Response:
    """200 when every engine answers a ping through all of its ranks within `--health-timeout`.

    503 when not, and when the server is shutting down.
    """
    if request.app.state.work.draining:
        return error_response(shutting_down())
    engines = _engines(request)
    config: EngineConfig = request.app.state.config
    if await engines.healthy(config.health_timeout):
        return Response()
    if not engines.alive:
        return error_response(engine_unavailable(ENGINE_GONE))
    text = f"An engine has not answered within the {config.health_timeout:g} s of --health-timeout."
    return error_response(ApiError(503, text, code="timeout"))


@router.head("/live", include_in_schema=False)
@router.get("/live")
async def live() -> Response:
    """200 while this process runs, whatever the engines do."""
    return Response()


@router.post("/reset_caches", responses=refuses(401, 403, 503, 504))
async def reset_caches(request: Request) -> Response:
    """Empty the prefix, encoder and media caches of every engine, but for what running requests use.

    200 when all have done so; 403 for a page of an origin that is not allowed; 503 when an engine is gone; 504 when
    one does not answer in time.
    """
    try:
        _check_origin(request)
        async with asyncio.timeout(RESET_SECONDS):
            await _engines(request).reset_caches()
    except ApiError as error:
        return error_response(error)
    except EngineError:
        return error_response(engine_unavailable(ENGINE_GONE))
    except TimeoutError:
        text = f"An engine has not answered within {RESET_SECONDS:g} s; its caches may be reset later, or not at all."
        return error_response(ApiError(504, text, code="timeout"))
    return Response()


def _check_origin(request: Request) -> None:
    """Any page may have a browser send a POST without a body, unasked; the browser says of which origin the page is.

    Raises:
        ApiError: 403; it is neither this server's own nor one of `--allowed-origins`.
    """
    origin, allowed = request.headers.get("origin"), request.app.state.config.allowed_origins
    if origin is None or "*" in allowed or origin in allowed:
        return
    if origin.partition("://")[2] != request.headers.get("host"):
        text = f"A page of {origin[:200]!r} may not do this; --allowed-origins would have to name it."
        raise ApiError(403, text, code="origin_not_allowed")


@router.get("/metrics", responses=refuses(401, 503))
async def show_metrics(request: Request) -> Response:
    """Figures of all API servers, and of the engines at this moment, in Prometheus's text format.

    503 when the host gives no descriptors to read them with.
    """
    await _engines(request).refresh_figures()
    return Response(await asyncio.to_thread(metrics.exposition), headers={"content-type": metrics.CONTENT_TYPE})


@router.get("/version", responses=GUARDED)
async def version() -> Response:
    """The version of this server."""
    return JSONResponse({"version": importlib.metadata.version("mini-engine")})
