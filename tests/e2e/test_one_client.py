"""What one client can do to others: one-token requests of a second client, ten per second, beside hostile ones."""

import contextlib
import dataclasses
import http.client
import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.grammars import REGEXES, SCHEMAS
from tests.support.processes import descendants, eventually, memory
from tests.support.running_server import RunningServer

PERIOD = 0.1  # seconds
SECONDS = 30.0  # of repeated attacks
MOST_SECONDS = 5.0  # for one token on a busy machine; a request that blocks others did so for a minute
MAX_GROWTH_BYTES = 128 << 20  # of an API server, beside the body that it receives
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
HOSTILE, OTHER = ("127.0.0.2", 0), ("127.0.0.3", 0)  # where they connect from: a client is an address

RULES = "\n".join(f"n{i}: /[a-z ]/" for i in range(650))
CUBIC = "start: s\ns: " + " | ".join(f"n{i} s" for i in range(650)) + f' | ""\n{RULES}'
ARRAYS = [{"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": i} for i in range(600)]
STOPS = [1023 * "é" + chr(ord("a") + i) for i in range(16)]
CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": f"[{'[],' * 2**20}0]"}}


@dataclasses.dataclass
class Attack:
    """A request, the statuses with which it may end, and how many of it are sent at once."""

    fields: dict[str, Any]
    statuses: tuple[int, ...] = (400,)
    count: int = 1
    path: str = CHAT

    def body(self, **more: Any) -> bytes:
        defaults = {"messages": MESSAGES, "max_tokens": 400} if self.path == CHAT else {}
        return json.dumps(defaults | self.fields | more, separators=(",", ":")).encode()


def tokens(count: int) -> dict[str, int]:
    return {"min_tokens": count, "max_tokens": count}


def guided(**grammar: Any) -> dict[str, Any]:
    return {"structured_outputs": grammar}


ATTACKS = {
    "a lexeme that takes for ever to compile": Attack(
        guided(grammar="start: T\nT: ~/(?s:.*a.{30}.*)/ & /(?s:.*b.{30})/")
    ),
    "masks that take cubic time": Attack(guided(grammar=CUBIC) | {"n": 6}),
    "masks that take long later on": Attack(guided(json={"$defs": {"n": {"anyOf": ARRAYS}}, "$ref": "#/$defs/n"})),
    "stop strings that almost occur": Attack({"stop": STOPS, "n": 64, **tokens(50), **guided(regex="é*")}, (200,)),
    "log probabilities": Attack({"logprobs": True, "top_logprobs": 20, "n": 64, **tokens(50)}, (200,)),
    "samples with priority": Attack({"n": 128, "priority": -(2**31), **tokens(20)}, (200,), count=2),
    # Almost as much as a body may have, and more.
    "lists for the template": Attack({"chat_template_kwargs": {"part": [[]] * 60_000}}),
    "empty parts": Attack({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 25_000}]}),
    "arguments of an earlier call": Attack({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}),
    "a schema": Attack(guided(json={"enum": [1] * 120_000})),
    "token ids": Attack({"tokens": [1] * 10**6}, path="/detokenize"),
    "a field that is ignored": Attack({"metadata": [[]] * 60_000, "max_tokens": 1}, (200,)),
    "a body that is too large": Attack({"metadata": [[]] * 10**7}, (413,)),
}


def post(server: RunningServer, path: str, body: bytes, client: tuple[str, int]) -> http.client.HTTPResponse:
    """The response, with its `body`."""
    connecting = http.client.HTTPConnection(*server.address, timeout=120, source_address=client)
    with contextlib.closing(connecting) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is refused before all of it is sent
            connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.body = response.read().decode()
        return response


@contextlib.contextmanager
def one_token_requests(server: RunningServer) -> Iterator[list[float]]:
    """Seconds that each took, while the block runs. Asserts that none failed."""
    took: list[float] = []
    ended = threading.Event()
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()

    def ask() -> None:
        begun = time.monotonic()
        response = post(server, CHAT, body, OTHER)
        assert response.status == 200, response.body
        took.append(time.monotonic() - begun)

    def ask_all() -> list[Future[None]]:
        return [threads.submit(ask) for _ in iter(lambda: ended.wait(PERIOD), True)]

    with ThreadPoolExecutor(64) as threads:
        requests = threads.submit(ask_all)
        try:
            yield took
        finally:
            ended.set()
        for request in requests.result():
            request.result()


