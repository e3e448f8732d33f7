"""The processes of a running server: names, imports, resource use, and exit."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import openai
import pytest

from tests.e2e.asked import ask_video
from tests.e2e.processes import descendants, has_socket
from tests.e2e.running_server import START_SECONDS, RunningServer
from tests.e2e.waiting import eventually


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def proportional_bytes(pid: int) -> int:
    """Resident memory, where shared pages count once over all processes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def test_processes_import_only_what_they_need(server):
    maps = {name: Path(f"/proc/{pid}/maps").read_text() for name, pid in server.pids().items()}
    assert {name for name, text in maps.items() if "libtorch" in text} == {"api 0", "worker 0.0"}
    assert "libav" not in maps["api 0"]  # FFmpeg is loaded in decoders only
    assert maps.keys() == {"api 0", "worker 0.0", "core 0", "supervisor"}


def test_log_names_model_address_and_transport(server):
    serving = "supervisor | serving mini-engine-demo at http://127.0.0.1"
    for part in (serving, "reach engine 0 by torch_shm", "KV blocks of 16 tokens"):
        assert part in server.log


def test_idle_server_uses_little_memory_and_no_cpu(server):
    server.ask("What colour is it?", ask_video(0).urls)
    pids = [server.process.pid, *descendants(server.process.pid)]
    assert sum(map(proportional_bytes, pids)) < 2 << 30

    def check() -> bool:
        before, begun = sum(map(cpu_seconds, pids)), time.monotonic()
        time.sleep(5)
        return sum(map(cpu_seconds, pids)) - before <= 0.01 * (time.monotonic() - begun)

    time.sleep(1)
    eventually(check)  # what ends only then, such as a collection of garbage, is not there all the time


def test_only_the_http_port_listens_beyond_this_host(server):
    listening = []
    tables = [path for name in ("tcp", "tcp6") if (path := Path("/proc/net", name)).exists()]  # not all have IPv6
    for table in tables:
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and any(has_socket(pid, int(fields[9])) for pid in server.pids().values()):
                listening.append(int(fields[1].rpartition(":")[2], 16))
    assert listening == [int(server.url.rpartition(":")[2].removesuffix("/v1"))]


@pytest.fixture(scope="module")
def watched():
    """A server whose /health was asked all through its start, and the answers. The first 200 is followed by a request
    at once."""
    seen: list[str] = []
    with socket.socket() as kept:  # from other programs, until the server has it
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("127.0.0.1", 0))
        server = RunningServer("-tp", "2", "--port", str(kept.getsockname()[1]))
        server.url = f"http://127.0.0.1:{kept.getsockname()[1]}/v1"

        def watch() -> None:
            deadline = time.monotonic() + START_SECONDS
            while time.monotonic() < deadline and seen[-1:] != ["200"]:
                try:
                    seen.append(str(server.get("/health").status))
                except OSError:
                    seen.append("refused")
                time.sleep(0.02)
            with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
                body = [{"role": "user", "content": "hello"}]
                reply = client.chat.completions.create(model="mini-engine-demo", messages=body, max_tokens=2)
                seen.append(f"served {reply.usage.completion_tokens}")

        watcher = threading.Thread(target=watch)
        watcher.start()
        with server:
            watcher.join()
            yield server, seen


def test_health_is_not_200_before_a_request_can_be_served(watched):
    _, seen = watched
    assert seen[0] != "200" and seen[-2:] == ["200", "served 2"]
    assert set(seen[:-2]) <= {"refused", "503"}


def test_everything_dies_with_the_supervisor(watched):
    server, _ = watched
    family = descendants(server.process.pid)
    server.process.kill()
    server.process.wait()
    server.assert_nothing_left(family)


def test_hung_rank_fails_requests_and_stops_the_server():
    with RunningServer("-tp", "2", "--collective-timeout", "6") as server:
        one = ask_video(3)
        assert server.ask(one.text, one.urls) == one.answer
        family = descendants(server.process.pid)
        os.kill(server.pids()["worker 0.1"], signal.SIGSTOP)
        with pytest.raises(openai.APIStatusError) as caught:
            server.ask("hello", [])
        assert caught.value.status_code in (500, 503)
        assert server.process.wait(60) == 1
        server.assert_nothing_left(family)
        assert "--collective-timeout)" in server.log and "Traceback" not in server.log
