"""The processes of a running server: their names, what they load, what they cost, and that they all go."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

from tests.e2e.asked import ask_video
from tests.e2e.barriers import eventually
from tests.e2e.pinned import has_socket
from tests.e2e.running_server import ROOT, START_SECONDS, RunningServer, descendants


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Proportional set size: shared pages count once over all processes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def test_ps_tells_them_apart(server):
    assert {"mini-engine: api 0", "mini-engine: core 0", "mini-engine: worker 0.0"} <= set(server.pids())


def test_the_core_maps_no_libtorch(server):
    pids = server.pids()
    libraries = {name: Path(f"/proc/{pid}/maps").read_text() for name, pid in pids.items()}
    assert "libtorch" not in libraries["mini-engine: core 0"]
    assert "libtorch" not in libraries["supervisor"]
    assert "libtorch" in libraries["mini-engine: worker 0.0"]  # the check can fail


def test_the_log_says_what_was_started(server):
    assert (
        "supervisor | serving mini-engine-demo (Qwen2_5_VLForConditionalGeneration) at http://127.0.0.1" in server.log
    )
    assert "reach engine 0 by torch_shm" in server.log
    assert "KV blocks of 16 tokens" in server.log


def test_an_idle_server_costs_next_to_nothing(server):
    server.ask("What colour is it?", ask_video(0).urls)
    pids = [server.process.pid, *descendants(server.process.pid)]

    def measured() -> None:
        before, begun = sum(map(cpu_seconds, pids)), time.monotonic()
        time.sleep(5)
        used = sum(map(cpu_seconds, pids)) - before
        assert used / (time.monotonic() - begun) <= 0.01

    time.sleep(1)
    eventually(measured)  # what ends only then, such as a collection of garbage, is not there all the time


def test_resident_memory_stays_below_two_gigabytes(server):
    server.ask("What colour is it?", ask_video(0).urls)
    assert sum(map(resident_bytes, [server.process.pid, *descendants(server.process.pid)])) < 2 << 30


def test_only_the_http_port_listens_beyond_this_host(server):
    listening = []
    tables = [path for name in ("tcp", "tcp6") if (path := Path("/proc/net", name)).exists()]  # not all have IPv6
    for table in tables:
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and any(has_socket(pid, int(fields[9])) for pid in server.pids().values()):
                listening.append(int(fields[1].rpartition(":")[2], 16))
    assert listening == [int(server.url.rpartition(":")[2].removesuffix("/v1"))]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_nothing(number):
    with RunningServer("-tp", "2", "--api-server-count", "2") as server:
        assert server.stop(number) == 0
        assert "is killed" not in server.log, "all have ended when they were told to"


def test_everything_dies_with_the_supervisor():
    with RunningServer("-tp", "2") as server:
        family = descendants(server.process.pid)
        server.process.kill()
        server.process.wait()
        server.assert_nothing_left(family)


def test_health_is_not_200_before_a_request_can_be_served():
    """Asked all through the start; the first 200 is followed by a request at once."""
    seen: list[str] = []

    def watch(port: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            except urllib.error.HTTPError as error:
                seen.append(str(error.code))
            except OSError:
                seen.append("refused")
            else:
                client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
                body = [{"role": "user", "content": "hello"}]
                reply = client.chat.completions.create(model="mini-engine-demo", messages=body, max_tokens=2)
                seen.append(f"served {reply.usage.completion_tokens}")
                client.close()
                return
            time.sleep(0.02)

    with socket.socket() as kept:  # from other programs, until the server has it
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        watcher = threading.Thread(target=watch, args=(port,))
        watcher.start()
        with RunningServer("--port", str(port)):
            watcher.join()
    assert seen[0] != seen[-1] == "served 2"
    assert set(seen[:-1]) <= {"refused", "503"}


def test_a_second_server_on_the_same_port_says_so(server):
    port = server.url.rpartition(":")[2].removesuffix("/v1")
    command = [sys.executable, "serve.py", "--host", "127.0.0.1", "--port", port]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert second.returncode == 2
    assert f"port {port}" in second.stderr and "--port" in second.stderr


@pytest.mark.parametrize("backend", ["auto", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_rank_that_hangs_ends_the_engine_with_its_requests_answered(backend):
    with RunningServer("-tp", "2", "--collective-timeout", "6", "--distributed-backend", backend) as server:
        one = ask_video(3)
        assert server.ask(one.text, one.urls) == one.answer
        family = descendants(server.process.pid)
        os.kill(server.pids()["mini-engine: worker 0.1"], signal.SIGSTOP)
        with pytest.raises(openai.APIStatusError) as caught:
            server.ask("hello", [])
        assert caught.value.status_code in (500, 503)
        assert server.process.wait(60) == 1
        server.assert_nothing_left(family)
        assert "(--collective-timeout)" in server.log and "Traceback" not in server.log
