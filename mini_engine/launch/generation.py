"""The processes of one start of the engines: started, introduced to each other, and released together.

Knows nothing of what follows when one of them dies.
"""

from __future__ import annotations

import logging
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
class Ground:
    """What stays while generations come and go."""

    config: EngineConfig
    model_dir: str
    media_cache: MediaCachePlan
    runtime_dir: Path
    listeners: list[socket.socket]  # one for each API server's slot
    processes: ProcessGroup


class Generation:
    """Number `number` of them, from 1 on."""

    def __init__(self, number: int, ground: Ground):
        self.number = number
        self.announced = False  # it serves
        self.limits: list[EngineLimits] = []  # of its engines
        self.transports: list[TransportChoice] = []  # of one of its API servers
        self.early_deaths = 0  # of API servers in a row, before they served
        self.vacant: set[int] = set()  # slots of API servers that are to be filled
        self._ground = ground
        self._processes = ground.processes
        self._directory = ground.runtime_dir / str(number)  # its own: it never finds a name of a dead generation
        self._media_stores: list[int] = []  # descriptors, by engine

    @property
    def children(self) -> list[ChildProcess]:
        """Those that live."""
        return [child for child in self._processes.children if child.generation == self.number]

    @property
    def complete(self) -> bool:
        """Whether all of them take requests."""
        return all(child.serving for child in self.children)

    def start(self) -> None:
        """Start all processes. Raises OSError: the host gives none."""
        config = self._ground.config
        self._directory.mkdir()
        if self._ground.media_cache.kind == "shm":
            for _ in range(config.data_parallel_size):
                self._media_stores.append(create_sparse(self._ground.media_cache.nbytes))
        for slot in range(config.api_server_count):  # first: they have the most to import
            self.fill(slot)
        for engine in range(config.data_parallel_size):
            self._processes.start("core", str(engine), self.number)
            for rank in range(config.tensor_parallel_size):
                own = self._media_stores[engine : engine + 1]
                self._processes.start("worker", f"{engine}.{rank}", self.number, media_stores=own)

    def fill(self, slot: int) -> None:
        """Start the API server of a slot. Raises OSError: the host gives no process."""
        self._processes.start("api", str(slot), self.number, self._ground.listeners[slot], self._media_stores)

    def end(self, spare: Sequence[ChildProcess] = ()) -> None:
        """Kill all of them but `spare`."""
        for child in self.children:
            if child not in spare:
                child.dismissed = True
                child.kill()

    def forget(self) -> None:
        """Its engines are dead: no process listens at their addresses, and none reads their media stores any more."""
        shutil.rmtree(self._directory, ignore_errors=True)
        for fd in self._media_stores:  # which its API servers, as long as they answer 503, have mapped
            discard(map_sparse(fd, self._ground.media_cache.nbytes))
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
                self._relieve(child)
                if self.announced:
                    logger.info("%s: replacement ready", child.title)

    def _init(self) -> Init:
        config, where = self._ground.config, self._directory
        engines, ranks = range(config.data_parallel_size), range(config.tensor_parallel_size)
        return Init(
            config=config,
            model_dir=self._ground.model_dir,
            runtime_dir=str(where),
            cores=[f"ipc://{where}/core-{engine}" for engine in engines],
            core_workers=[f"ipc://{where}/core-{engine}-workers" for engine in engines],
            ranks=[
                RankAddress(engine, rank, f"{where}/tensors-{engine}.{rank}") for engine in engines for rank in ranks
            ],
            media_cache=self._ground.media_cache,
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

    def _relieve(self, successor: ChildProcess) -> None:
        """The API servers of earlier generations in this slot need not answer 503 any longer."""
        for child in self._processes.api_servers():
            if child.generation < self.number and child.index == successor.index:
                child.terminate()
