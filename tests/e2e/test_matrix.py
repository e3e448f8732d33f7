"""Every combination of media cache, transport, API servers, ranks and engines, under 48 clients with a video each.

In each: all answers are right; a hit has the same tokens as the cold request, though it goes to another API server; the
transport that was asked for, and no other, carries one message for each item and rank; a third of the clients leave at
any moment; and afterwards no request is held, and each process has the descriptors and mappings of before.
"""

import contextlib
import functools
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.client import ClientRequest, ask_video
from tests.support.processes import eventually
from tests.support.running_server import CACHES, RunningServer, total

ask_same_video = functools.cache(ask_video)


@contextlib.contextmanager
def counted(server: RunningServer, apis: list[str]) -> Iterator[Counter[str]]:
    """Of the block, until the server is at rest with the files and mappings of before: decoded media, fallbacks, and
    tensor messages by transport."""

    def counts() -> Counter[str]:
        for api in apis:  # which has read the engines' messages, such as cached media: their answer comes last
            shown = server.metrics(api)
        names = ("torch_shm", "direct_rpc", "shm_store")
        messages = {name: shown[f'ipc_messages_total{{transport="{name}"}}'] for name in names}
        others = {name: total(shown, f"{name}_total") for name in ("media_decodes", "ipc_fallbacks")}
        return Counter(messages | others)

    before, grown = counts(), Counter[str]()
    eventually(lambda: not server.has_clients())
    files = server.files_and_mappings()  # an arena is mapped from the start
    yield grown
    server.assert_at_rest()
    eventually(lambda: not server.has_clients() and server.files_and_mappings() == files)
    grown.update(counts() - before)


def overwrite_media_stores(server: RunningServer) -> None:
    for fd in Path(f"/proc/{server.process.pid}/fd").iterdir():
        if os.readlink(fd).startswith("/memfd:mini-engine "):
            with open(fd, "r+b", buffering=0) as memory, contextlib.suppress(OSError):  # at the end are no data
                end = 0
                while True:
                    begin = memory.seek(end, os.SEEK_DATA)
                    end = memory.seek(begin, os.SEEK_HOLE)
                    os.pwrite(memory.fileno(), b"\xff" * (end - begin), begin)


@pytest.mark.parametrize(
    ("cache", "transport", "api_servers", "ranks", "engines", "clients"),
    [
        ("off", "direct_rpc", 1, 1, 2, 9),  # these three have every value of every axis
        ("lru", "torch_shm", 3, 1, 1, 9),
        ("shm", "torch_shm", 3, 2, 1, 9),
        *(
            pytest.param(*cell, 48, marks=pytest.mark.slow)
            for cell in itertools.product(CACHES, ("torch_shm", "direct_rpc"), (1, 3), (1, 2), (1, 2))
        ),
    ],
)
def test_every_combination_answers_right_and_frees_everything(cache, transport, api_servers, ranks, engines, clients):
    questions = [ask_same_video(700 + client) for client in range(clients)]
    carrier, apis = "shm_store" if cache == "shm" else transport, [f"api {slot}" for slot in range(api_servers)]
    sizes = ["--api-server-count", f"{api_servers}", "-tp", f"{ranks}", "-dp", f"{engines}"]
    # Neither embeddings nor KV blocks are kept for long: what is hit is the media.
    few_kept = ["--encoder-cache-tokens", "256", "--no-enable-prefix-caching"]
    with RunningServer(*sizes, *few_kept, *CACHES[cache], "--mm-tensor-ipc", transport) as server:
        server.client.close()  # its connection would count

        def ask(client: int, shift: int = 0) -> list[str]:
            """The tokens of one client's answer, whose text has to be right."""
            api = apis[(client + shift) % api_servers]
            (choice,) = ClientRequest(server, api, questions[client], logprobs=True).reply()["choices"]
            assert choice["message"]["content"] == questions[client].answer
            return [token["token"] for token in choice["logprobs"]["content"]]

        begun = time.monotonic()
        with counted(server, apis) as cold, ThreadPoolExecutor(clients) as pool:
            tokens = list(pool.map(ask, range(clients)))
        took = time.monotonic() - begun
        assert cold == Counter({carrier: clients * ranks, "media_decodes": clients})
        for _ in range(engines):  # with all at once an engine may be passed over: it caches in the first round
            if cache == "off":  # else embeddings are found
                assert server.get("/reset_caches", method="POST").status == 200
            # With four at once no engine is so busy as to be passed over.
            with counted(server, apis) as again, ThreadPoolExecutor(4) as pool:
                assert list(pool.map(functools.partial(ask, shift=1), range(clients))) == tokens
        assert again == (cold if cache == "off" else Counter())

        # From empty caches, whose memory is overwritten: a view of pages that were not written since changes an answer.
        assert server.get("/reset_caches", method="POST").status == 200
        overwrite_media_stores(server)
        rng = random.Random(str(sizes))
        pauses = {client: rng.uniform(0, took) for client in range(0, clients, 3)}  # of those that leave

        def ask_or_leave(client: int) -> None:
            if client not in pauses:
                ask(client)
                return
            api, more = apis[client % api_servers], {"max_tokens": 2000, "ignore_eos": True}
            request = ClientRequest(server, api, questions[client], stream=client % 2 == 0, **more)
            time.sleep(pauses[client])
            request.hang_up()

        with counted(server, apis) as left, ThreadPoolExecutor(clients) as pool:
            list(pool.map(ask_or_leave, range(clients)))
        assert left.keys() == {carrier, "media_decodes"}, left
        assert clients - len(pauses) <= left["media_decodes"] <= clients
        assert (clients - len(pauses)) * ranks <= left[carrier] <= left["media_decodes"] * ranks
