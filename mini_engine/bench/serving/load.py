"""Sends requests as they arrive, at most so many at once, and watches the client itself meanwhile."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
from tqdm import tqdm

from mini_engine.bench.report import percentile
from mini_engine.bench.serving.client import Outcome, Request, ask, session

TICK_SECONDS = 0.02


@dataclass(frozen=True)
class Traffic:
    """How requests are sent to `url`."""

    url: str
    headers: Mapping[str, str]
    max_concurrency: int | None
    timeout: float  # seconds for a request
    progress: bool = True  # shown on stderr


@dataclass(frozen=True)
class ClientLoad:
    """What the client itself took: its CPU time as a share of one core, and how late its loop was to wake up."""

    cpu_share: float
    lag_p99: float  # seconds
    lag_max: float


@dataclass(frozen=True)
class Run:
    """What came of all requests, in their order."""

    outcomes: list[Outcome]
    begun: float
    seconds: float  # from the start to the end of the last request
    client: ClientLoad


def drive(requests: Sequence[Request], starts: Sequence[float], traffic: Traffic, title: str) -> Run:
    """Send request i `starts[i]` seconds after the start, or once there is room for it, and wait for all."""
    return asyncio.run(_drive(requests, starts, traffic, title))


async def _drive(requests: Sequence[Request], starts: Sequence[float], traffic: Traffic, title: str) -> Run:
    room = asyncio.Semaphore(traffic.max_concurrency or max(1, len(requests)))
    outcomes: list[Outcome] = []
    lags: list[float] = []
    progress = Progress(len(requests), title, traffic.progress)

    async def one(http: aiohttp.ClientSession, request: Request) -> None:
        async with room:
            outcome = await ask(http, traffic.url, request, traffic.timeout)
        outcomes.append(outcome)
        progress.note(outcome)

    async with session(traffic.headers) as http:
        watch = asyncio.create_task(_watch(lags))
        begun, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as running:
            for request, start in zip(requests, starts, strict=True):
                if (wait := begun + start - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                running.create_task(one(http, request))
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        watch.cancel()
    progress.close()
    lags = lags or [0.0]
    client = ClientLoad(cpu / seconds if seconds else 0.0, percentile(lags, 0.99), max(lags))
    return Run(sorted(outcomes, key=lambda outcome: outcome.number), begun, seconds, client)


async def _watch(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        lags.append(max(0.0, time.perf_counter() - due))


class Progress:
    """The bar on stderr: requests done, tokens a second so far, failures."""

    def __init__(self, total: int, title: str, shown: bool):
        self._bar = tqdm(
            total=total,
            desc=title,
            unit=" requests",
            file=sys.stderr,
            dynamic_ncols=True,
            disable=not shown or sys.stderr is None,
        )
        self._begun = time.perf_counter()
        self._tokens = 0
        self._failed = 0

    def note(self, outcome: Outcome) -> None:
        """One more has ended."""
        self._tokens += outcome.output_tokens
        self._failed += outcome.error is not None
        rate = self._tokens / max(time.perf_counter() - self._begun, 1e-6)
        self._bar.set_postfix_str(f"{rate:.0f} tok/s, {self._failed} failed", refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Leave the last state of the bar standing."""
        self._bar.close()
