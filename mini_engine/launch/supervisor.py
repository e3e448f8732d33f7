"""The server from start to stop: which processes there are, and what follows from their deaths and from signals.

Once the server runs, the supervisor sleeps in one poller until a child dies or sends a message, or a signal comes; a
few times a minute it pings all of them.

The processes of one start are a generation. When an engine dies its generation is over: with `--restart-engine` the
next one starts at the same sockets when all of its processes have exited; until it serves, connections are refused.
"""

import contextlib
import dataclasses
import logging
import math
import os
import resource
import signal
import tempfile
import termios
import time
from typing import NoReturn

from setproctitle import getproctitle

from mini_engine.config import EngineConfig
from mini_engine.failpoints import reach_failpoint
from mini_engine.free_memory import available_memory
from mini_engine.launch.listeners import bind_listeners, leave_port, removed_afterwards, url_of
from mini_engine.launch.plan import startup_checks
from mini_engine.launch.plan.memory_plan import settle_memory
from mini_engine.launch.plan.parallelism import choose_parallelism
from mini_engine.launch.process_monitor import (
    ChildMessage,
    ChildProcess,
    ChildState,
    Event,
    Gone,
    Interrupted,
    ProcessGroup,
    Unkillable,
    catch_stop_signals,
)
from mini_engine.launch.process_setup import module_paths
from mini_engine.launch.runtime_directory import runtime_directory
from mini_engine.launch.server_generation import ServerGeneration
from mini_engine.messages import Drain, Refused

logger = logging.getLogger(__name__)

ENGINE_DEATH_GRACE_SECONDS = 1.0  # for API servers to answer every client of a dead engine
API_RESTARTS_IN_A_ROW = 5  # of an API server that dies before it serves; then the server stops
API_STOP_SECONDS = 5.0  # for API servers to end their responses after they were asked to exit
FIRST_PAUSE_SECONDS = 1.0  # before a restart of the engines; doubled each time
LONGEST_PAUSE_SECONDS = 60.0
HEALTHY_SECONDS = 600.0  # engines that have served for so long reset the count of restarts


def run_server(config: EngineConfig) -> int:
    """Serve until a signal or a death ends it; returns the exit status. Call it once, from the main thread. Raises
    ConfigError: a setting that cannot work here; no process was started."""
    while os.open(os.devnull, os.O_RDWR) < 3:  # in place of stdin, stdout and stderr, where they are closed
        pass
    getproctitle()  # for the titles of children: it finds their place by the environment, which changes below
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    reach_failpoint("resolving-model")
    startup_checks.check_host()
    startup_checks.check_device_and_tls(config)
    model_dir = startup_checks.resolve_model(config)
    model = startup_checks.check_model(model_dir, config)
    parallelism = choose_parallelism(config, model, os.environ.get("OMP_NUM_THREADS", ""))
    config = dataclasses.replace(config, data_parallel_size=parallelism.engines)
    media_cache = startup_checks.plan_media_cache(config)
    config, memory = settle_memory(config, model, media_cache, available_memory())
    # Of the workers. How threads wait for each other is left to OpenMP, which keeps them awake for a while: on two
    # cores GOMP_SPINCOUNT=0 and 1000 made tokens up to 1.9 times as slow, 10000 made no clear difference.
    os.environ["OMP_NUM_THREADS"] = str(parallelism.threads)
    stop_signals = catch_stop_signals()
    with contextlib.ExitStack() as stack:
        reach_failpoint("binding-sockets")
        listeners = bind_listeners(config)
        if config.uds is not None:
            stack.enter_context(removed_afterwards(config.uds))
        if config.debug and os.isatty(0):  # a debugger that is killed leaves it without echo
            stack.callback(termios.tcsetattr, 0, termios.TCSADRAIN, termios.tcgetattr(0))
        runtime_dir = stack.enter_context(runtime_directory())
        # What libraries leave in TMPDIR, here and in the children, is removed. Decoders find modules as this does.
        os.environ |= {**module_paths(), "TMPDIR": tempfile.mkdtemp(prefix="tmp-", dir=runtime_dir)}
        tempfile.tempdir = None
        reach_failpoint("creating-processes")
        processes = ProcessGroup(config, runtime_dir, stop_signals)
        if config.uds is None and config.host in ("0.0.0.0", "::") and not config.api_key:
            logger.warning("--host %s: open to the network; set --api-key, or --host 127.0.0.1", config.host)
        logger.info("%s", parallelism.describe(config))
        if memory:
            logger.info("%s", memory)
        logger.info("loading %s (%s) from %s", config.served_names[0], model.text.spec.architecture, model_dir)
        return Supervisor(ServerGeneration(1, config, model_dir, media_cache, runtime_dir, listeners, processes)).run()


