"""The loop of a worker: steps from the engine core in, results out, in order.

On the CPU a step is complete when it has been executed. On CUDA the next step, if received, is launched while one runs,
so that the device does not idle between them.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable

import zmq

from mini_engine.messages import Step
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.cuda_memory import wait_for
from mini_engine.worker.model_runner import Launched, ModelRunner

AHEAD = 2  # steps that are launched and not reported


def serve(core: zmq.Socket[bytes], encoder: Encoder, runner: ModelRunner) -> None:
    """Receive -> execute -> report, forever."""
    while True:
        core.send(encoder.encode(runner.execute(_receive(core))))


def serve_ahead(core: zmq.Socket[bytes], encoder: Encoder, runner: ModelRunner, watch: Watch) -> None:
    """Receive -> launch, and report what the device has done, forever. `watch` waits by `wait_for_device`."""
    running: deque[Launched] = deque()
    poller = zmq.Poller()
    poller.register(watch.done, zmq.POLLIN)
    while True:
        # Beyond AHEAD nothing is received, so that the device's queue holds no more than it must.
        poller.modify(core, zmq.POLLIN if len(running) < AHEAD else 0)
        ready = dict(poller.poll())
        if watch.done in ready:
            watch.take()
            core.send(encoder.encode(running.popleft().result()))
        if core in ready:
            launched = runner.launch(_receive(core))
            running.append(launched)
            watch.start(launched)


class Watch:
    """A thread that waits for the device: for each step that has been done, in order, `done` becomes readable once.

    What `wait` raises ends the thread, and is raised by `take`: the loop does not wait for steps that never end.
    """

    def __init__(self, wait: Callable[[Launched], None]) -> None:
        self.done = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._steps: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(wait,), name="watch", daemon=True)
        self._thread.start()

    def start(self, step: Launched) -> None:
        """Wait for one more step."""
        self._steps.put(step)

    def take(self) -> None:
        """Remove one step from `done`. Waits if it is not readable. Raises RuntimeError: the device failed in a step;
        CUDA's error is the cause."""
        os.eventfd_read(self.done)
        if self._crash is not None:
            raise RuntimeError("CUDA error in a step") from self._crash

    def close(self) -> None:
        """Stop the thread after the steps that it waits for."""
        self._steps.put(None)
        self._thread.join()
        os.close(self.done)

    def _run(self, wait: Callable[[Launched], None]) -> None:
        try:
            while (step := self._steps.get()) is not None:
                wait(step)
                os.eventfd_write(self.done, 1)
        except BaseException as error:
            self._crash = error
            os.eventfd_write(self.done, 1)
            raise


def wait_for_device(step: Launched) -> None:
    """Until the device has done the step; without holding the interpreter's lock."""
    if step.done is not None:
        wait_for(step.done)


def _receive(core: zmq.Socket[bytes]) -> Step:
    step = decode(core.recv()).body
    if not isinstance(step, Step):
        raise RuntimeError(f"expected a Step from the engine core, got {type(step).__name__}")
    return step
