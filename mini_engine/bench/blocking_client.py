"""A chat client for measuring: bodies made beforehand, one kept connection, the time from first to last byte.

It runs on threads and `http.client`: beside answers of some milliseconds it must cost next to nothing itself, and no
other client of the benchmark may hold it up, as they would in one event loop (`serving/client.py`).
"""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any

from mini_engine.bench.report import BenchError

TIMEOUT_SECONDS = 120.0
KEEP_SECONDS = 2.0  # a connection idle for longer is opened anew: the server may be about to close it


@dataclass(frozen=True)
class Reply:
    """One answered request. `begun` and `seconds` are of `time.perf_counter`."""

    begun: float
    seconds: float
    status: int
    body: bytes

    @property
    def text(self) -> str:
        """The answer of the model; only for status 200."""
        return str(json.loads(self.body)["choices"][0]["message"]["content"])

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, media included; only for status 200."""
        return int(json.loads(self.body)["usage"]["prompt_tokens"])

    @property
    def error(self) -> str | None:
        """What the server said against the request, or None."""
        return None if self.status == 200 else f"status {self.status}: {self.body[:200].decode(errors='replace')}"


class NoAnswer(BenchError):
    """The connection broke, or nothing came in time."""


class Client:
    """One connection to a server's root URL. Not thread-safe: one for each thread."""

    def __init__(self, url: str):
        self._connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=TIMEOUT_SECONDS)
        self._last_used = 0.0

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, body: bytes) -> Reply:
        """Post a chat request and wait for the whole answer.

        Raises:
            NoAnswer: the connection broke, or nothing came in time.
        """
        try:
            if time.perf_counter() - self._last_used > KEEP_SECONDS:
                self._connection.close()
                self._connection.connect()
            begun = time.perf_counter()
            self._connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"no answer from {self._connection.host}:{self._connection.port}: {error!r}") from error
        self._last_used = time.perf_counter()
        return Reply(begun, self._last_used - begun, response.status, data)

    def model(self) -> str:
        """The name of the served model."""
        self._connection.request("GET", "/v1/models")
        answer = json.loads(self._connection.getresponse().read())
        self._connection.close()
        return str(answer["data"][0]["id"])


def chat_body(model: str, question: str, video: bytes | None = None, **more: Any) -> bytes:
    """The body of a greedy chat request: an MP4 file if given, then the question; `more` are fields of the request."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": question}]
    if video is not None:
        url = "data:video/mp4;base64," + base64.b64encode(video).decode()
        parts.insert(0, {"type": "video_url", "video_url": {"url": url}})
    message = {"role": "user", "content": parts}
    return json.dumps({"model": model, "messages": [message], "temperature": 0, **more}).encode()
