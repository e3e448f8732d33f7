"""Any load: the invariants hold after every step, and every request ends once with its own tokens.

The simulated ranks check what a step requires of them (cache indices, block tables, media, budgets); these tests check
what the engine core owes its clients and itself.
"""

import dataclasses
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.messages import ChildRequest, ControlRequest, Finish, MediaReady, MessageId, PoolingParams, Problem
from tests.core.cycles import leaves_no_cycles
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
    lists: bool = False  # the log probabilities of the prompt
    gap: int = 0  # tokens of text between the temporal grids of an item

    def send(self, world: World, name: str, message: MessageId) -> bool:
        """Send the request and its children; returns whether it has a tensor message."""
        media = [
            item(message, 10 * i, 1 + video % 4, i, b"video %10d" % video, grids=1 + video % 4 // 3 * 3, gap=self.gap)
            for i, video in enumerate(self.media)
            if 10 * (i + 1) <= self.prompt
        ]
        more = {
            "priority": self.priority,
            "client": self.client,
            "children": [ChildRequest(f"{name}-{i}", i) for i in range(self.num_children)],
            "grammar": self.grammar,
            "pooling": PoolingParams() if self.pools else None,
            "prompt_logprobs": 0 if self.lists else None,
            "stop": [token_of(name, 2)] if self.stops else [],
        }
        world.request(name, self.prompt, self.output, media, self.first_token, ready=False, **more)
        return bool(media)

    def assert_answered(self, world: World, request_id: str) -> None:
        stop = token_of(request_id, 2) if self.stops else None
        for name in [request_id, *(f"{request_id}-{i}" for i in range(self.num_children))]:
            expected = [token_of(name, index) for index in range(self.output)]
            expected = expected[: expected.index(stop) + 1] if stop in expected else expected
            if name in world.links.started:
                rows = world.links.started[name].new.prompt_token_ids[1:] if self.lists and name == request_id else []
                assert world.listed[name] == rows[: len(world.listed[name])]
                assert world.ends[name] == ["abort"] or len(world.listed[name]) == len(rows)
            if self.pools:
                assert not world.tokens[name] and world.ends[name] in (["stop"], ["abort"])
                assert world.pooled.get(name) == (name.encode() if world.ends[name] == ["stop"] else None)
                assert self.abort is not None or world.ends[name] == ["stop"]
            elif self.grammar == "bad":
                assert not world.tokens[name] and world.ends[name] in (["error"], ["abort"])
            elif self.abort is None or name != request_id:
                assert world.tokens[name] == expected and world.ends[name] in (["length"], ["stop"])
            else:
                assert world.tokens[name] == expected[: len(world.tokens[name])] and world.ends[name] != ["error"]


ANYTHING = st.builds(
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
    abort=st.none() | st.integers(0, 25),
    stops=st.booleans(),
    grammar=st.sampled_from(["", "", "good", "fine", "bad"]),
    pools=st.booleans(),
    lists=st.booleans(),
).map(
    lambda load: (
        dataclasses.replace(load, output=1, num_children=0, stops=False, grammar="", lists=False)
        if load.pools
        else load
    )
)
ANY_WORLD = {
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

# Samples of one prompt about few videos, and urgent text that takes all blocks: each cache forgets what another holds.
ABOUT_FEW_VIDEOS = {"prompt": st.just(14), "arrival": st.integers(0, 40), "media": st.sampled_from([[3], [7]])}
SAMPLES = st.builds(
    RequestLoad, output=st.integers(1, 2), num_children=st.integers(1, 2), lists=st.booleans(), **ABOUT_FEW_VIDEOS
)
POOLED = st.builds(RequestLoad, output=st.just(1), pools=st.just(True), **ABOUT_FEW_VIDEOS)
URGENT = st.builds(
    RequestLoad,
    prompt=st.just(60),
    output=st.integers(1, 4),
    arrival=st.integers(10, 80),
    first_token=st.integers(100, 400),
    priority=st.just(-1),
    client=st.sampled_from([b"", b"a"]),
)

# Turns whose first video is in cached blocks, so that they have no room for it reserved; and text that evicts them.
TURNS = st.builds(
    RequestLoad,
    prompt=st.just(20),
    output=st.sampled_from([1, 24]),
    arrival=st.integers(0, 20),
    media=st.sampled_from([[1], [1, 5], [1, 9]]),
)
GROWING = st.builds(
    RequestLoad, prompt=st.just(4), output=st.just(60), arrival=st.integers(0, 20), priority=st.just(-1)
)
SMALL_WORLD = {
    "blocks": st.just(16),
    "encoder_cache_tokens": st.just(4),
    "max_tokens": st.sampled_from([8, 64]),
    "async_scheduling": st.booleans(),
    "snapshots": st.sampled_from([None, 2]),
}


def assert_invariants(world: World) -> None:
    requests = world.core.requests.values()
    assert world.pool.num_used == len({block for request in requests for block in request.blocks})
    users = Counter(media_hash for request in requests for media_hash in request.reserved)
    assert all(world.core.encoder[media_hash].users == number for media_hash, number in users.items())
    assert world.core.encoder.num_tokens <= world.core.encoder.budget
    running = world.core.scheduler.queues.running
    assert len(running) == world.core.scheduler.queues.num_running <= world.core.config.max_num_seqs
    assert all(request.is_running for request in running)
    assert not any(request.is_running for request in world.core.scheduler.queues.waiting)
    assert all(len(request.blocks) >= world.pool.blocks_for(request.num_known - 1) for request in running)
    assert len(world.core.in_flight) <= world.core.max_in_flight


def report_grammars(world: World, chance: random.Random, share: float) -> None:
    """What rank 0 has compiled, or could not: this share of the rest."""
    for digest in world.links.grammars.keys() - world.links.compiled:
        if chance.random() < share:
            world.grammar_ready(digest.decode(), Problem("it is bad") if digest == b"bad" else None)


@settings(max_examples=450, deadline=None)
@given(
    case=st.tuples(st.lists(ANYTHING, min_size=1, max_size=10), st.fixed_dictionaries(ANY_WORLD))
    | st.tuples(
        st.lists(SAMPLES | POOLED | URGENT, min_size=6, max_size=12),
        st.fixed_dictionaries(SMALL_WORLD | {"max_seqs": st.just(1)}),
    )
    | st.tuples(
        st.lists(TURNS | GROWING, min_size=3, max_size=8), st.fixed_dictionaries(SMALL_WORLD | {"max_seqs": st.just(3)})
    ),
    timing=st.integers(0, 2**32),
)
@leaves_no_cycles
def test_any_load_finishes_every_request_once_with_its_tokens(case, timing):
    loads, flags = case
    world, chance = World(block_size=4, **flags), random.Random(timing)
    sent: set[MessageId] = set()
    pending: list[tuple[int, object]] = []
    for turn in range(4000):
        for number, load in enumerate(loads):
            message = MessageId(API[1], number + 1)
            if load.arrival == turn and load.send(world, f"r{number}", message):
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
        report_grammars(world, chance, 0.2)
        if chance.random() < 0.03:
            world.receive(ControlRequest(turn, "reset_caches"))
        world.turn()
        assert_invariants(world)
        if world.links.steps and chance.random() < 0.5:
            world.links.run_step()
        if turn > max(load.arrival for load in loads) and not pending and not world.core.requests:
            break
    world.run()
    report_grammars(world, chance, 1)
    world.run()
    for number, load in enumerate(loads):
        load.assert_answered(world, f"r{number}")
    assert set(world.consumed) == sent and len(world.consumed) == len(sent)
    world.assert_at_rest()
