"""The engine core against simulated ranks, which check every step."""

import pytest

from mini_engine.messages import (
    ChildRequest,
    ControlReply,
    ControlRequest,
    Envelope,
    Finish,
    MediaReady,
    PeerGone,
    PoolingParams,
    Problem,
    SampledToken,
    Step,
    StepResult,
)
from tests.support.simulated_core import API, CachingWorld, World, item, message


def test_two_steps_are_in_flight_only_when_asynchronous():
    for async_scheduling, depth in ((True, 2), (False, 1)):
        world = World(async_scheduling=async_scheduling)
        world.request("a", max_tokens=10)
        world.turn()
        assert len(world.links.steps) == depth


def test_decodes_go_before_prefills():
    world = World(max_tokens=8, async_scheduling=False)
    world.request("short", prompt=4, max_tokens=8)
    world.run_steps(1)
    world.request("long", prompt=40, max_tokens=1)
    world.turn()
    chunks = world.links.steps[-1].chunks
    assert [(chunk.request_id, chunk.num_tokens) for chunk in chunks] == [("short", 1), ("long", 7)]


def test_tokens_are_counted_as_steps_retire():
    world = World(max_tokens=8, async_scheduling=False)
    world.request("long", prompt=20, max_tokens=3, children=[ChildRequest("child", 1)])

    def counted():
        stats = world.stats()
        return stats.prompt_tokens, stats.generation_tokens

    seen = [counted()]
    while world.links.steps:
        world.links.run_step()
        seen.append(counted())
    assert seen[:5] == [(0, 0), (8, 0), (8, 0), (4, 1), (0, 2)] and len(world.ends) == 2
    world.run_request("again", prompt=20, max_tokens=1)  # its blocks are in the prefix cache
    assert counted() == (20, 1)


def test_a_pooled_request_ends_with_one_output_and_no_token():
    world = World(blocks=64, block_size=4)
    for name in ("cold", "warm"):
        world.request(name, prompt=256, max_tokens=1, pooling=PoolingParams())  # as long as the model
        world.run()
        assert (world.ends[name], world.tokens[name], world.pooled[name]) == (["stop"], [], name.encode())
        assert len(world.times[name]) == 1 and world.stats().generation_tokens == 0
    assert world.cached == {"cold": 0, "warm": 252}, "at least one token is computed"
    world.assert_at_rest()


def test_a_prompt_whose_log_probabilities_are_requested_is_computed_once_though_it_is_cached():
    """Each of its tokens is listed once. Preempted, it takes from the prefix cache what it has computed itself, and its
    other sample what the first has."""
    world = World(blocks=24, max_tokens=8, max_seqs=2, async_scheduling=False)
    world.run_request("cached", prompt=40, max_tokens=1)
    listing = {"prompt": 40, "max_tokens": 2, "prompt_logprobs": 0, "children": [ChildRequest("child", 1)]}
    world.request("listing", **listing)
    world.run_steps(3)
    before, urgent = world.links.num_computed, {"prompt": 90, "first_token": 300, "priority": -1}
    world.request("urgent", max_tokens=1, **urgent)
    world.receive(Finish("urgent", "abort"))
    world.core.scheduler._preempt(world.core.requests["listing"])
    world.run()
    assert world.ends["listing"] == world.ends["child"] == ["length"]
    assert world.links.num_computed - before < 40, "what was listed before the preemption is cached"
    assert world.cached["listing"] == 0 and world.cached["child"] == 36
    assert world.listed["listing"] == list(range(21, 60)) and not world.listed["child"]
    world.assert_at_rest()


@pytest.mark.parametrize("listed", [None, 0])
def test_preempted_answer_is_found_in_the_prefix_cache(listed):
    """Whether the log probabilities of its prompt were requested or not."""
    world = World(max_tokens=8, async_scheduling=False)
    world.request("a", prompt=8, max_tokens=40, prompt_logprobs=listed)
    world.run_steps(30)
    before, left = world.links.num_computed, 40 - len(world.tokens["a"])
    world.core.scheduler._preempt(world.core.requests["a"])
    world.run()
    assert world.ends["a"] == ["length"] and world.links.num_computed - before < left + 4, "less than a block again"


def test_request_waits_for_all_ranks_without_blocking_others():
    world = World(ranks=2)
    world.request("video", media=[item(message(1), 1)], ready=False)
    world.request("text")
    world.media_ready(message(1), rank=0)
    world.run()
    assert world.ends == {"text": ["length"]}
    world.media_ready(message(1), rank=1)
    world.finish("video")
    assert world.consumed == [message(1)]
    world.assert_at_rest()


def test_media_that_arrive_after_an_abort_are_released_on_all_ranks():
    world = CachingWorld("shm", ranks=2)
    world.write(world.reserve("video", b"cached" * 2), "video")
    media = [item(None, 1, media_hash=b"cached" * 2), item(message(1), 4)]
    world.request("video", prompt=12, media=media, ready=False, children=[ChildRequest("video-1", 3)])
    world.media_ready(message(1), rank=1)
    world.run()
    for name in ("video", "video-1"):
        world.receive(Finish(name, "abort"))
    world.run()
    assert world.ends == {"video": ["abort"], "video-1": ["abort"]}
    assert world.links.released == [] == world.consumed, "rank 0 will get it"
    world.media_ready(message(1))
    world.run()
    assert world.links.released == [message(1)] == world.consumed, "an idle engine makes a step for it"
    world.assert_at_rest()


