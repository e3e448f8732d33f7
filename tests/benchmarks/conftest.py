"""`bench.py` inside this process, and a server that fails as it is asked to."""

import json
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cli
from tests.support.web import WebServer, chunked, response

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


class BrokenServer(WebServer):
    """A server that does what a prompt's text says: `ok` (three chunks and usage), `refuse` (500), `error` (an error in
    the stream), `cut` (no [DONE]), `garbage` (no JSON), `strange` (JSON of another form), `bare` (no usage), `hang up`
    (closes the connection). `asked` are the path, headers and body of the requests that came."""

    def __init__(self) -> None:
        super().__init__(self.respond)
        self.url = f"http://127.0.0.1:{self.port}"
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    def respond(self, connection: socket.socket, head: str) -> None:
        line, *fields = head.split("\r\n")[:-2]
        method, path, _ = line.split()
        if method == "GET":
            is_known = path == "/v1/models"
            models = b'{"data": [{"id": "some-model"}]}'
            connection.sendall(response(models) if is_known else response(status="404 Not Found"))
            return
        headers = dict(field.split(": ", 1) for field in fields)
        body = json.loads(connection.recv(int(headers["Content-Length"]), socket.MSG_WAITALL))
        self.asked.append((path, headers, body))
        text = body["messages"][-1]["content"][0]["text"] if "messages" in body else body["prompt"]
        connection.sendall(_answer(text.partition(":")[0], "messages" in body))


def _answer(behaviour: str, chat: bool) -> bytes:
    def text(word: str) -> dict[str, Any]:
        return {"choices": [{"delta": {"content": word}} if chat else {"text": word}]}

    if behaviour == "refuse":
        return response(b"out of order", "500 Internal Server Error", Connection="close")
    done = b"[DONE]"
    words = [json.dumps(text(word)).encode() for word in ("four ", "chunks", "")]
    events = {
        "ok": [*words, json.dumps(USAGE).encode(), done],
        "error": [*words, json.dumps({"error": {"message": "the engine is gone"}}).encode(), done],
        "cut": words,
        "garbage": [*words, b"{not json", done],
        "strange": [b'{"choices": ["text"]}', done],
        "bare": [*words, done],
        "hang up": words,
    }[behaviour]
    stream = chunked(*(b"data: %b\n\n" % event for event in events))
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + (stream[:-5] if behaviour == "hang up" else stream)  # without its end


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
