"""The engine core against simulated ranks that check every step they are given."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.config import EngineConfig
from mini_engine.core import engine_core
from mini_engine.core.engine_core import EngineCore
from mini_engine.core.kv_blocks import BlockPool
from mini_engine.messages import (
    Consumed,
    Envelope,
    Finish,
    MediaFailed,
    MediaItem,
    MediaReady,
    MessageId,
    NewRequest,
    Outputs,
    PeerGone,
    SamplingParams,
    TensorHandle,
)
from tests.core.simulated_ranks import SimulatedLinks, token_of

API = ("api 0", 7)


class World:
    """An engine core, its simulated ranks, and one API server that records what it is told."""

    def __init__(self, blocks=64, block_size=4, max_seqs=8, max_tokens=16, ranks=1, async_scheduling=True):
        config = EngineConfig(
            tensor_parallel_size=ranks, max_num_seqs=max_seqs, max_num_batched_tokens=max_tokens,
            block_size=block_size, async_scheduling=async_scheduling,
        )  # fmt: skip
        self.links = SimulatedLinks(ranks, block_size, max_tokens, max_seqs)
        self.links.identities[API[1]] = b"api 0:7"
        self.pool = BlockPool(blocks, block_size)
        self.core = EngineCore(config, self.links, self.pool)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, list[str]] = {}
        self.consumed: list[MessageId] = []

    def receive(self, body, sender=API):
        self.links.inbox.append(Envelope(*sender, body))

    def request(self, request_id, prompt=5, max_tokens=4, media=(), stop=()):
        self.receive(
            NewRequest(request_id, list(range(prompt)), SamplingParams(max_tokens, 1, stop_token_ids=list(stop)), media)
        )

    def media_ready(self, message, rank=0):
        self.receive(MediaReady(rank, message), ("worker 0.0 media", 100))

    def turn(self):
        """One turn of the core's loop."""
        self.core._receive()
        self.core._expire_media()
        while len(self.core.in_flight) < self.core.max_in_flight and self.core._dispatch():
            pass
        self.core._send()
        for _, body in self.links.sent:
            if isinstance(body, Outputs):
                for output in body.outputs:
                    self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                    if output.finish_reason:
                        self.ends.setdefault(output.request_id, []).append(output.finish_reason)
            elif isinstance(body, Consumed):
                self.consumed += body.messages
        self.links.sent.clear()

    def run(self, turns=2000):
        for _ in range(turns):
            self.turn()
            if not self.links.steps and not self.links.inbox:
                return
            if self.links.steps:
                self.links.run_step()
        raise AssertionError("the core does not come to rest")

    def assert_at_rest(self):
        assert self.pool.num_used == 0
        assert not self.core.requests and not self.core.scheduler.running and not self.core.scheduler.waiting
        assert not self.links.sequences, "the ranks still keep a sequence"
        assert not self.core.in_flight and not self.core.finished and not self.core.release
        assert len(self.core.directory) == 0


def item(message, offset, num_tokens=2, index=0):
    return MediaItem("video", offset, num_tokens, (1, 2, 4), 1.0, TensorHandle(message, index, (8, 12), "uint8"))


def test_a_request_gets_its_tokens_and_leaves_nothing():
    world = World()
    world.request("a", prompt=5, max_tokens=3)
    world.run()
    assert world.tokens["a"] == [token_of("a", i) for i in range(3)]
    assert world.ends == {"a": ["length"]}
    world.assert_at_rest()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_nothing_follows_a_stop_token(async_scheduling):
    world = World(async_scheduling=async_scheduling)
    world.request("a", max_tokens=10, stop=[token_of("a", 2)])
    world.run()
    assert world.tokens["a"] == [token_of("a", i) for i in range(3)]
    assert world.ends == {"a": ["stop"]}
    world.assert_at_rest()


def test_two_steps_are_in_flight_only_when_asynchronous():
    for async_scheduling, depth in ((True, 2), (False, 1)):
        world = World(async_scheduling=async_scheduling)
        world.request("a", max_tokens=10)
        world.turn()
        assert len(world.links.steps) == depth


def test_decodes_go_before_prefills():
    world = World(max_tokens=8, async_scheduling=False)
    world.request("short", prompt=4, max_tokens=8)
    world.turn()
    world.links.run_step()
    world.request("long", prompt=40, max_tokens=1)
    world.turn()
    chunks = world.links.steps[-1].chunks
    assert [(chunk.request_id, chunk.num_tokens) for chunk in chunks] == [("short", 1), ("long", 7)]


def test_a_request_waits_for_all_ranks_and_does_not_hold_up_others():
    world = World(ranks=2)
    message = MessageId(API[1], 1)
    world.request("video", media=[item(message, 1)])
    world.request("text")
    world.media_ready(message, rank=0)
    world.run()
    assert world.ends == {"text": ["length"]}
    world.media_ready(message, rank=1)
    world.run()
    assert world.ends["video"] == ["length"]
    assert world.consumed == [message]
    world.assert_at_rest()


def test_media_may_arrive_before_its_request():
    world = World()
    message = MessageId(API[1], 1)
    world.media_ready(message)
    world.run()
    world.request("video", media=[item(message, 1)])
    world.run()
    assert world.ends == {"video": ["length"]}
    world.assert_at_rest()


def test_tensors_are_consumed_when_the_encoding_step_retires_not_before():
    world = World()
    message = MessageId(API[1], 1)
    world.request("video", max_tokens=5, media=[item(message, 1)])
    world.media_ready(message)
    world.turn()
    world.turn()
    assert world.consumed == []
    world.links.run_step()
    world.turn()
    assert world.consumed == [message]


