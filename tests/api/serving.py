"""A whole API server in the test's own event loop: uvicorn on a socket, real media and chat, a scripted engine core."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import zmq.asyncio
from PIL import Image

from mini_engine.api.admission import ByteBudget, MediaAdmission, RequestAdmission
from mini_engine.api.app import create_app
from mini_engine.api.chat import ChatRenderer
from mini_engine.api.context import AppContext
from mini_engine.api.detokenizer import Vocabulary
from mini_engine.api.engine_client import EngineClient
from mini_engine.api.http_server import HttpServer
from mini_engine.api.media_loader import MediaLoader
from mini_engine.api.media_settings import MediaSettingsResolver
from mini_engine.api.middleware import ActiveRequests
from mini_engine.api.sampling import SamplingDefaults, SamplingResolver
from mini_engine.config import EngineConfig
from mini_engine.decode_limits import DecodeLimits
from mini_engine.media.decoder_pool import DecoderPool
from mini_engine.media.policy import MediaPolicy
from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import EngineLimits, NewRequest
from mini_engine.transport.codec import Encoder
from tests.api.patience import PATIENCE
from tests.api.peers import MemoryTransport, ScriptedCore

MAX_MODEL_LEN = 600
LIMITS = EngineLimits(MAX_MODEL_LEN, num_blocks=8, block_size=16, max_prompt_media_tokens=45)
MAX_MEDIA_BYTES = 1 << 20  # of one item
MAX_INFLIGHT_BYTES = 4 << 20
MAX_REQUESTS = 32
MAX_REQUEST_BYTES = 8 << 20


@dataclass
class Served:
    context: AppContext
    core: ScriptedCore
    transports: list[MemoryTransport]
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient
    port: int
    requests: ActiveRequests

    async def ask(self, content: Any = "hello", **more: Any) -> Any:
        """A chat completion by the openai client."""
        messages = [{"role": "user", "content": content}]
        return await self.openai.chat.completions.create(model="tiny", messages=messages, **more)

    async def post(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=chat_body(**body))

    async def connect(self, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request on a bare connection, which the test may close when it likes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = json.dumps(chat_body(**body)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(data) + data)
        await writer.drain()
        return reader, writer


def chat_body(content: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **more}


def image(side: int = 56) -> dict[str, Any]:
    """A content part with a grey image."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), "grey").save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def words(processor: MediaProcessor, *texts: str) -> Callable[[NewRequest], list[list[int]]]:
    """A script for the core: the tokens of each text in an output of their own."""
    encode = processor.hf_processor.tokenizer.backend_tokenizer.encode
    outputs = [encode(text).ids for text in texts]
    return lambda request: outputs


def media_settings(processor: MediaProcessor) -> MediaSettingsResolver:
    """Of a server without flags."""
    return MediaSettingsResolver(processor, (processor.hf_processor.tokenizer.name_or_path, None))


def media_loader(
    processor: Any,
    policy: MediaPolicy | None = None,
    threads: int = 2,
    limits: DecodeLimits | None = None,
    allow_partial_video: bool = False,
) -> MediaLoader:
    """A loader whose decoder processes start with its first item."""
    policy = policy or MediaPolicy(None, MAX_MEDIA_BYTES)
    decoders = DecoderPool("test", threads, limits or DecodeLimits(), policy.max_media_bytes)
    return MediaLoader(processor, policy, decoders, threads, allow_partial_video=allow_partial_video)


@contextlib.asynccontextmanager
async def serve(
    processor: MediaProcessor,
    directory: Path,
    script: Callable[[NewRequest], list[list[int]]],
    limits: dict[str, int] | None = None,
    transports: list[MemoryTransport] | None = None,
    media_cache: bool = True,
    settings: dict[str, Any] | None = None,
    media: MediaLoader | None = None,
) -> AsyncIterator[Served]:
    """Everything up, a request may be sent; everything down again at the end."""
    own = {"served_model_name": ["tiny", "alias"], "limit_mm_per_prompt": limits or {}, "timeout_keep_alive": 3600}
    config = EngineConfig(**{**own, "max_request_bytes": MAX_REQUEST_BYTES, **(settings or {})})
    zmq_context = zmq.asyncio.Context()
    sockets = tempfile.TemporaryDirectory(prefix="mini-")  # whose path, unlike `directory`'s, leaves room for a name
    endpoint = f"ipc://{sockets.name}/core"
    core = ScriptedCore(zmq_context, endpoint, script)
    transports = transports or [MemoryTransport()]
    engines = EngineClient(
        zmq_context, Encoder("api 0", 7), [endpoint], transports, media_capacity=media_cache and 1 << 30, stores=[None]
    )
    (allowed := directory / "allowed").mkdir(exist_ok=True)
    admission = MediaAdmission(4, MAX_INFLIGHT_BYTES)
    media = media or media_loader(processor, MediaPolicy(allowed, MAX_MEDIA_BYTES, ["127.0.0.1"]))
    media.decoders.count_decoded = admission.count
    context = AppContext(
        config=config,
        renderer=ChatRenderer(processor.hf_processor),
        tokenizer=processor.hf_processor.tokenizer,
        vocabulary=Vocabulary(processor.hf_processor.tokenizer),
        bodies=ByteBudget(MAX_REQUEST_BYTES, "inflight_bodies"),
        requests=RequestAdmission(MAX_REQUESTS),
        admission=admission,
        media_settings=media_settings(processor),
        media=media,
        sampling=SamplingResolver(
            SamplingDefaults(eos_token_id=[3]), MAX_MODEL_LEN, len(processor.hf_processor.tokenizer), 0, 7
        ),
        engines=engines,
        limits=LIMITS,
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    started = asyncio.Event()
    app = create_app(context)
    server = HttpServer(app, config, started.set)
    tasks = [asyncio.create_task(work) for work in (core.run(), engines.run())]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await started.wait()
    url = f"http://127.0.0.1:{port}"
    http = httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(keepalive_expiry=None))
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
    try:
        async with http, client:
            yield Served(context, core, transports, client, http, port, app.state.requests)
    finally:
        server.should_exit = True
        await serving
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.media.close()
        engines.close()
        core.close()
        zmq_context.destroy(linger=0)
        sockets.cleanup()
