"""The processes of a running server: names, imports, resource use, /health, drain, and exit."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.client import ENDLESS, TEXT, ClientRequest, ask_video
from tests.support.processes import alive, descendants, eventually, has_socket, stopped, tcp_sockets
from tests.support.running_server import CHAT_HEAD, START_SECONDS, RunningServer


def test_metrics_name_the_processes_and_the_cache(server):
    shown = server.metrics()
    assert {name for name in shown if name.startswith("process_resident_memory_bytes")} == {
        f'process_resident_memory_bytes{{process="{name}"}}' for name in server.pids()
    }
    (cache,) = [name for name in shown if name.startswith("cache_config_info")]
    assert re.search(r'block_size="16",.*num_gpu_blocks="[1-9]\d*"', cache)


def test_idle_server_uses_little_memory_and_no_cpu(server):
    server.ask("What colour is it?", ask_video(0).urls)
    pids = [server.process.pid, *descendants(server.process.pid)]
    # Shared pages count once over all processes.
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    assert sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")) < 2 << 30

    def cpu_seconds() -> float:
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split() for pid in pids]
        return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")

    def check() -> bool:
        before, begun = cpu_seconds(), time.monotonic()
        time.sleep(3)
        return cpu_seconds() - before <= 0.01 * (time.monotonic() - begun)

    eventually(check)  # what ends only then, such as a collection of garbage, is not there all the time


def test_only_the_http_port_listens_beyond_this_host(server):
    pids, listeners = server.pids().values(), [(port, inode) for port, remote, inode in tcp_sockets() if not remote]
    listening = [port for port, inode in listeners if any(has_socket(pid, inode) for pid in pids)]
    assert listening == [server.address[1]]


@pytest.fixture(scope="module")
def impatient() -> Iterator[RunningServer]:
    """`seen` is what /health said all through its start, and the request after the first 200."""
    with socket.socket() as kept:  # from other programs, until the server has it
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("127.0.0.1", 0))
        port, seen = kept.getsockname()[1], list[str]()
        server = RunningServer("-tp", "2", "--health-timeout", "1.5", "--port", str(port))
        server.url, server.model, server.seen = f"http://127.0.0.1:{port}/v1", "mini-engine-demo", seen

        def watch() -> None:
            deadline = time.monotonic() + START_SECONDS
            while time.monotonic() < deadline and seen[-1:] != ["200"]:
                try:
                    seen.append(str(server.get("/health").status))
                except OSError:
                    seen.append("refused")
                time.sleep(0.02)
            reply = ClientRequest(server, None, TEXT, max_tokens=2).reply()
            seen.append(f"served {reply['usage']['completion_tokens']}")

        watcher = threading.Thread(target=watch)
        watcher.start()
        with server:
            watcher.join()
            yield server


def test_health_is_not_200_before_a_request_can_be_served(impatient: RunningServer):
    *starting, healthy, served = impatient.seen
    assert starting and {*starting} <= {"refused", "503"} and (healthy, served) == ("200", "served 2")


@pytest.mark.parametrize("victim", ["worker 0.0", "core 0", "worker 0.1"])
def test_health_is_503_while_a_process_is_stopped(impatient, victim):
    """In an idle engine, where the second is asked for the headers alone, and in a busy one."""

    def health(path: str = "/health", method: str = "GET") -> tuple[int, str]:
        response = impatient.get(path, method=method)
        return response.status, response.body

    request = ClientRequest(impatient, None, TEXT, **ENDLESS) if victim == "worker 0.1" else None
    if request is not None:
        request.read_events(1)
    eventually(lambda: health() == health(method="HEAD") == (200, ""))
    with stopped(impatient.pids()[victim]):
        if victim == "core 0":
            assert health(method="HEAD") == (503, "")
        else:
            status, body = health()
            assert status == 503 and json.loads(body)["error"]["code"] == "timeout"
        assert health("/live") == (200, "")
    eventually(lambda: health() == (200, ""))
    if request is not None:
        request.read_events(3)
        request.hang_up()


def test_everything_dies_with_the_supervisor(impatient):
    family = descendants(impatient.process.pid)
    impatient.process.kill()
    impatient.process.wait()
    impatient.assert_nothing_left(family)


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
