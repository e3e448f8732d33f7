"""Pings: the core answers for all of its ranks, and only when they have shown that they run."""

from __future__ import annotations

from mini_engine.messages import ControlReply, ControlRequest, Envelope, Step, StepResult
from tests.core.world import World


def test_an_idle_engine_sends_an_empty_step_through_all_ranks():
    world = World(ranks=2)
    world.receive(ControlRequest(5))
    world.turn()
    world.receive(ControlRequest(6))
    world.turn()
    assert list(world.links.steps) == [Step(1)], "the second ping needs no step of its own"
    world.links.inbox.append(Envelope("worker 0.0", 100, StepResult(1)))
    world.turn()
    assert not world.told, "answered before all ranks were"
    world.links.inbox.append(Envelope("worker 0.1", 101, StepResult(1)))
    world.links.steps.clear()
    world.turn()
    assert world.told == [ControlReply(5), ControlReply(6)]
    world.turn()
    assert not world.links.steps, "one ping is one step"
    world.assert_at_rest()


def test_a_busy_engine_answers_by_the_step_that_runs():
    world = World(async_scheduling=False)
    world.request("a", max_tokens=3)
    world.turn()
    world.receive(ControlRequest(1))
    world.receive(ControlRequest(2))
    world.turn()
    assert len(world.links.steps) == 1 and not world.told
    world.links.run_step()
    world.turn()
    assert world.told == [ControlReply(1), ControlReply(2)]
    world.run()
    assert world.links.num_computed == 5 + 2 and world.ends == {"a": ["length"]}
    world.assert_at_rest()
