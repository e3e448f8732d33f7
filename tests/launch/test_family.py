"""Children that die, and those that do not."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from mini_engine.child_process import ChildProcess
from mini_engine.config import EngineConfig
from mini_engine.launch import family as family_module
from mini_engine.launch import stopping
from mini_engine.launch import supervisor as supervisor_module
from mini_engine.launch.family import Died, Family, Said, Undying
from mini_engine.launch.generation import Generation, Ground
from mini_engine.launch.listeners import bind_listeners
from mini_engine.launch.liveness import Liveness
from mini_engine.launch.stopping import Stopping
from mini_engine.launch.supervisor import API_RESTARTS_IN_A_ROW, GenerationOver, Stop, Supervisor
from mini_engine.messages import MediaCachePlan, Serving
from tests.e2e.barriers import eventually
from tests.launch.conftest import make_unkillable, until_in_state

DEATH_SECONDS = 1.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(family_module, "DEATH_SECONDS", DEATH_SECONDS)


def events(family: Family, number: int) -> list:
    seen: list = []
    while len(seen) < number:
        seen += family.wait(60)
    return seen


def test_who_is_killed_and_does_not_die_is_given_up(family):
    mortal, undying = family.start("worker", "sleeps", 1), make_unkillable(family.start("core", "sleeps", 1))
    until_in_state(undying, "S")
    begun = time.monotonic()
    for child in (mortal, undying):
        child.kill()
    assert events(family, 2) == [
        Died(mortal, "died: killed by SIGKILL", True),
        Undying(undying, "does not die 1 s after it was killed (state in proc(5): S)"),
    ]
    assert time.monotonic() - begun >= DEATH_SECONDS
    assert not family.children
    assert undying.output.closed


def test_who_hangs_and_does_not_die_is_killed_once(family, caplog):
    hung = make_unkillable(family.start("core", "sleeps", 1))
    hung.serving, hung.turns = True, 1000
    liveness = Liveness(EngineConfig(), family)
    for _ in range(3):
        liveness._next = 0.0
        liveness.turn()
    assert caplog.text.count("is killed: it gave no sign of life") == 1


def test_an_api_server_counts_on_in_the_files_of_a_dead_one_whose_gauges_are_forgotten(family, runtime):
    first, second = [family.start("api", "sleeps", 1) for _ in range(2)]
    assert (first.ledger, second.ledger) == (0, 1)
    files = {name: runtime / "metrics" / name for name in ("counter_0.db", "gauge_livesum_0.db", "gauge_livesum_1.db")}
    for file in files.values():
        file.write_bytes(bytes(range(1, 65)))
    first.kill()
    events(family, 1)
    left = {name for name, file in files.items() if file.read_bytes() == bytes(range(1, 65))}
    assert left == {"counter_0.db", "gauge_livesum_1.db"}
    assert files["gauge_livesum_0.db"].read_bytes()[:8] == bytes(8) and files["gauge_livesum_0.db"].stat().st_size == 64
    assert [family.start("api", "sleeps", 2).ledger for _ in range(2)] == [0, 2]


def test_a_stop_waits_for_nobody_who_does_not_die(family, caplog):
    config = EngineConfig()
    children = [family.start(role, "sleeps", 1) for role in ("core", "worker")]
    make_unkillable(children[1])
    undying = Stopping(family, Liveness(config, family), 0).run(0.0)
    assert [event.child for event in undying] == [children[1]] and not family.children
    assert "does not die" in caplog.text


@pytest.mark.parametrize(("interrupts", "warnings"), [(0, 1), (1, 0)])
def test_an_api_server_that_does_not_end_when_it_is_told_to_is_named(interrupts, warnings, family, monkeypatch, caplog):
    monkeypatch.setattr(stopping, "API_STOP_SECONDS", 0.0)
    child = family.start("api", "sleeps", 1)
    assert not Stopping(family, Liveness(EngineConfig(), family), interrupts).run(0.0)
    assert caplog.text.count(f"{child.title} is killed: it has not ended within 0 s") == warnings


def supervisor(family, runtime) -> Supervisor:
    """In its second generation, so that one start that fails is followed by another."""
    made = Supervisor(EngineConfig(restart_engine=5))
    made.listeners, made.family, made.liveness = [], family, Liveness(made.config, family)
    made.ground = Ground(made.config, "", MediaCachePlan("off", 0, ""), runtime, [], family)
    made.generation = Generation(2, made.ground)
    return made


@pytest.mark.parametrize("number", [1, 2])
def test_the_server_ends_if_a_dead_engine_has_a_process_that_does_not_die(number, family, runtime, monkeypatch, caplog):
    def start(self: Generation) -> None:
        family.start("core", "ends", self.number)
        make_unkillable(family.start("worker", "sleeps", self.number))

    monkeypatch.setattr(Generation, "start", start)
    one = supervisor(family, runtime)
    one.generation = Generation(number, one.ground)
    assert one._serve_until_stopped() == 1
    last = caplog.records[-1].getMessage()
    assert "worker sleeps" in last and "does not die" in last


def dead_together(one: Supervisor, children: list) -> None:
    """They served, and the next look finds them all dead."""
    one.generation = Generation(1, one.ground)
    one.generation.announced = True
    for child in children:
        child.serving = child.started = True
        assert select.select([child.pidfd], [], [], 60)[0]


@pytest.mark.parametrize("first", ["api", "core"])
def test_who_waits_in_line_at_an_api_server_that_dies_with_its_engine_is_told_at_once(first, family, runtime, caplog):
    """And both deaths are in the log, in whichever order they are found."""
    one = supervisor(family, runtime)
    one.listeners = bind_listeners(EngineConfig(host="127.0.0.1", port=0))
    one.listeners[0].listen()
    with one.listeners[0], socket.create_connection(one.listeners[0].getsockname()) as client:
        dead_together(one, [family.start(role, "0", 1) for role in sorted(("api", "core"), key=lambda it: it != first)])
        with pytest.raises(GenerationOver):
            one._poll(60)
        one._end_generation("its engine has died")
        client.settimeout(60)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(one.listeners[0].getsockname())
        one.listeners[0].listen()  # as a successor does
        socket.create_connection(one.listeners[0].getsockname()).close()
    said = [record.getMessage() for record in caplog.records]
    assert all(any(line.startswith(f"{role} 0 (pid ") for line in said) for role in ("api", "core")), said


@pytest.fixture
def one_that_serves(family, runtime) -> Iterator[Supervisor]:
    """Its one API server ends as soon as it has begun, as does each that takes its place."""
    one = supervisor(family, runtime)
    one.listeners += bind_listeners(EngineConfig(host="127.0.0.1", port=0))
    one.ground.listeners.extend(one.listeners)
    one.generation = Generation(1, one.ground)
    one.generation.announced = True
    one.generation.fill(0)
    yield one
    one.listeners[0].close()


def deaths_until_the_end(one: Supervisor, caplog) -> tuple[int, str]:
    """How many API servers have died, and the server's last words."""
    before = caplog.text.count("died: exit status 0")
    with pytest.raises(Stop) as stop:
        while True:
            one._poll(60)
    assert stop.value.status == 1
    return caplog.text.count("died: exit status 0") - before, stop.value.last_words


