"""After which time a process that does not answer, or does not get ready, is killed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mini_engine.config import EngineConfig
from mini_engine.launch.liveness import DEATH_SECONDS, TURNS, Liveness, Unkillable


class Child(SimpleNamespace):
    """One that never answers a ping."""

    def __init__(self, **state: object):
        super().__init__(role="core", title="core 0", name="core 0", state="T", turns=0, killed=False)
        self.__dict__.update(state)

    def kill(self) -> None:
        self.killed = True


def seconds_until_a_kill(children: list[Child], **timeouts: float) -> float:
    now = 0.0
    processes = SimpleNamespace(children=children, send=lambda *_: None, engine_of=lambda _: children)
    liveness = Liveness(EngineConfig(health_timeout=1, **timeouts), processes, lambda: now)
    while all(not child.killed for child in children):
        now += liveness.seconds_left()
        liveness.turn()
    return now


@pytest.mark.parametrize(("collective", "startup"), [(60, 600), (3600, 600), (60, 20)])
def test_hanging_processes_are_killed_at_their_timeout(collective, startup):
    """A process is pinged first one turn after it was seen alive, so that the time it had is the time-out."""
    for serving, timeout in ((True, collective), (False, startup)):
        child = Child(serving=serving, ready=serving, started=serving)
        seconds = seconds_until_a_kill([child], collective_timeout=collective, startup_timeout=startup)
        assert timeout < seconds <= (1 + 1 / TURNS) * timeout


@pytest.mark.parametrize(("states", "killed"), [("SST", "T"), ("SDS", "D"), ("SRT", "RT"), ("SSS", "SSS")])
def test_of_processes_that_are_not_ready_those_that_sleep_are_not_killed(states, killed, caplog):
    children = [Child(serving=False, ready=False, started=False, state=state, name=state) for state in states]
    waiting = Child(serving=False, ready=True, started=False)  # for the others
    seconds_until_a_kill([*children, waiting], startup_timeout=10)
    assert "".join(child.state for child in children if child.killed) == killed
    assert not waiting.killed
    assert f"(state in proc(5): {', '.join(f'{state} {state}' for state in states)})" in caplog.text


def test_a_killed_process_that_does_not_exit_is_reported_after_its_timeout():
    now, child = 0.0, Child(serving=True, killed=True, state="D")
    liveness = Liveness(EngineConfig(), SimpleNamespace(children=[child]), lambda: now)
    with pytest.raises(Unkillable, match=r"core 0 has not exited after SIGKILL \(state in proc\(5\): D\)"):
        while True:
            now += liveness.seconds_left()
            liveness.turn()
    assert DEATH_SECONDS < now <= (1 + 1 / TURNS) * DEATH_SECONDS
