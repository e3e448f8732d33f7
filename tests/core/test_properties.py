"""Any load: the invariants hold after every step, and every request ends once with its own tokens.

The simulated ranks check what a step requires of them (cache indices, block tables, media, budgets); these tests check
what the engine core owes its clients and itself.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.messages import ChildRequest, ControlRequest, Finish, MediaReady, MessageId, PoolingParams, Problem
from tests.support.simulated_core import API, World, item
from tests.support.simulated_ranks import token_of


@dataclasses.dataclass
class RequestLoad:
    """A request of a load."""

    prompt: int
    output: int
    arrival: int
    media: list[int] = dataclasses.field(default_factory=list)  # number of each item's video
    first_token: int = 20
    priority: int = 0
    client: bytes = b""
    num_children: int = 0
    abort: int | None = None  # after this many turns
    stops: bool = False  # at the third token
    grammar: str = ""  # "bad": cannot be followed
    pools: bool = False  # instead of all that concerns an output
    gap: int = 0  # tokens of text between the temporal grids of an item


loads = st.builds(
    RequestLoad,
    prompt=st.integers(1, 30),
    output=st.integers(1, 12),
    arrival=st.integers(0, 10),
    media=st.lists(st.integers(0, 3), max_size=2),
    gap=st.sampled_from([0, 2]),
    first_token=st.sampled_from([20, 60]),
    priority=st.integers(0, 1),
    client=st.sampled_from([b"", b"", b"a", b"b"]),
    num_children=st.integers(0, 2),
    abort=st.one_of(st.none(), st.integers(0, 25)),
    stops=st.booleans(),
    grammar=st.sampled_from(["", "", "good", "fine", "bad"]),
)
pooled = loads.map(
    lambda load: dataclasses.replace(load, output=1, num_children=0, stops=False, grammar="", pools=True)
)

# Samples of one prompt about few videos, and urgent text that takes all blocks: each cache forgets what another holds.
videos, children = st.sampled_from([[3], [7]]), st.integers(1, 2)
familiar = st.builds(RequestLoad, st.just(14), children, st.integers(0, 40), videos, num_children=children)
familiar_pooled = st.builds(RequestLoad, st.just(14), st.just(1), st.integers(0, 40), videos, pools=st.just(True))
# Turns whose first video is in cached blocks, so that they have no room for it reserved; and text that evicts those.
turns = st.sampled_from([[1], [1, 5], [1, 9]])
conversing = st.builds(RequestLoad, st.just(20), st.sampled_from([1, 24]), st.integers(0, 20), turns)
growing = st.builds(RequestLoad, st.just(4), st.just(60), st.integers(0, 20), priority=st.just(-1))
clients = st.sampled_from([b"", b"a"])
hungry = st.builds(
    RequestLoad,
    st.just(60),
    st.integers(1, 4),
    st.integers(10, 80),
    st.just([]),
    st.integers(100, 400),
    st.just(-1),
    clients,
)

worlds = st.fixed_dictionaries(
    {
        "blocks": st.integers(11, 40),
        "max_seqs": st.integers(1, 8),
        "max_tokens": st.integers(1, 24),
        "ranks": st.integers(1, 2),
        # Of the seconds of a step the latter leave time for 16 tokens, or for one block of the vision tower.
        "seconds": st.sampled_from([(0.02, 0.001, 0.002), (0.02, 0.02, 0.2)]),
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
    {"max_tokens": st.sampled_from([8, 64]), "async_scheduling": st.booleans(), "snapshots": st.sampled_from([None, 2])}
).map(lambda sizes: {"blocks": 16, "max_seqs": 1, "encoder_cache_tokens": 4, **sizes})
small_worlds_of_three = small_worlds.map(lambda sizes: {**sizes, "max_seqs": 3})


def send(world: World, name: str, message: MessageId, load: RequestLoad) -> bool:
    """Send a request and its children; returns whether it has a tensor message."""
    media = [
        item(message, 10 * i, 1 + video % 4, i, b"video %10d" % video, grids=1 + video % 4 // 3 * 3, gap=load.gap)
        for i, video in enumerate(load.media)
        if 10 * (i + 1) <= load.prompt
    ]
    more = {
        "priority": load.priority,
        "client": load.client,
        "children": [ChildRequest(f"{name}-{i}", i) for i in range(load.num_children)],
        "grammar": load.grammar,
        "pooling": PoolingParams() if load.pools else None,
        "stop": [token_of(name, 2)] if load.stops else [],
    }
    world.request(name, load.prompt, load.output, media, load.first_token, ready=False, **more)
    return bool(media)


def assert_invariants(world: World) -> None:
    requests = world.core.requests.values()
    assert world.pool.num_used == len({block for request in requests for block in request.blocks})
    users = Counter(media_hash for request in requests for media_hash in request.reserved)
    assert all(world.core.encoder[media_hash].users == number for media_hash, number in users.items())
    assert world.core.encoder.num_tokens <= world.core.encoder.budget
    running = world.core.scheduler.clients.running
    assert len(running) == world.core.scheduler.clients.num_running <= world.core.config.max_num_seqs
    assert all(request.is_running for request in running)
    assert not any(request.is_running for request in world.core.scheduler.clients.waiting)
    assert all(len(request.blocks) >= world.pool.blocks_for(request.num_known - 1) for request in running)
    assert len(world.core.in_flight) <= world.core.max_in_flight


def report_grammars(world: World, chosen: Callable[[], bool]) -> None:
    """What rank 0 has compiled, or could not."""
    for digest in world.links.grammars.keys() - world.links.compiled:
        if chosen():
            world.grammar_ready(digest.decode(), Problem("it is bad") if digest == b"bad" else None)


def play(loads: list[RequestLoad], flags: dict[str, object], timing: int) -> None:
    chance = random.Random(timing)
    world = World(block_size=4, **flags)
    sent: set[MessageId] = set()
    pending: list[tuple[int, object]] = []
    for turn in range(4000):
        for number, load in enumerate(loads):
            message = MessageId(API[1], number + 1)
            if load.arrival == turn and send(world, f"r{number}", message, load):
                sent.add(message)
                reports = [MediaReady(rank, message) for rank in range(world.links.num_ranks)]
                pending += [(turn + chance.randint(0, 12), report) for report in reports]
            if load.arrival == turn and load.abort is not None:
                pending.append((turn + load.abort, Finish(f"r{number}", "abort")))
        # Some of those that a release overtakes are on their way to the core by then, some to the rank.
        on_their_way = [body for _, body in pending if isinstance(body, MediaReady) and chance.random() < 0.1]
        world.links.reported |= {(body.rank, body.message) for body in on_their_way}
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
        if turn > max(load.arrival for load in loads) and not pending and not world.core.requests:
            break
    world.run()
    report_grammars(world, lambda: True)
    world.run()
    for number, load in enumerate(loads):
        assert_answered(world, f"r{number}", load)
    assert set(world.consumed) == sent and len(world.consumed) == len(sent)
    world.assert_at_rest()


def assert_answered(world: World, request_id: str, load: RequestLoad) -> None:
    stop = token_of(request_id, 2) if load.stops else None
    for name in [request_id, *(f"{request_id}-{i}" for i in range(load.num_children))]:
        expected = [token_of(name, index) for index in range(load.output)]
        expected = expected[: expected.index(stop) + 1] if stop in expected else expected
        if load.pools:
            assert not world.tokens[name] and world.ends[name] in (["stop"], ["abort"])
            assert world.pooled.get(name) == (name.encode() if world.ends[name] == ["stop"] else None)
            assert load.abort is not None or world.ends[name] == ["stop"]
        elif load.grammar == "bad":
            assert not world.tokens[name] and world.ends[name] in (["error"], ["abort"])
        elif load.abort is None or name != request_id:
            assert world.tokens[name] == expected and world.ends[name] in (["length"], ["stop"])
        else:
            assert world.tokens[name] == expected[: len(world.tokens[name])] and world.ends[name] != ["error"]


@settings(max_examples=250, deadline=None)
@given(loads=st.lists(loads | pooled, min_size=1, max_size=10), flags=worlds, timing=st.integers(0, 2**32))
def test_any_load_finishes_every_request_once_with_its_tokens(loads, flags, timing):
    play(loads, flags, timing)


@settings(max_examples=100, deadline=None)
@given(
    loads=st.lists(st.one_of(familiar, familiar, hungry, familiar_pooled), min_size=6, max_size=12),
    flags=small_worlds,
    timing=st.integers(0, 2**32),
)
def test_any_load_with_constant_eviction_finishes_every_request_once(loads, flags, timing):
    play(loads, flags, timing)


@settings(max_examples=100, deadline=None)
@given(
    loads=st.lists(st.one_of(conversing, conversing, growing), min_size=3, max_size=8),
    flags=small_worlds_of_three,
    timing=st.integers(0, 2**32),
)
def test_any_load_that_loses_cached_videos_finishes_every_request_once(loads, flags, timing):
    play(loads, flags, timing)
