"""A whole API server in the test's own event loop: uvicorn on a socket, real media and chat, a scripted engine core."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import zmq.asyncio
from PIL import Image

from mini_engine.config import EngineConfig
from mini_engine.engine_client.engines import EngineClient
from mini_engine.engine_client.media_store_client import CacheAccess
from mini_engine.http.app import create_app
from mini_engine.http.connections import HttpServer
from mini_engine.http.context import AppContext, ModelAssets
from mini_engine.http.middleware import ActiveRequests
from mini_engine.media.loader import MediaLoader
from mini_engine.media.processor import MediaProcessor
from mini_engine.media.settings import MediaSettingsResolver
from mini_engine.messages import EngineLimits
from mini_engine.metrics import REGISTRY
from mini_engine.prompt.detokenizer import Vocabulary
from mini_engine.prompt.pooling_prompts import Task
from mini_engine.prompt.renderer import ChatRenderer
from mini_engine.prompt.sampling_params import SamplingDefaults
from mini_engine.transport.codec import Encoder
from mini_engine.transport.tensor_ipc import TensorIpcSender
from tests.support import clips
from tests.support.patience import PATIENCE, STEP, cancelled, eventually, skip
from tests.support.peers import ScriptedCore, make_queue
from tests.support.web import WebServer, response

MAX_MODEL_LEN = 600
HIDDEN_SIZE = 4
LIMITS = EngineLimits(MAX_MODEL_LEN, num_blocks=8, block_size=16, max_prompt_media_tokens=45)
MAX_MEDIA_BYTES = 1 << 20  # of one item
MAX_INFLIGHT_BYTES = 4 << 20
MAX_REQUESTS = 8
MAX_REQUEST_BYTES = 8 << 20
ANSWER = ("a red", " circle", " moving left")
CHAT_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"

Serve = Callable[..., contextlib.AbstractAsyncContextManager["Served"]]


@dataclass
class Served:
    context: AppContext
    core: ScriptedCore  # the first of `cores`
    queue: TensorIpcSender
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient
    server: HttpServer
    port: int
    requests: ActiveRequests
    gate: GatedProcessor
    receiving: asyncio.Task[None]  # what the engines send
    cores: Sequence[ScriptedCore]
    open: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)  # requests and connections

    @property
    def allowed(self) -> Path:
        """Files below it may be read."""
        path = self.context.media_loader.policy.allowed_local_media_path
        assert path is not None
        return path

    def says(self, *texts: str) -> None:
        """The core answers with the tokens of each text in an output of their own."""
        outputs = [self.encode(text) for text in texts]
        self.core.script = lambda request: outputs

    def encode(self, text: str) -> list[int]:
        return self.context.renderer.tokenizer.encode(text, add_special_tokens=False).ids

    async def ask(self, content: Any = "hello", **more: Any) -> Any:
        """A chat completion by the openai client."""
        messages = [{"role": "user", "content": content}]
        return await self.openai.chat.completions.create(model="tiny", messages=messages, **more)

    async def complete(self, prompt: Any = "hello", **more: Any) -> Any:
        """A legacy completion by the openai client."""
        return await self.openai.completions.create(model="tiny", prompt=prompt, **more)

    async def post(self, content: Any = "hello", path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
        return await self.http.post(path, json=chat_body(content, **more))

    def asking(self, content: Any = "hello", **more: Any) -> asyncio.Task[httpx.Response]:
        """A chat request, which is cancelled at the end at the latest."""
        task = asyncio.create_task(self.post(content, **more))
        self.open.push_async_callback(cancelled, task)
        return task

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection, and `data` sent on it. It is closed at the end, at the latest."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.open.push_async_callback(hang_up, writer)
        writer.write(data)
        return reader, writer

    async def connect_chat(self, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A chat request on a bare connection."""
        data = json.dumps(chat_body(**body)).encode()
        return await self.connect(CHAT_HEAD + b"content-length: %d\r\n\r\n" % len(data) + data)

    def at_rest(self) -> bool:
        """Nothing of any request is left."""
        context = self.context
        return not (
            any(engine.requests or engine.preparing for engine in context.engines.engines)
            or self.queue.held
            or context.media_permits.num_free < context.media_permits.limit
            or not context.media_permits.turns.num_free
            or any(budget.used for budget in (context.media_bytes, context.requests, context.bodies))
            or metric("inflight_media_bytes")
        )


