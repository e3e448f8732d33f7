"""The requests of a scheduler by client: whose turn it is, and which is preempted. Knows nothing of steps.

The n-th request of a client goes after the first n - 1 of each other; among equals the client that was served least
recently goes first. Those of one client are in `Request.order`, running ones before waiting ones.
"""

import bisect
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import attrgetter

from mini_engine.core.request import Request

_order = attrgetter("order")


@dataclasses.dataclass(eq=False, slots=True)
class Client:
    """Its requests, both lists in order."""

    running: list[Request] = dataclasses.field(default_factory=list)
    waiting: list[Request] = dataclasses.field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Those that several of its requests share count for each."""
        return sum(len(request.blocks) for request in self.running)


class ClientQueues:
    """All running and waiting requests, by client."""

    def __init__(self) -> None:
        self.num_running = 0  # counted: the scheduler asks for each waiting request
        self._clients: OrderedDict[bytes, Client] = OrderedDict()  # those with requests, least recently served first

    @property
    def running(self) -> list[Request]:
        """In turns."""
        return list(_in_turns([client.running for client in self._clients.values() if client.running]))

    @property
    def waiting(self) -> Iterator[Request]:
        """In the order of each client."""
        return itertools.chain.from_iterable(client.waiting for client in self._clients.values())

    def in_turns(self) -> Iterator[Request]:
        """All requests, as they are now."""
        return _in_turns([[*client.running, *client.waiting] for client in self._clients.values()])

    def add(self, request: Request) -> None:
        """Queue a request, which waits or was preempted."""
        bisect.insort(self._clients.setdefault(request.new.client, Client()).waiting, request, key=_order)

    def start(self, request: Request) -> None:
        """Move a waiting request to the running ones."""
        client = self._clients[request.new.client]
        client.waiting.remove(request)
        bisect.insort(client.running, request, key=_order)
        self.num_running += 1

    def remove(self, request: Request) -> None:
        """Remove a running or waiting request; without effect for another."""
        client = self._clients.get(request.new.client, Client())
        if request in client.running:
            client.running.remove(request)
            self.num_running -= 1
        elif request in client.waiting:
            client.waiting.remove(request)
        if not client.running and not client.waiting:
            self._clients.pop(request.new.client, None)

    def serve(self, request: Request) -> None:
        """Make its client the one that was served last: the next step has work for the request."""
        self._clients.move_to_end(request.new.client)

    def victim_for_sequence(self, request: Request) -> Request | None:
        """The running request that stops so that a waiting one can: the last of the client with the most, which must
        not have fewer than the other afterwards. So it takes nothing back, and the first request of a client keeps
        running. None: `request` has to wait."""
        largest = max(self._clients.values(), key=lambda client: len(client.running))
        exceeds = len(largest.running) >= len(self._clients[request.new.client].running) + 2
        return largest.running[-1] if exceeds else None

    def victim_for_blocks(self, request: Request, count: int) -> Request | None:
        """The running request that gives its blocks to a waiting one, which needs `count`, by the same rule."""
        largest = max(self._clients.values(), key=lambda client: client.num_blocks)
        victim, held = largest.running[-1], self._clients[request.new.client].num_blocks
        return victim if held + count + len(victim.blocks) <= largest.num_blocks else None


def _in_turns(queues: Iterable[Iterable[Request]]) -> Iterator[Request]:
    """The first of each queue, then the second of each, and so on."""
    for turn in itertools.zip_longest(*queues):
        yield from filter(None, turn)
