"""Children that die, and those that do not; restarts, and the end of a server."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator

import pytest

from mini_engine.config import EngineConfig
from mini_engine.launch import process_group, supervisor
from mini_engine.launch.generation import Generation, LaunchContext
from mini_engine.launch.listeners import bind_listeners
from mini_engine.launch.liveness import Liveness
from mini_engine.launch.process_group import ChildProcess, Gone, ProcessGroup
from mini_engine.launch.supervisor import API_RESTARTS_IN_A_ROW, GenerationOver, Restarts, Stop, Supervisor
from mini_engine.messages import MediaCachePlan
from tests.launch.conftest import end_unkillable, make_unkillable

DEATH_SECONDS = 1.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(process_group, "DEATH_SECONDS", DEATH_SECONDS)


@pytest.fixture
def one(processes, runtime) -> Iterator[Supervisor]:
    """In its second generation, so that one start that fails is followed by another."""
    made = Supervisor(EngineConfig(restart_engine=5))
    made.listeners = bind_listeners(EngineConfig(host="127.0.0.1", port=0))
    made.processes, made.liveness = processes, Liveness(made.config, processes)
    plan = MediaCachePlan("off", 0, "")
    made.context = LaunchContext(made.config, "", plan, runtime, made.listeners, processes)
    made.generation = Generation(2, made.context)
    made.generation.announced = True
    yield made
    made.listeners[0].close()


def wait_for_deaths(children: list[ChildProcess]) -> None:
    for child in children:
        assert select.select([child.pidfd], [], [], 60)[0]


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


# --- the process group ------------------------------------------------------------------------------------------------


def test_a_killed_process_that_does_not_die_is_given_up(processes, monkeypatch):
    mortal = processes.start("worker", "sleeps", 1)
    undying = make_unkillable(processes.start("core", "sleeps", 1), monkeypatch)
    begun = time.monotonic()
    for child in (mortal, undying):
        child.kill()
    seen: list[Gone] = []
    while len(seen) < 2:
        seen += processes.wait(60)
    assert seen[0] == Gone(mortal, "died: killed by SIGKILL", by_signal=True)
    assert (seen[1].child, seen[1].reaped) == (undying, False) and "has not exited 1 s after SIGKILL" in seen[1].how
    assert time.monotonic() - begun >= DEATH_SECONDS and not processes.children
    end_unkillable(undying)


def test_of_deaths_found_together_the_killed_process_comes_first(processes: ProcessGroup):
    follower, killed = processes.start("worker", "fails", 1), processes.start("worker", "sleeps", 1)
    killed.kill()
    wait_for_deaths([follower, killed])
    assert [(gone.child, gone.how) for gone in processes.wait(60)] == [
        (killed, "died: killed by SIGKILL"), (follower, "died: exit status 1"),
    ]  # fmt: skip


def test_a_successor_counts_in_the_files_of_a_dead_api_server_whose_gauges_are_forgotten(processes, runtime):
    first, second = [processes.start("api", "sleeps", 1) for _ in range(2)]
    assert (first.metrics_number, second.metrics_number) == (0, 1)
    files = {name: runtime / "metrics" / name for name in ("counter_0.db", "gauge_livesum_0.db", "gauge_livesum_1.db")}
    for file in files.values():
        file.write_bytes(bytes(range(1, 65)))
    first.kill()
    processes.wait(60)
    left = {name for name, file in files.items() if file.read_bytes() == bytes(range(1, 65))}
    assert left == {"counter_0.db", "gauge_livesum_1.db"}
    assert [processes.start("api", "sleeps", 2).metrics_number for _ in range(2)] == [0, 2]


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_an_engine_process_that_does_not_die_ends_the_server(number, one, processes, monkeypatch, caplog):
    undying: list[ChildProcess] = []

    def start(self: Generation) -> None:
        processes.start("core", "exits", self.number)
        undying.append(make_unkillable(processes.start("worker", "sleeps", self.number), monkeypatch))

    monkeypatch.setattr(Generation, "start", start)
    one.generation = Generation(number, one.context)
    assert one.serve_until_stopped() == 1
    assert "worker sleeps" in messages(caplog)[-1] and "has not exited" in messages(caplog)[-1]
    for child in undying:
        end_unkillable(child)


@pytest.mark.parametrize("first", ["api", "core"])
def test_connections_queued_at_an_api_server_that_dies_with_its_engine_are_reset_at_once(first, one, processes, caplog):
    """And both deaths are in the log, in whichever order they are found."""
    listener = one.listeners[0]
    listener.listen()
    with socket.create_connection(listener.getsockname()) as client:
        children = [processes.start(role, "0", 2) for role in sorted(("api", "core"), key=lambda role: role != first)]
        for child in children:
            child.serving = child.started = True
        wait_for_deaths(children)
        with pytest.raises(GenerationOver):
            one.poll()
        one.end_generation("its engine has died")
        client.settimeout(60)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert all(any(line.startswith(f"{role} 0 (pid ") for line in messages(caplog)) for role in ("api", "core"))


def test_an_api_server_that_dies_before_it_serves_again_and_again_ends_the_server(one, caplog):
    one.generation.start_api_server(0)
    with pytest.raises(Stop) as stop:
        while True:
            one.poll()
    assert stop.value.status == 1 and caplog.text.count("died: exit status 0") == API_RESTARTS_IN_A_ROW
    assert f"so did the {API_RESTARTS_IN_A_ROW - 1} before it" in stop.value.last_line


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("served", [False, True])
def test_restarts_have_a_limit_and_pauses_that_double(served):
    assert Restarts(0).next_pause() is None
    now = [1000.0]
    restarts = Restarts(8, lambda: now[0])
    assert [restarts.next_pause() for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, None]
    if served:  # else the time goes by in a start
        restarts.serving()
    now[0] += supervisor.HEALTHY_SECONDS
    assert restarts.next_pause() == (1 if served else None)
