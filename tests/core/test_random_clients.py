"""API servers that follow the engine core's answers, at random: all their requests end well, and all is released.

They look media up, write what is absent or send its tensor, rely on embeddings, and send a request again if those have
been evicted. The simulated ranks check that each item that a step reads is there.
"""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.messages import ChildRequest, ControlRequest, Finish, MediaReady, MessageId, PeerGone, Written
from mini_engine.transport.page_allocator import PAGE_BYTES
from tests.core.cycles import leaves_no_cycles
from tests.support.simulated_core import API, BYTES, OTHER, CachingWorld, item
from tests.support.simulated_ranks import token_of

OUTPUT = 4  # tokens


class RandomRequest:
    """A request of an API server; the messages that it receives decide what is done next."""

    message_numbers = itertools.count(1)

    def __init__(self, world: CachingWorld, chance: random.Random, name: str, sender: tuple[str, int]):
        self.world, self.chance, self.name, self.sender = world, chance, name, sender
        numbers = chance.choice([[0], [1], [2], [0, 1], [1, 4], [2, 3], [3, 0]])  # they fit into the encoder cache
        # In tokens, each of a temporal grid of its own.
        self.sizes = {bytes([number]) * 16: 1 + number % 3 for number in numbers}
        self.named = {media_hash for media_hash in self.sizes if chance.random() < 0.2}  # what it has by name alone
        self.children = [ChildRequest(f"{name} 1", 1)] * chance.choice([0, 0, 1])
        self.samples = [name, *(child.request_id for child in self.children)]
        self.arrival: int | None = None  # when it is sent again
        self.state = ""  # or "prepared", or "sent"
        self.look_up()

    def look_up(self) -> None:
        """A name is not found only if the engine has neither patches nor embeddings."""
        found = {media_hash: self.world.look_up(self.name, media_hash, self.sender) for media_hash in self.sizes}
        if any(found[media_hash] in ("", "facts") for media_hash in self.named):
            return self.leave()
        self.state, self.sources, self.reservations = "prepared", found, {}
        for media_hash, held in found.items():
            is_needed = held == "embeddings" and self.arrival is not None and media_hash not in self.named
            if is_needed or held in ("", "facts"):
                self.sources[media_hash] = "tensor"
                if self.world.kind == "shm":
                    reserved = self.world.reserve(self.name, media_hash, self.sizes[media_hash], self.sender)
                    if reserved.outcome == "present":
                        self.sources[media_hash] = "patches"
                    elif reserved.outcome == "reserved":
                        self.reservations[media_hash] = reserved

    def leave(self) -> None:
        self.state = ""
        self.world.receive(Finish(self.name, "abort"), self.sender)

    def proceed(self) -> None:
        """Write its items, and send it, or its client leaves."""
        leaves = self.chance.random() < 0.15
        for media_hash, reserved in self.reservations.items():
            if leaves or self.chance.random() < 0.2:
                self.world.receive(Written(media_hash, None), self.sender)
            else:
                self.world.write(reserved, self.name, sender=self.sender)
                self.sources[media_hash] = "patches"
        if leaves:
            return self.leave()
        self.state, is_lost, media = "sent", self.chance.random() < 0.1, []
        for offset, (media_hash, size) in zip((1, 5), self.sizes.items(), strict=False):
            is_tensor = self.sources[media_hash] == "tensor"
            message = MessageId(self.sender[1], next(self.message_numbers)) if is_tensor else None
            media.append(item(message, offset, size, media_hash=media_hash, grids=size))
        more = {"children": self.children, "arrival": self.arrival, "ready": not is_lost}
        self.world.request(self.name, 9, OUTPUT, media, sender=self.sender, **more)
        for message in [each.patches.message for each in media if each.patches and is_lost]:
            self.world.receive(MediaReady(0, message, "no descriptor"), ("worker 0.0 media", 100))

    def miss(self, arrival: int | None) -> None:
        """The engine turns it down: tensors are lost, or with `arrival` embeddings."""
        lost = "tensor" if arrival is None else "embeddings"
        causes = {media_hash for media_hash, source in self.sources.items() if source == lost}
        assert causes and (None in (arrival, self.arrival) or causes <= self.named), "data are needed again"
        if self.state == "sent":
            self.state = ""
            if arrival is not None:  # else its API server forgets it
                self.arrival = arrival
                self.look_up()

    def abort(self) -> None:
        self.state = ""
        for sample in self.samples:
            self.world.receive(Finish(sample, "abort"), self.sender)
            if self.chance.random() < 0.3:
                self.world.turn()

    def die(self) -> None:
        """With its API server: what this has sent before, and arrives after that, is void."""
        for reserved in self.reservations.values() if self.state == "prepared" else ():
            self.world.write(reserved, self.name, sender=self.sender)
        self.state = ""


