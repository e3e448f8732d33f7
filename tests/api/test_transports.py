"""Which placement of the tensor queue an API server chooses, and what it says of it."""

import asyncio

import pytest

from mini_engine.api.transports import add_slots, choose
from mini_engine.config import ConfigError, TensorIpc
from mini_engine.messages import TransportChoice, TransportName
from mini_engine.metrics import REGISTRY
from mini_engine.transport.codec import TransportError
from tests.api.peers import MemoryTransport


def queue_that_fails(*failing: str) -> MemoryTransport:
    async def made() -> MemoryTransport:
        queue = MemoryTransport()
        queue.probe_errors = dict.fromkeys(failing, "rank 1 has no /run/socket")
        return queue

    return asyncio.run(made())


def chosen(mode: TensorIpc, *failing: TransportName) -> TransportChoice:
    queue = queue_that_fails(*failing)
    choice = choose(3, mode, queue, timeout=1)
    assert queue.placement == choice.transport
    return choice


def is_set(transport: str, reason: str) -> bool:
    labels = {"engine": "3", "transport": transport, "reason": reason}
    return REGISTRY.get_sample_value("mini_engine:mm_tensor_ipc_info", labels) == 1


def test_auto_takes_the_first_that_works() -> None:
    choice = chosen("auto")
    assert (choice.engine, choice.transport, choice.reason) == (3, "torch_shm", "the first whose probe passed")
    assert is_set("torch_shm", "probe_passed")


def test_auto_passes_over_one_that_fails_and_says_why() -> None:
    choice = chosen("auto", "torch_shm")
    assert choice.transport == "direct_rpc" and "torch_shm was passed over: rank 1 has no" in choice.reason
    assert is_set("direct_rpc", "torch_shm_failed")


def test_auto_without_any_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"torch_shm: rank 1.*direct_rpc: rank 1"):
        chosen("auto", "torch_shm", "direct_rpc")


@pytest.mark.parametrize("name", ["torch_shm", "direct_rpc"])
def test_what_was_asked_for_is_taken_or_is_an_error(name: TransportName) -> None:
    other: TransportName = "direct_rpc" if name == "torch_shm" else "torch_shm"
    assert chosen(name, other).reason == "asked for by --mm-tensor-ipc" and is_set(name, "asked_for")
    with pytest.raises(ConfigError, match=f"--mm-tensor-ipc {name}: .*Use --mm-tensor-ipc auto"):
        chosen(name, name)


def test_slots_that_fail_send_cuda_tensors_by_way_of_the_host() -> None:
    choice = TransportChoice(0, "torch_shm", "the first")
    assert add_slots(queue_that_fails(), choice, "auto", object, 1) == choice
    replaced = add_slots(queue_that_fails("slots"), choice, "auto", object, 1)
    assert replaced.reason == "the first; CUDA tensors go by way of the host: rank 1 has no /run/socket"
    with pytest.raises(ConfigError, match="--mm-tensor-ipc torch_shm: .*auto"):
        add_slots(queue_that_fails("slots"), choice, "torch_shm", object, 1)


def test_slots_without_device_memory_do_so_too() -> None:
    def make() -> object:
        raise TransportError("out of memory")

    choice = add_slots(queue_that_fails(), TransportChoice(0, "direct_rpc", "x"), "auto", make, 1)
    assert choice.reason.endswith("out of memory")
    with pytest.raises(ConfigError):
        add_slots(queue_that_fails("direct_rpc"), TransportChoice(0, "direct_rpc", "x"), "auto", make, 1)
