"""What a worker's process chooses before it loads a model, and its loops. `tests/faults/` has ranks that lose another.

Of the loop that launches steps ahead, over real sockets, a gate that the test opens stands in the place of the device's
end of a step, so that steps can be seen to be launched before; the one that packs weights between steps has a clock of
the test's.
"""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import zmq

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.messages import Step, StepResult
from mini_engine.transport.codec import Encoder, decode
from mini_engine.worker import worker
from mini_engine.worker.worker import AHEAD, PACKING_SECONDS, serve, serve_ahead
from tests.support.processes import eventually

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_collectives():
    names = {("auto", CPU): "shm", ("auto", CUDA): "nccl", ("gloo", CUDA): "gloo", ("gloo", CPU): "gloo"}
    for (asked, device), name in names.items():
        assert worker.choose_collectives(EngineConfig(distributed_backend=asked), device) == name
    with pytest.raises(ConfigError, match="nccl needs CUDA devices, and there is none here; use shm or auto"):
        worker.choose_collectives(EngineConfig(distributed_backend="nccl"), CPU)
    with pytest.raises(ConfigError, match="shm is for workers on the CPU; use nccl, gloo or auto"):
        worker.choose_collectives(EngineConfig(distributed_backend="shm"), CUDA)


def test_attention_backends_on_the_cpu():
    assert worker.choose_backend("auto", CPU) == worker.choose_backend("sdpa", CPU) == "sdpa"
    with pytest.raises(ConfigError, match="--attention-backend triton: .*; choose auto"):
        worker.choose_backend("triton", CPU)


def test_a_worker_on_the_cpu_needs_no_triton_and_no_worker_transformers():
    code = "import sys; sys.modules['triton'] = None; import mini_engine.worker.worker; "
    code += "assert 'transformers' not in sys.modules; import benchmarks.cli"
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_weights_are_packed_while_no_step_is_there_and_for_as_long_as_steps_take(monkeypatch):
    """A part takes an eighth of a second; the first step comes when five are packed, the others wait."""
    now, packed = 0.0, 0
    durations, packed_before = [0.5, 0.25, 100.0, 0.0625, 0.0625, 0.0], list[int]()

    def pack() -> Iterator[None]:
        nonlocal now, packed
        for _ in range(40):
            now, packed = now + 0.125, packed + 1
            yield

    def receive() -> bytes:
        if len(packed_before) == len(durations):
            raise EOFError
        return Encoder("core 0", 1).encode(Step(len(packed_before)))

    def launch(step: Step) -> SimpleNamespace:
        nonlocal now
        packed_before.append(packed)
        now += durations[step.number]
        return SimpleNamespace(result=lambda: StepResult(step.number))

    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now))
    core = SimpleNamespace(poll=lambda _: packed >= 5, recv=receive, send=lambda _: None)
    with pytest.raises(EOFError):
        serve(core, Encoder("worker 0.0", 1), SimpleNamespace(launch=launch), pack())
    limit = int(PACKING_SECONDS / 0.125)
    assert packed_before == [5, 9, 11, 11 + limit, 12 + limit, 12 + limit], "a part for two short steps"
    assert packed == 12 + limit


def test_steps_are_served_once_all_weights_are_packed():
    packing = iter([None, None])
    steps = [Encoder("core 0", 1).encode(Step(number)) for number in range(3)]
    launched: list[int] = []

    def launch(step: Step) -> SimpleNamespace:
        launched.append(step.number)
        return SimpleNamespace(result=lambda: StepResult(step.number))

    core = SimpleNamespace(poll=lambda _: False, recv=lambda: steps.pop(0), send=lambda _: None)
    with pytest.raises(IndexError):
        serve(core, Encoder("worker 0.0", 1), SimpleNamespace(launch=launch), packing)
    assert launched == [0, 1, 2]
