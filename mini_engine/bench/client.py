"""Sends streamed requests to an OpenAI-compatible server as they arrive, and notes when each chunk came.

Bodies are ready before the clock starts. Knows nothing of data sets. On aiohttp: the client often shares its cores with
the server, and a stream costs aiohttp a fifth of what httpx takes.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec
from tqdm import tqdm

ERROR_CHARACTERS = 300
KEEP_SECONDS = 2.0  # a connection idle for longer is opened again: the server may be about to close it
REQUEST_SECONDS = 6 * 60 * 60
TICK_SECONDS = 0.02


@dataclass(frozen=True)
class Request:
    """What is sent. `answer`: the right one, where it is known."""

    number: int
    body: bytes
    answer: str | None = None


@dataclass
class Outcome:
    """What came of a request. Moments are of `time.perf_counter`."""

    number: int
    begun: float = 0.0
    ended: float = 0.0  # when the last event came
    chunks: list[float] = field(default_factory=list)  # when each chunk with `choices` came
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    right: bool | None = None  # None: no answer is known
    stages: dict[str, float] | None = None  # the server's own account, in seconds
    error: str | None = None

    @property
    def ok(self) -> bool:
        """It was answered to the end."""
        return self.error is None

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
        return [after - before for before, after in itertools.pairwise(self.chunks)]


@dataclass(frozen=True)
class Traffic:
    """How requests are sent to `url`."""

    url: str
    headers: Mapping[str, str]
    max_concurrency: int | None
    progress: bool  # shown on stderr


@dataclass(frozen=True)
class Run:
    """What came of all requests, in their order, and what the client itself took."""

    outcomes: list[Outcome]
    begun: float
    seconds: float  # from the start to the end of the last request
    cpu_share: float = 0.0  # of one core
    lags: Sequence[float] = (0.0,)  # seconds by which the event loop woke up late


def arrivals(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds from the start at which each of `count` requests is sent, ascending.

    The times between them are drawn from a gamma distribution with the mean 1 / `rate` and the shape `burstiness`, as
    vLLM's client means it: 1 is a Poisson process, less comes in bursts, more is more even. An infinite rate sends all
    at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    return list(itertools.accumulate(rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count)))


async def send_all(requests: Sequence[Request], starts: Sequence[float], traffic: Traffic, title: str) -> Run:
    """Send request i `starts[i]` seconds after the start, or once there is room for it, and wait for all."""
    room = asyncio.Semaphore(traffic.max_concurrency or len(requests))
    outcomes: list[Outcome] = []
    lags = [0.0]
    bar = tqdm(total=len(requests), desc=title, unit=" requests", file=sys.stderr, disable=not traffic.progress)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS)
    headers = {"Content-Type": "application/json", **traffic.headers}
    timeout = aiohttp.ClientTimeout(REQUEST_SECONDS, sock_connect=None)

    async def one(http: aiohttp.ClientSession, request: Request) -> None:
        async with room:
            outcome = await ask(http, traffic.url, request)
        outcomes.append(outcome)
        if not outcome.ok:
            bar.set_postfix(failed=sum(not one.ok for one in outcomes), refresh=False)
        bar.update()

    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as http:
        watch = asyncio.create_task(_watch(lags))
        begun, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as running:
            for request, start in zip(requests, starts, strict=True):
                if (wait := begun + start - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                running.create_task(one(http, request))
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        watch.cancel()
    bar.close()
    return Run(sorted(outcomes, key=lambda outcome: outcome.number), begun, seconds, cpu / seconds, lags)


async def _watch(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        lags.append(max(0.0, time.perf_counter() - due))


async def ask(http: aiohttp.ClientSession, url: str, request: Request) -> Outcome:
    """Send a request and read its stream; what goes wrong is in the outcome."""
    outcome = Outcome(request.number, begun=time.perf_counter())
    try:
        async with http.post(url, data=io.BytesIO(request.body), allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {await response.text()}")
            await _read(response, outcome)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = "" if type(error) is ValueError else f"{type(error).__name__}: "
        outcome.error = " ".join(f"{what}{error}".split())[:ERROR_CHARACTERS]
        outcome.ended = time.perf_counter()
    if request.answer is not None and outcome.ok:
        outcome.right = outcome.text.strip() == request.answer
    return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    """Read the events of a stream. Raises ValueError where it does not end as it should, and what goes wrong with an
    event of another form."""
    counted = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            if not outcome.chunks or not counted:
                with_or_not = "with" if counted else "without"
                raise ValueError(f"the stream ended after {len(outcome.chunks)} chunks, {with_or_not} usage")
            return
        event = msgspec.json.decode(data)
        if event.get("error"):
            raise ValueError(f"error in the stream: {event['error']}")
        outcome.ended = time.perf_counter()
        if event.get("choices"):
            outcome.chunks.append(outcome.ended)
            choice = event["choices"][0]
            outcome.text += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
        if event.get("usage"):
            outcome.prompt_tokens = event["usage"]["prompt_tokens"]
            outcome.output_tokens = event["usage"]["completion_tokens"]
            counted = True
        outcome.stages = event.get("metrics") or outcome.stages
    raise ValueError(f"the stream ended without [DONE] after {len(outcome.chunks)} chunks")
