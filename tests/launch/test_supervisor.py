"""Children that die, and those that do not; restarts, and the end of a server."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from mini_engine.config import EngineConfig
from mini_engine.launch import process_group, supervisor
from mini_engine.launch.generation import Generation, Ground
from mini_engine.launch.listeners import bind_listeners
from mini_engine.launch.liveness import Liveness
from mini_engine.launch.process_group import ChildProcess, Gone, ProcessGroup, Received
from mini_engine.launch.supervisor import API_RESTARTS_IN_A_ROW, GenerationOver, Restarts, Stop, Supervisor
from mini_engine.messages import MediaCachePlan, Serving
from tests.launch.conftest import make_unkillable, wait_for_state

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
    made.ground = Ground(made.config, "", plan, runtime, made.listeners, processes)
    made.generation = Generation(2, made.ground)
    yield made
    made.listeners[0].close()


def serve_in(made: Supervisor, number: int, children: list[ChildProcess]) -> None:
    """As if the children of this generation had served, until they died."""
    made.generation = Generation(number, made.ground)
    made.generation.announced = True
    for child in children:
        child.serving = child.started = True
        assert select.select([child.pidfd], [], [], 60)[0]


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


# --- the process group ------------------------------------------------------------------------------------------------


def test_a_killed_process_that_does_not_die_is_given_up(processes):
    mortal, undying = processes.start("worker", "sleeps", 1), make_unkillable(processes.start("core", "sleeps", 1))
    wait_for_state(undying, "S")
    begun = time.monotonic()
    for child in (mortal, undying):
        child.kill()
    seen: list = []
    while len(seen) < 2:
        seen += processes.wait(60)
    assert seen == [
        Gone(mortal, "died: killed by SIGKILL", by_signal=True),
        Gone(undying, "does not die 1 s after it was killed (state in proc(5): S)", by_signal=False, reaped=False),
    ]
    assert time.monotonic() - begun >= DEATH_SECONDS
    assert not processes.children


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
    def start(self: Generation) -> None:
        processes.start("core", "exits", self.number)
        make_unkillable(processes.start("worker", "sleeps", self.number))

    monkeypatch.setattr(Generation, "start", start)
    one.generation = Generation(number, one.ground)
    assert one._serve_until_stopped() == 1
    assert "worker sleeps" in messages(caplog)[-1] and "does not die" in messages(caplog)[-1]


@pytest.mark.parametrize("first", ["api", "core"])
def test_connections_queued_at_an_api_server_that_dies_with_its_engine_are_reset_at_once(first, one, processes, caplog):
    """And both deaths are in the log, in whichever order they are found."""
    listener = one.listeners[0]
    listener.listen()
    with socket.create_connection(listener.getsockname()) as client:
        roles = sorted(("api", "core"), key=lambda role: role != first)
        serve_in(one, 1, [processes.start(role, "0", 1) for role in roles])
        with pytest.raises(GenerationOver):
            one._poll(60)
        one._end_generation("its engine has died")
        client.settimeout(60)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(listener.getsockname())
        listener.listen()  # as a successor does
        socket.create_connection(listener.getsockname()).close()
    assert all(any(line.startswith(f"{role} 0 (pid ") for line in messages(caplog)) for role in ("api", "core"))


def test_a_port_that_is_left_twice_is_joined_again(one):
    """As when the successor of a dead API server dies while it loads."""
    listener = one.listeners[0]
    for _ in range(2):
        listener.listen()
        for _ in range(3):
            one._leave_port(0)
    listener.listen()
    with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as server:
        client.sendall(b"?")
        assert server.recv(1) == b"?"


def test_of_deaths_found_together_the_killed_process_is_named_as_the_cause(one, processes, caplog):
    follower, killed = processes.start("worker", "fails", 1), processes.start("worker", "sleeps", 1)
    killed.kill()
    serve_in(one, 1, [follower, killed])
    with pytest.raises(GenerationOver, match=r"worker sleeps .* killed by SIGKILL"):
        one._poll(60)
    one._end_generation("its engine has died")
    assert "worker fails" in caplog.text and "exit status 1" in caplog.text


def test_the_line_of_a_death_has_the_states_of_the_rest_of_its_engine(one, processes, caplog):
    stopped, other = processes.start("core", "0.sleeps", 2), processes.start("core", "1.sleeps", 2)
    wait_for_state(stopped, "S")
    os.kill(stopped.pid, signal.SIGSTOP)
    wait_for_state(stopped, "T")
    processes.start("worker", "0.fails", 2)
    one.generation.announced = True
    with pytest.raises(GenerationOver):
        while True:
            one._poll(60)
    pattern = r"worker 0.fails \(pid \d+\) died: exit status 1 \(others in proc\(5\): core 0.sleeps T\)"
    assert re.search(pattern, caplog.text) and other in processes.children


# --- replacements -----------------------------------------------------------------------------------------------------


def api_deaths_until_the_end(one: Supervisor, caplog) -> tuple[int, str]:
    """How many API servers have died, and the last line of the log."""
    with pytest.raises(Stop) as stop:
        while True:
            one._poll(60)
    assert stop.value.status == 1
    return caplog.text.count("died: exit status 0"), stop.value.last_line


def test_an_api_server_that_dies_before_it_serves_again_and_again_ends_the_server(one, caplog):
    one.generation.announced = True
    one.generation.fill(0)
    deaths, last_line = api_deaths_until_the_end(one, caplog)
    assert deaths == API_RESTARTS_IN_A_ROW
    assert "status 1: api 0 " in last_line and f"so did the {deaths - 1} before it" in last_line


def test_an_api_server_that_serves_resets_the_count(one, processes, caplog):
    one.generation.announced = True
    one.generation.fill(0)
    one.generation.early_deaths = API_RESTARTS_IN_A_ROW - 1
    one._handle(Received(processes.api_servers()[0], Serving()))  # so its own death is none before it served
    assert api_deaths_until_the_end(one, caplog)[0] == 1 + API_RESTARTS_IN_A_ROW


def test_an_api_server_that_cannot_be_started_is_tried_again_after_a_pause(one, monkeypatch, caplog):
    tries: list[float] = []

    def fill(slot: int) -> None:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise OSError("no process")

    monkeypatch.setattr(one.generation, "fill", fill)
    monkeypatch.setattr(supervisor, "FILL_PAUSE_SECONDS", 0.5)
    one.generation.vacant.add(0)
    while one.generation.vacant:
        one._poll(None)
    assert len(tries) == 3 and all(then - now >= 0.5 for now, then in zip(tries, tries[1:], strict=False))
    assert caplog.text.count("cannot be started now") == 2


# --- restarts and the end ---------------------------------------------------------------------------------------------


def test_restarts_have_a_limit_and_pauses_that_double():
    assert Restarts(0).next_pause() is None
    restarts = Restarts(8)
    assert [restarts.next_pause() for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, None]


@pytest.mark.parametrize(("served", "pause"), [(False, None), (True, 1.0)])
def test_engines_that_served_long_enough_reset_the_count(served, pause):
    now = [1000.0]
    restarts = Restarts(1, lambda: now[0])
    restarts.next_pause()
    if served:  # else the time went by in a start
        restarts.serving()
    now[0] += supervisor.HEALTHY_SECONDS
    assert restarts.next_pause() == pause


def test_a_stop_does_not_wait_for_a_process_that_does_not_die(one, processes, caplog):
    children = [processes.start(role, "sleeps", 1) for role in ("core", "worker")]
    make_unkillable(children[1])
    stop = Stop(0)
    one._stop_processes(stop)
    assert [gone.child for gone in stop.undying] == [children[1]] and not processes.children
    assert "does not die" in caplog.text


@pytest.mark.parametrize(("interrupts", "warnings"), [(0, 1), (1, 0)])
def test_an_api_server_that_does_not_exit_when_it_is_asked_to_is_named(
    interrupts, warnings, one, processes, monkeypatch, caplog
):
    monkeypatch.setattr(supervisor, "API_STOP_SECONDS", 0.0)
    child = processes.start("api", "sleeps", 1)
    one._stop_processes(Stop(0, interrupts=interrupts))
    assert caplog.text.count(f"{child.title} is killed: it has not exited within 0 s") == warnings


def test_a_stop_lasts_no_longer_than_its_api_servers(one, processes: ProcessGroup):
    processes.start("api", "exits", 1).serving = True
    begun = time.monotonic()
    one._stop_processes(Stop(0, drain_seconds=600))
    assert time.monotonic() - begun < 60 and not processes.children
