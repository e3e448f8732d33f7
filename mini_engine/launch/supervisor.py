"""The server from start to stop: which processes there are, and what follows from their deaths and from signals.

Once the server runs, the supervisor sleeps in one poller until a child dies or sends a message, or a signal comes; a
few times a minute it pings all of them.

The processes of one start are a generation. When an engine dies its generation is over: with `--restart-engine` the
next one starts behind the same sockets, and until it serves, the API servers of the one before answer 503.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from mini_engine.config import EngineConfig
from mini_engine.failpoints import reach_failpoint
from mini_engine.host import (
    check_model,
    check_tls,
    fill_standard_descriptors,
    plan_media_cache,
    raise_descriptor_limit,
    resolve_model,
    runtime_directory,
    without_effect,
)
from mini_engine.launch.generation import Generation, LaunchContext
from mini_engine.launch.listeners import bind_listeners, leave_port, url_of
from mini_engine.launch.liveness import Liveness, states
from mini_engine.launch.process_group import ChildProcess, Event, Gone, Interrupted, ProcessGroup, Received, StopSignals
from mini_engine.log import LogSettings
from mini_engine.messages import Drain, Refused
from mini_engine.transport import sockets

logger = logging.getLogger(__name__)

ENGINE_DEATH_GRACE_SECONDS = 1.0  # for API servers to answer every client of a dead engine
API_RESTARTS_IN_A_ROW = 5  # of an API server that dies before it serves; then the server stops
RETRY_SECONDS = 1.0  # until the next attempt to start an API server
API_STOP_SECONDS = 5.0  # for API servers to end their responses after they were asked to exit
FIRST_PAUSE_SECONDS = 1.0  # before a restart of the engines; doubled each time
LONGEST_PAUSE_SECONDS = 60.0
HEALTHY_SECONDS = 600.0  # engines that have served for so long reset the count of restarts


class Stop(Exception):
    """The server stops."""

    def __init__(self, status: int, last_line: str = "", *, drain_seconds: float = 0.0, interrupts: int = 0):
        self.status = status
        self.last_line = last_line  # of the log, unless it is there already
        self.drain_seconds = drain_seconds  # for running requests
        self.interrupts = interrupts  # signals that have come after the one that stops it
        self.unkillable: list[Gone] = []  # processes that were killed and have not died


class GenerationOver(Exception):
    """An engine is dead, or what should have replaced it did not get so far. The text names the process and cause."""


class Restarts:
    """How often engines are restarted, at most `most` times in a row, and after which pause."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic):
        self.most = most
        self.in_a_row = 0
        self._clock = clock
        self._serving_since = math.inf

    def serving(self) -> None:
        """The engines serve from now on."""
        self._serving_since = self._clock()

    def next_pause(self) -> float | None:
        """They have died, or did not get so far: seconds to wait before the next start; None: there is to be none."""
        if self._clock() - self._serving_since >= HEALTHY_SECONDS:
            self.in_a_row = 0
        self._serving_since = math.inf
        if self.in_a_row >= self.most:
            return None
        self.in_a_row += 1
        return min(FIRST_PAUSE_SECONDS * 2 ** (self.in_a_row - 1), LONGEST_PAUSE_SECONDS)


