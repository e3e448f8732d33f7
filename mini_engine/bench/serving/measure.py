"""One benchmark from its prompts to its figures: bodies, warm-up, the run, the table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mini_engine.bench.datasets.loading import load
from mini_engine.bench.datasets.sample import Prompts, draws
from mini_engine.bench.datasets.tokenized import load_tokenizer
from mini_engine.bench.report import BenchError, Report, say
from mini_engine.bench.serving import figures, table
from mini_engine.bench.serving.arrivals import arrivals
from mini_engine.bench.serving.bodies import requests_of
from mini_engine.bench.serving.load import Run, Traffic, drive
from mini_engine.bench.serving.media import MediaPlace, media_place
from mini_engine.bench.serving.settings import Settings
from mini_engine.bench.serving.target import Target, ready, target
from mini_engine.cli import parse
from mini_engine.config import ConfigError


@dataclass(frozen=True)
class Prepared:
    """What can be made before there is a server."""

    settings: Settings
    prompts: Prompts
    place: MediaPlace


@dataclass(frozen=True)
class Measured:
    """A run and its figures, which are plain data."""

    run: Run
    figures: dict[str, Any]
    text: str  # the table
    failures: list[str]
    model: str


@contextmanager
def prepared(settings: Settings) -> Iterator[Prepared]:
    """The prompts, their media where a server finds them; these are gone when the block ends.

    Raises:
        ConfigError: flags that cannot be used.
        BenchError: the prompts are not to be had, or the server that should run does not answer.
    """
    data = settings.data
    if settings.launch is None:
        model = ready(settings).model  # before the work of making prompts
    else:
        model = parse(settings.launch).model
    prompts = load(dataclasses.replace(data, tokenizer=data.tokenizer or model))
    for note in prompts.notes:
        say(note)
    with media_place(settings.media_transport, settings.media_dir, settings.media_port) as place:
        place.add(medium for sample in prompts.samples + prompts.warm_ups for medium in sample.media)
        if settings.launch is None and place.server_flags:
            say(f"the server must run with {' '.join(place.server_flags)}")
        yield Prepared(settings, prompts, place)


def run_once(ready: Prepared, title: str) -> Measured:
    """Measure the server of the settings, which is started and stopped if they say so. That it ended by itself, or did
    not stop, is a failure; what was measured by then stands.
    """
    measured = None
    try:
        with target(ready.settings, ready.place.server_flags) as server:
            measured = measure(ready, server, title)
    except BenchError as error:
        if measured is None:
            raise
        measured.failures.append(str(error))
    return measured


def next_of(before: bool, name: str, report: Report, run: Callable[[], Measured]) -> Measured | None:
    """What one of several runs measured; None if it came to nothing, or was interrupted. This is in the report then,
    under its `name`: what others measured `before` stands. Of the first run the error is raised.
    """
    try:
        return run()
    except (BenchError, ConfigError, KeyboardInterrupt) as error:
        if not before:
            raise
        report.interrupted = isinstance(error, KeyboardInterrupt)
        report.failures.append(f"{name}: {'interrupted' if report.interrupted else error}")
        return None


def measure(ready: Prepared, server: Target, title: str) -> Measured:
    """Warm the server up, send everything, and sum up."""
    settings, prompts = ready.settings, ready.prompts
    warm_ups = requests_of(prompts.warm_ups, settings, server, ready.place, cancel=False)
    requests = requests_of(prompts.samples, settings, server, ready.place)
    rng = draws(settings.data.seed, "arrivals")
    starts = arrivals(len(requests), settings.request_rate, settings.burstiness, rng)
    traffic = Traffic(
        server.url, settings.headers, settings.max_concurrency, settings.request_timeout, settings.data.progress
    )
    failures = []
    if warm_ups:
        before = drive(warm_ups, [0.0] * len(warm_ups), traffic, "warm-up")
        failures = [f"warm-up: {failure}" for failure in figures.failures(before.outcomes)]
    run = drive(requests, starts, traffic, "requests")
    _count_tokens(run, settings)
    to_close = [request.number for request in requests if request.cancel_after is not None]
    if ended := sum(run.outcomes[number].ok for number in to_close):
        say(f"--cancel-rate: {ended} of {len(to_close)} streams ended before they were to be closed; see --ignore-eos")
    found = {
        "max_concurrency": settings.max_concurrency,
        "request_rate": "inf" if math.isinf(settings.request_rate) else settings.request_rate,
        **figures.figures_of(run, settings.measures),
    }
    text = table.describe(found, settings.measures, title)
    return Measured(run, found, text, failures + figures.failures(run.outcomes), server.model)


def _count_tokens(run: Run, settings: Settings) -> None:
    """By the tokenizer that was named, where the server gives no usage."""
    uncounted = [outcome for outcome in run.outcomes if outcome.ok and outcome.counted_by == "chunks"]
    if not uncounted or settings.tokenizer is None:
        return
    try:
        tokenizer = load_tokenizer(settings.tokenizer, "to count tokens, for the server does not")
    except ConfigError as error:
        say(str(error))
        return
    for outcome in uncounted:
        outcome.output_tokens = len(tokenizer.encode(outcome.text, add_special_tokens=False))
        outcome.counted_by = "tokenizer"
