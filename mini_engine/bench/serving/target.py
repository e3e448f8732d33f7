"""The server that is measured: one that runs, or one that is started for the purpose; and what it says of itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mini_engine.bench.report import BenchError
from mini_engine.bench.serving.settings import Settings

ANSWER_SECONDS = 30.0
READY_CHECK_SECONDS = 0.2
MOST_BYTES = 1 << 24  # of an answer
SHOWN = 200  # characters of what went wrong
# By no proxy, as the requests that are measured.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Target:
    """Where requests go, for which model, and whether the server tells its stages when it is asked."""

    url: str
    model: str
    timings: bool


@contextlib.contextmanager
def target(settings: Settings, more_flags: Sequence[str] = ()) -> Iterator[Target]:
    """The server of `settings`, started with `more_flags` if it is to be started, and stopped when the block ends.

    Raises:
        BenchError: nothing listens there, it says nothing of a model, or it ended meanwhile.
    """
    if settings.launch is None:
        yield probe(settings, settings.root)
        return
    from mini_engine.bench.served import Served

    with Served([*settings.launch, *more_flags]) as server:
        yield probe(settings, server.url)
        server.check_alive()


def probe(settings: Settings, root: str) -> Target:
    """Ask a server for its model, and for what it can tell."""
    model = settings.model
    if model is None:
        try:
            model = str(json.loads(_get(settings, f"{root}/v1/models"))["data"][0]["id"])
        except (ValueError, LookupError, TypeError, RecursionError, urllib.error.HTTPError) as error:
            raise BenchError(f"{root}/v1/models names no model ({error}): give --model") from None
    timings = False
    with contextlib.suppress(urllib.error.HTTPError):  # not every server describes its interface
        described = _get(settings, f"{root}/openapi.json")
        timings = settings.backend == "openai-chat" and b'"return_timings"' in described
    return Target(root + settings.endpoint, model, timings)


def ready(settings: Settings) -> Target:
    """The server that runs at the settings' root, once it answers, for as long as they say.

    Raises:
        BenchError: it does not answer by then, or says nothing of a model.
    """
    deadline = time.monotonic() + settings.ready_seconds
    while True:
        try:
            return probe(settings, settings.root)
        except BenchError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(READY_CHECK_SECONDS)


def _get(settings: Settings, url: str) -> bytes:
    try:
        request = urllib.request.Request(url, headers=settings.headers)
        with OPENER.open(request, timeout=ANSWER_SECONDS) as response:
            return bytes(response.read(MOST_BYTES))
    except urllib.error.HTTPError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = " ".join(str(getattr(error, "reason", error)).split())[:SHOWN] or type(error).__name__
        raise BenchError(
            f"no server answers at {settings.root} ({why}): start one with `python serve.py`, "
            'or let bench.py start it with --launch ""'
        ) from None
