"""After which time a process that does not answer, or does not get ready, is killed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mini_engine.config import EngineConfig
from mini_engine.launch import liveness as liveness_module
from mini_engine.launch.liveness import TURNS, Liveness

TIMEOUTS = [(60, 600), (3600, 600), (60, 20)]  # --collective-timeout, --startup-timeout


class Child(SimpleNamespace):
    """One that never answers a ping."""

    def __init__(self, **state: object):
        super().__init__(role="core", title="core 0", name="core 0", engine="0", state="T", turns=0, killed_at=None)
        self.__dict__.update(state)

    def kill(self) -> None:
        self.killed_at = liveness_module.time.monotonic()


def seconds_until_killed(child: Child, monkeypatch: pytest.MonkeyPatch, collective: float, startup: float) -> float:
    now = 0.0
    monkeypatch.setattr(liveness_module, "time", SimpleNamespace(monotonic=lambda: now))
    processes = SimpleNamespace(children=[child], send=lambda *_: True, engine_of=lambda _: [child])
    config = EngineConfig(collective_timeout=collective, startup_timeout=startup, health_timeout=1)
    liveness = Liveness(config, processes)
    while child.killed_at is None:
        now += liveness.seconds_left()
        liveness.turn()
    return child.killed_at


@pytest.mark.parametrize(("collective", "startup"), TIMEOUTS)
def test_an_unresponsive_process_is_killed_at_the_collective_timeout(collective, startup, monkeypatch):
    """It is asked first one turn after it was seen alive, so that the time it had is the time-out."""
    seconds = seconds_until_killed(Child(serving=True, ready=True, started=True), monkeypatch, collective, startup)
    assert collective < seconds <= (1 + 1 / TURNS) * collective


@pytest.mark.parametrize(("collective", "startup"), TIMEOUTS)
def test_a_process_that_is_not_ready_is_killed_at_the_startup_timeout(collective, startup, monkeypatch):
    seconds = seconds_until_killed(Child(serving=False, ready=False, started=False), monkeypatch, collective, startup)
    assert startup < seconds <= (1 + 1 / TURNS) * startup


@pytest.mark.parametrize(
    ("states", "killed"),
    [("SST", "T"), ("SDS", "D"), ("SRT", "RT"), ("SSS", "SSS")],
)
def test_of_processes_that_are_not_ready_those_that_sleep_are_not_killed(states, killed, monkeypatch, caplog):
    children = [Child(serving=False, ready=False, started=False, state=state, name=state) for state in states]
    children.append(Child(serving=False, ready=True, started=False))  # it waits for them, too
    now = 0.0
    monkeypatch.setattr(liveness_module, "time", SimpleNamespace(monotonic=lambda: now))
    liveness = Liveness(EngineConfig(startup_timeout=10), SimpleNamespace(children=children))
    while not any(child.killed_at for child in children):
        now += liveness.seconds_left()
        liveness.turn()
    assert "".join(child.state for child in children if child.killed_at) == killed
    assert f"(state in proc(5): {', '.join(f'{state} {state}' for state in states)})" in caplog.text
