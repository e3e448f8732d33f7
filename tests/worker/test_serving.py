"""The worker's loop that launches steps ahead, over real sockets, with a real runner. In the place of the device's end
of a step stands a gate that the test opens, so that steps can be seen to be launched before."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch
import zmq

from mini_engine.messages import Step, StepResult
from mini_engine.transport.codec import Encoder, decode
from mini_engine.worker.model_runner import Launched, ModelRunner
from mini_engine.worker.serving import AHEAD, Watch, serve_ahead
from tests.transport.conftest import eventually
from tests.worker import script, tiny
from tests.worker.conftest import NUM_BLOCKS

ENCODER = Encoder("core 0", 1)


class Core:
    """The engine core's end, and a thread with the worker's."""

    def __init__(self, runner: ModelRunner) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.bind("inproc://core")
        self._runner = runner
        self.launched: list[int] = []
        self.gate = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        launch = self._runner.launch

        def noted(step: Step) -> Launched:
            self.launched.append(step.number)
            return launch(step)

        self._runner.launch = noted
        with self._context.socket(zmq.PAIR) as core, contextlib.suppress(RuntimeError):  # "expected a Step"
            core.connect("inproc://core")
            with contextlib.closing(Watch(lambda _: self.gate.acquire())) as watch:
                serve_ahead(core, Encoder("worker 0.0", 1), self._runner, watch)

    def send(self, message: object) -> None:
        self._socket.send(ENCODER.encode(message))

    def result(self, seconds: float = 60) -> StepResult | None:
        return decode(self._socket.recv()).body if self._socket.poll(1000 * seconds) else None

    def close(self) -> None:
        self.gate.release(1000)
        self.send(StepResult(0))  # no Step: the worker's end
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def core(make_runner) -> Iterator[tuple[Core, list[Step]]]:
    media = tiny.MemoryMedia()
    steps = script.write_steps(tiny.mixed_requests(media), 20, 64, 16, NUM_BLOCKS)
    with contextlib.closing(Core(make_runner(media))) as made:
        yield made, steps


def test_results_come_in_order_with_their_tokens(core, expected):
    core, steps = core
    core.gate.release(1000)
    for step in steps:
        core.send(step)
    tokens: dict[str, list[int]] = {}
    for step in steps:
        result = core.result()
        assert result.number == step.number
        for sampled in result.tokens:
            tokens.setdefault(sampled.request_id, []).append(sampled.token_id)
    assert tokens == expected


def test_some_steps_are_launched_before_one_has_ended_and_no_more(core):
    core, _ = core
    for number in range(5):
        core.send(Step(number))
    assert eventually(lambda: len(core.launched) == AHEAD)
    assert core.result(0.3) is None
    assert core.launched == list(range(AHEAD))
    core.gate.release()
    assert core.result().number == 0
    assert eventually(lambda: len(core.launched) == AHEAD + 1)
    assert core.result(0.3) is None
    assert core.launched == list(range(AHEAD + 1))
    core.gate.release(4)
    assert [core.result().number for _ in range(4)] == [1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_device_that_fails_is_reported_without_a_further_step():
    def wait(step: Launched) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with contextlib.closing(Watch(wait)) as watch:
        watch.start(Launched(StepResult(0), None, torch.device("cpu")))
        with pytest.raises(RuntimeError, match="the device has failed in a step") as raised:
            watch.take()
    assert "illegal memory access" in str(raised.value.__cause__)
