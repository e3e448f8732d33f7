"""The first words between the supervisor and a child."""

from __future__ import annotations

import os

import pytest

from mini_engine.child import Child, ChildSpec
from mini_engine.config import EngineConfig
from mini_engine.log import LogSettings
from mini_engine.messages import ControlRequest, Init, MediaCachePlan, PeerGone
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder

INIT = Init(EngineConfig(), "", "", [], [], [], MediaCachePlan("off", 0, ""))


@pytest.fixture
def child(runtime, context):
    """And what sends to it as the supervisor does."""
    router = sockets.bind_router(context, f"ipc://{runtime}/supervisor")
    made = Child(ChildSpec("core", "0", 5, os.getpid(), f"ipc://{runtime}/supervisor", LogSettings("info")))
    peer, _hello = router.recv_multipart()
    yield made, lambda body: router.send_multipart([peer, Encoder("supervisor", 0).encode(body)])
    made.context.destroy(linger=0)


def test_a_death_before_init_is_skipped(child):
    one, send = child
    send(PeerGone("api 0", 3))
    send(INIT)
    assert one.init() == INIT


def test_anything_else_is_an_error(child):
    one, send = child
    send(ControlRequest(1))
    with pytest.raises(RuntimeError, match="expected Init"):
        one.init()
