"""One engine core and its one worker, as they run under `serve.py`, without the rest of a server.

This process stands in for the supervisor (starts them, shakes hands) and for API server 0 (sends requests, takes
tokens); both children are the real ones, started by the supervisor's own `ChildProcess`. So nothing but the engine
works while it is measured, and what it is sent is known to the token. Nothing here reads a clock but on receipt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import zmq

from mini_engine.bench import timed_child
from mini_engine.bench.report import BenchError
from mini_engine.child import ChildSpec
from mini_engine.config import EngineConfig
from mini_engine.host import resolve_model, runtime_directory
from mini_engine.launch.process_group import ChildProcess
from mini_engine.log import LogSettings
from mini_engine.messages import AnyMessage, Hello, Init, MediaCachePlan, NewRequest, Outputs, RankAddress, Ready, Role
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode

CORE, WORKER, API = 1, 2, 3  # incarnations
API_NAME = "api 0"
QUIET_MS = 300  # no frame for so long: see whether all requests have ended
STALL_SECONDS = 60.0


class EngineError(BenchError):
    """The engine died, stalled, or ended a request otherwise than by its length."""


class Arrival(NamedTuple):
    """What the engine core sent, and when it was there (`time.perf_counter`)."""

    when: float
    outputs: Outputs


@dataclasses.dataclass(frozen=True)
class ThreadTime:
    """Of a process's main thread, from the kernel's scheduler."""

    cpu: float  # seconds on a CPU
    wait: float  # seconds ready to run, but without a CPU


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a set of requests brought."""

    arrivals: list[Arrival]  # in order
    warm: int  # index of the arrival after which every request had its warm-up tokens
    after_warm: dict[str, ThreadTime]  # of each child by name, from then to the end
    model_seconds: float  # that the worker's model took on the clock, from then to the end

    def steps_after_warm(self, batch: int) -> float:
        """Tokens for each of `batch` sequences that came after the warm-up."""
        outputs = itertools.chain.from_iterable(arrival.outputs.outputs for arrival in self.arrivals[self.warm + 1 :])
        return sum(len(output.token_ids) for output in outputs) / batch


