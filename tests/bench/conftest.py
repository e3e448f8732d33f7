"""`bench.py` inside this process, a server of the bundled model, and a server that fails as it is asked to."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mini_engine.bench import cli
from tests.e2e.running_server import RunningServer

USAGE = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 6}}


@dataclass
class Ran:
    """What a run of `bench.py` left on its streams, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def last(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])

    @property
    def results(self) -> dict[str, Any]:
        return self.last["results"]

    def row(self, label: str) -> float:
        """The first number of a row of the table."""
        line = next(line for line in self.out.splitlines() if line.startswith(label))
        return float(line.removeprefix(label).split()[0])


@pytest.fixture
def bench(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """`bench("--num-prompts", "3")` is `python bench.py --num-prompts 3`."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*flags: object) -> Ran:
        capfd.readouterr()
        status = cli.main([str(flag) for flag in flags])
        return Ran(status, *capfd.readouterr())

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def media_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def server(media_dir: Path) -> Iterator[RunningServer]:
    """May read files below `media_dir`."""
    with RunningServer("--allowed-local-media-path", str(media_dir)) as running:
        yield running


@pytest.fixture
def root(server: RunningServer) -> str:
    """The server's URL as `--base-url` takes it."""
    return server.url.removesuffix("/v1")


class BrokenServer:
    """A chat server that does what a prompt's text says: `ok` (three chunks and usage), `refuse` (500), `error` (an
    error in the stream), `cut` (no [DONE]), `garbage` (no JSON), `strange` (JSON of another form), `bare` (no usage),
    `hang up` (closes the connection).

    `requests` are those that came. No answer begins before there were `wanted_at_once` requests at once.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.at_once = self.most_at_once = self.wanted_at_once = 0

    def __enter__(self) -> BrokenServer:
        ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(ready),))
        self._thread.start()
        assert ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/{name:.*}", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "some-model"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, dict(request.headers), body))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        while self.most_at_once < self.wanted_at_once:  # noqa: ASYNC110 - other requests change it
            await asyncio.sleep(0.001)
        behaviour = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        behaviour = behaviour.partition(":")[0]
        if behaviour == "refuse":
            self.at_once -= 1
            return web.Response(status=500, text="out of order")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        *events, last = _events(behaviour, "messages" in body)
        for event in events:
            await response.write(b"data: " + event + b"\n\n")
            await asyncio.sleep(0.01)
        self.at_once -= 1  # before the client can send its next request
        await response.write(b"data: " + last + b"\n\n")
        if behaviour == "hang up":
            assert request.transport is not None
            request.transport.close()
        return response


def _events(behaviour: str, chat: bool) -> list[bytes]:
    def text(word: str) -> dict[str, Any]:
        return {"choices": [{"delta": {"content": word}} if chat else {"text": word}]}

    done = b"[DONE]"
    words = [json.dumps(text(word)).encode() for word in ("four ", "chunks", "")]
    return {
        "ok": [*words, json.dumps(USAGE).encode(), done],
        "error": [*words, json.dumps({"error": {"message": "the engine is gone"}}).encode(), done],
        "cut": words,
        "garbage": [*words, b"{not json", done],
        "strange": [b'{"choices": ["text"]}', done],
        "bare": [*words, done],
        "hang up": words,
    }[behaviour]


@pytest.fixture
def broken() -> Iterator[BrokenServer]:
    with BrokenServer() as server:
        yield server


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., list[object]]:
    """A data set whose prompts are these texts, in this order; returns the flags for it."""

    def write(*texts: str) -> list[object]:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": text, "output_tokens": 50}) + "\n" for text in texts))
        flags = ["--dataset-name", "custom", "--dataset-path", path, "--disable-shuffle", "--num-warmups", 0]
        return [*flags, "--num-prompts", len(texts)]

    return write