def test_failed_media_end_their_request_alone():
    world = World()
    bad, good = MessageId(API[1], 1), MessageId(API[1], 2)
    world.request("bad", media=[item(bad, 1)])
    world.request("good", media=[item(good, 1)])
    world.receive(MediaFailed(0, bad, "no buffer"), ("worker 0.0 media", 100))
    world.media_ready(good)
    world.run()
    assert world.ends == {"bad": ["error"], "good": ["length"]}
    assert set(world.consumed) == {bad, good}
    world.assert_at_rest()


def test_media_may_fail_before_their_request_comes():
    world = World()
    message = MessageId(API[1], 1)
    world.receive(MediaFailed(0, message, "no buffer"), ("worker 0.0 media", 100))
    world.run()
    world.request("bad", media=[item(message, 1)])
    world.run()
    assert world.ends == {"bad": ["error"]}
    world.assert_at_rest()


def test_media_that_never_come_end_their_request(monkeypatch):
    monkeypatch.setattr(engine_core, "MEDIA_TIMEOUT_SECONDS", 0.0)
    world = World()
    message = MessageId(API[1], 1)
    world.request("video", media=[item(message, 1)])
    world.run()
    assert world.ends == {"video": ["error"]}
    assert world.links.released == [message]
    assert world.consumed == [message]
    world.media_ready(message)  # late, after the end of its request
    world.run()
    world.assert_at_rest()


@pytest.mark.parametrize("turns", range(9))
def test_abort_in_any_state(turns):
    world = World(max_tokens=2)
    message = MessageId(API[1], 1)
    world.request("video", prompt=10, max_tokens=6, media=[item(message, 1), item(message, 7, index=1)])
    if turns:
        world.media_ready(message)
    for _ in range(turns):
        world.turn()
        if world.links.steps:
            world.links.run_step()
    world.receive(Finish("video", "abort"))
    world.run()
    if not turns:
        world.media_ready(message)
        world.run()
    assert world.ends == {"video": ["abort"]}
    assert world.consumed == [message]
    world.assert_at_rest()


def test_the_first_terminal_event_wins():
    world = World()
    world.request("a", max_tokens=1)
    world.run()
    world.receive(Finish("a", "abort"))
    world.run()
    assert world.ends == {"a": ["length"]}


def test_a_dead_api_server_takes_its_requests_along_and_nothing_else():
    world = World()
    dead, alive = ("api 1", 8), API
    message = MessageId(8, 1)
    world.receive(NewRequest("dead", list(range(6)), SamplingParams(9, 1), [item(message, 1)]), dead)
    world.request("alive", max_tokens=6)
    world.media_ready(message)
    for _ in range(3):
        world.turn()
        world.links.run_step()
    world.receive(PeerGone("api 1", 8), ("supervisor", 0))
    world.receive(NewRequest("late", [1, 2], SamplingParams(3, 1)), dead)
    world.media_ready(MessageId(8, 2))
    seen_before = len(world.tokens["dead"])
    world.run()
    assert world.ends == {"alive": ["length"]}
    assert len(world.tokens["alive"]) == 6
    assert len(world.tokens["dead"]) == seen_before
    assert "late" not in world.tokens
    world.assert_at_rest()
    assert alive[1] not in world.core.gone


requests_strategy = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt
        st.integers(1, 12),  # output
        st.integers(0, 2),  # media items
        st.one_of(st.none(), st.integers(0, 25)),  # abort after this many turns
        st.booleans(),  # stop token at output 2
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=120, deadline=None)
@given(
    requests=requests_strategy,
    blocks=st.integers(11, 40),
    max_seqs=st.integers(1, 8),
    max_tokens=st.integers(1, 24),
    ranks=st.integers(1, 2),
    async_scheduling=st.booleans(),
    data=st.data(),
)
def test_any_load_ends_every_request_once_with_its_own_tokens(
    requests, blocks, max_seqs, max_tokens, ranks, async_scheduling, data
):
    world = World(blocks, 4, max_seqs, max_tokens, ranks, async_scheduling)
    pending, sent = [], set()
    for number, (prompt, output, num_items, abort, stops) in enumerate(requests):
        name, message = f"r{number}", MessageId(API[1], number + 1)
        media = [item(message, 9 * index, 1, index) for index in range(num_items) if 9 * index < prompt]
        sent |= {message} if media else set()
        world.request(name, prompt, output, media, [token_of(name, 2)] if stops else [])
        pending += [(data.draw(st.integers(0, 20)), MediaReady(rank, message)) for rank in range(ranks) if media]
        pending += [(abort, Finish(name, "abort"))] if abort is not None else []
    for turn in range(3000):
        due = [body for when, body in pending if when <= turn]
        pending = [(when, body) for when, body in pending if when > turn]
        for body in due:
            world.receive(body)
        world.turn()
        if world.links.steps and data.draw(st.booleans(), label="run a step"):
            world.links.run_step()
        if not pending and not world.links.inbox and not world.core.requests:
            break
    world.run()
    for number, (_, output, _, abort, stops) in enumerate(requests):
        name = f"r{number}"
        expected = [token_of(name, index) for index in range(min(output, 3) if stops else output)]
        got = world.tokens.get(name, [])
        assert len(world.ends[name]) == 1
        assert got == expected[: len(got)]
        if abort is None:
            assert got == expected
    assert set(world.consumed) == sent and len(world.consumed) == len(sent)
    world.assert_at_rest()
