"""A process, or the whole server, is out of file descriptors."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.asked import Asked, ask_small
from tests.e2e.running_server import RunningServer, message
from tests.faults.load import ask
from tests.web import WebServer, response


def set_limit(pid: int, descriptors: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors, 4096))


def take_descriptors(pid: int) -> None:
    """Allow the process no further descriptors."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    set_limit(pid, next(number for number in itertools.count() if number not in taken))


def ask_on(connection: http.client.HTTPConnection, one: Asked) -> tuple[int, str]:
    """The status, and the answer or the error's code, of a question on a connection that stays open."""
    body = {"messages": [message(one.text, one.urls)], "temperature": 0}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    got = connection.getresponse()
    reply = json.loads(got.read())
    if got.status == 200:
        return 200, reply["choices"][0]["message"]["content"]
    assert got.headers["retry-after"] and "out of file descriptors" in reply["error"]["message"], reply
    return got.status, reply["error"]["code"]


@pytest.mark.slow
def test_api_server_out_of_descriptors_returns_503(tmp_path):
    """Requests that need one are refused; others on open connections are served; new connections wait."""
    one, first, inline, waits = (ask_small(34_200 + number) for number in range(4))
    video = base64.b64decode(one.urls[0][1].partition(",")[2])
    Path(tmp_path, "a.mp4").write_bytes(video)
    flags = ["--allowed-local-media-path", str(tmp_path), "--allowed-media-domains", "127.0.0.1"]
    with (
        WebServer(response(video)) as web,
        RunningServer("--mm-processor-cache-type", "lru", *flags) as server,
        ThreadPoolExecutor() as pool,
    ):
        places = (f"file://{tmp_path}/a.mp4", f"http://127.0.0.1:{web.port}/a.mp4")
        local, remote = (Asked(one.text, one.answer, [("video_url", url)]) for url in places)
        connection, pids = server.connect("api 0"), server.pids()
        assert ask_on(connection, first) == (200, first.answer)  # libraries import some parts at the first
        take_descriptors(pids["api 0"])
        for item in (local, remote) * 3:
            assert ask_on(connection, item) == (503, "overloaded")
        assert ask_on(connection, inline) == (200, inline.answer)
        connection.request("GET", "/metrics")
        with connection.getresponse() as metrics:
            assert metrics.status == 503 and metrics.read()
        waiting = pool.submit(ask, server, waits)
        time.sleep(2)  # a few attempts to accept its connection
        assert server.log.count("out of file descriptors: requests") == 1
        set_limit(pids["api 0"], 4096)
        for item in (local, remote):
            assert ask_on(connection, item) == (200, one.answer)
        assert waiting.result().kind == "right"
        assert server.pids() == pids and "Traceback" not in server.log
        connection.close()
