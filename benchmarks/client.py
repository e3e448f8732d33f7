"""Sends streamed requests to an OpenAI-compatible server as they arrive, and records when each chunk arrived.

Bodies are ready before the clock starts. Knows nothing of data sets. On aiohttp: the client often shares its cores with
the server, and a stream costs aiohttp a fifth of what httpx takes.
"""

import asyncio
import io
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec
import numpy as np
from tqdm import tqdm

ERROR_CHARACTERS = 300
KEEP_SECONDS = 2.0  # a connection idle for longer is opened again: the server may be about to close it


@dataclass(frozen=True)
class Target:
    """Where requests go, for which model, and whether the server reports the stages of a request."""

    url: str
    model: str
    timings: bool
    headers: dict[str, str]
    disable_tqdm: bool = False
    pid: int | None = None  # of the server that --launch started


@dataclass
class Outcome:
    """The outcome of a request. Moments are of `time.perf_counter`."""

    begun: float = 0.0
    ended: float = 0.0  # when the last event arrived
    chunks: list[float] = field(default_factory=list)  # when each chunk with `choices` arrived
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_media: int = 0  # images and videos, from servers that list them
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


@dataclass
class Run:
    """The outcomes of all requests, in their order; and the client's own CPU time, as a share of one core."""

    outcomes: list[Outcome]
    begun: float = 0.0
    seconds: float = 0.0  # from the start to the end of the last request
    cpu_share: float = 0.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, and the run so far: requests without an answer have failed."""

    def __init__(self, run: Run):
        self.run = run


def arrivals(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """Seconds from the start at which each of `count` requests is sent, ascending.

    The times between them are drawn from a gamma distribution with the mean 1 / `rate` and the shape `burstiness`, as
    vLLM's client means it: 1 is a Poisson process, less comes in bursts, more is more even. An infinite rate sends all
    at once.
    """
    return np.cumsum(rng.gamma(burstiness, 1 / (rate * burstiness), count))


def send_all(target: Target, bodies: Sequence[bytes], starts: Iterable[float], at_once: int | None) -> Run:
    """Send request i `starts[i]` seconds after the start, or once there is room for it, and wait for all. Raises
    Interrupted."""
    run = Run([Outcome(error="interrupted") for _ in bodies])
    try:
        asyncio.run(_send_all(run, target, bodies, starts, asyncio.Semaphore(at_once or len(bodies))))
    except KeyboardInterrupt as error:
        raise Interrupted(run) from error
    return run


async def _send_all(
    run: Run, target: Target, bodies: Sequence[bytes], starts: Iterable[float], room: asyncio.Semaphore
) -> None:
    bar = tqdm(total=len(bodies), unit=" requests", disable=target.disable_tqdm or None)  # None: only on a terminal
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS)
    timeout = aiohttp.ClientTimeout()  # none

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        async with room:
            run.outcomes[number] = await ask(http, target.url, bodies[number])
        bar.update()

    async with aiohttp.ClientSession(connector=connector, headers=target.headers, timeout=timeout) as http:
        run.begun, cpu = time.perf_counter(), time.process_time()
        try:
            async with asyncio.TaskGroup() as running:
                for number, start in enumerate(starts):
                    await asyncio.sleep(max(0.0, run.begun + start - time.perf_counter()))
                    running.create_task(one(http, number))
        finally:
            run.seconds = time.perf_counter() - run.begun
            run.cpu_share = (time.process_time() - cpu) / run.seconds
            bar.close()


async def ask(http: aiohttp.ClientSession, url: str, body: bytes) -> Outcome:
    """Send a request and read its stream; what goes wrong is in the outcome."""
    outcome = Outcome(begun=time.perf_counter())
    try:
        async with http.post(url, data=io.BytesIO(body), allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {await response.text()}")
            await _read(response, outcome)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        outcome.error = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARACTERS]
        outcome.ended = time.perf_counter()
    return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    """Read the events of a stream; raises ValueError, or what an event of another form raises."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            if not outcome.chunks or not outcome.prompt_tokens:
                raise ValueError(f"the stream ended after {len(outcome.chunks)} chunks, or without usage")
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
            outcome.num_media = len(event["usage"].get("media") or ())
        outcome.stages = event.get("metrics") or outcome.stages
    raise ValueError(f"the stream ended without [DONE] after {len(outcome.chunks)} chunks")