def test_an_api_server_that_dies_before_it_serves_again_and_again_ends_the_server(one_that_serves, caplog):
    deaths, last_words = deaths_until_the_end(one_that_serves, caplog)
    assert deaths == API_RESTARTS_IN_A_ROW
    assert "status 1: api 0 " in last_words and f"so did the {deaths - 1} before it" in last_words


def test_one_that_serves_between_them_begins_a_new_row(one_that_serves, family, caplog):
    one_that_serves.generation.early_deaths = API_RESTARTS_IN_A_ROW - 1
    one_that_serves._handle(Said(family.api_servers()[0], Serving()))  # its own death is none before it served
    deaths, _ = deaths_until_the_end(one_that_serves, caplog)
    assert deaths == 1 + API_RESTARTS_IN_A_ROW


def test_a_line_that_is_left_twice_is_joined_again_all_the_same(family, runtime):
    """As when the successor of a dead API server dies while it loads."""
    one = supervisor(family, runtime)
    one.listeners = bind_listeners(EngineConfig(host="127.0.0.1", port=0))
    with one.listeners[0] as listener:
        for _ in range(2):
            listener.listen()
            for _ in range(3):
                one._leave_line(0)
        listener.listen()
        with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as server:
            client.sendall(b"?")
            assert server.recv(1) == b"?"
            server.sendall(b"!")
            assert client.recv(1) == b"!"


