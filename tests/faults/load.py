"""Clients that ask questions with known answers and record the outcome of each request."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.support.client import ClientRequest, Question
from tests.support.processes import eventually
from tests.support.running_server import RunningServer

# How a request may end whose engine has died, while the API server lives; and one whose API server has died.
ENGINE_DIED = ("error",)
API_SERVER_DIED = ("cut", "refused")
SOON = 5  # seconds after a death: at once, on a busy machine


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one request ended: `right`, `wrong`, `error` (in OpenAI's form), `cut` or `refused` (the connection)."""

    kind: str
    begun: float
    ended: float
    detail: str = ""


def ask(server: RunningServer, question: Question, api: str | None = None, **more: object) -> Outcome:
    """One question, on a new connection."""
    return outcome_of(lambda: ClientRequest(server, api, question, **more))


def outcome_of(send: Callable[[], ClientRequest]) -> Outcome:
    """How a request ends, from now on; `send` sends it, or returns one that was sent."""
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            request = send()
            stack.callback(request.hang_up)
            kind, detail = _judged(request)
        except ConnectionRefusedError as error:
            kind, detail = "refused", repr(error)
        except (ConnectionError, http.client.HTTPException) as error:
            kind, detail = "cut", repr(error)
    return Outcome(kind, begun, time.monotonic(), detail)


def _judged(request: ClientRequest) -> tuple[str, str]:
    response, right = request.response(), request.question.answer
    text = response.read().decode()
    if response.status != 200:
        assert response.status in (500, 503), f"{response.status} {text}"
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
    return "right" if answer == right else "wrong", f"{right!r} expected, got {answer!r}"


class Load:
    """`with Load(server, questions) as load:` The clients take the questions in turn, every other one as a stream."""

    def __init__(self, server: RunningServer, questions: Sequence[Question], clients: int = 3, api: str | None = None):
        self.outcomes: list[Outcome] = []
        self._server = server
        self._api = api
        self._requests = zip(itertools.cycle(questions), itertools.cycle((False, True)), strict=False)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._running = [self._pool.submit(self._run) for _ in range(clients)]

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        for client in self._running:
            client.result()

    def tally(self) -> Counter[str]:
        """How many requests have ended in each way."""
        return Counter(outcome.kind for outcome in list(self.outcomes))

    def wait_for(self, kind: str, more: int) -> None:
        """Until that many more have ended this way."""
        wanted = self.tally()[kind] + more
        eventually(lambda: self.tally()[kind] >= wanted or self._has_failed(), 120)
        assert not self._has_failed(), "see the client's error"

    def _has_failed(self) -> bool:
        return any(client.done() for client in self._running)

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                question, stream = next(self._requests)
            outcome = ask(self._server, question, self._api, stream=stream)
            self.outcomes.append(outcome)
            if outcome.kind != "right":
                self._over.wait(0.2)


def assert_right_or_ended(outcomes: Sequence[Outcome], since: float, bound: float, kinds: Collection[str]) -> None:
    """No answer is wrong, and a request without one ended in one of these ways: not before the fault at `since`, and
    within `bound` seconds of it, or of the request where that came later."""
    for outcome in outcomes:
        if outcome.kind != "right":
            assert outcome.kind in kinds, outcome
            assert outcome.ended >= since, f"failed before the fault: {outcome}"
            assert outcome.ended - max(outcome.begun, since) <= bound, f"ended too late: {outcome}"
