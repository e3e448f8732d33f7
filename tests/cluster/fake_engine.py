"""A process in the place of an engine: it counts what it is sent, and takes the seconds that a request asks for.

A body's `chunks` are streamed with `seconds` between them. `/metrics` has how many distinct media it was sent, which an
engine would decode, and the requests in progress.
"""

import argparse
import asyncio
import json
import os
import socket
import sys

from aiohttp import web

from mini_engine.cluster.routing import media_key
from mini_engine.launch.process_setup import die_with_parent
from mini_engine.protocol.body_split import SplitBody

media: set[str] = set()
counts = {"num_requests_running": 0, "health": 0}


@web.middleware
async def authenticate(request: web.Request, handler) -> web.StreamResponse:
    key = f"Bearer {os.environ['MINI_ENGINE_API_KEY']}"
    if request.path != "/health" and request.headers.get("authorization") != key:
        return web.Response(status=401)
    return await handler(request)


async def chat(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    fields = json.loads(body)
    split = SplitBody()
    split.feed(body)
    media.add(media_key(split, request.path))
    counts["num_requests_running"] += 1
    try:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if not fields.get("stream"):
            await asyncio.sleep(fields.get("seconds", 0))
            return web.json_response({"pid": os.getpid()})
        await response.prepare(request)
        for number in range(fields["chunks"]):
            await response.write(f"data: {number}\n\n".encode())
            await asyncio.sleep(fields.get("seconds", 0))
        return response
    finally:
        counts["num_requests_running"] -= 1


async def metrics(_: web.Request) -> web.Response:
    samples = counts | {"decodes": len(media), "pid": os.getpid()}
    return web.Response(text="".join(f"# TYPE fake:{name} gauge\nfake:{name} {samples[name]}\n" for name in samples))


async def health(_: web.Request) -> web.Response:
    counts["health"] += 1
    return web.Response()


async def echo(request: web.Request) -> web.Response:
    return web.Response(text=request.raw_path)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    arguments, _ = parser.parse_known_args()
    app = web.Application(middlewares=[authenticate])
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/metrics", metrics), web.get("/health", health)])
    app.add_routes([web.post("/reset_caches", echo), web.get("/v1/models/{name:.*}", echo)])
    with socket.create_server((arguments.host, 0)) as listener:
        print(f"serving fake at http://{arguments.host}:{listener.getsockname()[1]}/v1 after 0 s", flush=True)
        web.run_app(app, sock=listener, print=None, handle_signals=False, handler_cancellation=True)
