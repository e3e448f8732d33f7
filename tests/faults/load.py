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
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tests.support.client import ClientRequest, Question
from tests.support.processes import eventually
from tests.support.running_server import RunningServer
from tests.support.stages import HeldRequest

PATIENCE_SECONDS = 120  # for right answers; errors have a bound of their own
PAUSE_AFTER_ERROR = 0.2
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


def ask(
    server: RunningServer, question: Question, stream: bool = False, api: str | None = None, **more: object
) -> Outcome:
    """One question, on a new connection."""
    with contextlib.ExitStack() as stack:

        def respond() -> http.client.HTTPResponse:
            request = ClientRequest(server, api, question, stream=stream, **more)
            stack.callback(request.hang_up)
            return request.response()

        return outcome_of(question, respond)


def outcome_of(question: Question, respond: Callable[[], http.client.HTTPResponse]) -> Outcome:
    """How the request for `question` ends, from now on; `respond` sends it, or waits for its response."""
    begun = time.monotonic()
    try:
        kind, detail = _judged(question, respond())
    except ConnectionRefusedError as error:
        kind, detail = "refused", repr(error)
    except (ConnectionError, http.client.HTTPException) as error:
        kind, detail = "cut", repr(error)
    return Outcome(kind, begun, time.monotonic(), detail)


@contextlib.contextmanager
def awaited(held: HeldRequest) -> Iterator[Future[Outcome]]:
    """The outcome of a request at a stage; the end of the block does not wait for it."""
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(outcome_of, held.question, held.request.response)
        finally:
            held.request.disconnect()
    held.request.hang_up()


def _judged(question: Question, response: http.client.HTTPResponse) -> tuple[str, str]:
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
    return "right" if answer == question.answer else "wrong", f"{question.answer!r} expected, got {answer!r}"


class Load:
    """`with Load(server, questions) as load:` The clients take the questions in turn, every other one as a stream.

    `api`: the API server that they ask; None: any.
    """

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
        eventually(lambda: self.tally()[kind] >= wanted or self._has_failed(), PATIENCE_SECONDS)
        assert not self._has_failed(), "see the client's error"

    def _has_failed(self) -> bool:
        return any(client.done() for client in self._running)

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                question, stream = next(self._requests)
            outcome = ask(self._server, question, stream, self._api)
            self.outcomes.append(outcome)
            if outcome.kind != "right":
                self._over.wait(PAUSE_AFTER_ERROR)


def assert_right_or_ended(
    outcomes: Sequence[Outcome], since: float, bound: float, kinds: Collection[str] = ENGINE_DIED
) -> None:
    """No answer is wrong, and a request without one ended in one of these ways: not before the fault at `since`, and
    within `bound` seconds of it, or of the request where that came later."""
    for outcome in outcomes:
        if outcome.kind != "right":
            assert outcome.kind in kinds, outcome
            assert outcome.ended >= since, f"failed before the fault: {outcome}"
            assert outcome.ended - max(outcome.begun, since) <= bound, f"ended too late: {outcome}"
