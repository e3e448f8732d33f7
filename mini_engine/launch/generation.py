"""The processes of one start of the engines: started, introduced to each other, and released together.

Knows nothing of what follows when one of them dies.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mini_engine.config import EngineConfig
from mini_engine.launch.process_group import ChildProcess, ProcessGroup, Received
from mini_engine.messages import (
    EngineLimits,
    Hello,
    Init,
    MediaCachePlan,
    RankAddress,
    Ready,
    Serving,
    Start,
    TransportChoice,
)
from mini_engine.transport.memory import create_sparse, discard, map_sparse

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchContext:
    """What all generations share."""

    config: EngineConfig
    model_dir: str
    media_cache: MediaCachePlan
    runtime_dir: Path
    listeners: list[socket.socket]  # one for each API server's slot
    processes: ProcessGroup


class Generation:
    """Generation `number`, from 1 on."""

    def __init__(self, number: int, context: LaunchContext):
        self.number = number
        self.serving_since = math.inf  # by `time.monotonic`
        self.limits: list[EngineLimits] = []  # of its engines
        self.transports: list[TransportChoice] = []  # of one of its API servers
        self.early_deaths = 0  # of API servers in a row, before they served
        self._context = context
        self._processes = context.processes
        self._directory = context.runtime_dir / str(number)  # its own: no socket of a dead generation is in it
        self._media_stores: list[int] = []  # descriptors, by engine

    @property
    def children(self) -> list[ChildProcess]:
        """Its living processes."""
        return [child for child in self._processes.children if child.generation == self.number]

    @property
    def announced(self) -> bool:
        """Whether it has begun to serve."""
        return self.serving_since < math.inf

    @property
    def complete(self) -> bool:
        """Whether all of them take requests."""
        return all(child.serving for child in self.children)

    def start(self) -> None:
        """Start all processes. Raises OSError: out of processes, descriptors or disk space."""
        config = self._context.config
        self._directory.mkdir()
        if self._context.media_cache.kind == "shm":
            for _ in range(config.data_parallel_size):
                self._media_stores.append(create_sparse(self._context.media_cache.nbytes))
        self.start_api_servers()  # first: they have the most to import
        for engine in range(config.data_parallel_size):
            self._processes.start("core", str(engine), self.number)
            for rank in range(config.tensor_parallel_size):
                own = self._media_stores[engine : engine + 1]
                self._processes.start("worker", f"{engine}.{rank}", self.number, media_stores=own)

    def start_api_servers(self) -> None:
        """Start one for each slot that has none. Raises OSError, as `start` does."""
        taken = {child.index for child in self.children if child.role == "api"}
        for slot, listener in enumerate(self._context.listeners):
            if str(slot) not in taken:
                self._processes.start("api", str(slot), self.number, listener, self._media_stores)

    def kill(self, spare: Sequence[ChildProcess] = ()) -> None:
        """Kill all of them but `spare`."""
        for child in self.children:
            if child not in spare:
                child.dismissed = True
                child.kill()

    def release_memory(self) -> None:
        """Remove its sockets and empty its media stores. Its engines are dead."""
        shutil.rmtree(self._directory, ignore_errors=True)
        for fd in self._media_stores:  # which its API servers, as long as they answer 503, have mapped
            discard(map_sparse(fd, self._context.media_cache.nbytes))
            os.close(fd)
        self._media_stores.clear()

    def receive(self, received: Received) -> None:
        """Take the next message of the handshake: Hello -> Init; Ready, once all engines are -> Start; Serving."""
        child = received.child
        match received.body:
            case Hello():
                self._processes.send(child, self._init())
            case Ready(limits=limits, transports=transports):
                child.ready = True
                if limits is not None:
                    self.limits.append(limits)
                self.transports = self.transports or transports
                self._release_api_servers()
            case Serving():
                self.early_deaths = 0
                child.set_serving()
                for old in self._processes.api_servers():  # which has answered 503 in this slot
                    if old.generation < self.number and old.index == child.index:
                        old.terminate()
                if self.announced:
                    logger.info("%s: replacement ready", child.title)

    def _init(self) -> Init:
        config, where = self._context.config, self._directory
        engines, ranks = range(config.data_parallel_size), range(config.tensor_parallel_size)
        return Init(
            config=config,
            model_dir=self._context.model_dir,
            runtime_dir=str(where),
            cores=[f"ipc://{where}/core-{engine}" for engine in engines],
            core_workers=[f"ipc://{where}/core-{engine}-workers" for engine in engines],
            ranks=[
                RankAddress(engine, rank, f"{where}/tensors-{engine}.{rank}") for engine in engines for rank in ranks
            ],
            media_cache=self._context.media_cache,
            restarts=self.number - 1,
        )

    def _release_api_servers(self) -> None:
        """Let API servers accept connections once every engine can take requests."""
        engines = [child for child in self.children if child.role != "api"]
        if not all(child.ready for child in engines):
            return
        for child in engines:
            child.set_serving()
        for child in self.children:
            if child.role == "api" and child.ready and not child.started:
                child.started = True
                self._processes.send(child, Start(min(self.limits, key=lambda limits: limits.max_model_len)))
