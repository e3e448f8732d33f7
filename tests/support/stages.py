"""A request at a stage of its path, on a server with two API servers and `--max-num-batched-tokens 128`."""

import contextlib
import itertools
from collections.abc import Iterator

from tests.support.client import ENDLESS, ClientRequest, Question, ask_large, ask_small
from tests.support.running_server import RunningServer, message

API, OTHER = "api 0", "api 1"
seeds = itertools.count(5000)  # of videos that no server has seen


def new_question() -> Question:
    return ask_small(next(seeds))


@contextlib.contextmanager
def at_stage(server: RunningServer, stage: str) -> Iterator[ClientRequest]:
    """Held at the fail point `stage`; or `generating` for minutes, and the client has some of its tokens."""
    question = ask_large(next(seeds)) if stage == "writing" else new_question()  # in the middle of the copy
    more = {}
    if stage == "prefilling":  # in the middle of a prompt whose media come at its end; the prefix cache has no part
        system = {"role": "system", "content": f"{next(seeds)} " + "word " * 600}
        more = {"messages": [system, message(question.text, question.urls)]}
    if stage == "generating":
        request = ClientRequest(server, API, question, **ENDLESS)
        request.read_events(3)
        yield request
        return
    with server.failpoint(stage) as point:
        request = ClientRequest(server, API, question, **more)
        point.wait()
        assert request.has_nothing_yet()
        assert stage != "prefilling" or server.total("kv_cache_usage_perc", OTHER) > 0
        yield request
