"""`bench.py` inside this process, and a server that fails as it is asked to."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cli

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

    def row(self, name: str) -> str:
        """What the table has beside a name."""
        return next(line for line in self.out.splitlines() if line.startswith(f"{name}: ")).rpartition(": ")[2].strip()


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


class BrokenServer(ThreadingHTTPServer):
    """A server that does what a prompt's text says: `ok` (three chunks and usage), `refuse` (500), `error` (an error in
    the stream), `cut` (no [DONE]), `garbage` (no JSON), `strange` (JSON of another form), `bare` (no usage), `hang up`
    (closes the connection). `requests` are the path, headers and body of those that came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: BrokenServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        self.reply(200 if found else 404, b'{"data": [{"id": "some-model"}]}' if found else b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        asked = body["messages"][-1]["content"][0]["text"] if "messages" in body else body["prompt"]
        behaviour = asked.partition(":")[0]
        if behaviour == "refuse":
            self.reply(500, b"out of order")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in _events(behaviour, "messages" in body):
            data = b"data: " + event + b"\n\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.close_connection = behaviour == "hang up"
        if not self.close_connection:
            self.wfile.write(b"0\r\n\r\n")

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


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
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., list[object]]:
    """A data set whose prompts are these texts, in this order; returns the flags for it."""

    def write(*texts: str) -> list[object]:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": text, "output_tokens": 50}) + "\n" for text in texts))
        flags = ["--dataset-name", "custom", "--dataset-path", path, "--disable-shuffle", "--num-warmups", 0]
        return [*flags, "--num-prompts", len(texts)]

    return write
