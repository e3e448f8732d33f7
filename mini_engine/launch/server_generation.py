"""The processes of one start of the engines: started, introduced to each other, and released together.

Knows nothing of what follows when one of them dies.
"""

import itertools
import logging
import math
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mini_engine.config import EngineConfig
from mini_engine.launch.child import ChildSpec
from mini_engine.launch.preload import preload
from mini_engine.launch.process_monitor import ChildMessage, ChildState, ProcessGroup
from mini_engine.messages import EngineLimits, Init, MediaCachePlan, RankAddress, Ready, Serving, Start
from mini_engine.transport.shared_memory import create_sparse

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ServerGeneration:
    """Generation `number`, from 1 on. `dataclasses.replace` makes the next one, which begins without processes."""

    number: int
    config: EngineConfig
    model_dir: str
    media_cache: MediaCachePlan
    runtime_dir: Path
    listeners: list[socket.socket]  # one for each API server
    processes: ProcessGroup

    serving_since: float = field(default=math.inf, init=False)  # by `time.monotonic`
    limits: list[EngineLimits] = field(default_factory=list, init=False)  # of its engines
    early_deaths: int = field(default=0, init=False)  # of API servers in a row, before they served
    _media_stores: list[int] = field(default_factory=list, init=False)  # descriptors, by engine
    _weights: list[int] = field(default_factory=list, init=False)  # descriptors, by rank, where engines share them

    @property
    def announced(self) -> bool:
        """Whether it has begun to serve."""
        return self.serving_since < math.inf

    @property
    def directory(self) -> Path:
        """Of its sockets: none of a dead generation is in it."""
        return self.runtime_dir / str(self.number)

    def start(self) -> Iterator[None]:
        """Start all processes: first those that need few libraries, whose work then runs beside the import of more.
        After each import is a step, so that the caller can look at events. Raises OSError: out of processes,
        descriptors or disk space."""
        config, init, endpoint = self.config, self._init(), self.processes.endpoint
        self.directory.mkdir()
        if self.media_cache.kind == "shm":
            for _ in range(config.engines):
                self._media_stores.append(create_sparse(self.media_cache.nbytes))
        for engine in range(config.engines):
            self.processes.start(ChildSpec("core", str(engine), init, endpoint))
        yield from preload("worker")
        ranks = range(config.tensor_parallel_size)
        self._weights += [os.memfd_create("mini-engine-weights") for _ in ranks if config.engines > 1]
        for engine, rank in itertools.product(range(config.engines), ranks):
            own, weights = self._media_stores[engine : engine + 1], self._weights[rank] if self._weights else None
            spec = ChildSpec("worker", f"{engine}.{rank}", init, endpoint, media_stores=own, weights=weights)
            self.processes.start(spec)
        yield from preload("api")
        self.start_api_servers()

    def start_api_servers(self) -> None:
        """Start each that does not run. Raises OSError, as `start` does."""
        taken = {child.spec.index for child in self.processes.api_servers()}
        for index, listener in enumerate(self.listeners):
            if str(index) not in taken:
                inherited = listener.fileno(), self._media_stores
                spec = ChildSpec("api", str(index), self._init(), self.processes.endpoint, *inherited)
                self.processes.start(spec)

    def release_memory(self) -> None:
        """Remove its sockets and close its memories. Its processes are dead."""
        shutil.rmtree(self.directory, ignore_errors=True)
        for fd in (*self._media_stores, *self._weights):
            os.close(fd)
        self._media_stores.clear()
        self._weights.clear()

    def receive(self, received: ChildMessage) -> None:
        """Take the next message of the handshake: Ready, once all engines are -> Start; Serving."""
        child = received.child
        match received.body:
            case Ready(limits=limits):
                child.advance(ChildState.READY)
                if limits is not None:
                    self.limits.append(limits)
                self._release_api_servers()
            case Serving():
                self.early_deaths = 0
                child.advance(ChildState.SERVING)
                if self.announced:
                    logger.info("%s: replacement ready", child.title)

    def _init(self) -> Init:
        config, path = self.config, self.directory
        engines, ranks = range(config.engines), range(config.tensor_parallel_size)
        pairs = itertools.product(engines, ranks)
        return Init(
            config=config,
            model_dir=self.model_dir,
            runtime_dir=str(path),
            cores=[f"ipc://{path}/core-{engine}" for engine in engines],
            core_workers=[f"ipc://{path}/core-{engine}-workers" for engine in engines],
            ranks=[RankAddress(engine, rank, f"{path}/tensors-{engine}.{rank}") for engine, rank in pairs],
            media_cache=self.media_cache,
            restarts=self.number - 1,
        )

    def _release_api_servers(self) -> None:
        """Let API servers accept connections once every engine can take requests."""
        engines = self.processes.engines()
        if not self.limits or any(child.state not in (ChildState.READY, ChildState.SERVING) for child in engines):
            return
        for child in engines:
            child.advance(ChildState.SERVING)
        for child in self.processes.api_servers():
            if child.state is ChildState.READY:
                child.advance(ChildState.STARTED)
                self.processes.send(child, Start(min(self.limits, key=lambda limits: limits.num_blocks)))
