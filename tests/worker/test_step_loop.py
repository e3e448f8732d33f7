"""The worker's loop that launches steps ahead, over real sockets. In the place of the device's end of a step stands a
gate that the test opens, so that steps can be seen to be launched before."""

import contextlib
import threading
from types import SimpleNamespace

import torch
import zmq

from mini_engine.messages import Step, StepResult
from mini_engine.transport.codec import Encoder, decode
from mini_engine.worker.worker import AHEAD, serve_ahead
from tests.support.processes import eventually


def test_some_steps_are_launched_before_one_has_ended_and_no_more_until_the_device_fails(context):
    launched: list[int] = []
    gate, device_fails, encoder = threading.Semaphore(0), threading.Event(), Encoder("core 0", 1)

    def launch(step: Step) -> SimpleNamespace:
        launched.append(step.number)
        return SimpleNamespace(wait=wait, result=lambda: StepResult(step.number))

    def wait() -> None:
        gate.acquire()
        if device_fails.is_set():
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def work() -> None:
        with context.socket(zmq.PAIR) as end, contextlib.suppress(torch.AcceleratorError):
            end.connect("inproc://core")
            serve_ahead(end, Encoder("worker 0.0", 1), SimpleNamespace(launch=launch))

    def results(count: int) -> list[int]:
        return [decode(core.recv()).body.number for _ in range(count) if core.poll(60_000)]

    with context.socket(zmq.PAIR) as core:
        core.bind("inproc://core")
        thread = threading.Thread(target=work)
        thread.start()
        for number in range(5):
            core.send(encoder.encode(Step(number)))
        for ended in (0, 1):
            assert eventually(lambda ended=ended: len(launched) == ended + AHEAD)
            assert not core.poll(300) and launched == list(range(ended + AHEAD))
            gate.release()
            assert results(1) == [ended]
        gate.release(3)
        assert results(3) == [2, 3, 4]
        device_fails.set()
        core.send(encoder.encode(Step(5)))
        gate.release()
        thread.join(60)  # without a further step
        assert not thread.is_alive()