class Supervisor:
    """One server from start to stop. `run` may be called once, from the main thread."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.restarts = Restarts(config.restart_engine)
        self.events: collections.deque[Event] = collections.deque()  # not handled yet
        self.retry_at = 0.0  # when, after an API server could not be started

    def run(self) -> int:
        """Serve until a signal or a death ends it; returns the exit status."""
        config = self.config
        fill_standard_descriptors()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        raise_descriptor_limit(config)
        reach_failpoint("resolving-model")
        model_dir = resolve_model(config)
        self.architecture = check_model(model_dir, config).architecture
        media_cache = plan_media_cache(config)
        check_tls(config)
        signals = StopSignals()
        with contextlib.ExitStack() as held:
            reach_failpoint("binding-sockets")
            self.listeners = bind_listeners(config)
            if config.uds is not None:
                held.callback(sockets.BoundPath(config.uds).unlink)
            runtime_dir = held.enter_context(runtime_directory())
            reach_failpoint("creating-processes")
            self.processes = ProcessGroup(runtime_dir, LogSettings(config.log_level, config.log_format), signals)
            self.liveness = Liveness(config, self.processes)
            self.context = LaunchContext(config, model_dir, media_cache, runtime_dir, self.listeners, self.processes)
            self.generation = Generation(1, self.context)
            if config.uds is None and config.host in ("0.0.0.0", "::") and not config.api_key:
                logger.warning("--host %s: open to the network; set --api-key, or --host 127.0.0.1", config.host)
            logger.info("loading %s (%s) from %s", config.served_names[0], self.architecture, model_dir)
            return self.serve_until_stopped()

    def serve_until_stopped(self) -> int:
        """Start the processes, handle what happens, stop the processes; returns the exit status."""
        stop = Stop(1)
        try:
            self._serve()
        except Stop as asked:
            stop = asked
        finally:
            for listener in self.listeners:  # so that the end of an API server ends its part of the port, too
                listener.close()
            self._stop_processes(stop)
            self.processes.close()
        if stop.unkillable and not stop.status:
            stop = Stop(1, f"ended with status 1: {stop.unkillable[0].child.title} {stop.unkillable[0].how}")
        if stop.last_line:
            logger.log(logging.ERROR if stop.status else logging.INFO, "%s", stop.last_line)
        return stop.status

    def _serve(self) -> NoReturn:
        """One generation after the other."""
        while True:
            try:
                self._start()
                while True:
                    self.poll()
            except GenerationOver as over:
                self.end_generation(str(over))

    def _start(self) -> None:
        begun = time.monotonic()
        try:
            self.generation.start()
        except OSError as error:
            self._start_failed(f"a process cannot be started: {error}")
        while not self.generation.complete:
            self.poll()
        self.generation.announced = True
        self.restarts.serving()
        self._announce(time.monotonic() - begun)

    def _announce(self, seconds: float) -> None:
        config, limits, cache = self.config, self.generation.limits[0], self.context.media_cache
        for choice in self.generation.transports:
            what = "media that do not fit the cache" if cache.kind == "shm" else "media"
            logger.info("%s reach engine %d by %s: %s", what, choice.engine, choice.transport, choice.reason)
        if useless := without_effect(config, cache, limits.device):
            logger.info("no effect here: %s", "; ".join(useless))
        logger.info("media cache: %s (%s)", cache.kind, cache.reason)
        logger.info(
            "serving %s (%s) at %s/v1 after %.1f s: %d API server(s), %d engine(s) x %d worker(s), "
            "%d KV blocks of %d tokens, up to %d tokens a request",
            config.served_names[0], self.architecture, url_of(config, self.listeners[0]), seconds,
            config.api_server_count, config.data_parallel_size, config.tensor_parallel_size,
            limits.num_blocks, limits.block_size, limits.max_model_len,
        )  # fmt: skip

    # --- events ------------------------------------------------------------------------------------------------------

    def poll(self, seconds: float | None = None) -> None:
        """Wait for the next events, for so long at most, and handle each.

        Raises:
            GenerationOver: an engine is dead.
            Stop: the server is to stop.
        """
        turn = self.liveness.seconds_left()
        if self.generation.empty_slots:
            turn = min(turn, max(0.0, self.retry_at - time.monotonic()))
        if not self.events:  # some are left when the one before them has ended a generation
            self.events += self.processes.wait(turn if seconds is None else min(turn, seconds))
        while self.events:
            self._handle(self.events.popleft())
        self._fill_empty_slots()
        self.liveness.turn()

    def _handle(self, event: Event) -> None:
        match event:
            case Interrupted(numbers=[first, *more]):
                drain_seconds = self.config.shutdown_timeout if first == signal.SIGTERM else 0.0
                logger.info(
                    "stopping on %s: %g s for running requests; a second signal stops at once",
                    signal.Signals(first).name, drain_seconds,
                )  # fmt: skip
                raise Stop(0, "stopped", drain_seconds=drain_seconds, interrupts=len(more))
            case Received(child=child, body=Refused(reason=reason)):
                if child.generation == self.generation.number and not self.generation.announced:
                    self._start_failed(reason)
                child.kill_reason = reason
                child.kill()
            case Received(child=child):
                if child.generation == self.generation.number:
                    self.generation.receive(event)
            case Gone(child=child, how=how, reaped=False) if child.role != "api":
                raise Stop(1, f"ended with status 1: {child.title} {how}")
            case Gone(child=child):
                if child.generation == self.generation.number:
                    self._on_death(child, event.how)
                else:
                    self._on_late_death(event)

    def _on_death(self, child: ChildProcess, how: str) -> None:
        text = f"{child.title} {how}"
        # A process that exits by itself may have waited for another one of its engine in vain.
        others = self.processes.engine_of(child)
        details = f"{text} (others in proc(5): {states(others)})" if others else text
        if not self.generation.announced:
            self._start_failed(details, text)
        logger.error("%s", details)
        if child.role != "api":
            raise GenerationOver(text)
        if not child.serving:
            self.generation.early_deaths += 1
        if self.generation.early_deaths >= API_RESTARTS_IN_A_ROW:
            raise Stop(1, f"ended with status 1: {text}, and so did the {API_RESTARTS_IN_A_ROW - 1} before it")
        if any(other.serving for other in self.generation.children if other.role == "api"):
            self._leave_port(int(child.index))  # else connections are queued for its successor
        self.generation.empty_slots.add(int(child.index))

    def _on_late_death(self, gone: Gone) -> None:
        """Of an API server whose engines are dead, and that answered 503 until its successor serves; or of a process of
        these engines, found with the death that has ended them."""
        if gone.child.role == "api":  # first: after the line of the log no connection is queued for it
            self._leave_port(int(gone.child.index))
        if not (gone.child.dismissed and gone.reaped):
            logger.error("%s %s", gone.child.title, gone.how)

    def _start_failed(self, details: str, text: str | None = None) -> NoReturn:
        """This generation will not serve. The first of all is not tried again: most often the settings are at fault."""
        logger.error("start failed: %s", details)
        if self.generation.number == 1:
            raise Stop(1)
        raise GenerationOver(text or details)

    # --- what follows from a death -----------------------------------------------------------------------------------

    def _leave_port(self, slot: int) -> None:
        """Have no more connections queued at the slot's socket, unless an API server of any generation accepts them."""
        accepting = [child for child in self.processes.api_servers() if child.started and not child.dismissed]
        if not any(int(child.index) == slot for child in accepting):
            leave_port(self.listeners[slot])

    def _fill_empty_slots(self) -> None:
        """Start API servers for the slots that lack one; where the host gives no process, later."""
        if time.monotonic() < self.retry_at:
            return
        for slot in sorted(self.generation.empty_slots):
            try:
                self.generation.start_api_server(slot)
            except OSError as error:
                logger.error("api %d cannot be started now, retrying: %s", slot, error)
                self.retry_at = time.monotonic() + RETRY_SECONDS
                return
            self.generation.empty_slots.remove(slot)

    def end_generation(self, why: str) -> None:
        """End its engines, so that every client has its answer; returns when the next generation is to start.

        API servers that serve go on, to answer 503.

        Raises:
            Stop: there is to be none.
        """
        over = self.generation
        over.kill(spare=[child for child in over.children if child.role == "api" and child.serving])
        self.generation = Generation(over.number + 1, self.context)  # other deaths of the old one change nothing
        for slot in range(len(self.listeners)):  # those whose API server is dead or does not serve yet
            self._leave_port(slot)
        reach_failpoint("restarting-engines")
        pause = self.restarts.next_pause()
        if pause is not None:
            logger.error("restart %d of %d in %g s, since %s", self.restarts.in_a_row, self.restarts.most, pause, why)
        deadline = time.monotonic() + (ENGINE_DEATH_GRACE_SECONDS if pause is None else pause)
        while (left := deadline - time.monotonic()) > 0 or self.processes.engines():
            self.poll(left if left > 0 else None)
        over.release_memory()
        if pause is None:
            remedy = "" if self.restarts.most else "; --restart-engine would restart its engines"
            raise Stop(1, f"ended with status 1: {why}{remedy}")

    # --- the end -----------------------------------------------------------------------------------------------------

    def _stop_processes(self, stop: Stop) -> None:
        """API servers may finish their requests, and then what they are sending; the rest holds nothing that outlives
        it. Another signal leaves no time for that. Returns when no child is left."""
        if stop.drain_seconds:
            for child in self.processes.api_servers():
                if child.serving:
                    self.processes.send(child, Drain())
                else:  # it has no requests
                    child.terminate()
            self._wait_for_api_servers(stop, stop.drain_seconds, serving=True)
        for child in self.processes.api_servers():
            child.terminate()
        self._wait_for_api_servers(stop, API_STOP_SECONDS)
        for child in self.processes.children:
            if child.role == "api" and not stop.interrupts:
                logger.warning("%s is killed: it has not exited within %g s", child.title, API_STOP_SECONDS)
            child.dismissed = True
            child.kill()
        while self.processes.children:
            self._wait_while_stopping(stop, None)

    def _wait_for_api_servers(self, stop: Stop, seconds: float, serving: bool = False) -> None:
        """Until all have exited, or all that are `serving`, the time is up, or another signal comes."""
        deadline = time.monotonic() + seconds
        while any(child.serving or not serving for child in self.processes.api_servers()):
            left = deadline - time.monotonic()
            if stop.interrupts or left <= 0:
                return
            self._wait_while_stopping(stop, min(left, self.liveness.seconds_left()))
            self.liveness.turn()

    def _wait_while_stopping(self, stop: Stop, seconds: float | None) -> None:
        for event in self.processes.wait(seconds):
            match event:
                case Interrupted(numbers=numbers):
                    stop.interrupts += len(numbers)
                case Gone(child=child, how=how, reaped=False):
                    logger.error("%s %s", child.title, how)
                    stop.unkillable.append(event)
                case Gone(child=child, how=how) if child.role != "api" and not child.dismissed:
                    logger.error("%s %s while the server was stopping", child.title, how)
