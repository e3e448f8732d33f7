"""A request at each stage of its path: held at a fail point, or by flags and by the requests before it.

The servers have two API servers, `--max-num-batched-tokens 128`, and for some stages the flags of `HOLDING`.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator

from tests.support.client import ENDLESS, TEXT, ClientRequest, Question, ask_large, ask_small
from tests.support.processes import eventually
from tests.support.running_server import RunningServer, message

API, OTHER = "api 0", "api 1"
HOLDING = ["--maximum-concurrent-videos", "1", "--max-num-seqs", "1", "--max-num-encoder-input-tokens", "8"]
seeds = itertools.count(5000)  # of videos that no server has seen


Stage = Callable[[RunningServer], contextlib.AbstractContextManager[ClientRequest]]


def new_question() -> Question:
    return ask_small(next(seeds))


def wait_for_metrics(server: RunningServer, **wanted: float) -> None:
    eventually(lambda: {name: server.total(name, OTHER) for name in wanted} == wanted)


@contextlib.contextmanager
def at_fail_point(
    server: RunningServer, name: str, question: Question | None = None, **more: object
) -> Iterator[ClientRequest]:
    with server.failpoint(name) as point:
        request = ClientRequest(server, API, question or new_question(), **more)
        point.wait()
        assert request.has_nothing_yet()
        yield request


@contextlib.contextmanager
def prefilling(server: RunningServer) -> Iterator[ClientRequest]:
    """In the middle of a prompt whose media come at its end, and that the prefix cache does not hold."""
    question = new_question()
    system = {"role": "system", "content": f"{next(seeds)} " + "word " * 600}
    messages = [system, message(question.text, question.urls)]
    with at_fail_point(server, "prefilling", question, messages=messages) as request:
        assert server.total("kv_cache_usage_perc", OTHER) > 0
        yield request


@contextlib.contextmanager
def queued_for_admission(server: RunningServer) -> Iterator[ClientRequest]:
    """Behind one that is decoded."""
    with at_fail_point(server, "decoding") as ahead:
        yield ClientRequest(server, API, new_question())
    assert ahead.answer() == ahead.question.answer


@contextlib.contextmanager
def waiting(server: RunningServer, is_kept: bool = False) -> Iterator[ClientRequest]:
    """In the core's queue, its media with the engine, behind a request without media that does not end."""
    question = new_question()
    if is_kept:
        assert ClientRequest(server, OTHER, question).answer() == question.answer
        server.assert_at_rest(OTHER)
    decodes = server.total("media_decodes_total", OTHER)
    ahead = ClientRequest(server, OTHER, TEXT, **ENDLESS)
    ahead.read_events(2)
    request = ClientRequest(server, API, question)
    decodes += not is_kept
    wait_for_metrics(server, num_requests_running=1, num_requests_waiting=1, media_decodes_total=decodes)
    assert request.has_nothing_yet()
    yield request
    wait_for_metrics(server, num_requests_running=1, num_requests_waiting=0)
    ahead.read_events(2)
    ahead.hang_up()


@contextlib.contextmanager
def generating(server: RunningServer) -> Iterator[ClientRequest]:
    """The client has some of its tokens. It would run for minutes."""
    request = ClientRequest(server, API, new_question(), **ENDLESS)
    request.read_events(3)
    yield request


SMALL = ("decoding", "processing", "receiving", "accepting", "encoding")  # fail points that any video reaches
STAGES: dict[str, Stage] = {
    "admission": queued_for_admission,
    **{name: lambda server, name=name: at_fail_point(server, name) for name in SMALL},
    "storing": lambda server: at_fail_point(server, "writing", ask_large(next(seeds))),  # in the middle of the copy
    "waiting": waiting,
    "waiting, kept": lambda server: waiting(server, is_kept=True),
    "prefilling": prefilling,
    "generating": generating,
}
