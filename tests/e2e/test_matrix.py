"""Every combination of media cache, transport, API servers, ranks and engines, under 48 clients with a video each.

In each: all answers are right; a hit has the same tokens as the cold request, though it goes to another API server; the
transport that was asked for, and no other, carries one message for each item and rank; a third of the clients leave at
any moment; and afterwards no request is held, and each process has the descriptors and mappings of the start.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.client import ClientRequest, Question, ask_video
from tests.support.processes import eventually
from tests.support.running_server import CACHES, RunningServer, total

CLIENTS, FEW_CLIENTS = 48, 9
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


@dataclasses.dataclass(frozen=True)
class Counts:
    """Growth of counters: tensor messages of the transport that was asked for, and decoded media."""

    messages: float
    decodes: float


class ClientPool:
    """The clients of one server. Each asks for one video, at an API server of its own choice."""

    def __init__(self, cell: Cell, questions: list[Question], server: RunningServer):
        self.cell = cell
        self.questions = questions
        self.server = server
        self.apis = [f"api {slot}" for slot in range(cell.api_servers)]
        server.client.close()  # its connection would count
        self.wait_for_metrics()  # what a first request opens is open
        eventually(lambda: not server.has_clients())
        self.before = server.files_and_mappings()  # an arena is mapped from the start

    def wait_for_metrics(self) -> None:
        """Until each API server has read the messages of the engines, such as cached media: for `/metrics` it
        asks the engines, and their answer comes last."""
        for api in self.apis:
            self.server.metrics(api)

    def ask(self, client: int, shift: int = 0) -> list[str]:
        """The tokens of one client's answer, whose text has to be right."""
        api = self.apis[(client + shift) % len(self.apis)]
        (choice,) = ClientRequest(self.server, api, self.questions[client], logprobs=True).reply()["choices"]
        assert choice["message"]["content"] == self.questions[client].answer
        return [token["token"] for token in choice["logprobs"]["content"]]

    def ask_all(self, at_once: int, shift: int = 0) -> list[list[str]]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda client: self.ask(client, shift), range(len(self.questions))))

    def ask_while_others_leave(self, seconds: float) -> None:
        """All ask at once; every third leaves within `seconds`, and the others are served."""
        rng = random.Random(str(self.cell))
        pauses = {client: rng.uniform(0, seconds) for client in range(0, len(self.questions), 3)}

        def ask_or_leave(client: int) -> None:
            if client not in pauses:
                self.ask(client)
                return
            api, more = self.apis[client % len(self.apis)], {"max_tokens": 2000, "ignore_eos": True}
            request = ClientRequest(self.server, api, self.questions[client], stream=client % 2 == 0, **more)
            time.sleep(pauses[client])
            request.hang_up()

        with ThreadPoolExecutor(len(self.questions)) as pool:
            list(pool.map(ask_or_leave, range(len(self.questions))))

    def counts_during(self, work: Callable[[], object]) -> Counts:
        """The growth of the counters while `work` ran, until idle."""
        self.wait_for_metrics()
        before = self.server.metrics()
        work()
        self.server.assert_at_rest()
        eventually(lambda: not self.server.has_clients() and self.server.files_and_mappings() == self.before)
        grown = {name: value - before.get(name, 0) for name, value in self.server.metrics().items()}
        messages = {name: grown[f'ipc_messages_total{{transport="{name}"}}'] for name in (*TRANSPORTS, "shm_store")}
        carried = messages.pop("shm_store" if self.cell.cache == "shm" else self.cell.transport)
        assert not any(messages.values()) and not total(grown, "ipc_fallbacks_total")
        return Counts(carried, total(grown, "media_decodes_total"))


ask_same_video = functools.cache(ask_video)

CASES = [
    *(pytest.param(cell, FEW_CLIENTS, id=f"{cell}-few") for cell in FAST),
    *(pytest.param(cell, CLIENTS, id=str(cell), marks=pytest.mark.slow) for cell in CELLS),
]


@pytest.mark.parametrize(("cell", "clients"), CASES)
def test_every_combination_answers_right_and_frees_everything(cell: Cell, clients: int):
    tokens: list[list[list[str]]] = []
    with RunningServer(*cell.flags) as server:
        pool = ClientPool(cell, [ask_same_video(700 + client) for client in range(clients)], server)
        begun = time.monotonic()
        cold = pool.counts_during(lambda: tokens.append(pool.ask_all(clients)))
        took = time.monotonic() - begun
        assert cold == Counts(clients * cell.ranks, clients)
        for _ in range(cell.engines):  # with all at once an engine may be passed over: it caches in the first round
            if cell.cache == "off":  # else embeddings are found
                assert server.get("/reset_caches", method="POST").status == 200
            again = pool.counts_during(lambda: tokens.append(pool.ask_all(AT_ONCE, shift=1)))
        assert again == (cold if cell.cache == "off" else Counts(0, 0))
        assert all(row == tokens[0] for row in tokens)

        # From empty caches, whose memory is overwritten: a view of pages that were not written since changes an answer.
        assert server.get("/reset_caches", method="POST").status == 200
        for fd in Path(f"/proc/{server.process.pid}/fd").iterdir():
            if os.readlink(fd).startswith("/memfd:mini-engine "):  # a media store
                with open(fd, "r+b", buffering=0) as memory, contextlib.suppress(OSError):  # at the end are no data
                    end = 0
                    while True:
                        begin = memory.seek(end, os.SEEK_DATA)
                        end = memory.seek(begin, os.SEEK_HOLE)
                        os.pwrite(memory.fileno(), b"\xff" * (end - begin), begin)
        left = pool.counts_during(lambda: pool.ask_while_others_leave(took))
        served = clients - len(range(0, clients, 3))
        assert served <= left.decodes <= clients
        assert served * cell.ranks <= left.messages <= left.decodes * cell.ranks
