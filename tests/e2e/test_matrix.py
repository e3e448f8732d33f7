"""Every combination of media cache, transport, API servers, ranks and engines, under 48 clients with a video each.

In each: all answers are right; a hit says the same tokens as the cold request did, though it goes to another API
server; the transport that was asked for, and no other, carries one message for each item and rank; a third of the
clients leave at any moment; and what the processes hold afterwards is accounted for to the last descriptor.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.asked import Asked, ask_video
from tests.e2e.barriers import Inside, eventually
from tests.e2e.held import assert_nothing_held, descriptors, mappings, samples, total
from tests.e2e.pinned import Asking, call, catch_up, wait_for_no_clients
from tests.e2e.running_server import CACHES, RunningServer

CLIENTS, FEW_CLIENTS = 48, 16
AT_ONCE = 4  # for hits: one engine is never so much busier than another that it is passed over
# Neither embeddings nor KV blocks are kept for long: what is hit is the media.
FLAGS = ["--encoder-cache-tokens", "256", "--no-enable-prefix-caching"]
TRANSPORTS = ("torch_shm", "direct_rpc")


@dataclasses.dataclass(frozen=True)
class Cell:
    cache: str
    transport: str
    api_servers: int
    ranks: int
    engines: int

    @property
    def flags(self) -> list[str]:
        sizes = ["--api-server-count", str(self.api_servers), "-tp", str(self.ranks), "-dp", str(self.engines)]
        return [*FLAGS, *CACHES[self.cache], "--mm-tensor-ipc", self.transport, *sizes]

    def __str__(self) -> str:
        return f"{self.cache}-{self.transport}-N{self.api_servers}-T{self.ranks}-D{self.engines}"


CELLS = [Cell(*axes) for axes in itertools.product(CACHES, TRANSPORTS, (1, 3), (1, 2), (1, 2))]
# Every value of every axis.
FAST = [Cell("off", "direct_rpc", 1, 1, 2), Cell("lru", "torch_shm", 3, 1, 1), Cell("shm", "torch_shm", 3, 2, 1)]
SLOW = [pytest.param(cell, marks=pytest.mark.slow) for cell in CELLS]


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ask_video, range(700, 700 + CLIENTS)))


class Crowd:
    """The clients of one server. Each asks for one video, at an API server of its own choice."""

    def __init__(self, cell: Cell, asked: list[Asked], inside: Inside, server: RunningServer):
        self.cell = cell
        self.asked = asked
        self.inside = inside
        self.server = server
        self.apis = [f"mini-engine: api {slot}" for slot in range(cell.api_servers)]
        server.client.close()  # its connection would count
        for title in self.apis:
            assert self.samples(title)  # what a first request opens is open
        wait_for_no_clients(server)
        self.before = self.files_and_mappings()

    def samples(self, title: str | None = None) -> dict[str, float]:
        return samples(self.server, title or self.apis[0])

    def ask(self, client: int, shift: int = 0) -> list[str]:
        """The tokens of one client's answer, whose text has to be right."""
        title = self.apis[(client + shift) % len(self.apis)]
        (choice,) = Asking(self.server, title, self.asked[client], logprobs=True).reply()["choices"]
        assert choice["message"]["content"] == self.asked[client].answer
        return [token["token"] for token in choice["logprobs"]["content"]]

    def ask_all(self, at_once: int, shift: int = 0) -> list[list[str]]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda client: self.ask(client, shift), range(len(self.asked))))

    def leave_after(self, client: int, seconds: float, stream: bool) -> None:
        title = self.apis[client % len(self.apis)]
        asking = Asking(self.server, title, self.asked[client], stream=stream, max_tokens=2000, ignore_eos=True)
        time.sleep(seconds)
        asking.hang_up()

    def counted(self, work: Callable[[], None]) -> Counted:
        """What has been counted while `work` ran and all came to rest."""
        catch_up(self.server, *self.apis)
        before = self.samples()
        work()
        eventually(self.assert_at_rest)
        after = self.samples()
        grown = {name: value - before.get(name, 0) for name, value in after.items()}
        messages = {name: grown[f'ipc_messages_total{{transport="{name}"}}'] for name in (*TRANSPORTS, "shm_store")}
        carried = messages.pop("shm_store" if self.cell.cache == "shm" else self.cell.transport)
        assert not any(messages.values()) and not total(grown, "ipc_fallbacks_total")
        return Counted(carried, total(grown, "media_decodes_total"))

    def files_and_mappings(self) -> dict[str, tuple[int, int]]:
        """Descriptors and mappings of each process: an arena is mapped from the start."""
        return {title: (descriptors(pid), mappings(pid)) for title, pid in self.server.pids().items()}

    def assert_at_rest(self) -> None:
        """No request is there, and every descriptor and mapping is from the start."""
        titles = self.server.pids().keys() - {"supervisor"}
        assert_nothing_held(self.server, self.inside, self.apis[0], titles)
        assert self.files_and_mappings() == self.before


@dataclasses.dataclass(frozen=True)
class Counted:
    messages: float
    decodes: float


def leave(crowd: Crowd, seconds: float) -> None:
    """All ask at once, of videos that nobody keeps; every third leaves within `seconds`, and the others are served."""
    rng = random.Random(str(crowd.cell))
    call(crowd.server, crowd.apis[0], "POST", "/reset_caches")
    clients = range(len(crowd.asked))
    leaving = [
        threading.Thread(target=crowd.leave_after, args=(client, rng.uniform(0, seconds), rng.random() < 0.5))
        for client in clients[::3]
    ]
    for thread in leaving:
        thread.start()
    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(crowd.ask, [client for client in clients if client % 3]))
    for thread in leaving:
        thread.join()


def check(cell: Cell, asked: list[Asked]) -> None:
    items, ranks = len(asked), cell.ranks
    with Inside() as inside, RunningServer(*cell.flags, environ=inside.environ, own_dev_shm=True) as server:
        crowd = Crowd(cell, asked, inside, server)
        tokens: list[list[list[str]]] = []
        begun = time.monotonic()
        cold = crowd.counted(lambda: tokens.append(crowd.ask_all(items)))
        took = time.monotonic() - begun
        assert cold == Counted(items * ranks, items)
        again = crowd.counted(lambda: tokens.append(crowd.ask_all(AT_ONCE, shift=1)))
        assert again == (cold if cell.cache == "off" else Counted(0, 0))
        assert tokens[0] == tokens[1]
        left = crowd.counted(lambda: leave(crowd, took))
        served = items - len(asked[::3])
        assert served <= left.decodes <= items
        assert served * ranks <= left.messages <= left.decodes * ranks
        server.assert_dev_shm_never_written()


@pytest.mark.parametrize("cell", FAST, ids=str)
def test_a_few_cells(cell, asked):
    check(cell, asked[:FEW_CLIENTS])


@pytest.mark.parametrize("cell", SLOW, ids=str)
def test_every_cell(cell, asked):
    check(cell, asked)
