"""The end of the server: API servers finish what runs, then all are killed. Another signal leaves no time for that."""

from __future__ import annotations

import logging
import time

from mini_engine.launch.liveness import Liveness
from mini_engine.launch.process_group import Event, Gone, Interrupted, ProcessGroup
from mini_engine.messages import Drain

logger = logging.getLogger(__name__)

API_STOP_SECONDS = 5.0  # how long API servers may take to end their responses once they were asked to exit


class Stopping:
    """The end of all processes. `interrupts`: signals that have come after the one that stops the server."""

    def __init__(self, processes: ProcessGroup, liveness: Liveness, interrupts: int):
        self._processes = processes
        self._liveness = liveness
        self._interrupts = interrupts
        self._undying: list[Gone] = []

    def run(self, drain_seconds: float) -> list[Gone]:
        """API servers may finish their requests, for `drain_seconds`, and then what they are sending; the rest holds
        nothing that outlives it. Returns when no child is left, with those that have not died."""
        if drain_seconds:
            for child in self._processes.api_servers():
                if child.serving:
                    self._processes.send(child, Drain())
                else:  # it has no requests
                    child.terminate()
            self._wait_for_api_servers(drain_seconds, serving=True)
        for child in self._processes.api_servers():
            child.terminate()
        self._wait_for_api_servers(API_STOP_SECONDS)
        for child in self._processes.children:
            if child.role == "api" and not self._interrupts:
                logger.warning("%s is killed: it has not exited within %g s", child.title, API_STOP_SECONDS)
            child.kill()
        while self._processes.children:
            for event in self._processes.wait(None):
                self._note(event)
        return self._undying

    def _wait_for_api_servers(self, seconds: float, serving: bool = False) -> None:
        """Until all have exited, or all that are `serving`, the time is up, or another signal comes."""
        deadline = time.monotonic() + seconds
        while any(child.serving or not serving for child in self._processes.api_servers()):
            left = deadline - time.monotonic()
            if self._interrupts or left <= 0:
                return
            for event in self._processes.wait(min(left, self._liveness.seconds_left())):
                self._note(event)
                if isinstance(event, Gone) and event.reaped and event.child.role != "api":
                    logger.error("%s %s while requests were to end", event.child.title, event.how)
            self._liveness.turn()

    def _note(self, event: Event) -> None:
        match event:
            case Interrupted(numbers=numbers):
                self._interrupts += len(numbers)
            case Gone(child=child, how=how, reaped=False):
                logger.error("%s %s", child.title, how)
                self._undying.append(event)
