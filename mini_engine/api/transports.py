"""How this API server's tensors reach the ranks: by which transport towards each engine (`--mm-tensor-ipc`), decided by
probes before it serves.

Knows the transports' names and their order, not how they work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
import zmq

from mini_engine import metrics
from mini_engine.config import ConfigError, EngineConfig, TensorIpc
from mini_engine.messages import RankAddress, TransportChoice, TransportName
from mini_engine.transport.base import TensorSender, TransportError
from mini_engine.transport.codec import Encoder
from mini_engine.transport.credit import ByteCredit

ORDER: tuple[TransportName, ...] = ("torch_shm", "direct_rpc")  # each is the fallback of the one before it
PROBE_SECONDS = 60.0  # the ranks answer as soon as they run, while their model still loads

Candidates = Mapping[TransportName, Callable[[], TensorSender]]


@dataclass(frozen=True)
class EngineTransports:
    """The senders that passed their probe towards all ranks of one engine, in the order of use."""

    senders: list[TensorSender]
    choice: TransportChoice


def connect(
    config: EngineConfig,
    encoder: Encoder,
    context: zmq.Context,
    engine: int,
    ranks: list[RankAddress],
    make_cuda: Callable[[list[RankAddress]], TensorSender] | None = None,
) -> EngineTransports:
    """Probe the transports towards `engine`, whose ranks are among `ranks`. Blocks.

    `make_cuda` makes the sender for CUDA tensors towards these ranks of one engine; None: this server makes no such
    tensors.

    Raises:
        ConfigError: the transport that was asked for, or every one under `auto`, fails its probe.
    """
    from mini_engine.transport.direct_rpc import DirectRpcSender
    from mini_engine.transport.tensor_ipc import TensorIpcSender

    theirs = [rank for rank in ranks if rank.engine == engine]
    credit = ByteCredit(config.mm_ipc_memory_bytes)  # of both: a request's tensors are on their way by one of them
    candidates: Candidates = {
        "torch_shm": lambda: TensorIpcSender(encoder, theirs, credit),
        "direct_rpc": lambda: DirectRpcSender(encoder, theirs, credit, context),
    }
    timeout = min(PROBE_SECONDS, config.startup_timeout)
    transports = choose(engine, config.mm_tensor_ipc, candidates, timeout)
    if make_cuda is None or config.mm_tensor_ipc == "direct_rpc":
        return transports
    return with_cuda(transports, config.mm_tensor_ipc, lambda: make_cuda(theirs), timeout)


def choose(engine: int, mode: TensorIpc, candidates: Candidates, timeout: float) -> EngineTransports:
    """The first transport from `mode` on that passes its probe, and after it those that can stand in for it.

    Raises:
        ConfigError: see `connect`.
    """
    wanted = ORDER if mode == "auto" else ORDER[ORDER.index(mode) :]
    senders: list[TensorSender] = []
    failures: dict[TransportName, TransportError] = {}
    for name in wanted:
        try:
            senders.append(_probed(candidates[name], timeout))
        except TransportError as error:
            failures[name] = error
    if not senders or (mode != "auto" and mode in failures):
        raise ConfigError(_refusal(engine, mode, failures))
    chosen = senders[0].name
    passed_over = [name for name in wanted[: wanted.index(chosen)] if name in failures]
    reason = "asked for by --mm-tensor-ipc" if mode != "auto" else "the first whose probe passed"
    for name in passed_over:
        reason += f"; {name} was passed over: {failures[name]}"
    # Without the errors' texts: they may hold addresses, and figures are read by others than logs.
    label = "asked_for" if mode != "auto" else "_".join([*passed_over, "failed"]) if passed_over else "probe_passed"
    metrics.mm_tensor_ipc_info.labels(str(engine), chosen, label).set(1)
    return EngineTransports(senders, TransportChoice(engine, chosen, reason))


def with_cuda(
    transports: EngineTransports, mode: TensorIpc, make: Callable[[], TensorSender], timeout: float
) -> EngineTransports:
    """`transports`, and the sender for CUDA tensors that `make` makes, if its probe passes.

    Raises:
        ConfigError: it does not, and the tensor queue was asked for by name.
    """
    try:
        return replace(transports, senders=[_probed(make, timeout), *transports.senders])
    except TransportError as error:
        if mode != "auto":
            raise ConfigError(_refusal(transports.choice.engine, mode, {"torch_shm": error})) from error
        reason = f"{transports.choice.reason}; CUDA tensors go by way of the host: {error}"
        return replace(transports, choice=msgspec.structs.replace(transports.choice, reason=reason))


def _probed(make: Callable[[], TensorSender], timeout: float) -> TensorSender:
    sender = make()
    try:
        sender.probe(timeout)
    except TransportError:
        sender.close()
        raise
    return sender


def _refusal(engine: int, mode: TensorIpc, failures: Mapping[TransportName, TransportError]) -> str:
    why = "; ".join(f"{name}: {error}" for name, error in failures.items())
    remedy = "" if mode == "auto" else " Use --mm-tensor-ipc auto to take whichever works."
    return f"--mm-tensor-ipc {mode}: no tensor gets through to all workers of engine {engine}: {why}.{remedy}"
