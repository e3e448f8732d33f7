"""The server from start to stop: which processes there are, and what follows from what happens to them.

Once the server runs, the supervisor sleeps in one poller until a child dies, speaks or writes, or a signal comes; a few
times a minute it asks everybody for a sign of life.

The processes of one start are a generation. When an engine dies its generation is over: with `--restart-engine` the
next one starts behind the same sockets, and until it serves, the API servers of the one before answer 503.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Mapping
from typing import NoReturn

from mini_engine import log
from mini_engine.child_process import ChildProcess
from mini_engine.config import EngineConfig
from mini_engine.host import (
    bind_again,
    bind_listeners,
    check_tls,
    fill_standard_descriptors,
    load_model_config,
    plan_media_cache,
    raise_descriptor_limit,
    resolve_model,
    runtime_directory,
    without_effect,
)
from mini_engine.launch import addresses
from mini_engine.launch.family import Asked, Died, Event, Family, Said, Signals
from mini_engine.launch.liveness import Liveness
from mini_engine.launch.restarting import Restarts
from mini_engine.launch.stopping import Stopping
from mini_engine.messages import (
    PROTOCOL_VERSION,
    EngineLimits,
    Hello,
    Init,
    Ready,
    Refused,
    Serving,
    Start,
    TransportChoice,
)
from mini_engine.transport import sockets

logger = logging.getLogger(__name__)

ENGINE_DEATH_GRACE_SECONDS = 1.0  # how long API servers may take to answer every client of a dead engine
API_RESTARTS_IN_A_ROW = 5  # an API server that dies this often before it serves will not get better


class Stop(Exception):
    """The server ends."""

    def __init__(self, status: int, patience: float = 0.0, interrupts: int = 0):
        self.status = status
        self.patience = patience  # seconds for running requests to end
        self.interrupts = interrupts  # signals that have come after the one that ends it


class GenerationOver(Exception):
    """An engine is dead, or what should have replaced it did not get so far. The text says who and how."""


class Supervisor:
    """One server from start to stop. `run` may be called once, from the main thread."""

    def __init__(self, config: EngineConfig, origins: Mapping[str, str] | None = None):
        """`origins`: by field, what gave the settings that are not left at their defaults, such as `--port`."""
        self.config = config
        self.origins = origins or {}
        self.log = log.LogSettings(config.log_level, config.log_format)
        self.restarts = Restarts(config.restart_engine)
        self.generation = 1
        self.announced = False  # this generation serves
        self.limits: list[EngineLimits] = []  # of its engines
        self.transports: list[TransportChoice] = []  # of one of its API servers
        self.early_deaths = 0

    def run(self) -> int:
        """Serve until a signal or a death ends it; returns the exit status."""
        fill_standard_descriptors()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        raise_descriptor_limit(self.config)
        self.model_dir = resolve_model(self.config)
        self.model_config = load_model_config(self.model_dir, self.config)
        self.media_cache = plan_media_cache(self.config)
        check_tls(self.config)
        signals = Signals()
        with contextlib.ExitStack() as held:
            self.listeners = bind_listeners(self.config)
            if self.config.uds is not None:
                held.callback(sockets.BoundPath(self.config.uds).unlink)
            self.runtime_dir = held.enter_context(runtime_directory())
            self.family = Family(self.runtime_dir, self.log, signals)
            self.liveness = Liveness(self.config, self.family)
            return self._serve_until_stopped()

    def _serve_until_stopped(self) -> int:
        end = Stop(1)
        try:
            self._serve()
        except Stop as stop:
            end = stop
        finally:
            for listener in self.listeners:  # so that the end of an API server ends its part of the port, too
                listener.close()
            Stopping(self.family, self.liveness, end.interrupts).run(end.patience)
            self.family.close()
        return end.status

    def _serve(self) -> NoReturn:
        """One generation after the other."""
        while True:
            try:
                self._start_generation()
                self._wait_until_serving()
                while True:
                    self._poll(None)
            except GenerationOver as over:
                self._end_generation(str(over))

    # --- start -------------------------------------------------------------------------------------------------------

    def _start_generation(self) -> None:
        self.limits, self.transports, self.early_deaths = [], [], 0
        addresses.directory(self.runtime_dir, self.generation).mkdir()
        for slot, listener in enumerate(self.listeners):  # first: they have the most to import
            self.family.start("api", str(slot), self.generation, listener)
        for engine in range(self.config.data_parallel_size):
            self.family.start("core", str(engine), self.generation)
            for rank in range(self.config.tensor_parallel_size):
                self.family.start("worker", f"{engine}.{rank}", self.generation)

    def _wait_until_serving(self) -> None:
        begun = time.monotonic()
        while not all(child.serving for child in self._present()):
            self._poll(None)
        self.announced = True
        self.restarts.serving()
        self._announce(time.monotonic() - begun)

    def _announce(self, seconds: float) -> None:
        config, limits = self.config, self.limits[0]
        for choice in self.transports:
            what = "media that the cache has no room for" if self.media_cache.kind == "shm" else "media"
            logger.info("%s reach engine %d by %s: %s", what, choice.engine, choice.transport, choice.reason)
        if useless := without_effect(config, self.origins, self.media_cache, limits.device):
            logger.info("no effect here: %s", "; ".join(useless))
        logger.info("processed media are cached: %s (%s)", self.media_cache.kind, self.media_cache.reason)
        logger.info(
            "serving %s (%s) at %s/v1 after %.1f s: %d API server(s), %d engine(s) x %d worker(s), "
            "%d KV blocks of %d tokens, up to %d tokens a request",
            config.served_names[0], self.model_config.architecture, addresses.url(config, self.listeners[0]), seconds,
            config.api_server_count, config.data_parallel_size, config.tensor_parallel_size,
            limits.num_blocks, limits.block_size, limits.max_model_len,
        )  # fmt: skip

    def _init(self) -> Init:
        directory = addresses.directory(self.runtime_dir, self.generation)
        return Init(
            config=self.config,
            model_dir=self.model_dir,
            runtime_dir=str(directory),
            cores=addresses.cores(directory, self.config),
            core_workers=addresses.core_workers(directory, self.config),
            ranks=addresses.ranks(directory, self.config),
            media_cache=self.media_cache,
            late=self.announced or self.generation > 1,
            restarts=self.generation - 1,
        )

    # --- events ------------------------------------------------------------------------------------------------------

    def _present(self) -> list[ChildProcess]:
        """The children of this generation."""
        return [child for child in self.family.children if child.generation == self.generation]

    def _poll(self, seconds: float | None) -> None:
        """Wait for the next events, for so long at most, and handle each."""
        turn = self.liveness.seconds_left()
        for event in self.family.wait(turn if seconds is None else min(turn, seconds)):
            self._handle(event)
        self.liveness.turn()

    def _handle(self, event: Event) -> None:
        match event:
            case Said(child=child, body=Hello(protocol_version=version)) if version != PROTOCOL_VERSION:
                logger.error("%s speaks protocol %d, this is %d", child.title, version, PROTOCOL_VERSION)
                raise Stop(1)
            case Said(child=child) if child.generation == self.generation:
                self._hear(event)
            case Asked(numbers=[first, *more]):
                patience = self.config.shutdown_timeout if first == signal.SIGTERM else 0.0
                logger.info(
                    "stopping on %s: up to %g s for requests that run; a second signal stops at once",
                    signal.Signals(first).name, patience,
                )  # fmt: skip
                raise Stop(0, patience, len(more))
            case Died(child=child) if child.generation == self.generation:
                self._on_death(child, event.how)

    def _hear(self, said: Said) -> None:
        child = said.child
        match said.body:
            case Hello():
                self.family.send(child, self._init())
            case Ready(limits=limits, transports=transports):
                child.ready = True
                if limits is not None:
                    self.limits.append(limits)
                self.transports = self.transports or transports
                self._release_api_servers()
            case Refused(reason=reason):
                if not self.announced and self.generation == 1:
                    logger.error("start failed: %s", reason)
                    raise Stop(1)
                child.verdict = reason
                child.kill()
            case Serving():
                self.early_deaths = 0
                self._serves(child)
                self._relieve(child)
                if self.announced:
                    logger.info("%s serves in the place of the one that died", child.title)

    def _serves(self, child: ChildProcess) -> None:
        if not child.serving:
            child.serving, child.turns = True, 0

    def _release_api_servers(self) -> None:
        """Let API servers accept connections once every engine can take requests."""
        engines = [child for child in self._present() if child.role != "api"]
        if not all(child.ready for child in engines):
            return
        for child in engines:
            self._serves(child)
        for child in self._present():
            if child.role == "api" and child.ready and not child.started:
                child.started = True
                self.family.send(child, Start(min(self.limits, key=lambda limits: limits.max_model_len)))

    def _relieve(self, successor: ChildProcess) -> None:
        """The API servers of generations before in this slot have answered long enough."""
        for child in self.family.api_servers():
            if child.generation < self.generation and child.index == successor.index:
                child.terminate()

    # --- deaths ------------------------------------------------------------------------------------------------------

    def _on_death(self, child: ChildProcess, how: str) -> None:
        failed = "" if self.announced else "start failed: "
        logger.error("%s%s %s; %s", failed, child.title, how, child.last_lines())
        if failed and self.generation == 1:
            raise Stop(1)
        if failed or child.role != "api":
            raise GenerationOver(f"{child.title} {how}")
        if not child.serving:
            self.early_deaths += 1
        if self.early_deaths >= API_RESTARTS_IN_A_ROW:
            logger.error("the server ends: %s died before it served, as %d did", child.title, self.early_deaths)
            raise Stop(1)
        self._replace(child)

    def _replace(self, dead: ChildProcess) -> None:
        """A new API server for a slot. While others serve, the kernel is not to put connections in line there."""
        slot = int(dead.index)
        if dead.serving and any(child.serving for child in self._present() if child.role == "api"):
            self.listeners[slot] = bind_again(self.listeners[slot])
        self.family.start("api", dead.index, self.generation, self.listeners[slot])

    def _end_generation(self, why: str) -> None:
        """End its engines, so that every client has its answer; returns when the next generation is to start.

        API servers that serve go on, to answer 503.

        Raises:
            Stop: there is to be none.
        """
        for child in self._present():
            if not (child.role == "api" and child.serving):
                child.kill()
        ended, self.generation = self.generation, self.generation + 1
        self.announced = False
        pause = self.restarts.next_pause()
        if pause is None:
            remedy = "" if self.restarts.most else "; --restart-engine would start its engines anew"
            logger.error("the server ends with status 1, since %s%s", why, remedy)
        else:
            logger.error("restart %d of %d in %g s, since %s", self.restarts.in_a_row, self.restarts.most, pause, why)
        deadline = time.monotonic() + (ENGINE_DEATH_GRACE_SECONDS if pause is None else pause)
        while (left := deadline - time.monotonic()) > 0 or self.family.engines():
            self._poll(left if left > 0 else None)
        shutil.rmtree(addresses.directory(self.runtime_dir, ended), ignore_errors=True)
        if pause is None:
            raise Stop(1)
