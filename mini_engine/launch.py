"""The supervisor: lays out the processes, shakes hands with them, watches them, and stops them.

It alone starts processes, all from its main thread, since the kernel's parent-death signal follows the parent thread.
It never touches a request: once the server runs, it waits in one poller for a death, a log line or a signal.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping

import zmq

from mini_engine import log
from mini_engine.child_process import ChildProcess
from mini_engine.config import EngineConfig
from mini_engine.host import (
    bind_listeners,
    check_tls,
    load_model_config,
    plan_media_cache,
    raise_descriptor_limit,
    resolve_model,
    runtime_directory,
    without_effect,
)
from mini_engine.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Drain,
    EngineLimits,
    Envelope,
    Hello,
    Init,
    PeerGone,
    RankAddress,
    Ready,
    Refused,
    Role,
    Serving,
    Start,
    TransportChoice,
)
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode

logger = logging.getLogger(__name__)

API_STOP_SECONDS = 5.0  # how long API servers may take to end their responses once told to stop
ENGINE_DEATH_GRACE_SECONDS = 1.0  # how long they may take to answer every client of a dead engine
API_RESTARTS_IN_A_ROW = 5  # an API server that dies this often before it serves will not get better


class Stop(Exception):
    """Leave the supervision loop with this exit status."""

    def __init__(self, status: int):
        self.status = status


class Supervisor:
    """One server from start to stop. `run` may be called once, from the main thread."""

    def __init__(self, config: EngineConfig, origins: Mapping[str, str] | None = None):
        """`origins`: by field, what gave the settings that are not left at their defaults, such as `--port`."""
        self.config = config
        self.origins = origins or {}
        self.log = log.LogSettings(config.log_level, config.log_format)
        self.children: dict[str, ChildProcess] = {}  # by name, such as "worker 0.1"
        self.limits: list[EngineLimits] = []
        self.transports: dict[str, list[TransportChoice]] = {}
        self.incarnations = itertools.count(1)
        self.early_deaths = 0
        self.announced = False
        self.stopping = False
        self.interrupts = 0  # signals after the one that stops the server
        self.patience = 0.0  # seconds for running requests to end, once the server stops

    def run(self) -> int:
        """Serve until a signal or a death ends it; returns the exit status."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        raise_descriptor_limit()
        self.model_dir = resolve_model(self.config)
        self.model_config = load_model_config(self.model_dir, self.config)
        self.media_cache = plan_media_cache(self.config)
        check_tls(self.config)
        self.listeners = bind_listeners(self.config)
        with contextlib.ExitStack() as held:
            if self.config.uds is not None:
                held.callback(sockets.BoundPath(self.config.uds).unlink)
            self.runtime_dir = held.enter_context(runtime_directory())
            self._open_links()
            try:
                self._start_children()
                self._wait_until_serving()
                while True:
                    self._poll(None)
            except Stop as stop:
                return stop.status
            finally:
                self._stop_children()
                self.context.destroy(linger=0)

    # --- start -------------------------------------------------------------------------------------------------------

    def _open_links(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.encoder = Encoder("supervisor", 0)
        self.endpoint = f"ipc://{self.runtime_dir}/supervisor"
        self.router = sockets.bind_router(self.context, self.endpoint)
        (self.runtime_dir / "metrics").mkdir()
        (self.runtime_dir / "tmp").mkdir()
        self.signal_fd, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # the number arrives through the wake-up descriptor

    def _start_children(self) -> None:
        engines = range(self.config.data_parallel_size)
        ranks = range(self.config.tensor_parallel_size)
        self.deadline = time.monotonic() + self.config.startup_timeout
        for slot in range(self.config.api_server_count):  # first: they have the most to import
            self._start("api", str(slot), self.listeners[slot])
        for engine in engines:
            self._start("core", str(engine))
            for rank in ranks:
                self._start("worker", f"{engine}.{rank}")

    def _start(self, role: Role, index: str, listener: socket.socket | None = None) -> None:
        child = ChildProcess.start(
            role=role,
            index=index,
            incarnation=next(self.incarnations),
            supervisor=self.endpoint,
            log=self.log,
            listener=listener,
            environment={
                "PROMETHEUS_MULTIPROC_DIR": str(self.runtime_dir / "metrics"),
                "TMPDIR": str(self.runtime_dir / "tmp"),  # what libraries leave there goes with the directory
            },
        )
        self.children[child.name] = child

    def _init(self) -> Init:
        ipc = f"ipc://{self.runtime_dir}"
        engines = range(self.config.data_parallel_size)
        return Init(
            config=self.config,
            model_dir=self.model_dir,
            runtime_dir=str(self.runtime_dir),
            cores=[f"{ipc}/core-{engine}" for engine in engines],
            core_workers=[f"{ipc}/core-{engine}-workers" for engine in engines],
            ranks=[
                RankAddress(
                    engine, rank, f"{self.runtime_dir}/tensors-{engine}.{rank}", f"{ipc}/tensors-rpc-{engine}.{rank}"
                )
                for engine in engines
                for rank in range(self.config.tensor_parallel_size)
            ],
            media_cache=self.media_cache,
            late=self.announced,
        )

    def _wait_until_serving(self) -> None:
        begun = time.monotonic()
        while not all(child.serving for child in self.children.values()):
            left = self.deadline - time.monotonic()
            if left <= 0:
                silent = ", ".join(child.name for child in self.children.values() if not child.ready)
                logger.error(
                    "start failed: not ready after %.0f s (--startup-timeout): %s", self.config.startup_timeout, silent
                )
                for child in self.children.values():
                    if not child.ready:
                        child.log_tail(logger)
                raise Stop(1)
            self._poll(left)
        self._announce(time.monotonic() - begun)

    def _announce(self, seconds: float) -> None:
        self.announced = True
        config, limits = self.config, self.limits[0]
        for choice in next(iter(self.transports.values()), []):
            what = "media that the cache has no room for" if self.media_cache.kind == "shm" else "media"
            logger.info("%s reach engine %d by %s: %s", what, choice.engine, choice.transport, choice.reason)
        if useless := without_effect(config, self.origins, self.media_cache, limits.device):
            logger.info("no effect here: %s", "; ".join(useless))
        logger.info("processed media are cached: %s (%s)", self.media_cache.kind, self.media_cache.reason)
        logger.info(
            "serving %s (%s) at %s/v1 after %.1f s: %d API server(s), %d engine(s) x %d worker(s), "
            "%d KV blocks of %d tokens, up to %d tokens a request",
            config.served_names[0], self.model_config.architecture, self._address(), seconds,
            config.api_server_count, config.data_parallel_size, config.tensor_parallel_size,
            limits.num_blocks, limits.block_size, limits.max_model_len,
        )  # fmt: skip

    def _address(self) -> str:
        config = self.config
        scheme = "https" if config.ssl_certfile else "http"
        if config.uds is not None:
            return f"{scheme}+unix://{config.uds}:{config.root_path}"
        host = f"[{config.host}]" if ":" in config.host else config.host
        return f"{scheme}://{host}:{self.listeners[0].getsockname()[1]}{config.root_path}"

    # --- events ------------------------------------------------------------------------------------------------------

    def _poll(self, timeout: float | None) -> None:
        """Wait for the next events and handle each: messages, signals, log lines, deaths, in this order."""
        poller = zmq.Poller()
        poller.register(self.router, zmq.POLLIN)
        poller.register(self.signal_fd, zmq.POLLIN)
        children = list(self.children.values())
        for child in children:
            poller.register(child.pidfd, zmq.POLLIN)
            poller.register(child.output, zmq.POLLIN)
        ready = dict(poller.poll(None if timeout is None else max(0, int(timeout * 1000))))
        if self.router in ready:
            self._receive()
        if self.signal_fd in ready:
            self._on_signal()
        for child in children:
            if child.output.fileno() in ready:
                child.forward_output()
        for child in children:
            if child.pidfd in ready:
                self._on_death(child)

    def _receive(self) -> None:
        while True:
            try:
                peer, frame = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            envelope = decode(frame)
            child = self.children.get(envelope.sender)
            if child is not None and child.incarnation == envelope.incarnation:
                child.peer = peer
                self._handle(child, envelope)

    def _handle(self, child: ChildProcess, envelope: Envelope) -> None:
        match envelope.body:
            case Hello(protocol_version=version):
                if version != PROTOCOL_VERSION:
                    logger.error("%s speaks protocol %d, this is %d", child.name, version, PROTOCOL_VERSION)
                    raise Stop(1)
                self._send(child, self._init())
            case Ready(limits=limits, transports=transports):
                child.ready = True
                if limits is not None:
                    self.limits.append(limits)
                if child.role == "api":
                    self.transports[child.name] = transports
                self._release_api_servers()
            case Refused(reason=reason) if not self.stopping:
                logger.error("%s: %s", child.name if self.announced else "start failed", reason)
                if not self.announced:
                    raise Stop(1)
                child.kill()
            case Serving():
                self.early_deaths = 0
                child.serving = True
                if self.announced:
                    logger.info("%s (pid %d) serves in the place of the one that died", child.name, child.pid)

    def _release_api_servers(self) -> None:
        """Let API servers accept connections once every engine can take requests."""
        engines = [child for child in self.children.values() if child.role != "api"]
        if not all(child.ready for child in engines):
            return
        for child in engines:
            child.serving = True
        for child in self.children.values():
            if child.role == "api" and child.ready and not child.started:
                child.started = True
                self._send(child, Start(min(self.limits, key=lambda limits: limits.max_model_len)))

    def _send(self, child: ChildProcess, body: AnyMessage) -> None:
        try:
            self.router.send_multipart([child.peer, self.encoder.encode(body)], zmq.NOBLOCK)
        except zmq.ZMQError:  # it is dying or hangs: its pidfd, or the start-up time-out, has the last word
            logger.debug("%s does not take %s", child.name, type(body).__name__)

    def _on_signal(self) -> None:
        numbers = [number for number in os.read(self.signal_fd, 64) if number in (signal.SIGINT, signal.SIGTERM)]
        if self.stopping:
            self.interrupts += len(numbers)
        elif numbers:
            self.interrupts = len(numbers) - 1
            self.patience = self.config.shutdown_timeout if numbers[0] == signal.SIGTERM else 0.0
            logger.info(
                "stopping on %s: up to %g s for requests that run; a second signal stops at once",
                signal.Signals(numbers[0]).name, self.patience,
            )  # fmt: skip
            raise Stop(0)

    def _on_death(self, child: ChildProcess) -> None:
        del self.children[child.name]
        how = child.reap()
        self._drop_metrics(child)
        for other in self.children.values():
            self._send(other, PeerGone(child.name, child.incarnation))
        if self.stopping:
            if self.patience and child.role != "api":
                logger.error("%s (pid %d) died while requests were to end: %s", child.name, child.pid, how)
            return
        logger.error("%s (pid %d) died: %s", child.name, child.pid, how)
        child.log_tail(logger)
        if child.role != "api":
            self._on_engine_death(child)
        if not child.serving:
            self.early_deaths += 1
        if not self.announced or self.early_deaths >= API_RESTARTS_IN_A_ROW:
            logger.error("start failed: %s", child.name)
            raise Stop(1)
        self._start("api", child.index, self.listeners[int(child.index)])

    def _on_engine_death(self, child: ChildProcess) -> None:
        """A dead worker ends its engine, and a dead engine the server, once every client has its answer."""
        engine = child.index.partition(".")[0]
        logger.error("engine %s cannot go on without %s: the server ends", engine, child.name)
        core = self.children.get(f"core {engine}")
        if core is not None:
            core.kill()
            for other in self.children.values():
                self._send(other, PeerGone(core.name, core.incarnation))
        self.stopping = True
        deadline = time.monotonic() + ENGINE_DEATH_GRACE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and self._api_servers():
            self._poll(left)
        raise Stop(1)

    def _drop_metrics(self, child: ChildProcess) -> None:
        """Forget the live gauges of a dead process; its counters stay in the totals."""
        for path in (self.runtime_dir / "metrics").glob(f"gauge_live*_{child.pid}.db"):
            path.unlink(missing_ok=True)

    # --- stop --------------------------------------------------------------------------------------------------------

    def _stop_children(self) -> None:
        """API servers may finish their requests, if there is patience, and then what they are sending; the rest holds
        nothing that outlives it. Then kill. Another signal leaves no time for any of that."""
        self.stopping = True
        for listener in self.listeners:  # so that the end of an API server ends its part of the port, too
            listener.close()
        if self.patience:
            for child in self._api_servers():
                if child.serving:
                    self._send(child, Drain())
                else:
                    child.terminate()
            self._wait_for_api_servers(self.patience)
        for child in self._api_servers():
            child.terminate()
        self._wait_for_api_servers(API_STOP_SECONDS)
        self.patience = 0.0
        for child in self.children.values():
            child.kill()
        while self.children:
            self._poll(None)

    def _api_servers(self) -> list[ChildProcess]:
        return [child for child in self.children.values() if child.role == "api"]

    def _wait_for_api_servers(self, seconds: float) -> None:
        """Until all have ended, the time is up, or another signal comes."""
        deadline = time.monotonic() + seconds
        while self._api_servers() and not self.interrupts and (left := deadline - time.monotonic()) > 0:
            self._poll(left)
