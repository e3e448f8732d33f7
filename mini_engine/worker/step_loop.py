"""The loop of a worker: steps from the engine core in, results out, in order.

On the CPU a step is complete when it has been executed. On CUDA the next step, if received, is launched while one runs,
so that the device does not idle between them.
"""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import zmq

from mini_engine.messages import Step
from mini_engine.transport.codec import Encoder, decode
from mini_engine.worker.model_runner import Launched, ModelRunner

AHEAD = 2  # steps that are launched and not reported


def serve(core: zmq.Socket[bytes], encoder: Encoder, runner: ModelRunner) -> None:
    """Receive -> launch -> report, forever."""
    while True:
        step = decode(core.recv()).body
        assert isinstance(step, Step)
        core.send(encoder.encode(runner.launch(step).result()))


def serve_ahead(core: zmq.Socket[bytes], encoder: Encoder, runner: ModelRunner) -> None:
    """Receive -> launch, and report what the device has completed, forever. A thread waits for each step, in order;
    what that raises ends the loop."""
    running: deque[tuple[Launched, Future[None]]] = deque()
    done = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)  # readable once for each completed step
    poller = zmq.Poller()
    poller.register(done, zmq.POLLIN)
    with ThreadPoolExecutor(1, "watch") as watch:
        while True:
            # Beyond AHEAD nothing is received, so that the device's queue holds no more than it must.
            poller.modify(core, zmq.POLLIN if len(running) < AHEAD else 0)
            ready = dict(poller.poll())
            if done in ready:
                os.eventfd_read(done)
                launched, waited = running.popleft()
                waited.result()
                core.send(encoder.encode(launched.result()))
            if core in ready:
                step = decode(core.recv()).body
                assert isinstance(step, Step)
                launched = runner.launch(step)
                running.append((launched, watch.submit(launched.wait)))
                running[-1][1].add_done_callback(lambda _: os.eventfd_write(done, 1))
