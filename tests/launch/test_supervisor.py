"""Children that die, hang, or do not die; restarts, and the end of a server."""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from mini_engine.config import EngineConfig
from mini_engine.launch import child as child_module
from mini_engine.launch import process_monitor, supervisor
from mini_engine.launch.child import ChildSpec
from mini_engine.launch.listeners import bind_listeners
from mini_engine.launch.process_monitor import TURNS, ChildProcess, ChildState, ProcessGroup
from mini_engine.launch.server_generation import ServerGeneration
from mini_engine.launch.supervisor import API_RESTARTS_IN_A_ROW, GenerationOver, Stop, Supervisor
from mini_engine.messages import Init, MediaCachePlan, Role
from tests.support.processes import eventually


def run_role(spec: ChildSpec) -> None:
    """In the place of a role, in a child: exit, sleep, spin or read, by the index."""
    behaviour = spec.index.rpartition(".")[2]  # behind the engine's number, if there is one
    if behaviour == "fails":
        sys.exit(1)
    if behaviour == "sleeps":
        time.sleep(600)
    if behaviour == "reads":
        sys.exit(int(os.read(0, 10)))
    while behaviour == "spins":
        pass


@pytest.fixture
def make_processes(runtime, monkeypatch) -> Iterator[Callable[[EngineConfig], ProcessGroup]]:
    """A group with this configuration, whose children run `run_role`. The test's own signals are left alone."""
    monkeypatch.setattr(child_module, "run_role", run_role)
    no_signals = os.eventfd(0)
    made: list[ProcessGroup] = []

    def make(config: EngineConfig) -> ProcessGroup:
        made.append(ProcessGroup(config, runtime, no_signals))
        return made[0]

    yield make
    for group in made:
        for child in group.children:
            child.kill()
            child.reap()
        group.close()
    os.close(no_signals)


@pytest.fixture
def processes(make_processes) -> ProcessGroup:
    return make_processes(EngineConfig())


@pytest.fixture
def server(processes, runtime) -> Iterator[Supervisor]:
    """In its second generation, so that a start that fails is followed by another."""
    config = EngineConfig(restart_engine=5)
    listeners = bind_listeners(EngineConfig(host="127.0.0.1", port=0))
    generation = ServerGeneration(2, config, "", MediaCachePlan("off", 0, ""), runtime, listeners, processes)
    generation.serving_since = time.monotonic()
    yield Supervisor(generation)
    listeners[0].close()


def start(group: ProcessGroup, role: Role, index: str, debug: bool = False) -> ChildProcess:
    init = Init(EngineConfig(debug=debug), "", "", [], [], [], MediaCachePlan("off", 0, ""))
    return group.start(ChildSpec(role, index, init, group.endpoint))


def wait_for_deaths(children: list[ChildProcess]) -> None:
    for child in children:
        assert select.select([child.pidfd], [], [], 60)[0]


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


# --- the process group ------------------------------------------------------------------------------------------------


def test_of_deaths_found_together_the_killed_process_comes_first(processes: ProcessGroup):
    follower, killed = start(processes, "worker", "fails"), start(processes, "worker", "sleeps")
    killed.kill()
    wait_for_deaths([follower, killed])
    texts = [gone.text.partition(" (others")[0] for gone in processes.wait(60)]
    assert texts == [f"{killed.title} died: killed by SIGKILL", f"{follower.title} died: exit status 1"]


def test_a_debugger_in_a_child_reads_the_input_of_the_server(processes):
    read_end, write_end = os.pipe()
    own = os.dup(0)
    os.dup2(read_end, 0)
    start(processes, "worker", "reads", debug=True)
    os.dup2(own, 0)
    os.write(write_end, b"7")
    (gone,) = processes.wait(60)
    assert gone.text.endswith("exit status 7")
    for fd in (read_end, write_end, own):
        os.close(fd)


def test_a_successor_counts_in_the_files_of_a_dead_api_server_whose_gauges_are_forgotten(processes, runtime):
    first, second = [start(processes, "api", "sleeps") for _ in range(2)]
    assert (first.metrics_number, second.metrics_number) == (0, 1)
    files = {name: runtime / "metrics" / name for name in ("counter_0.db", "gauge_livesum_0.db", "gauge_livesum_1.db")}
    for file in files.values():
        file.write_bytes(bytes(range(1, 65)))
    first.kill()
    processes.wait(60)
    left = {name for name, file in files.items() if file.read_bytes() == bytes(range(1, 65))}
    assert left == {"counter_0.db", "gauge_livesum_1.db"}
    assert [start(processes, "api", "sleeps").metrics_number for _ in range(2)] == [0, 2]


# --- hanging processes ------------------------------------------------------------------------------------------------


def wait_for_a_kill(group: ProcessGroup) -> int:
    """Returns how many turns, or parts of one, it took."""
    children, turns = [*group.children], 0
    while not any(child.state is ChildState.KILLED for child in children):
        group.wait()
        turns += 1
    return turns


