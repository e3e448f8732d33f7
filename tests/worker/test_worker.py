"""The worker's process as the supervisor starts it; this test is supervisor and engine core."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from mini_engine.child import ChildSpec
from mini_engine.config import ConfigError, EngineConfig
from mini_engine.log import LogSettings
from mini_engine.messages import (
    Chunk,
    Hello,
    Init,
    MediaCachePlan,
    NewSequence,
    RankAddress,
    Ready,
    SamplingParams,
    Step,
    WorkerReady,
)
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode
from mini_engine.worker import worker

INCARNATION = 5
TIMEOUT_MS = 60_000
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def tmp_path(runtime: Path) -> Path:
    """Short, unlike pytest's: there are sockets in it."""
    return runtime


@pytest.fixture
def links(tmp_path):
    """ROUTERs of the supervisor and of the core."""
    context = zmq.Context()
    bound = [sockets.bind_router(context, f"ipc://{tmp_path}/{name}") for name in ("supervisor", "core")]
    for socket in bound:
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    yield bound
    context.destroy(linger=0)


@pytest.fixture
def start(tmp_path, links):
    """Starts the process of a rank."""
    children = []

    def started(rank: int) -> subprocess.Popen:
        supervisor, log = f"ipc://{tmp_path}/supervisor", LogSettings("warning")
        spec = ChildSpec("worker", f"0.{rank}", INCARNATION + rank, os.getpid(), supervisor, log)
        child = subprocess.Popen(
            [sys.executable, "-m", "mini_engine.child", msgspec.json.encode(spec).decode()],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        children.append(child)
        return child

    yield started
    for child in children:
        child.kill()
        child.wait()
        child.stderr.close()


def init_with(tmp_path, checkpoint, config: EngineConfig) -> Init:
    """What the supervisor answers to each rank of one engine."""
    ranks = [RankAddress(0, rank, f"{tmp_path}/tensors{rank}") for rank in range(config.tensor_parallel_size)]
    cache = MediaCachePlan("off", 0, "")
    return Init(config, str(checkpoint), str(tmp_path), [], [f"ipc://{tmp_path}/core"], ranks, cache)


def test_a_rank_that_loses_another_logs_a_line_and_does_not_exit_first(tmp_path, links, start, checkpoint):
    """The supervisor is to find one death, and this is it."""
    supervisor, core = links
    encoder = Encoder("supervisor", 0)
    survivor, dying = start(0), start(1)
    config = EngineConfig(device="cpu", kv_cache_memory_bytes=1 << 20, tensor_parallel_size=2)
    for _ in range(2):
        peer, frame = supervisor.recv_multipart()
        assert decode(frame).body in (Hello("worker", "0.0"), Hello("worker", "0.1"))
        supervisor.send_multipart([peer, encoder.encode(init_with(tmp_path, checkpoint, config))])
    ready = {decode(frame).body: peer for peer, frame in (core.recv_multipart() for _ in range(2))}
    # Two layers, keys and values, 16 tokens, one head of 16 in float32.
    num_blocks = (1 << 20) // (2 * 2 * 16 * 1 * 16 * 4)
    peers = [ready[WorkerReady(rank, num_blocks, "cpu")] for rank in range(2)]
    assert [decode(supervisor.recv_multipart()[1]).body for _ in range(2)] == [Ready(), Ready()]

    new = NewSequence("one", [17], SamplingParams(max_tokens=9, seed=0, temperature=0.0), [])
    chunk = Chunk("one", 0, 1, [0], True)
    core.send_multipart([peers[0], encoder.encode(Step(1, started=[new], chunks=[chunk]))])
    core.send_multipart([peers[1], encoder.encode(Step(1, chunks=[chunk]))])  # of which it knows nothing
    assert dying.wait(timeout=60) == 1
    assert "KeyError: 'one'" in dying.stderr.read().decode()
    said = next(line for line in survivor.stderr if b" ERROR " in line).decode()
    assert said.endswith("ERROR   worker 0.0 | all_reduce: rank 1 has ended\n")
    assert survivor.poll() is None
    survivor.kill()
    assert b"worker 0.0 |" not in survivor.stderr.read()


@pytest.mark.parametrize(("given", "threads"), [("3", 3), ("", 2), ("0", 2), ("x", 2)])
def test_threads(given, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(9))
    assert worker.choose_threads(EngineConfig(tensor_parallel_size=2, data_parallel_size=2)) == threads


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_takes_the_kernels():
    assert worker.choose_backend("auto", CUDA) == worker.choose_backend("triton", CUDA) == "triton"


def test_a_worker_on_the_cpu_needs_no_triton_and_no_worker_transformers():
    code = "import sys; sys.modules['triton'] = None; import mini_engine.worker.worker; "
    code += "assert 'transformers' not in sys.modules; import mini_engine.bench.cli"
    subprocess.run([sys.executable, "-c", code], check=True)