@pytest.mark.parametrize("name", ATTACKS)
def test_one_client_does_not_block_others(server, name):
    attack = ATTACKS[name]
    post(server, CHAT, json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode(), OTHER)
    family, api = set(descendants(server.process.pid)), server.pids()["api 0"]
    body, before = attack.body(), memory(api, "VmRSS")
    Path(f"/proc/{api}/clear_refs").write_text("5")  # VmHWM starts at VmRSS
    with one_token_requests(server) as took, ThreadPoolExecutor(attack.count) as threads:
        sent = [threads.submit(post, server, attack.path, body, HOSTILE) for _ in range(attack.count)]
        statuses = {request.result().status for request in sent}
        eventually(lambda: len(took) > 3)
    assert statuses <= {*attack.statuses}
    print(f"{len(took)} requests, {1000 * max(took):.0f} ms at most")
    assert max(took) < MOST_SECONDS
    assert memory(api, "VmHWM") - before < len(body) + MAX_GROWTH_BYTES
    server.assert_at_rest()
    assert server.pids()["api 0"] == api
    eventually(lambda: family <= set(descendants(server.process.pid)))
    assert "Traceback" not in server.log


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.path == CHAT])
def test_others_are_answered_soon_beside_repeated_attacks(server, name):
    """Each attack with a grammar that the server has not seen."""
    attack, ended = ATTACKS[name], time.monotonic() + SECONDS
    with one_token_requests(server) as took:
        for number in itertools.count():
            if time.monotonic() > ended:
                break
            response = post(server, CHAT, attack.body(cache_salt=f"{number}"), HOSTILE)
            assert response.status in attack.statuses, response.body
    median, p99 = (1000 * sorted(took)[int(share * len(took))] for share in (0.5, 0.99))
    print(f"{len(took)} requests beside {number}: median {median:.0f}, p99 {p99:.0f}, max {1000 * max(took):.0f} ms")
    is_grammar = "structured_outputs" in attack.fields and attack.statuses == (400,)
    assert p99 < 250 and not (is_grammar and max(took) > 0.25)


@pytest.mark.slow
def test_random_grammars_do_not_block_others(server):
    """Some grow exponentially."""
    count, negation = st.sampled_from(["", "*", "{30}", "{0,300}", "{1000}"]), st.sampled_from(["", "~"])
    terms = st.builds("(({}){}.{}){}".format, REGEXES, count, REGEXES, count)
    rules = 'start: (T{} | a)*\na: ("x" | a){} start | ""\nT: {}/{}/ {} {}/{}/'
    lark = st.builds(rules.format, count, count, negation, terms, st.sampled_from("&|"), negation, terms)
    schemas = st.builds(
        lambda schema, size: {"anyOf": size * [{"items": schema, "maxItems": size}, {"items": {"$ref": "#"}}]},
        SCHEMAS,
        st.integers(1, 300),
    )
    grammars = st.one_of(
        lark.map(lambda text: guided(grammar=text)),
        terms.map(lambda text: guided(regex=text)),
        schemas.map(lambda schema: guided(json=schema)),
    )
    bodies = list[str]()

    @settings(max_examples=200)
    @given(grammars, st.integers(1, 16))
    def draw(fields: dict[str, Any], n: int) -> None:
        bodies.append(json.dumps({"messages": MESSAGES, "max_tokens": 60, "n": n, **fields}))

    draw()  # apart, since hypothesis would send a request that fails again and again, smaller
    before = server.pids()
    with one_token_requests(server) as took:
        for body in bodies:
            response = post(server, CHAT, body.encode(), HOSTILE)
            assert response.status in (200, 400), f"{response.body} for {body[:2000]}"
    print(f"{len(took)} requests, {1000 * max(took):.0f} ms at most")
    assert max(took) < 1.0
    server.assert_at_rest()
    assert server.pids() == before