def turn(world: CachingWorld, requests: dict[str, RandomRequest]) -> None:
    """What the core does, and requests that it needs again."""
    world.turn()
    missed, world.missed = world.missed, {}
    for name, arrival in missed.items():
        requests[name.split()[0]].miss(arrival)  # of an aborted one perhaps a child


@pytest.mark.parametrize("kind", ["lru", "shm"])
@settings(max_examples=75, deadline=None)
@given(
    room=st.integers(0, 6),
    timing=st.integers(0, 2**32),
    flags=st.fixed_dictionaries(
        {
            "async_scheduling": st.booleans(),
            "enable_prefix_caching": st.booleans(),
            "blocks": st.sampled_from([6, 64]),  # of which a sequence takes four: others are preempted
            "max_num_encoder_input_tokens": st.sampled_from([1, None]),  # items are encoded in parts
            "snapshots": st.sampled_from([None, 0, 3]),
        }
    ),
)
@leaves_no_cycles
def test_clients_that_follow_the_answers_never_fail(kind, room, timing, flags):
    chance, senders, room = random.Random(timing), [API, OTHER], room or kind == "shm"
    world, requests = CachingWorld(kind, room, max_tokens=12, **flags), dict[str, RandomRequest]()
    item_bytes = PAGE_BYTES if kind == "shm" else 2 * BYTES

    def in_state(state: str) -> list[RandomRequest]:
        return [request for request in requests.values() if request.state == state]

    for number in range(40):
        requests[f"r{number}"] = RandomRequest(world, chance, f"r{number}", chance.choice(senders))
        while (prepared := in_state("prepared")) and chance.random() < 0.6:
            chance.choice(prepared).proceed()
        if (sent := in_state("sent")) and chance.random() < 0.2:
            chance.choice(sent).abort()
        if chance.random() < 0.1:
            world.receive(ControlRequest(number, "reset_caches"))
        if chance.random() < 0.05:
            dead, senders[1] = senders[1], (senders[1][0], senders[1][1] + 2)
            world.receive(PeerGone(*dead), ("supervisor", 0))
            for request in [each for each in requests.values() if each.sender == dead]:
                request.die()
            world.request(f"late {dead}", sender=dead)
        turn(world, requests)
        while world.links.steps and chance.random() < 0.6:
            world.links.run_step()
            turn(world, requests)
        media = world.core.media
        assert media.num_bytes_pinned <= media.num_bytes <= room * item_bytes
        assert kind == "shm" or world.links.kept.issuperset(world.idle), "idle before every rank has its copy"
    turn(world, requests)
    while (prepared := in_state("prepared")) or world.core.requests or world.core.in_flight or world.links.inbox:
        for request in prepared:
            request.proceed()
        world.run()
        turn(world, requests)
    for sample in [sample for request in in_state("sent") for sample in request.samples]:
        assert world.ends[sample] == ["length"]
        assert world.tokens[sample] == [token_of(sample, index) for index in range(OUTPUT)]
    assert not [name for name in world.tokens if name.startswith("late")]
    world.assert_at_rest()
