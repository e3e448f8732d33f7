import asyncio

import pytest

from mini_engine.api.transports import EngineTransports, choose, with_cuda
from mini_engine.config import ConfigError, TensorIpc
from mini_engine.messages import TransportName
from mini_engine.metrics import REGISTRY
from tests.api.peers import MemoryTransport


def chosen(mode: TensorIpc, *failing: TransportName) -> tuple[EngineTransports, dict[str, MemoryTransport]]:
    async def scenario() -> tuple[EngineTransports, dict[str, MemoryTransport]]:
        made: dict[str, MemoryTransport] = {}

        def maker(name: TransportName) -> MemoryTransport:
            made[name] = MemoryTransport(name)
            made[name].probe_error = "no way to /run/socket" if name in failing else None
            return made[name]

        candidates = {name: lambda name=name: maker(name) for name in ("torch_shm", "direct_rpc")}
        return choose(3, mode, candidates, timeout=1), made

    return asyncio.run(scenario())


def names(transports: EngineTransports) -> list[str]:
    return [sender.name for sender in transports.senders]


def test_auto_takes_the_first_that_works_and_keeps_the_other() -> None:
    transports, _ = chosen("auto")
    assert names(transports) == ["torch_shm", "direct_rpc"]
    assert (transports.choice.engine, transports.choice.transport) == (3, "torch_shm")
    labels = {"engine": "3", "transport": "torch_shm", "reason": "probe_passed"}
    assert REGISTRY.get_sample_value("mini_engine:mm_tensor_ipc_info", labels) == 1


def test_auto_passes_over_one_that_fails_and_says_why() -> None:
    transports, made = chosen("auto", "torch_shm")
    assert names(transports) == ["direct_rpc"]
    assert "torch_shm was passed over: no way to" in transports.choice.reason
    assert made["torch_shm"].closed
    labels = {"engine": "3", "transport": "direct_rpc", "reason": "torch_shm_failed"}
    assert REGISTRY.get_sample_value("mini_engine:mm_tensor_ipc_info", labels) == 1


def test_auto_without_any_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"torch_shm: no way.*direct_rpc: no way"):
        chosen("auto", "torch_shm", "direct_rpc")


def test_a_transport_asked_for_by_name() -> None:
    transports, _ = chosen("torch_shm")
    assert names(transports) == ["torch_shm", "direct_rpc"]  # the second is for requests that the first cannot take
    assert "--mm-tensor-ipc" in transports.choice.reason
    transports, made = chosen("direct_rpc")
    assert names(transports) == ["direct_rpc"]
    assert "torch_shm" not in made
    transports, _ = chosen("torch_shm", "direct_rpc")
    assert names(transports) == ["torch_shm"]


def test_a_transport_asked_for_by_name_that_fails_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--mm-tensor-ipc torch_shm.*no way.*--mm-tensor-ipc auto"):
        chosen("torch_shm", "torch_shm")


def with_device(mode: TensorIpc, probe_error: str | None) -> EngineTransports:
    device = MemoryTransport(takes="cuda")
    device.probe_error = probe_error
    try:
        return with_cuda(chosen(mode)[0], mode, lambda: device, timeout=1)
    finally:
        assert device.closed == (probe_error is not None)


def test_cuda_tensors_have_a_sender_of_their_own() -> None:
    transports = with_device("auto", None)
    assert [sender.takes for sender in transports.senders] == ["cuda", "cpu", "cpu"]
    assert "CUDA" not in transports.choice.reason


def test_cuda_tensors_go_by_the_host_where_their_probe_fails() -> None:
    transports = with_device("auto", "no peer access")
    assert [sender.takes for sender in transports.senders] == ["cpu", "cpu"]
    assert transports.choice.transport == "torch_shm"
    assert transports.choice.reason.endswith("; CUDA tensors go by way of the host: no peer access")
    with pytest.raises(ConfigError, match="torch_shm: no peer access"):
        with_device("torch_shm", "no peer access")
