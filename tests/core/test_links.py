"""The core's sockets, with peers in this process."""

import contextlib
from types import SimpleNamespace

from mini_engine.core.links import SUPERVISOR, Links
from mini_engine.messages import ControlRequest, Found, ItemFacts, WorkerReady
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder


@contextlib.contextmanager
def core_links(runtime, context, *numbers):
    """A core's sockets, and those of so many API servers."""
    endpoints = [f"ipc://{runtime}/{name}" for name in ("supervisor", "api", "workers")]
    supervisor = sockets.connect_dealer(context, endpoints[0], b"core 0:1")
    child = SimpleNamespace(encoder=Encoder("core 0", 1), context=context, supervisor=supervisor)
    links = Links(child, endpoints[1], endpoints[2], 1)
    apis = {
        number: sockets.connect_dealer(context, endpoints[1], sockets.identity(f"api {number}", number))
        for number in numbers
    }
    with contextlib.ExitStack() as stack:
        for socket in (*links.sockets, *apis.values()):
            stack.enter_context(socket)
        yield links, apis


def test_late_messages_of_a_dead_api_server_are_ignored(runtime, context):
    with core_links(runtime, context, 7, 8) as (links, apis):

        def send(number: int) -> None:
            apis[number].send(Encoder(f"api {number}", number).encode(ControlRequest(0, "stats")))
            assert [envelope.incarnation for envelope in links.receive()] == [number]

        send(7)
        send(8)
        assert links.identities.keys() == {SUPERVISOR, 7, 8}
        links.forget(7)
        send(7)
        assert links.identities.keys() == {SUPERVISOR, 8} and links.gone == {7}


def test_messages_sent_while_ranks_load_are_received_later(runtime, context):
    """API servers are often ready before, and would wait forever for answers to lost messages."""
    with core_links(runtime, context, 7, 8) as (links, apis):
        for number, api in apis.items():
            api.send(Encoder(f"api {number}", number).encode(ControlRequest(0, "stats")))
        links.poller.poll()
        with sockets.connect_dealer(context, f"ipc://{runtime}/workers", b"worker 0.0:2") as worker:
            worker.send(Encoder("worker 0.0", 2).encode(WorkerReady(0, 100, "cpu")))
            assert [ready.num_blocks for ready in links.wait_for_workers()] == [100]
        received: list[int] = []
        while len(received) < 2:
            envelopes = links.receive()
            assert envelopes
            received += [envelope.incarnation for envelope in envelopes]
        assert sorted(received) == [7, 8] and links.identities.keys() == {SUPERVISOR, 7, 8}


def test_unresponsive_api_server_is_logged_once_and_blocks_nothing(runtime, context, monkeypatch, caplog):
    monkeypatch.setattr(sockets, "QUEUE_LIMIT", 2)
    with core_links(runtime, context, 7) as (links, apis):
        apis[7].send(Encoder("api 7", 7).encode(ControlRequest(0, "stats")))
        links.receive()
        huge = Found("r", [ItemFacts(bytes(1 << 20), "image", 1, (1, 1, 1), None)])
        for _ in range(20):
            links.send(7, huge)  # more than the kernel takes
        links.identities[9] = b"api 9:9"
        links.send(9, Found("r", []))  # it exited
        (record,) = caplog.records
        assert record.levelname == "ERROR" and record.getMessage().startswith("api 7:7 ")
