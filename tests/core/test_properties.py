"""Any load: the invariants hold after every step, and every request ends once with its own tokens.

The simulated ranks check what a step may ask of them (slots, block tables, media, budgets); here stands what the engine
core owes its clients and itself.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.messages import ControlRequest, Finish, MediaReady, MessageId, Sibling
from tests.support.simulated_core import API, MODEL, TIMED, World, item
from tests.support.simulated_ranks import token_of


@dataclasses.dataclass
class Asked:
    prompt: int
    output: int
    arrival: int
    media: list[int] = dataclasses.field(default_factory=list)  # number of each item's video
    first_token: int = 20
    priority: int = 0
    client: bytes = b""
    siblings: int = 0
    abort: int | None = None  # after this many turns
    stops: bool = False  # at the third token
    grammar: str = ""  # "bad": cannot be followed


asked = st.builds(
    Asked,
    prompt=st.integers(1, 30),
    output=st.integers(1, 12),
    arrival=st.integers(0, 10),
    media=st.lists(st.integers(0, 3), max_size=2),
    first_token=st.sampled_from([20, 60]),
    priority=st.integers(0, 1),
    client=st.sampled_from([b"", b"", b"a", b"b"]),
    siblings=st.integers(0, 2),
    abort=st.one_of(st.none(), st.integers(0, 25)),
    stops=st.booleans(),
    grammar=st.sampled_from(["", "", "good", "fine", "bad"]),
)

# Samples of one prompt about few videos, and urgent text that takes all blocks: each cache forgets what another holds.
familiar = st.builds(
    Asked,
    prompt=st.just(14),
    output=st.integers(1, 2),
    media=st.sampled_from([[3], [7]]),
    siblings=st.integers(1, 2),
    arrival=st.integers(0, 40),
)
hungry = st.builds(
    Asked,
    prompt=st.just(60),
    output=st.integers(1, 4),
    first_token=st.integers(100, 400),
    priority=st.just(-1),
    client=st.sampled_from([b"", b"a"]),
    arrival=st.integers(10, 80),
)

worlds = st.fixed_dictionaries(
    {
        "model": st.sampled_from([MODEL, TIMED]),
        "blocks": st.integers(11, 40),
        "max_seqs": st.integers(1, 8),
        "max_tokens": st.integers(1, 24),
        "ranks": st.integers(1, 2),
        "async_scheduling": st.booleans(),
        "enable_prefix_caching": st.booleans(),
        "encoder_cache_tokens": st.integers(8, 14),
        "max_num_encoder_input_tokens": st.sampled_from([None, 1, 3, 6]),
        "long_prefill_token_threshold": st.sampled_from([0, 4]),
        "snapshots": st.sampled_from([None, 0, 1, 3, 20]),
        "state_snapshot_interval": st.sampled_from([4, 12]),
    }
)
small_worlds = st.fixed_dictionaries(
    {
        "blocks": st.just(16),
        "max_seqs": st.just(1),
        "max_tokens": st.sampled_from([8, 64]),
        "async_scheduling": st.booleans(),
        "encoder_cache_tokens": st.just(4),
        "snapshots": st.sampled_from([None, 2]),
    }
)


def send(world: World, number: int, one: Asked) -> set[MessageId]:
    """Send request `r<number>` and its siblings; returns the tensor message it has, if any."""
    message = MessageId(API[1], number + 1)
    gap = 2 * (world.core.model is TIMED)
    media = [
        item(message, 10 * index, 1 + video % 4, index, b"video %10d" % video, grids=1 + video % 4 // 3 * 3, gap=gap)
        for index, video in enumerate(one.media)
        if 10 * (index + 1) <= one.prompt
    ]
    siblings = [Sibling(f"r{number}-{i}", i) for i in range(one.siblings)]
    world.request(
        f"r{number}", one.prompt, one.output, media, [token_of(f"r{number}", 2)] if one.stops else [],
        one.first_token, priority=one.priority, client=one.client, siblings=siblings, grammar=one.grammar,
    )  # fmt: skip
    return {message} if media else set()


def answer(name: str, length: int, stop: int | None) -> list[int]:
    """The tokens of a request without an abort."""
    tokens = [token_of(name, index) for index in range(length)]
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


def assert_invariants(world: World) -> None:
    held = [block for request in world.core.requests.values() for block in request.blocks]
    assert world.pool.num_used == len(set(held))
    users = Counter(value for one in world.core.requests.values() if one.holds_media for value in one.media_tokens)
    assert all(world.core.encoder[value].users == number for value, number in users.items())
    assert world.core.encoder.num_tokens <= world.core.encoder.budget
    running = world.core.scheduler.clients.running
    assert len(running) == world.core.scheduler.clients.num_running <= world.core.config.max_num_seqs
    assert all(request.is_running for request in running)
    assert not any(request.is_running for request in world.core.scheduler.clients.waiting)
    assert all(len(request.blocks) >= world.pool.blocks_for(request.num_known - 1) for request in running)
    assert len(world.core.steps.in_flight) <= world.core.max_in_flight


def report_grammars(world: World, chosen: Callable[[], bool]) -> None:
    """What rank 0 has compiled, or could not."""
    for digest in world.links.grammars.keys() - world.links.compiled:
        if chosen():
            world.grammar_ready(digest.decode(), "it is bad" if digest == b"bad" else "")


def play(requests: list[Asked], settings: dict[str, object], timing: int) -> World:
    chance = random.Random(timing)
    world = World(block_size=4, **settings)
    last_arrival = max(one.arrival for one in requests)
    sent: set[MessageId] = set()
    pending: list[tuple[int, object]] = []
    for turn in range(4000):
        for number, one in enumerate(requests):
            if one.arrival == turn:
                messages = send(world, number, one)
                sent |= messages
                pending += [
                    (turn + chance.randint(0, 12), MediaReady(rank, message))
                    for message in messages
                    for rank in range(world.links.num_ranks)
                ]
                # Some of those that a release overtakes are on their way to the core by then, some to the rank.
                world.links.reported |= {
                    (body.rank, body.message)
                    for _, body in pending
                    if isinstance(body, MediaReady) and chance.random() < 0.5
                }
                pending += [(turn + one.abort, Finish(f"r{number}", "abort"))] if one.abort is not None else []
        for body in [body for when, body in pending if when <= turn]:
            world.receive(body)
        pending = [(when, body) for when, body in pending if when > turn]
        report_grammars(world, lambda: chance.random() < 0.2)
        if chance.random() < 0.03:
            world.receive(ControlRequest(turn, "reset_caches"))
        world.turn()
        assert_invariants(world)
        if world.links.steps and chance.random() < 0.5:
            world.links.run_step()
        if turn > last_arrival and not pending and not world.links.inbox and not world.core.requests:
            break
    world.run()
    report_grammars(world, lambda: True)
    world.run()
    for number, one in enumerate(requests):
        for name in [f"r{number}", *(f"r{number}-{i}" for i in range(one.siblings))]:
            expected = answer(name, one.output, token_of(f"r{number}", 2) if one.stops else None)
            assert len(world.ends[name]) == 1
            if one.grammar == "bad":
                assert not world.tokens[name] and world.ends[name] in (["error"], ["abort"])
                continue
            assert world.ends[name] != ["error"]
            assert world.tokens[name] == expected[: len(world.tokens[name])]
            if one.abort is None or name != f"r{number}":
                assert world.tokens[name] == expected
    assert set(world.consumed) == sent and len(world.consumed) == len(sent)
    world.assert_at_rest()
    return world


@settings(max_examples=250, deadline=None)
@given(requests=st.lists(asked, min_size=1, max_size=10), settings=worlds, timing=st.integers(0, 2**32))
def test_any_load_finishes_every_request_once_with_its_tokens(requests, settings, timing):
    play(requests, settings, timing)


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(st.one_of(familiar, familiar, hungry), min_size=6, max_size=12),
    settings=small_worlds,
    timing=st.integers(0, 2**32),
)
def test_any_load_with_constant_eviction_finishes_every_request_once(requests, settings, timing):
    play(requests, settings, timing)
