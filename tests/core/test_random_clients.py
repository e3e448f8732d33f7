"""API servers that follow the engine core's answers, at random: none of their requests fails, and all is released."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.core.media_store import MediaStore
from mini_engine.messages import (
    Abandoned,
    ControlRequest,
    Finish,
    MediaFailed,
    MessageId,
    PeerGone,
    Reserved,
    Sibling,
    Unreserve,
    Written,
)
from mini_engine.transport.pages import PAGE_BYTES
from tests.support.simulated_core import (
    API,
    BYTES,
    OTHER,
    World,
    copies_world,
    item,
    named,
    reserve,
    store_world,
    write,
)


class RandomClients:
    """Requests of two API servers, each at some stage; the messages that they receive decide their next actions."""

    def __init__(self, world: World, chance: random.Random):
        self.world, self.chance = world, chance
        self.numbers = iter(range(1, 1 << 30))
        self.senders = [API, OTHER]
        self.reservations: dict[int, tuple[Reserved, str, tuple[str, int]]] = {}
        self.coming: dict[str, tuple[bytes, tuple[str, int]]] = {}
        self.sent: dict[str, tuple[bytes, tuple[str, int], int | None]] = {}
        self.names = (f"r{number}" for number in range(1 << 30))

    def begin(self) -> None:
        name, value, sender = next(self.names), bytes([self.chance.randrange(5)]) * 16, self.chance.choice(self.senders)
        if self.world.look_up(name, value, sender=sender):
            self.coming[name] = value, sender
            return
        if isinstance(self.world.core.media, MediaStore):
            reserved = reserve(self.world, name, value, 1 + value[0] % 3, sender)
            if reserved.outcome == "present":
                self.coming[name] = value, sender
                return
            if reserved.outcome == "reserved":
                self.reservations[reserved.number] = reserved, name, sender
                return
        self.bring(name, value, sender)

    def bring(self, name: str, value: bytes, sender: tuple[str, int]) -> None:
        number = MessageId(sender[1], next(self.numbers))
        media = [item(number, 1, 1 + value[0] % 3, media_hash=value)]
        self.world.request(name, prompt=8, media=media, sender=sender)
        self.world.media_ready(number)
        self.sent[name] = value, sender, number.number

    def go_on(self) -> None:
        """With one that may."""
        if self.reservations and self.chance.random() < 0.5:
            reserved, name, sender = self.reservations.pop(self.chance.choice(list(self.reservations)))
            if self.chance.random() < 0.2:
                self.world.receive(Abandoned(reserved.number), sender)
            elif self.chance.random() < 0.2:
                write(self.world, reserved, sender=sender)
            else:
                write(self.world, reserved, name, sender=sender)
                self.coming[name] = reserved.media_hash, sender
        elif self.coming:
            name = self.chance.choice(list(self.coming))
            value, sender = self.coming.pop(name)
            media, what = [named(1, value, 1 + value[0] % 3)], self.chance.random()
            if what < 0.2:
                self.world.receive(Unreserve(name), sender)
            elif what < 0.4:  # it is rejected
                number = MessageId(sender[1], next(self.numbers))
                self.world.request(name, prompt=8, media=[*media, item(number, 5, 1)], sender=sender)
                self.world.receive(MediaFailed(0, number, "no descriptor"), ("worker 0.0 media", 100))
                self.world.turn()
                assert self.world.rejected.pop() == name
            else:
                siblings = [Sibling(f"{name} 1", 1)] if what < 0.6 else []
                self.world.request(name, prompt=8, media=media, sender=sender, siblings=siblings)
                self.sent[name] = value, sender, None

    def die(self) -> None:
        dead = self.senders[1]
        self.world.receive(PeerGone(*dead), ("supervisor", 0))
        for number, (_, name, sender) in self.reservations.items():
            if sender == dead:  # what it sent before it died and arrives after that is void
                self.world.receive(self.chance.choice([Written(number, [name]), Abandoned(number)]), dead)
        self.world.request(f"late {dead}", sender=dead)
        self.senders[1] = (dead[0], dead[1] + 2)
        self.world.links.identities[dead[1] + 2] = b"api 1:%d" % (dead[1] + 2)
        for held in (self.coming, self.sent):
            for name in [name for name, value in held.items() if value[1] == dead]:
                del held[name]
        self.reservations = {number: each for number, each in self.reservations.items() if each[2] != dead}

    def finish(self) -> None:
        while self.reservations or self.coming:
            self.go_on()
        self.world.run()
        for name in self.sent:
            assert self.world.ends[name] in (["length"], ["abort"]), name
        assert not [name for name in self.world.tokens if name.startswith("late")]


def play(kind: str, budget: int, timing: int, asynchronous: bool) -> World:
    chance = random.Random(timing)
    more = {"max_tokens": 12, "async_scheduling": asynchronous}
    world = store_world(budget, **more) if kind == "shm" else copies_world(budget, **more)
    world.links.identities[OTHER[1]] = b"api 1:9"
    clients = RandomClients(world, chance)
    for turn in range(40):
        clients.begin()
        while chance.random() < 0.6:
            clients.go_on()
        if clients.sent and chance.random() < 0.2:
            name = chance.choice(list(clients.sent))
            world.receive(Finish(name, "abort"), clients.sent[name][1])
        if chance.random() < 0.1:
            world.receive(ControlRequest(turn, "reset_caches"))
        if chance.random() < 0.05:
            clients.die()
        world.turn()
        while world.links.steps and chance.random() < 0.6:
            world.links.run_step()
            world.turn()
        media, item_bytes = world.core.media, PAGE_BYTES if kind == "shm" else 2 * BYTES
        assert media.num_bytes_pinned <= media.num_bytes <= budget * item_bytes
        assert kind == "shm" or world.links.kept.issuperset(world.idle), "found before every rank has its copy"
    clients.finish()
    world.assert_at_rest()
    return world


@pytest.mark.parametrize("kind", ["lru", "shm"])
@settings(max_examples=75, deadline=None)
@given(budget=st.integers(1, 6), timing=st.integers(0, 2**32), asynchronous=st.booleans())
def test_clients_that_follow_the_answers_never_fail(kind, budget, timing, asynchronous):
    play(kind, budget, timing, asynchronous)
