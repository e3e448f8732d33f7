"""API servers that follow the engine core's answers, at random: none of their requests fails, and all is released."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.messages import (
    Abandoned,
    ChildRequest,
    ControlRequest,
    Finish,
    MediaFailed,
    MessageId,
    PeerGone,
    Reserved,
    Unreserve,
    Written,
)
from mini_engine.transport.pages import PAGE_BYTES
from tests.support.simulated_core import API, BYTES, OTHER, CachingWorld, item, named


class RandomClients:
    """Requests of two API servers, each at some stage; the messages that they receive decide their next actions."""

    def __init__(self, world: CachingWorld, chance: random.Random):
        self.world, self.chance = world, chance
        self.senders = [API, OTHER]
        self.numbers = itertools.count(1)  # of tensor messages and requests
        self.reservations: dict[int, tuple[Reserved, str, tuple[str, int]]] = {}
        self.found: dict[str, tuple[bytes, tuple[str, int]]] = {}  # requests that refer to an item
        self.sent: dict[str, tuple[str, int]] = {}

    def begin(self) -> None:
        name, sender = f"r{next(self.numbers)}", self.chance.choice(self.senders)
        media_hash = bytes([self.chance.randrange(5)]) * 16
        outcome, size = "full", 1 + media_hash[0] % 3
        if self.world.look_up(name, media_hash, sender):
            outcome = "present"
        elif self.world.kind == "shm":
            reserved = self.world.reserve(name, media_hash, size, sender)
            outcome = reserved.outcome
        if outcome == "present":
            self.found[name] = media_hash, sender
        elif outcome == "reserved":
            self.reservations[reserved.number] = reserved, name, sender
        else:
            message = MessageId(sender[1], next(self.numbers))
            media = [item(message, 1, size, media_hash=media_hash)]
            self.world.request(name, prompt=8, media=media, sender=sender)
            self.sent[name] = sender

    def continue_writing(self) -> None:
        reserved, name, sender = self.reservations.pop(self.chance.choice(list(self.reservations)))
        match self.chance.choice(["abandon", "write", "write and send", "write and send", "write and send"]):
            case "abandon":
                self.world.receive(Abandoned(reserved.number), sender)
            case "write":
                self.world.write(reserved, sender=sender)
            case _:
                self.world.write(reserved, name, sender=sender)
                self.found[name] = reserved.media_hash, sender

    def continue_found(self) -> None:
        name = self.chance.choice(list(self.found))
        media_hash, sender = self.found.pop(name)
        media = [named(1, media_hash, 1 + media_hash[0] % 3)]
        match self.chance.choice(["leave", "fail", "children", "send", "send"]):
            case "leave":
                self.world.receive(Unreserve(name), sender)
            case "fail":
                message = MessageId(sender[1], next(self.numbers))
                self.world.request(name, prompt=8, media=[*media, item(message, 5, 1)], sender=sender, ready=False)
                self.world.receive(MediaFailed(0, message, "no descriptor"), ("worker 0.0 media", 100))
                self.world.turn()
                assert self.world.rejected.pop() == name
            case choice:
                children = [ChildRequest(f"{name} 1", 1)] if choice == "children" else []
                self.world.request(name, prompt=8, media=media, sender=sender, children=children)
                self.sent[name] = sender

    def proceed(self) -> None:
        if self.reservations and self.chance.random() < 0.5:
            self.continue_writing()
        elif self.found:
            self.continue_found()

    def die(self) -> None:
        dead = self.senders[1]
        self.world.receive(PeerGone(*dead), ("supervisor", 0))
        for number, (_, name, sender) in self.reservations.items():
            if sender == dead:  # what it sent before it died and arrives after that is void
                self.world.receive(self.chance.choice([Written(number, [name]), Abandoned(number)]), dead)
        self.world.request(f"late {dead}", sender=dead)
        self.senders[1] = (dead[0], dead[1] + 2)
        self.world.links.identities[dead[1] + 2] = b"api 1:%d" % (dead[1] + 2)
        self.found = {name: request for name, request in self.found.items() if request[1] != dead}
        self.sent = {name: sender for name, sender in self.sent.items() if sender != dead}
        self.reservations = {number: each for number, each in self.reservations.items() if each[2] != dead}


def play(kind: str, room: int, timing: int, async_scheduling: bool) -> None:
    chance = random.Random(timing)
    world = CachingWorld(kind, room, max_tokens=12, async_scheduling=async_scheduling)
    clients = RandomClients(world, chance)
    media, item_bytes = world.core.media, PAGE_BYTES if kind == "shm" else 2 * BYTES
    for turn in range(40):
        clients.begin()
        while chance.random() < 0.6:
            clients.proceed()
        if clients.sent and chance.random() < 0.2:
            name = chance.choice(list(clients.sent))
            world.receive(Finish(name, "abort"), clients.sent[name])
        if chance.random() < 0.1:
            world.receive(ControlRequest(turn, "reset_caches"))
        if chance.random() < 0.05:
            clients.die()
        world.turn()
        while world.links.steps and chance.random() < 0.6:
            world.links.run_step()
            world.turn()
        assert media.num_bytes_pinned <= media.num_bytes <= room * item_bytes
        assert kind == "shm" or world.links.kept.issuperset(world.idle), "found before every rank has its copy"
    while clients.reservations or clients.found:
        clients.proceed()
    world.run()
    assert all(world.ends[name] in (["length"], ["abort"]) for name in clients.sent), world.ends
    assert not [name for name in world.tokens if name.startswith("late")]
    world.assert_at_rest()


@pytest.mark.parametrize("kind", ["lru", "shm"])
@settings(max_examples=75, deadline=None)
@given(room=st.integers(1, 6), timing=st.integers(0, 2**32), async_scheduling=st.booleans())
def test_clients_that_follow_the_answers_never_fail(kind, room, timing, async_scheduling):
    play(kind, room, timing, async_scheduling)