@dataclasses.dataclass(eq=False)
class Stop(Exception):
    """The server stops."""

    status: int
    last_line: str  # of the log
    drain_seconds: float = 0.0  # for running requests
    at_once: bool = False  # another signal has come after the one that stops it


class GenerationOver(Exception):
    """An engine is dead, or a generation cannot start. The text names the process and the cause."""


class Supervisor:
    """One server, from the start of its first generation to the end of all processes. `run` may be called once."""

    def __init__(self, first: ServerGeneration):
        self.config, self.listeners, self.processes = first.config, first.listeners, first.processes
        self.generation = first
        self.restarts = 0  # of the engines, in a row

    def run(self) -> int:
        """Start the processes, handle what happens, stop the processes; returns the exit status."""
        try:
            try:
                self._serve()
            except Stop as raised:
                stop = raised
            for listener in self.listeners:  # so that the end of an API server ends its part of the port, too
                listener.close()
            self._stop_processes(stop)
            self.processes.close()
        except Unkillable as error:  # the other processes die with this one
            stop = Stop(1, f"ended with status 1: {error}")
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
            for _ in self.generation.start():
                self.poll(0)
        except OSError as error:
            raise GenerationOver(f"a process cannot be started: {error}") from None
        while any(child.state is not ChildState.SERVING for child in self.processes.children):
            self.poll()
        self.generation.serving_since = time.monotonic()
        self._announce(time.monotonic() - begun)

    def _announce(self, seconds: float) -> None:
        config, limits, cache = self.config, self.generation.limits[0], self.generation.media_cache
        if useless := startup_checks.without_effect(config, cache, limits):
            logger.info("no effect here: %s", "; ".join(useless))
        logger.info("media cache: %s (%s)", cache.kind, cache.reason)
        url = f"{url_of(config, self.listeners[0])}/v1" + ("" if config.disable_playground else " (playground: /)")
        engines = f"{config.engines} engine(s) x {config.tensor_parallel_size} worker(s)"
        processes = f"{config.api_server_count} API server(s), {engines}"
        requests = limits.num_blocks * limits.block_size / limits.max_model_len
        blocks = f"{limits.num_blocks} KV blocks of {limits.block_size} tokens in each engine"
        capacity = f"{blocks}, {requests:.1f} requests of {limits.max_model_len:,} tokens"
        model = config.served_names[0]
        logger.info("serving %s at %s after %.1f s: %s, %s", model, url, seconds, processes, capacity)

    # --- events ------------------------------------------------------------------------------------------------------

    def poll(self, seconds: float = math.inf) -> None:
        """Wait for the next events, for so long at most, and handle each; those after one that raises change nothing.

        Raises GenerationOver: an engine is dead; Stop: the server is to stop; Unkillable: see `ProcessGroup.wait`.
        """
        for event in self.processes.wait(seconds):
            self._handle(event)
        if self.generation.announced:
            try:
                self.generation.start_api_servers()  # in the place of dead ones
            except OSError as error:
                logger.error("an API server cannot be started now, retrying: %s", error)  # after the next events

    def _handle(self, event: Event) -> None:
        match event:
            case Interrupted(numbers=[first, *more]):
                seconds = 0.0 if first == signal.SIGINT else self.config.shutdown_timeout
                text = "stopping on %s: %g s for running requests; a second signal stops at once"
                logger.info(text, signal.Signals(first).name, seconds)
                raise Stop(0, "stopped", drain_seconds=seconds, at_once=bool(more))
            case ChildMessage(child=child, body=Refused(reason=reason)):
                if not self.generation.announced:
                    if self.generation.number == 1:
                        raise Stop(2, f"start failed: {reason}")
                    raise GenerationOver(reason)
                child.kill(reason)
            case ChildMessage():
                self.generation.receive(event)
            case Gone(child=child, text=text):
                self._on_death(child, text)

    def _on_death(self, child: ChildProcess, text: str) -> None:
        if child.spec.role != "api" or not self.generation.announced:
            raise GenerationOver(text)
        if not child.has_served:
            self.generation.early_deaths += 1
        if self.generation.early_deaths >= API_RESTARTS_IN_A_ROW:
            raise Stop(1, f"ended with status 1: {text}, and so did the {API_RESTARTS_IN_A_ROW - 1} before it")
        if any(other.state is ChildState.SERVING for other in self.processes.api_servers()):
            leave_port(self.listeners[int(child.spec.index)])  # else connections are queued for its replacement

    # --- what follows from a death -----------------------------------------------------------------------------------

    def end_generation(self, reason: str) -> None:
        """End its engines, so that every client has its answer, and then its API servers; returns when the next
        generation is to start. Raises Stop: there is to be none."""
        ended, limit = self.generation, self.config.restart_engine
        if ended.number == 1 and not ended.announced:  # most often the settings are at fault
            raise Stop(1, f"start failed: {reason}")
        for child in self.processes.children:
            if child.spec.role != "api" or child.state is not ChildState.SERVING:
                child.kill()
        reach_failpoint("restarting-engines")
        if time.monotonic() - ended.serving_since >= HEALTHY_SECONDS:
            self.restarts = 0
        pause = min(FIRST_PAUSE_SECONDS * 2**self.restarts, LONGEST_PAUSE_SECONDS)
        self.restarts += 1
        if self.restarts <= limit:
            logger.error("restart %d of %d in %g s, since %s", self.restarts, limit, pause, reason)
        deadline, stop = time.monotonic() + pause, Stop(0, "stopped")
        self._wait_for_api_servers(stop, ENGINE_DEATH_GRACE_SECONDS)
        if self.restarts > limit:
            remedy = "" if limit else "; --restart-engine would restart its engines"
            raise Stop(1, f"ended with status 1: {reason}{remedy}")
        self._stop_processes(stop)
        if stop.at_once:
            raise stop
        for listener in self.listeners:  # connections that were not accepted are reset
            leave_port(listener)
        ended.release_memory()
        self.generation = dataclasses.replace(ended, number=ended.number + 1)
        while (left := deadline - time.monotonic()) > 0:
            self.poll(left)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _stop_processes(self, stop: Stop) -> None:
        """API servers may finish their requests, and then what they are sending; the rest holds nothing that outlives
        it. Another signal leaves no time for that. Returns when no child is left."""
        if stop.drain_seconds:
            for child in self.processes.api_servers():
                if child.state is ChildState.SERVING:
                    child.advance(ChildState.STOPPING)
                    self.processes.send(child, Drain())
                else:  # it has no requests
                    child.kill()
            self._wait_for_api_servers(stop, stop.drain_seconds)
        for child in self.processes.api_servers():
            child.terminate()
        self._wait_for_api_servers(stop, API_STOP_SECONDS)
        for child in self.processes.children:
            if child.spec.role == "api" and not stop.at_once:
                logger.warning("%s is killed: it has not exited within %g s", child.title, API_STOP_SECONDS)
            child.kill()
        while self.processes.children:
            stop.at_once |= any(isinstance(event, Interrupted) for event in self.processes.wait())

    def _wait_for_api_servers(self, stop: Stop, seconds: float) -> None:
        """Until all have exited, the time is up, or another signal comes."""
        deadline = time.monotonic() + seconds
        while self.processes.api_servers() and not stop.at_once and (left := deadline - time.monotonic()) > 0:
            stop.at_once |= any(isinstance(event, Interrupted) for event in self.processes.wait(left))
