"""API servers that follow the engine core's answers, at random: all their requests end well, and all is released.

They look media up, write what is absent or send its tensor, rely on embeddings, and send a request again if those have
been evicted. The simulated ranks check that each item that a step reads is there.
"""

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.messages import (
    ChildRequest,
    ControlRequest,
    Finish,
    MediaReady,
    MessageId,
    PeerGone,
    Reserved,
    Written,
)
from mini_engine.transport.pages import PAGE_BYTES
from tests.support.simulated_core import API, BYTES, OTHER, CachingWorld, item
from tests.support.simulated_ranks import token_of

MEDIA = [[0], [1], [2], [0, 1], [1, 4], [2, 3], [3, 0]]  # the items of a request; they fit into the encoder cache
OUTPUT = 4  # tokens


@dataclasses.dataclass(eq=False)
class Asked:
    """A request, at some stage, and from where the engine has or gets each of its items."""

    name: str
    sender: tuple[str, int]
    hashes: list[bytes]
    named: set[bytes]  # of those, what it has by name alone
    children: list[ChildRequest]
    sources: dict[bytes, str] = dataclasses.field(default_factory=dict)  # "patches", "embeddings" or "tensor"
    reservations: dict[bytes, Reserved] = dataclasses.field(default_factory=dict)
    arrival: int | None = None  # when it is sent again

    @property
    def samples(self) -> list[str]:
        return [self.name, *(child.request_id for child in self.children)]


class RandomClients:
    """The requests of two API servers; the messages that they receive decide their next actions."""

    def __init__(self, world: CachingWorld, chance: random.Random):
        self.world, self.chance = world, chance
        self.senders = [API, OTHER]
        self.numbers = itertools.count(1)  # of tensor messages and requests
        self.prepared: list[Asked] = []
        self.asked: dict[str, Asked] = {}
        self.sent: dict[str, Asked] = {}  # but for aborted ones

    def begin(self) -> None:
        name, numbers = f"r{next(self.numbers)}", self.chance.choice(MEDIA)
        children = [ChildRequest(f"{name} 1", 1)] * self.chance.choice([0, 0, 1])
        hashes = [bytes([number]) * 16 for number in numbers]
        named = {media_hash for media_hash in hashes if self.chance.random() < 0.2}
        self.asked[name] = asked = Asked(name, self.chance.choice(self.senders), hashes, named, children)
        self.look_up(asked)

    def look_up(self, asked: Asked) -> None:
        """A name is not found only if the engine has neither patches nor embeddings."""
        found = {media_hash: self.world.look_up(asked.name, media_hash, asked.sender) for media_hash in asked.hashes}
        if any(found[media_hash] in ("", "facts") for media_hash in asked.named):
            self.world.receive(Finish(asked.name, "abort"), asked.sender)
            return
        for media_hash, held in found.items():
            is_needed = held == "embeddings" and asked.arrival is not None and media_hash not in asked.named
            source = "tensor" if is_needed or held in ("", "facts") else held
            if source == "tensor" and self.world.kind == "shm":
                reserved = self.world.reserve(asked.name, media_hash, size_of(media_hash), asked.sender)
                source = "patches" if reserved.outcome == "present" else source
                if reserved.outcome == "reserved":
                    asked.reservations[media_hash] = reserved
            asked.sources[media_hash] = source
        self.prepared.append(asked)

    def proceed(self) -> None:
        """Write an item of a request, or send it, or its client leaves."""
        asked = self.chance.choice(self.prepared)
        leaves = self.chance.random() < 0.15
        for media_hash, reserved in asked.reservations.items():
            if leaves or self.chance.random() < 0.2:
                self.world.receive(Written(media_hash, None), asked.sender)
            else:
                self.world.write(reserved, asked.name, sender=asked.sender)
                asked.sources[media_hash] = "patches"
        asked.reservations = {}
        self.prepared.remove(asked)
        if leaves:
            self.world.receive(Finish(asked.name, "abort"), asked.sender)
        else:
            self.send(asked)

    def send(self, asked: Asked) -> None:
        media, is_lost = [], self.chance.random() < 0.1
        for offset, media_hash in zip((1, 5), asked.hashes, strict=False):
            message = MessageId(asked.sender[1], next(self.numbers)) if asked.sources[media_hash] == "tensor" else None
            media.append(item(message, offset, size := size_of(media_hash), media_hash=media_hash, grids=size))
        more = {"children": asked.children, "arrival": asked.arrival, "ready": not is_lost}
        self.world.request(asked.name, prompt=9, max_tokens=OUTPUT, media=media, sender=asked.sender, **more)
        self.sent[asked.name] = asked
        for message in [each.patches.message for each in media if each.patches and is_lost]:
            self.world.receive(MediaReady(0, message, "no descriptor"), ("worker 0.0 media", 100))

    def abort(self) -> None:
        asked = self.sent.pop(self.chance.choice(list(self.sent)))
        for sample in asked.samples:
            self.world.receive(Finish(sample, "abort"), asked.sender)
            if self.chance.random() < 0.3:
                self.world.turn()

    def turn(self) -> None:
        """What the core does, and requests that it needs again."""
        self.world.turn()
        missed, self.world.missed = self.world.missed, {}
        for name, arrival in missed.items():
            asked = self.asked[name.split()[0]]  # of an aborted one perhaps a child
            lost = "tensor" if arrival is None else "embeddings"
            causes = {media_hash for media_hash, source in asked.sources.items() if source == lost}
            assert causes and (None in (arrival, asked.arrival) or causes <= asked.named), "data are needed again"
            if self.sent.pop(asked.name, None) and arrival is not None:  # else its API server forgets it
                asked.arrival = arrival
                self.look_up(asked)

    def die(self) -> None:
        dead = self.senders[1]
        self.world.receive(PeerGone(*dead), ("supervisor", 0))
        for asked in [asked for asked in self.prepared if asked.sender == dead]:
            self.prepared.remove(asked)
            for reserved in asked.reservations.values():  # what it sent before it died and arrives after that is void
                self.world.write(reserved, asked.name, sender=dead)
        self.world.request(f"late {dead}", sender=dead)
        self.senders[1] = (dead[0], dead[1] + 2)
        self.sent = {name: asked for name, asked in self.sent.items() if asked.sender != dead}