def test_the_line_of_a_dead_api_server_is_left_before_its_death_is_in_the_log(family, runtime, monkeypatch):
    """As when its engine has died before it: who reads of it may count on that."""
    one = supervisor(family, runtime)
    one.listeners = bind_listeners(EngineConfig(host="127.0.0.1", port=0))
    accepting: list[int] = []
    with one.listeners[0] as listener:
        listener.listen()
        dead_together(one, [family.start("api", "0", 1)])
        one.generation = Generation(2, one.ground)
        look = lambda *_: accepting.append(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))  # noqa: E731
        monkeypatch.setattr(supervisor_module.logger, "error", look)
        one._poll(60)
    assert accepting == [0]


def test_who_does_not_die_ends_the_server_though_another_death_is_found_at_once(family, runtime):
    one = supervisor(family, runtime)
    undying = make_unkillable(family.start("worker", "sleeps", 1))
    undying.kill()
    time.sleep(DEATH_SECONDS)
    dead_together(one, [family.start("core", "ends", 1)])
    with pytest.raises(GenerationOver):
        one._poll(60)
    with pytest.raises(Stop) as stop:
        one._end_generation("its engine has died")
    assert "does not die" in stop.value.last_words


def test_who_was_killed_is_named_before_who_ended_for_want_of_him(family, runtime, caplog):
    one = supervisor(family, runtime)
    follower, killed = family.start("worker", "fails", 1), family.start("worker", "sleeps", 1)
    killed.kill()
    dead_together(one, [follower, killed])
    with pytest.raises(GenerationOver, match=r"worker sleeps .* killed by SIGKILL"):
        one._poll(60)
    one._end_generation("its engine has died")
    assert "worker fails" in caplog.text and "exit status 1" in caplog.text


def test_an_api_server_that_cannot_be_started_is_tried_again_after_a_pause(family, runtime, monkeypatch, caplog):
    one = supervisor(family, runtime)
    tries: list[float] = []

    def fill(slot: int) -> None:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise OSError("no process")

    monkeypatch.setattr(one.generation, "fill", fill)
    one.generation.vacant.add(0)
    monkeypatch.setattr(supervisor_module, "FILL_PAUSE_SECONDS", 3600)
    for _ in range(3):
        one._poll(0)
    assert len(tries) == 1
    monkeypatch.setattr(supervisor_module, "FILL_PAUSE_SECONDS", 0.5)
    one.fill_again = 0.0
    while one.generation.vacant:
        one._poll(None)
    assert len(tries) == 3 and tries[2] - tries[1] >= 0.5
    assert caplog.text.count("cannot be started now") == 2


def test_who_ends_by_himself_is_told_of_with_the_states_of_those_that_he_may_have_waited_for(family, runtime, caplog):
    one = supervisor(family, runtime)
    stopped, other = family.start("core", "0.sleeps", 2), family.start("core", "1.sleeps", 2)
    os.kill(stopped.pid, signal.SIGSTOP)
    eventually(lambda: assert_stopped(stopped))
    family.start("worker", "0.fails", 2)
    one.generation.announced = True
    with pytest.raises(GenerationOver):
        while True:
            one._poll(60)
    assert re.search(
        r"worker 0.fails \(pid \d+\) died: exit status 1 \(others in proc\(5\): core 0.sleeps T\)", caplog.text
    )
    assert other in family.children


def assert_stopped(child: ChildProcess) -> None:
    assert child.state == "T"
