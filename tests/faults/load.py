"""Clients that ask questions whose right answers are known, one after the other, and note how each request ended."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from urllib.parse import urlsplit

from tests.e2e.asked import Asked
from tests.e2e.pinned import connect
from tests.e2e.running_server import RunningServer, message

PATIENCE_SECONDS = 120  # a client waits for so long, for right answers only: errors have a bound of their own
PAUSE_AFTER_ERROR = 0.2
MAY_FAIL_WITH = (500, 503)
# How a request may end whose engine has died, while the API server lives; and one whose API server has died.
TOLD = ("error",)
LEFT = ("cut", "refused")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one request ended: `right`, `wrong`, `error` (told in OpenAI's form), `cut` or `refused` (the connection)."""

    kind: str
    begun: float
    ended: float
    detail: str = ""


def ask(
    server: RunningServer,
    one: Asked,
    stream: bool = False,
    kept: http.client.HTTPConnection | None = None,
    **more: object,
) -> Outcome:
    """One question, on a connection of its own or on one that is kept."""
    address = urlsplit(server.url)
    connection = kept or http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE_SECONDS)
    body = {"messages": [message(one.text, one.urls)], "temperature": 0, "stream": stream, **more}
    headers = {"Content-Type": "application/json", "Connection": "keep-alive" if kept else "close"}

    def respond() -> http.client.HTTPResponse:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection.getresponse()

    with contextlib.nullcontext() if kept else contextlib.closing(connection):
        return outcome_of(one, respond)


def outcome_of(one: Asked, respond: Callable[[], http.client.HTTPResponse]) -> Outcome:
    """How the request ends that asks for `one`, from now on; `respond` sends it, or waits for its response."""
    begun = time.monotonic()
    try:
        kind, detail = _judged(one, respond())
    except ConnectionRefusedError as error:
        kind, detail = "refused", repr(error)
    except (ConnectionError, http.client.HTTPException) as error:
        kind, detail = "cut", repr(error)
    return Outcome(kind, begun, time.monotonic(), detail)


def _judged(one: Asked, response: http.client.HTTPResponse) -> tuple[str, str]:
    text = response.read().decode()
    if response.status != 200:
        assert response.status in MAY_FAIL_WITH, f"{response.status} {text}"
        assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}
        assert response.status == 500 or response.headers["retry-after"]
        return "error", text
    if not response.headers["content-type"].startswith("text/event-stream"):
        answer = json.loads(text)["choices"][0]["message"]["content"]
    else:
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        if events and '"error"' in events[-1]:
            return "error", events[-1]
        if not events or events[-1] != "[DONE]":
            return "cut", text[-200:]
        deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
        answer = "".join(delta.get("content") or "" for delta in deltas)
    return ("right", answer) if answer == one.answer else ("wrong", f"{one.answer!r} expected, got {answer!r}")


class Load:
    """`with Load(server, questions) as load:` The clients take `asked` in turn, every other request as a stream.

    With the title of an API server each keeps one connection, to that one.
    """

    def __init__(self, server: RunningServer, asked: Sequence[Asked], clients: int = 3, title: str | None = None):
        self.outcomes: list[Outcome] = []
        self._server = server
        self._title = title
        self._asked = itertools.cycle(asked)
        self._streams = itertools.cycle((False, True))
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """No new requests; returns when every client has its outcome."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def count(self, kind: str) -> int:
        """Requests that have ended so."""
        return sum(outcome.kind == kind for outcome in list(self.outcomes))

    def wait_for(self, kind: str, more: int, seconds: float = PATIENCE_SECONDS) -> None:
        """Until so many more have ended so."""
        wanted, deadline = self.count(kind) + more, time.monotonic() + seconds
        while self.count(kind) < wanted:
            assert time.monotonic() < deadline, f"{self.tally()}\n{self._server.log}"
            assert not self._failures, self._failures
            time.sleep(0.05)

    def tally(self) -> dict[str, int]:
        """How many requests have ended in each way."""
        kinds = [outcome.kind for outcome in list(self.outcomes)]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    def _run(self) -> None:
        try:
            with (
                contextlib.closing(connect(self._server, self._title))
                if self._title
                else contextlib.nullcontext() as kept
            ):
                while not self._over.is_set():
                    with self._lock:
                        one, stream = next(self._asked), next(self._streams)
                    outcome = ask(self._server, one, stream, kept)
                    self.outcomes.append(outcome)
                    if outcome.kind != "right":
                        self._over.wait(PAUSE_AFTER_ERROR)
        except BaseException as error:  # noqa: BLE001 - raised where the load ends
            self._failures.append(error)


def assert_only_right_or_told(
    outcomes: Sequence[Outcome], since: float, bound: float, kinds: Collection[str] = TOLD
) -> None:
    """No answer is wrong, and who has none was told so in one of these ways: not before the fault at `since`, and
    within `bound` seconds of it, or of the request where that came later."""
    for outcome in outcomes:
        if outcome.kind != "right":
            assert outcome.kind in kinds, outcome
            assert outcome.ended >= since, f"failed before the fault: {outcome}"
            assert outcome.ended - max(outcome.begun, since) <= bound, f"told too late: {outcome}"