def size_of(media_hash: bytes) -> int:
    """In tokens, each of a temporal grid of its own."""
    return 1 + media_hash[0] % 3


def play(kind: str, room: int, timing: int, flags: dict[str, object]) -> None:
    chance = random.Random(timing)
    world = CachingWorld(kind, room, max_tokens=12, **flags)
    clients = RandomClients(world, chance)
    media, item_bytes = world.core.media, PAGE_BYTES if kind == "shm" else 2 * BYTES
    for turn in range(40):
        clients.begin()
        while clients.prepared and chance.random() < 0.6:
            clients.proceed()
        if clients.sent and chance.random() < 0.2:
            clients.abort()
        if chance.random() < 0.1:
            world.receive(ControlRequest(turn, "reset_caches"))
        if chance.random() < 0.05:
            clients.die()
        clients.turn()
        while world.links.steps and chance.random() < 0.6:
            world.links.run_step()
            clients.turn()
        assert media.num_bytes_pinned <= media.num_bytes <= room * item_bytes
        assert kind == "shm" or world.links.kept.issuperset(world.idle), "idle before every rank has its copy"
    clients.turn()
    while clients.prepared or world.core.requests or world.core.in_flight or world.links.inbox:
        if clients.prepared:
            clients.proceed()
        world.run()
        clients.turn()
    for asked in clients.sent.values():
        for sample in asked.samples:
            assert world.ends[sample] == ["length"]
            assert world.tokens[sample] == [token_of(sample, index) for index in range(OUTPUT)]
    assert not [name for name in world.tokens if name.startswith("late")]
    world.assert_at_rest()


worlds = st.fixed_dictionaries(
    {
        "async_scheduling": st.booleans(),
        "enable_prefix_caching": st.booleans(),
        "blocks": st.sampled_from([6, 64]),  # of which a sequence takes four: others are preempted
        "max_num_encoder_input_tokens": st.sampled_from([1, None]),  # items are encoded in parts
        "snapshots": st.sampled_from([None, 0, 3]),
    }
)


@pytest.mark.parametrize("kind", ["lru", "shm"])
@settings(max_examples=75, deadline=None)
@given(room=st.integers(0, 6), timing=st.integers(0, 2**32), flags=worlds)
def test_clients_that_follow_the_answers_never_fail(kind, room, timing, flags):
    play(kind, room or kind == "shm", timing, flags)
