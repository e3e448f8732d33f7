"""The handshake of a child with the supervisor."""

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


def test_init_is_awaited_past_the_deaths_of_other_processes(runtime, context):
    child = Child(ChildSpec("core", "0", 5, os.getpid(), f"ipc://{runtime}/supervisor", LogSettings("info")))
    with sockets.bind_router(context, f"ipc://{runtime}/supervisor") as router:
        peer, _hello = router.recv_multipart()
        for body in (PeerGone("api 0", 3), INIT, ControlRequest(1)):
            router.send_multipart([peer, Encoder("supervisor", 0).encode(body)])
        assert child.init() == INIT
        with pytest.raises(RuntimeError, match="expected Init"):
            child.init()
    child.context.destroy(linger=0)
