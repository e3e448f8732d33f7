"""One streamed request to an OpenAI-compatible server, and when each of its chunks came.

On aiohttp: a stream of 50 chunks costs it some 0.8 ms of CPU, a fifth of what httpx takes, and the client often shares
its cores with the server. Bodies are ready before. Knows nothing of data sets or of when requests are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import aiohttp
import msgspec

from mini_engine.bench.blocking_client import KEEP_SECONDS

ERROR_TEXT_LENGTH = 300
MOST_EVENT_BYTES = 1 << 22


@dataclass(frozen=True)
class Request:
    """What is sent. `cancel_after`: the stream is closed after so many chunks, None to read it to its end."""

    number: int
    body: bytes
    answer: str | None = None
    cancel_after: int | None = None


@dataclass
class Outcome:
    """What came of a request. Moments are of `time.perf_counter`; lists belong to the outcome."""

    number: int
    begun: float = 0.0
    ended: float = 0.0  # when the last event came
    chunks: list[float] = field(default_factory=list)  # when each chunk with `choices` came
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted_by: Literal["server", "tokenizer", "chunks"] = "chunks"  # the output tokens
    right: bool | None = None  # whether it is the expected answer, None if none is known
    stages: dict[str, float] | None = None  # seconds, as the server says
    cancelled: bool = False
    error: str | None = None

    @property
    def ok(self) -> bool:
        """It was answered to the end."""
        return self.error is None and not self.cancelled

    @property
    def ttft(self) -> float:
        """Seconds to the first chunk; only if it is ok."""
        return self.chunks[0] - self.begun

    @property
    def e2el(self) -> float:
        """Seconds to the last event; only if it is ok."""
        return self.ended - self.begun

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first, None if there is none."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between chunks."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None  # of a completion


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    metrics: Any = None


_read_event = msgspec.json.Decoder(_Event).decode


class StreamError(Exception):
    """The stream did not end as it should; the text says how."""


def session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """The connections of a run; as many as there are requests at once."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS)
    return aiohttp.ClientSession(
        connector=connector, headers={"Content-Type": "application/json", **headers},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
    )  # fmt: skip


async def ask(http: aiohttp.ClientSession, url: str, request: Request, seconds: float) -> Outcome:
    """Send a request and read its stream; what goes wrong is in the outcome. It must end within `seconds`."""
    outcome = Outcome(request.number, begun=time.perf_counter())
    try:
        async with asyncio.timeout(seconds), _post(http, url, request) as response:
            if response.status != 200:
                to = response.headers.get("Location")
                said = _shown(await response.content.read(4 * ERROR_TEXT_LENGTH))
                raise StreamError(f"status {response.status}{f', to {to}' if to else ''}: {said}")
            await _read(response, outcome, request.cancel_after)
    except TimeoutError:
        came = f"{len(outcome.chunks)} chunks" if outcome.chunks else "nothing"
        outcome.error = f"not ended within the {seconds:g} s of --request-timeout; {came} had come"
    except (aiohttp.ClientError, OSError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    except (StreamError, msgspec.DecodeError, UnicodeDecodeError) as error:
        outcome.error = str(error)
    except RecursionError:
        outcome.error = "an event has too many levels"
    if outcome.error is not None or outcome.cancelled:
        outcome.ended = time.perf_counter()
    if outcome.counted_by == "chunks":
        outcome.output_tokens = len(outcome.chunks)
    if request.answer is not None and outcome.ok:
        outcome.right = outcome.text.strip() == request.answer
    return outcome


def _post(http: aiohttp.ClientSession, url: str, request: Request) -> contextlib.AbstractAsyncContextManager[Any]:
    """A redirect is not followed: its time would be measured with the rest."""
    return http.post(url, data=io.BytesIO(request.body), allow_redirects=False)


def _shown(data: bytes) -> str:
    """The beginning of what came, on one line."""
    return " ".join(data.decode(errors="replace").split())[:ERROR_TEXT_LENGTH]


async def _read(response: aiohttp.ClientResponse, outcome: Outcome, cancel_after: int | None) -> None:
    rest = b""
    async for data in response.content.iter_any():
        now = time.perf_counter()
        *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if _take(event, outcome, now):
                return
            if cancel_after is not None and len(outcome.chunks) >= cancel_after:
                outcome.cancelled = True
                response.close()
                return
        if len(rest) > MOST_EVENT_BYTES:
            raise StreamError(f"an event is longer than {MOST_EVENT_BYTES} bytes; it begins with {_shown(rest[:1000])}")
    told = b"data:" in rest
    if told and _take(rest, outcome, time.perf_counter()):  # an end without the empty line after it
        return
    said = f"; it said {_shown(rest)}" if rest.strip() and not told else ""
    raise StreamError(f"the stream ended without [DONE] after {len(outcome.chunks)} chunks{said}")


def _take(event: bytes, outcome: Outcome, now: float) -> bool:
    """Note an event that came `now`; returns whether it is the end of the stream."""
    # Other lines name or number an event, or are comments, as some servers send to keep a connection.
    data = b"\n".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:")).strip()
    if not data:
        return False
    if data == b"[DONE]":
        if not outcome.chunks:
            raise StreamError("the stream ended without a chunk")
        return True
    found = _read_event(data)
    if found.error is not None:
        raise StreamError(f"error in the stream: {str(found.error)[:ERROR_TEXT_LENGTH]}")
    outcome.ended = now
    if found.choices:
        outcome.chunks.append(now)
        choice = found.choices[0]
        outcome.text += (choice.delta.content if choice.delta else choice.text) or ""
    if found.usage is not None and found.usage.completion_tokens is not None:
        outcome.prompt_tokens, outcome.output_tokens = found.usage.prompt_tokens or 0, found.usage.completion_tokens
        outcome.counted_by = "server"
    if isinstance(found.metrics, dict) and all(isinstance(value, int | float) for value in found.metrics.values()):
        outcome.stages = found.metrics
    return False
