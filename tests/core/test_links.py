"""The core's sockets, with peers in this process."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

from mini_engine.core.links import Links
from mini_engine.messages import AskFigures
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder


def test_what_a_dead_api_server_still_says_makes_nobody_of_it(runtime, context):
    endpoints = [f"ipc://{runtime}/{name}" for name in ("supervisor", "api", "workers")]
    supervisor = sockets.connect_dealer(context, endpoints[0], b"core 0:1")
    child = SimpleNamespace(encoder=Encoder("core 0", 1), context=context, supervisor=supervisor)
    links = Links(child, endpoints[1], endpoints[2], 1)
    apis = {
        number: sockets.connect_dealer(context, endpoints[1], sockets.identity(f"api {number}", number))
        for number in (7, 8)
    }
    with contextlib.ExitStack() as stack:
        for socket in (*links.sockets, *apis.values()):
            stack.enter_context(socket)

        def say(number: int) -> None:
            apis[number].send(Encoder(f"api {number}", number).encode(AskFigures()))
            assert [envelope.incarnation for envelope in links.receive(10)] == [number]

        say(7)
        say(8)
        assert links.identities.keys() == {7, 8}
        links.forget(7)
        say(7)
        assert links.identities.keys() == {8} and links.gone == {7}