def test_an_unresponsive_process_is_killed_at_its_timeout(make_processes):
    """It is pinged first one turn after it was seen alive, so that the time it had is the time-out."""
    group, begun = make_processes(EngineConfig(collective_timeout=2, health_timeout=1)), time.monotonic()
    child = start(group, "core", "0.sleeps")
    child.advance(ChildState.SERVING)
    assert wait_for_a_kill(group) <= TURNS + 3 and time.monotonic() - begun > 2
    assert child.kill_reason == "it was unresponsive for 2 s (--collective-timeout)"


@pytest.mark.parametrize(("states", "killed"), [("SST", "T"), ("SRT", "RT"), ("SSS", "SSS")])
def test_of_processes_that_are_not_ready_those_that_sleep_are_not_killed(states, killed, make_processes, caplog):
    group = make_processes(EngineConfig(startup_timeout=1.5))
    children = [start(group, "worker", "spins" if state == "R" else "sleeps") for state in states]
    if killed == "RT":  # the one that sleeps has been late for a turn when those that it waits for are
        children[0].turns += 1
    waiting = start(group, "api", "sleeps")  # for the others
    waiting.advance(ChildState.READY)
    for child, state in zip(children, states, strict=True):
        if state == "T":
            os.kill(child.pid, signal.SIGSTOP)
        eventually(lambda child=child, state=state: child.proc_state == state)
    wait_for_a_kill(group)
    assert "".join(state for child, state in zip(children, states, strict=True) if child.kill_reason) == killed
    assert waiting.state is ChildState.READY
    named = [f"{child.spec.name} {state}" for child, state in zip(children, states, strict=True)]
    assert f"(state in proc(5): {', '.join(named)})" in caplog.text


def test_no_process_is_killed_for_a_pause_of_the_supervisor(processes, monkeypatch):
    """As when it was stopped, or the machine suspended: it has not read the answers to its pings."""
    child, clock = start(processes, "core", "0.sleeps"), time.monotonic
    child.advance(ChildState.SERVING)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000)
    processes.wait(0)
    assert child.state is ChildState.SERVING and child.turns == 1


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_deaths(monkeypatch):
    """A killed process has half a second to exit."""
    monkeypatch.setattr(process_monitor, "DEATH_SECONDS", 0.5)


@pytest.mark.parametrize("role", ["api", "worker"])
@pytest.mark.usefixtures("short_deaths")  # before the process group is made
def test_a_process_that_does_not_die_ends_the_server(role, server, processes, monkeypatch, caplog):
    """As one that waits in the kernel for a device: SIGKILL does not end it."""
    undying = start(processes, role, "sleeps")
    with monkeypatch.context() as patched:
        patched.setattr(undying, "_signal", lambda _: None)
        assert server.run() == 1
    assert f"ended with status 1: {undying.title} has not exited after SIGKILL" in messages(caplog)[-1]


@pytest.mark.parametrize("first", ["api", "core"])
def test_connections_queued_at_an_api_server_that_dies_with_its_engine_are_reset(first, server, processes, caplog):
    """And both deaths are in the log, in whichever order they are found."""
    listener = server.listeners[0]
    listener.listen()
    with socket.create_connection(listener.getsockname()) as client:
        children = [start(processes, role, "0") for role in sorted(("api", "core"), key=lambda role: role != first)]
        for child in children:
            child.advance(ChildState.SERVING)
        wait_for_deaths(children)
        with pytest.raises(GenerationOver):
            server.poll()
        server.end_generation("its engine has died")
        client.settimeout(60)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert all(any(line.startswith(f"{role} 0 (pid ") for line in messages(caplog)) for role in ("api", "core"))


def test_an_api_server_that_dies_before_it_serves_again_and_again_ends_the_server(server, processes, caplog):
    """One that has served does not count, even if it was killed while it hung."""
    hung = start(processes, "api", "0")
    hung.advance(ChildState.SERVING)
    hung.kill("it hung")
    with pytest.raises(Stop) as stop:
        while True:
            server.poll()
    assert stop.value.status == 1 and "was killed: it hung" in caplog.text
    assert caplog.text.count("died: exit status 0") == API_RESTARTS_IN_A_ROW
    assert f"so did the {API_RESTARTS_IN_A_ROW - 1} before it" in stop.value.last_line


def test_restarts_have_a_limit_and_pauses_that_double(server, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.01)
    server.generation.serving_since -= supervisor.HEALTHY_SECONDS
    server.restarts = 3
    for _ in range(5):
        server.end_generation("it died")
    with pytest.raises(Stop, match="ended with status 1: it died"):
        server.end_generation("it died")
    seconds = [0.01, 0.02, 0.04, 0.08, 0.16]
    assert messages(caplog) == [
        f"restart {number} of 5 in {pause} s, since it died" for number, pause in enumerate(seconds, 1)
    ]
