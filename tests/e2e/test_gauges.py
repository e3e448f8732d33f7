"""The gauges of `/metrics` say what is, also while nothing has come back for a request, and after a reset."""

from __future__ import annotations

from tests.e2e.asked import Asked, ask_small
from tests.e2e.barriers import eventually, stopped
from tests.e2e.pinned import Asking, call
from tests.e2e.running_server import RunningServer

STORED = 'mini_engine:mm_store_bytes{engine="0",state="used"}'
API = "mini-engine: api 0"


def assert_total(server: RunningServer, name: str, wanted: float) -> None:
    assert server.total(name) == wanted, name


def test_a_request_shows_while_its_prompt_is_computed(server):
    with stopped(server.pids()["mini-engine: worker 0.0"]):
        asking = Asking(server, API, Asked("tell me", "", []), max_tokens=2)
        eventually(lambda: assert_total(server, "num_requests_running", 1))
    asking.answer()


def test_empty_caches_show(server):
    one = ask_small(6000)
    assert server.ask(one.text, one.urls) == one.answer
    assert server.total("encoder_cache_tokens") > 0 and server.metrics()[STORED] > 0
    call(server, API, "POST", "/reset_caches")
    eventually(lambda: assert_total(server, "encoder_cache_tokens", 0))
    eventually(lambda: assert_nothing_stored(server))


def assert_nothing_stored(server: RunningServer) -> None:
    assert server.metrics()[STORED] == 0
