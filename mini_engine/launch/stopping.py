"""The end of the server: API servers finish what runs, then all are killed. Another signal leaves no time for that."""

from __future__ import annotations

import logging
import time

from mini_engine.launch.family import Asked, Died, Event, Family, Undying
from mini_engine.launch.liveness import Liveness
from mini_engine.messages import Drain

logger = logging.getLogger(__name__)

API_STOP_SECONDS = 5.0  # how long API servers may take to end their responses once told to stop


class Stopping:
    """The end of a family. `interrupts`: signals that have come after the one that ends it."""

    def __init__(self, family: Family, liveness: Liveness, interrupts: int):
        self._family = family
        self._liveness = liveness
        self._interrupts = interrupts
        self._undying: list[Undying] = []

    def run(self, patience: float) -> list[Undying]:
        """API servers may finish their requests, for `patience` seconds, and then what they are sending; the rest holds
        nothing that outlives it. Returns when no child is left, with those that have not died."""
        if patience:
            for child in self._family.api_servers():
                if child.serving:
                    self._family.send(child, Drain())
                else:  # nobody is in there
                    child.terminate()
            self._wait_for_api_servers(patience, serving=True)
        for child in self._family.api_servers():
            child.terminate()
        self._wait_for_api_servers(API_STOP_SECONDS)
        for child in self._family.children:
            if child.role == "api" and not self._interrupts:
                logger.warning("%s is killed: it has not ended within %g s", child.title, API_STOP_SECONDS)
            child.kill()
        while self._family.children:
            for event in self._family.wait(None):
                self._note(event)
        return self._undying

    def _wait_for_api_servers(self, seconds: float, serving: bool = False) -> None:
        """Until all have ended, or all that are `serving`, the time is up, or another signal comes."""
        deadline = time.monotonic() + seconds
        while any(child.serving or not serving for child in self._family.api_servers()):
            left = deadline - time.monotonic()
            if self._interrupts or left <= 0:
                return
            for event in self._family.wait(min(left, self._liveness.seconds_left())):
                self._note(event)
                if isinstance(event, Died) and event.child.role != "api":
                    logger.error("%s %s while requests were to end", event.child.title, event.how)
            self._liveness.turn()

    def _note(self, event: Event) -> None:
        match event:
            case Asked(numbers=numbers):
                self._interrupts += len(numbers)
            case Undying(child=child, how=how):
                logger.error("%s %s", child.title, how)
                self._undying.append(event)