@pytest.mark.parametrize("report", [MediaReady(0, message(1)), MediaReady(0, message(1), "no buffer")])
def test_media_may_be_reported_before_their_request_arrives(report):
    world = World()
    world.receive(report, ("worker 0.0 media", 100))
    world.run()
    world.request("video", media=[item(message(1), 1)], ready=False)
    world.run()
    is_ready = not report.problem
    assert (world.ends, world.missed) == (({"video": ["length"]}, {}) if is_ready else ({}, {"video": None}))
    world.assert_at_rest()


def test_request_with_failed_media_is_rejected_and_released_after_all_ranks_reported():
    world = World(ranks=2)
    world.request("bad", media=[item(message(1), 1)], ready=False)
    world.request("good", media=[item(message(2), 1)])
    world.receive(MediaReady(0, message(1), "no buffer"))
    world.finish("good")
    assert world.missed == {"bad": None} and world.links.released == [message(2)] == world.consumed
    world.receive(MediaReady(1, message(1), "no buffer"))
    world.run()
    assert world.links.released == [message(2), message(1)] == world.consumed
    world.assert_at_rest()


def test_request_waits_for_its_grammar_without_blocking_others():
    world = World()
    world.request("a", grammar="g", children=[ChildRequest("a-1", 2)])
    world.request("b", grammar="g", media=[item(message(1), 1)], ready=False)
    world.request("text")
    world.run()
    assert world.ends == {"text": ["length"]} and [*world.links.grammars] == [b"g"]
    world.grammar_ready("g")
    world.finish("a", "a-1")
    world.media_ready(message(1))
    world.finish("b")
    world.assert_at_rest()  # no rank keeps a grammar that no request follows


def test_requests_end_whose_grammar_cannot_be_followed():
    """At once, those that come while another still waits for its media too; and a row for which a mask takes too
    long."""
    world = World()
    world.request("a", grammar="bad", children=[ChildRequest("a-1", 2)])
    world.request("b", grammar="bad", media=[item(message(1), 1)], ready=False)
    world.run()
    world.grammar_ready("bad", Problem("too complex"))
    world.run()
    world.request("c", grammar="bad")
    world.run()
    world.media_ready(message(1))
    world.run()
    assert world.ends == dict.fromkeys(["a", "a-1", "b", "c"], ["error"])
    assert {*world.errors.values()} == {Problem("too complex")} and not world.links.started
    world.request("row", max_tokens=8, grammar="slow")
    world.run()
    world.grammar_ready("slow")
    world.turn()
    world.links.steps.clear()
    killed = Problem("it was killed", retry=True)
    world.receive(StepResult(world.core.in_flight[0].step.number, [SampledToken("row", 0, problem=killed)]))
    world.turn()
    assert world.errors["row"] == killed


def test_an_api_server_may_die_while_samples_share_a_grammar_that_can_be_followed_no_further():
    world = World(async_scheduling=False, max_seqs=1)
    world.request("row", grammar="g")
    world.request("several", grammar="g", children=[ChildRequest("several-1", 2)])
    world.run()
    world.grammar_ready("g")
    world.turn()
    done = world.links._execute(world.links.steps.popleft())
    world.receive(StepResult(done.number, [SampledToken("row", 0, problem=Problem("killed"))]))
    world.turn()
    world.receive(PeerGone(*API), ("supervisor", 0))
    world.run()
    assert [*world.ends] == ["row"]
    world.assert_at_rest()


# --- pings: the core answers for all of its ranks, and only when they have shown that they run -----------------------


def test_ping_of_an_idle_engine_runs_an_empty_step():
    world = World(ranks=2)
    world.receive(ControlRequest(5))
    world.turn()
    world.receive(ControlRequest(6))
    world.turn()
    assert list(world.links.steps) == [Step(1)], "the second ping needs no step of its own"
    world.links.inbox.append(Envelope(100, StepResult(1)))
    world.turn()
    assert not world.replies, "answered before all ranks were"
    world.links.inbox.append(Envelope(101, StepResult(1)))
    world.links.steps.clear()
    world.turn()
    assert world.replies == [ControlReply(5), ControlReply(6)]
    world.turn()
    assert not world.links.steps, "one ping is one step"
    world.assert_at_rest()


def test_ping_of_a_busy_engine_is_answered_by_the_running_step():
    world = World(async_scheduling=False)
    world.request("a", max_tokens=3)
    world.turn()
    world.receive(ControlRequest(1))
    world.receive(ControlRequest(2))
    world.turn()
    assert len(world.links.steps) == 1 and not world.replies
    world.links.run_step()
    world.turn()
    assert world.replies == [ControlReply(1), ControlReply(2)]
    world.run()
    assert world.links.num_computed == 5 + 2 and world.ends == {"a": ["length"]}
    world.assert_at_rest()
