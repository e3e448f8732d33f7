"""The processes of one start of the engines: they are laid out, told who they are, and let loose together.

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

from mini_engine.child_process import ChildProcess
from mini_engine.config import EngineConfig
from mini_engine.launch import addresses
from mini_engine.launch.family import Family, Said
from mini_engine.messages import EngineLimits, Hello, Init, MediaCachePlan, Ready, Serving, Start, TransportChoice
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
    family: Family


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
        self._family = ground.family
        self._directory = addresses.directory(ground.runtime_dir, number)
        self._media_stores: list[int] = []  # descriptors, by engine

    @property
    def children(self) -> list[ChildProcess]:
        """Those that live."""
        return [child for child in self._family.children if child.generation == self.number]

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
            self._family.start("core", str(engine), self.number)
            for rank in range(config.tensor_parallel_size):
                own = self._media_stores[engine : engine + 1]
                self._family.start("worker", f"{engine}.{rank}", self.number, media_stores=own)

    def fill(self, slot: int) -> None:
        """Start the API server of a slot. Raises OSError: the host gives no process."""
        self._family.start("api", str(slot), self.number, self._ground.listeners[slot], self._media_stores)

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

    def hear(self, said: Said) -> None:
        """Take the next message of the handshake."""
        child = said.child
        match said.body:
            case Hello():
                self._family.send(child, self._init())
            case Ready(limits=limits, transports=transports):
                child.ready = True
                if limits is not None:
                    self.limits.append(limits)
                self.transports = self.transports or transports
                self._release_api_servers()
            case Serving():
                self.early_deaths = 0
                child.now_serves()
                self._relieve(child)
                if self.announced:
                    logger.info("%s serves in the place of the one that died", child.title)

    def _init(self) -> Init:
        ground = self._ground
        return Init(
            config=ground.config,
            model_dir=ground.model_dir,
            runtime_dir=str(self._directory),
            cores=addresses.cores(self._directory, ground.config),
            core_workers=addresses.core_workers(self._directory, ground.config),
            ranks=addresses.ranks(self._directory, ground.config),
            media_cache=ground.media_cache,
            late=self.announced or self.number > 1,
            restarts=self.number - 1,
        )

    def _release_api_servers(self) -> None:
        """Let API servers accept connections once every engine can take requests."""
        engines = [child for child in self.children if child.role != "api"]
        if not all(child.ready for child in engines):
            return
        for child in engines:
            child.now_serves()
        for child in self.children:
            if child.role == "api" and child.ready and not child.started:
                child.started = True
                self._family.send(child, Start(min(self.limits, key=lambda limits: limits.max_model_len)))

    def _relieve(self, successor: ChildProcess) -> None:
        """The API servers of generations before in this slot have answered long enough."""
        for child in self._family.api_servers():
            if child.generation < self.number and child.index == successor.index:
                child.terminate()
