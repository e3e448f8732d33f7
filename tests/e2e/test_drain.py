"""SIGTERM while requests run."""

import contextlib
import json
import os
import re
import signal
import socket

from tests.support.client import TEXT, ClientRequest
from tests.support.processes import alive, descendants, eventually, stopped
from tests.support.running_server import CHAT_HEAD, RunningServer


def test_a_drain_finishes_running_requests_and_refuses_new_ones():
    """The signal is sent to all processes, as by the end of a terminal; the supervisor acts on it."""
    with (
        RunningServer("--api-server-count", "2", "-tp", "2", "--shutdown-timeout", "600") as server,
        contextlib.ExitStack() as stack,
    ):
        family, pids = descendants(server.process.pid), server.pids()
        with stopped(pids["worker 0.1"]):  # so that the request runs for as long as the rest takes
            usage = {"stream_options": {"include_usage": True}}
            request = ClientRequest(server, "api 0", TEXT, **usage, stream=True, max_tokens=20, ignore_eos=True)
            stack.callback(request.hang_up)
            eventually(lambda: server.total("num_requests_running") == 1)
            half = stack.enter_context(socket.create_connection(server.address, timeout=60))
            half.sendall(CHAT_HEAD + b"Content-Length: 20\r\nExpect: 100-continue\r\n\r\n")
            assert b" 100 " in half.recv(4096)  # the server asks for the body
            half.sendall(b"{")
            os.killpg(server.process.pid, signal.SIGHUP)
            eventually(lambda: not alive(pids["api 1"]))
            for _ in range(5):  # whichever port a connection comes from, the other server has it
                for path, method in (("/health", "GET"), ("/v1/chat/completions", "POST")):
                    refused = server.get(path, method=method)
                    code = json.loads(refused.body)["error"]["code"]
                    assert (refused.status, code) == (503, "shutting_down")
                assert refused.headers["retry-after"]
            assert b" 503 " in half.recv(4096)  # it delays nothing
        *events, done = re.findall("^data: (.*)$", request.response().read().decode(), re.MULTILINE)
        *_, last, used = map(json.loads, events)
        assert done == "[DONE]" and used["usage"]["completion_tokens"] == 20
        assert last["choices"][0]["finish_reason"] == "length"
        request.hang_up()
        assert server.process.wait(60) == 0
        server.assert_nothing_left(family)
        assert "died" not in server.log and "is killed" not in server.log