class EngineAlone:
    """`with EngineAlone(config) as engine: engine.generate(requests, warm_up=10)`.

    Enter it on the main thread: the children live no longer than the thread that started them. The worker has one torch
    thread.

    Args:
        config: T and D must be 1.
    """

    def __init__(self, config: EngineConfig):
        assert config.tensor_parallel_size == config.data_parallel_size == 1
        self._config = config
        self._model_dir = resolve_model(config)
        self.children: dict[str, ChildProcess] = {}  # by name: "core 0", "worker 0.0"

    def __enter__(self) -> EngineAlone:
        with contextlib.ExitStack() as stack:
            self._directory = stack.enter_context(runtime_directory())
            (self._directory / "metrics").mkdir()
            self._model_time = self._directory / "model-time"
            timed_child.create(self._model_time)
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(self._context.destroy, linger=0)
            supervisor = sockets.bind_router(self._context, f"ipc://{self._directory}/supervisor")
            stack.callback(self._kill)
            self._start("core", "0", CORE)
            self._start("worker", "0.0", WORKER)
            self._shake_hands(supervisor)
            self._encoder = Encoder(API_NAME, API)
            self._core = sockets.connect_dealer(
                self._context, self._endpoint("core-0"), sockets.identity(API_NAME, API)
            )  # fmt: skip
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def generate(self, requests: Sequence[NewRequest], warm_up: int) -> Generation:
        """Send the requests in one go and wait until each has ended.

        Once every request has more than `warm_up` tokens, what comes is stamped and only decoded at the end, so that
        this process then takes hardly more of a core than an API server that waits.

        Raises:
            EngineError: the engine died or stalled, or a request ended before it was warm or otherwise than by its
                length.
        """
        for request in requests:
            self._core.send(self._encoder.encode(request))
        produced = {request.request_id: 0 for request in requests}
        unfinished = set(produced)
        arrivals: list[Arrival] = []
        while min(produced.values()) <= warm_up:
            if len(unfinished) < len(requests):
                raise EngineError("a sequence ended before all were warm: more steps are needed")
            new = self._decode([self._receive()])
            for output in itertools.chain.from_iterable(arrival.outputs.outputs for arrival in new):
                produced[output.request_id] += len(output.token_ids)
            unfinished -= _finished(new)
            arrivals += new
        warm, before, model_before = len(arrivals) - 1, self._thread_times(), timed_child.read(self._model_time)
        while unfinished:
            new = self._decode(self._receive_until_quiet())
            unfinished -= _finished(new)
            arrivals += new
        after, model_after = self._thread_times(), timed_child.read(self._model_time)
        spent = {
            name: ThreadTime(after[name].cpu - before[name].cpu, after[name].wait - before[name].wait)
            for name in self.children
        }
        return Generation(arrivals, warm, spent, model_after[0] - model_before[0])

    def _receive(self) -> tuple[float, bytes]:
        """The next frame, and when it came."""
        deadline = time.monotonic() + STALL_SECONDS
        while not self._core.poll(QUIET_MS):
            self._check_alive()
            if time.monotonic() > deadline:
                raise EngineError(f"the engine said nothing for {STALL_SECONDS:.0f} s")
        frame = self._core.recv()
        return time.perf_counter(), frame

    def _receive_until_quiet(self) -> list[tuple[float, bytes]]:
        frames = [self._receive()]
        while self._core.poll(QUIET_MS):
            frames.append(self._receive())
        return frames

    @staticmethod
    def _decode(frames: Sequence[tuple[float, bytes]]) -> list[Arrival]:
        bodies = [(when, decode(frame).body) for when, frame in frames]
        return [Arrival(when, body) for when, body in bodies if isinstance(body, Outputs)]

    def _thread_times(self) -> dict[str, ThreadTime]:
        found = {}
        for name, child in self.children.items():
            cpu, wait, _ = Path(f"/proc/{child.pid}/schedstat").read_text().split()
            found[name] = ThreadTime(int(cpu) / 1e9, int(wait) / 1e9)
        return found

    # --- start and stop ----------------------------------------------------------------------------------------------

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._directory}/{name}"

    def _start(self, role: Role, index: str, incarnation: int) -> None:
        child = ChildProcess.start(
            ChildSpec(role, index, incarnation, os.getpid(), self._endpoint("supervisor"), LogSettings("warning")),
            {
                "OMP_NUM_THREADS": "1",
                "PROMETHEUS_MULTIPROC_DIR": str(self._directory / "metrics"),
                "TMPDIR": str(self._directory),
                timed_child.FILE_VARIABLE: str(self._model_time),
            },
            module=timed_child.__name__,
        )
        self.children[child.name] = child

    def _shake_hands(self, supervisor: zmq.Socket[bytes]) -> None:
        ready: set[str] = set()
        deadline = time.monotonic() + self._config.startup_timeout
        while len(ready) < len(self.children):
            self._check_alive()
            if time.monotonic() > deadline:
                raise EngineError(f"the engine was not ready within {self._config.startup_timeout:.0f} s")
            if not supervisor.poll(100):
                continue
            peer, frame = supervisor.recv_multipart()
            envelope = decode(frame)
            if isinstance(envelope.body, Hello):
                answer: AnyMessage = self._init()
                supervisor.send_multipart([peer, Encoder("supervisor", 0).encode(answer)])
            elif isinstance(envelope.body, Ready):
                ready.add(envelope.sender)

    def _init(self) -> Init:
        return Init(
            config=self._config,
            model_dir=self._model_dir,
            runtime_dir=str(self._directory),
            cores=[self._endpoint("core-0")],
            core_workers=[self._endpoint("core-0-workers")],
            ranks=[RankAddress(0, 0, f"{self._directory}/tensors-0.0")],
            media_cache=MediaCachePlan("off", 0, "no media are sent"),
        )

    def _check_alive(self) -> None:
        """Raises EngineError when one of them is dead."""
        poller = zmq.Poller()
        for child in self.children.values():
            poller.register(child.pidfd, zmq.POLLIN)
        dead = dict(poller.poll(0))
        for name, child in self.children.items():
            if child.pidfd in dead:
                raise EngineError(f"{name} died; its log is above")

    def _kill(self) -> None:
        for child in self.children.values():
            child.kill()
            child.reap()
        self.children.clear()
        sys.stderr.flush()


def _finished(arrivals: Sequence[Arrival]) -> set[str]:
    """The requests that these ended.

    Raises:
        EngineError: one of them ended otherwise than by its length.
    """
    outputs = itertools.chain.from_iterable(arrival.outputs.outputs for arrival in arrivals)
    ends = [output for output in outputs if output.finish_reason is not None]
    for output in ends:
        if output.finish_reason != "length":
            raise EngineError(f"{output.request_id} ended: {output.finish_reason}, {output.error}")
    return {output.request_id for output in ends}