def chat_body(content: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **more}


def png(side: int = 56) -> bytes:
    """A grey image."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), "grey").save(file, "PNG")
    return file.getvalue()


def image(side: int = 56) -> dict[str, Any]:
    """A content part."""
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png(side)).decode()}}


CLIP = clips.encode(frames=12, container="matroska")


def video(data: bytes = CLIP) -> dict[str, Any]:
    """A content part."""
    url = "data:video/x-matroska;base64," + base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": url}}


class SlowWeb(WebServer):
    """A web server whose response, an image, waits for `go`."""

    def __init__(self) -> None:
        super().__init__(self.send)
        self.asked, self.go = threading.Event(), threading.Event()
        self.body = png()

    def send(self, connection: socket.socket, _: str) -> None:
        self.asked.set()
        assert self.go.wait(PATIENCE)
        connection.sendall(response(self.body))

    def __exit__(self, *raised: object) -> None:
        self.go.set()
        super().__exit__(*raised)

    @property
    def part(self) -> dict[str, Any]:
        """A content part with its image."""
        return {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{self.port}/a.png"}}


class GatedProcessor(MediaProcessor):
    """Its threads pass a door, which is open at first: so a test holds items at a known stage."""

    def __init__(self, model_dir: Path):
        super().__init__(model_dir)
        self.door = threading.Event()
        self.door.set()
        self.threads: set[int] = set()  # at the door

    @property
    def inside(self) -> int:
        """How many items are held."""
        return len(self.threads)

    def process_image(self, *args: Any) -> Any:
        return self._pass_door(super().process_image, *args)

    def process_video(self, *args: Any) -> Any:
        return self._pass_door(super().process_video, *args)

    def _pass_door(self, process: Callable[..., Any], *args: Any) -> Any:
        self.threads.add(threading.get_ident())
        assert self.door.wait(PATIENCE)
        self.threads.discard(threading.get_ident())
        return process(*args)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@dataclass
class Choices:
    """An answer of the openai client, whole or streamed."""

    texts: list[str]
    reasons: list[str | None]
    logprobs: list[Any]  # in the order in which they came
    usage: Any = None


async def choices_of(answer: Any, count: int = 1) -> Choices:
    """Checks how a stream is made up: one role and one finish reason for each choice, the usage in the last chunk."""
    is_stream = isinstance(answer, openai.AsyncStream)
    got, begun = Choices([""] * count, [None] * count, []), set()
    for chunk in [chunk async for chunk in answer] if is_stream else [answer]:
        assert got.usage is None and (not is_stream or len(chunk.choices) == (chunk.usage is None))
        got.usage = chunk.usage
        for choice in chunk.choices:
            assert got.reasons[choice.index] is None
            part = getattr(choice, "delta", None) or getattr(choice, "message", None)
            if is_stream and part is not None:
                assert (part.role == "assistant") is not (choice.index in begun)
                begun.add(choice.index)
            got.texts[choice.index] += choice.text if part is None else part.content or ""
            got.reasons[choice.index] = choice.finish_reason
            got.logprobs += [choice.logprobs] if choice.logprobs else []
    return got


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that has ended well."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def check_error(response: httpx.Response, status: int, code: str, says: str = "") -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), response.text
    assert set(error) == {"message", "type", "param", "code"} and says in error["message"], error
    assert response.headers["x-request-id"]


def metric(name: str, **labels: str) -> float:
    value = REGISTRY.get_sample_value(f"mini_engine:{name}", labels)
    assert value is not None, f"{name} {labels} is not there"
    return value


class Counted:
    """What the metrics `names`, each perhaps with labels such as "a{b=c}", have counted since this was made."""

    def __init__(self, *names: str):
        self.before = {name: self.read(name) for name in names}

    @staticmethod
    def read(name: str) -> float:
        name, _, labels = name.rstrip("}").partition("{")
        return metric(name, **dict(label.split("=") for label in labels.split(",") if label))

    def since(self) -> list[float]:
        return [self.read(name) - before for name, before in self.before.items()]


@contextlib.asynccontextmanager
async def serve(
    processor: GatedProcessor,
    media: MediaLoader,
    *,
    queue: TensorIpcSender | None = None,
    caches: Sequence[CacheAccess] = (CacheAccess(1 << 30),),
    **settings: Any,
) -> AsyncIterator[Served]:
    """Everything up, a request may be sent. At the end nothing of any request is left, and everything goes down.

    There is an engine for each of `caches`. `settings` are fields of `EngineConfig`.
    """
    own = {
        "served_model_name": ["tiny", "alias"],
        "timeout_keep_alive": 3600,
        "max_request_bytes": MAX_REQUEST_BYTES,
        "max_inflight_media_gb": MAX_INFLIGHT_BYTES / 2**30,
        "max_num_queued_reqs": MAX_REQUESTS,
        "maximum_concurrent_videos": 4,
    }
    config = EngineConfig(**{**own, **settings})
    queue = queue or make_queue()
    zmq_context, encoder = zmq.asyncio.Context(), Encoder("api 0", 7)
    async with contextlib.AsyncExitStack() as stack:
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="mini-"))  # leaves room for a socket's name
        endpoints = [f"ipc://{sockets}/core{number}" for number in range(len(caches))]
        stack.callback(zmq_context.destroy, linger=0)
        cores = [stack.enter_context(contextlib.closing(ScriptedCore(zmq_context, name))) for name in endpoints]
        engines = EngineClient(zmq_context, encoder, endpoints, [queue] * len(caches), caches)
        stack.callback(engines.close)
        app = create_app(context := make_context(processor, config, media, engines))
        server = HttpServer(app, config, lambda: None)
        receiving = asyncio.create_task(engines.run())
        background = [receiving, *(asyncio.create_task(core.run()) for core in cores)]
        port = await stack.enter_async_context(running(server, *background))
        url, limits = f"http://127.0.0.1:{port}", httpx.Limits(keepalive_expiry=None)
        http = httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits, verify=False)
        await stack.enter_async_context(http)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
        rest = (app.state.requests, processor, receiving)
        served = Served(context, cores[0], queue, client, http, server, port, *rest, cores)
        served.says(*ANSWER)
        try:
            yield served
        finally:
            processor.door.set()
        await served.open.aclose()
        await eventually(served.at_rest)


def make_context(
    processor: GatedProcessor, config: EngineConfig, media: MediaLoader, engines: EngineClient
) -> AppContext:
    tokenizer = processor.hf_processor.tokenizer
    assets = ModelAssets(
        renderer=ChatRenderer(processor.hf_processor),
        vocabulary=Vocabulary(tokenizer),
        vocab_size=len(tokenizer),
        media_settings=MediaSettingsResolver(processor, Path(tokenizer.name_or_path), config),
        media_loader=media,
        defaults=SamplingDefaults(eos_token_id=[3]),
        task=Task.of(config, Path(tokenizer.name_or_path), HIDDEN_SIZE, len(tokenizer), tokenizer.backend_tokenizer),
    )
    context = AppContext(assets, config, engines, LIMITS, incarnation=7)
    context.renderer.max_tokens = MAX_MODEL_LEN
    media.decoders.count_decoded = context.media_bytes.count
    return context


@contextlib.asynccontextmanager
async def running(server: HttpServer, *background: asyncio.Task[None]) -> AsyncIterator[int]:
    """The server on a port of its own. At its end the tasks in the background end too."""
    if socket.has_dualstack_ipv6():  # as with `--host ::`: the addresses of IPv4 clients are written as IPv6 ones
        listener = socket.create_server(("::ffff:127.0.0.1", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("127.0.0.1", 0))
    listener = socket.socket(fileno=listener.detach())  # knows its protocol: else asyncio does not set TCP_NODELAY
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await eventually(lambda: server.started)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        while not serving.done():
            skip(0.1)  # uvicorn sleeps so long, before it stops and afterwards
            await asyncio.sleep(STEP)
        await serving
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
