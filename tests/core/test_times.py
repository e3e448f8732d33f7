"""Times of a request in its outputs, with the first and the last tokens only."""

from mini_engine.messages import ChildRequest, EngineTimes, Finish
from tests.support.simulated_core import World, item, message


def timed_world(monkeypatch, **flags):
    """Its clock shows 100 at first, and each step takes a second."""
    world = World(seconds=(1, 0, 0), **flags)
    world.links.now = 100.0
    world.core.scheduler.times.clock = lambda: 0.0  # so that it does not learn how long steps take
    monkeypatch.setattr("time.monotonic", lambda: world.links.now)
    return world


def test_times_of_a_request_with_media(monkeypatch):
    world = timed_world(monkeypatch, max_tokens=16, async_scheduling=False)
    world.request("a", prompt=30, max_tokens=3, media=[item(message(1), 1, 8)], ready=False)
    world.run()
    assert not world.times  # not accepted: no rank has its media
    world.links.now = 200.0
    world.media_ready(message(1))
    world.run()
    # Of the first step's 16 tokens the item takes 8; the prompt's other 22 take two steps; each later token one.
    first, last = world.times["a"]
    assert first == EngineTimes(200, 200, encoded=201, first_token=203, last_token=203)
    assert last == EngineTimes(200, 200, encoded=201, first_token=203, last_token=205)
    world.assert_at_rest()


def test_times_of_a_queued_request(monkeypatch):
    world = timed_world(monkeypatch, max_seqs=1, async_scheduling=False)
    world.request("a", max_tokens=4)
    world.request("b", max_tokens=1, first_token=60)
    world.run()
    assert world.times["a"][-1] == EngineTimes(100, 100, 100, 101, 104)
    assert world.times["b"] == [EngineTimes(100, 104, 104, 105, 105)]  # one token: the first and the last


def test_preemption_keeps_the_first_times(monkeypatch):
    world = timed_world(monkeypatch, blocks=8, async_scheduling=False)
    names = ["a", "b"]
    for number, name in enumerate(names):
        world.request(name, prompt=8, max_tokens=16, first_token=20 + 40 * number)
    world.run()
    assert world.stats().preemptions > 0
    for name in names:
        first, last = world.times[name]
        assert first.accepted == first.scheduled == 100 and first.first_token == 101
        assert last.first_token == 101
    generation = [world.times[name][-1].last_token - 101 for name in names]
    assert min(generation) == 15 < max(generation)  # the other one's detour is in its generation


def test_children_and_stopped_requests_have_no_times(monkeypatch):
    world = timed_world(monkeypatch, async_scheduling=False)
    world.request("a", max_tokens=3, children=[ChildRequest("a-1", 2)])
    world.request("b", max_tokens=9, first_token=60)
    while len(world.tokens.get("b", ())) < 2:
        world.run_steps(1)
    world.receive(Finish("b", "stop"))
    world.run()
    assert world.ends == {"a": ["length"], "a-1": ["length"], "b": ["stop"]}
    assert {name: len(times) for name, times in world.times.items()} == {"a": 2, "b": 1}
