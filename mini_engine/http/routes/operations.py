"""The endpoints about the server itself: models, health, metrics, caches, version; and the log's line of statistics."""

import asyncio
import importlib.metadata
import logging
import time
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from mini_engine import metrics
from mini_engine.engine_client.engines import EngineClient
from mini_engine.http.body import JSON, check_headers, check_model
from mini_engine.http.context import context_of
from mini_engine.protocol.api_errors import ApiError, EngineError

logger = logging.getLogger(__name__)

STATS_SECONDS = 10.0  # between two lines of statistics
RESET_SECONDS = 30.0  # for the engines to answer; a step may run first

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The names of the model that is served."""
    names = context_of(request).config.served_names
    return JSONResponse({"object": "list", "data": [_model(request, name) for name in names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """One of these names."""
    check_model(name, context_of(request).config.served_names)
    return JSONResponse(_model(request, name))


def _model(request: Request, name: str) -> dict[str, Any]:
    """OpenAI's description of a model, with vLLM's limit on tokens of prompt and answer together."""
    limit = context_of(request).limits.max_model_len
    created = request.app.state.created
    return {"id": name, "object": "model", "created": created, "owned_by": "mini-engine", "max_model_len": limit}


@router.get("/health")
async def health(request: Request) -> Response:
    """200 when every engine answers a ping through all of its ranks within `--health-timeout`.

    503 when not, and when the server is shutting down.
    """
    engines, seconds = context_of(request).engines, context_of(request).config.health_timeout
    if all(await asyncio.gather(*(engine.answers_ping(seconds) for engine in engines.engines))):
        return Response()
    if not engines.alive:
        raise EngineError("An engine has stopped.")
    raise ApiError(503, f"An engine has not answered within the {seconds:g} s of --health-timeout.", code="timeout")


@router.get("/live")
async def live() -> Response:
    """200 while this process runs, whatever the engines do."""
    return Response()


EMPTY = {"requestBody": {"required": True, "content": {JSON: {"schema": {"type": "object", "maxProperties": 0}}}}}


@router.post("/reset_caches", openapi_extra=EMPTY)
async def reset_caches(request: Request) -> Response:
    """Empty the prefix, encoder and media caches of every engine, but for what running requests use.

    200 when all have done so; 503 when an engine is down; 504 when one does not answer in time. 415 without the header
    `Content-Type: application/json`, which no page of another origin can send.
    """
    check_headers(request.headers, context_of(request).config.max_request_bytes)
    try:
        async with asyncio.timeout(RESET_SECONDS):
            await context_of(request).engines.reset_caches()
    except TimeoutError:
        text = f"An engine has not answered within {RESET_SECONDS:g} s; its caches may not be reset."
        raise ApiError(504, text, code="timeout") from None
    return Response()


@router.get("/metrics")
async def show_metrics(request: Request) -> Response:
    """Metrics of all API servers, and of the engines at this moment, in Prometheus's text format.

    503 when the host gives no descriptors to read them with.
    """
    context = context_of(request)
    await context.engines.refresh_metrics()
    text = await asyncio.to_thread(metrics.exposition, context.config.served_names[0])
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/version")
async def version() -> Response:
    """The version of this server."""
    return JSONResponse({"version": importlib.metadata.version("mini-engine")})


# --- statistics in the log --------------------------------------------------------------------------------------------

Samples = dict[str, list[float]]  # see `metrics.samples`


def stats_line(before: Samples, after: Samples, seconds: float) -> str | None:
    """Throughputs and hit rates between two readings of the metrics, and how full the engines are; None when nothing
    ran."""

    def since(name: str) -> float:
        return sum(after.get(name, ())) - sum(before.get(name, ()))

    def rate(kind: str) -> str:
        queries = since(f"{kind}_queries_total")
        return f"{since(f'{kind}_hits_total') / queries:.0%}" if queries else "-"

    media = since("media_tokens_encoded_total")
    prompt, generated = since("prompt_tokens_total"), since("generation_tokens_total")
    running, waiting = (sum(after.get(f"num_requests_{state}", ())) for state in ("running", "waiting"))
    if not (media or prompt or generated or running or waiting):
        return None
    usage = after.get("kv_cache_usage_perc") or [0.0]
    return (
        f"media {media / seconds:.1f} tokens/s, prompts {prompt / seconds:.1f} tokens/s, "
        f"answers {generated / seconds:.1f} tokens/s, "
        f"{running:.0f} running, {waiting:.0f} waiting, KV cache {sum(usage) / len(usage):.1%} in use; "
        f"hits: prefix cache {rate('prefix_cache')}, media cache {rate('mm_cache')}, "
        f"encoder cache {rate('encoder_cache')}"
    )


async def log_stats(engines: EngineClient) -> None:
    """Log the lines until cancelled."""
    last: tuple[Samples, float] | None = None
    while True:
        try:
            now = await asyncio.to_thread(metrics.samples), time.monotonic()
            if last is not None and (line := stats_line(last[0], now[0], now[1] - last[1])):
                logger.info("%s", line)
            last = now
        except OSError as error:  # no descriptor is free: the next line counts it all
            logger.debug("metrics cannot be read, retrying: %s", error)
        await asyncio.sleep(STATS_SECONDS)
        await engines.refresh_metrics()
