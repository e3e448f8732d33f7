"""A worker's process: one rank of one engine, from its start to its loop: steps from the engine core in, results out,
in order.

On the CPU a step is complete when it has been executed; between steps weights may be packed. On CUDA the next step, if
received, is launched while one runs, so that the device does not idle between them.

Beside the main thread there are the receiver of `media_inputs.py`, on rank 0 the reports of `grammar.py`, and, on CUDA,
the `watch` of `serve_ahead`. An exception ends the process: the supervisor detects it and ends the engine. A rank
that has lost another one logs that in a line; the supervisor reports why that one exited.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import zmq

from mini_engine.config import AttentionBackendName, ConfigError, EngineConfig
from mini_engine.failpoints import reach_failpoint
from mini_engine.free_memory import available_memory
from mini_engine.kernels.ops import mask_tokens, triton_obstacle
from mini_engine.launch.child import Child
from mini_engine.launch.plan.memory_plan import check_in_worker
from mini_engine.launch.process_setup import keep_freed_memory, use_own_pages
from mini_engine.messages import Chunk, GrammarReady, Init, NewSequence, Step, WorkerReady
from mini_engine.model.checkpoint import CheckpointError
from mini_engine.model.config import ModelConfig
from mini_engine.model.experts import compile_products
from mini_engine.model.layers import pack_later
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.quantization import DENSE_BITS, weight_bits
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.model.weights import load_model
from mini_engine.transport import sockets
from mini_engine.transport.arena import ReadableMemory
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.cuda_memory import CudaMapped
from mini_engine.worker.attention.recurrent_states import RecurrentStates
from mini_engine.worker.attention.sdpa import AttentionBackend, KVCache, empty_blocks
from mini_engine.worker.cache_sizes import (
    HUNGRY_SAMPLING,
    CacheSize,
    MemoryUse,
    cache_size,
    has_fixed_cache,
    profile,
    room_for,
)
from mini_engine.worker.media_inputs import MediaInputs
from mini_engine.worker.model_runner import Launched, ModelRunner
from mini_engine.worker.normalisation import Normalisation
from mini_engine.worker.pinning import PinnedMemory
from mini_engine.worker.sampling.grammar import Grammars
from mini_engine.worker.shared_collectives import RankEnded, RankLost, meet
from mini_engine.worker.shared_weights import LEAST_BYTES, share_weights

if TYPE_CHECKING:
    from mini_engine.worker.attention.decode_graphs import DecodeGraphs  # imports Triton

logger = logging.getLogger(__name__)

# A rank that has closed its connections may take a while to exit, and the supervisor names the first that exits.
EXIT_DELAY_SECONDS = 10
NVIDIA_DEVICE = Path("/dev/nvidia0")
AHEAD = 2  # steps that are launched and not reported
PACKING_SECONDS = 1.0  # of weights, and a part, at most while a step waits; `--health-timeout` counts them
GRAPHS_REMEDY = (
    "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --max-num-seqs, or leave them out with --enforce-eager"
)


def run(child: Child) -> None:
    """Main function of a worker process; never returns."""
    try:
        _run(child)
    except RankLost as lost:
        logger.error("%s", lost)
        if isinstance(lost, RankEnded):
            time.sleep(EXIT_DELAY_SECONDS)
        sys.exit(1)


def _run(child: Child) -> None:
    init = child.spec.init
    engine, rank = (int(part) for part in child.spec.index.split("."))
    device = choose_device(init.config, engine, rank)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    check_in_worker(init.config, ModelConfig.from_dir(init.model_dir), device.type, free)
    backend = choose_backend(init.config.attention_backend, device)
    # First of all that takes time: API servers probe these addresses while the model loads.
    pinned = PinnedMemory(device) if device.type == "cuda" else None
    media = receive_media(child, init, engine, rank, device, pinned)
    rows = init.config.step_sequences(device.type, recurrent=False)
    grammars = start_grammars(child, init, engine, rows) if rank == 0 else None  # it loads beside the model
    # Most attention weights of a trained model are almost zero; subnormal numbers would double the softmax's time.
    # Before torch starts its threads, which inherit the setting.
    torch.set_flush_denormal(True)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch may have been imported before this was known
    tp = join_group(init, engine, rank, device)
    model = load_shared(child, tp) if device.type == "cpu" else load(init.model_dir, init.config, tp, device)
    normalise, to_device = Normalisation.from_dir(init.model_dir), pinned.to_device if pinned else None

    def runner_with(size: CacheSize) -> ModelRunner:
        attention, graphs = make_attention(init.config, model, backend, size)
        return ModelRunner(model, attention, media, normalise, tp, to_device, graphs)

    use = None
    if device.type == "cuda" and not has_fixed_cache(init.config):
        use = profile(init.config, init.model_dir, init.media_cache, model.config, runner_with(CacheSize(1, 1)))
    if device.type == "cpu":
        keep_freed_memory()  # the buffers of a step; not those of loading, which lie between the weights
    runner = runner_with(choose_cache_size(init.config, model, use))
    with room_for("CUDA graphs and a first step beside the KV cache", GRAPHS_REMEDY, device):
        if runner.graphs is not None:
            runner.graphs.capture()
        if device.type == "cuda":
            compile_products(model, runner.dtype)
        warm_up(runner, model.config, tp.size)
    gc.freeze()  # what is loaded stays: the collector need not walk over it
    gc.enable()
    identity = sockets.identity(child.spec.name, child.spec.incarnation)
    core = sockets.connect_dealer(child.context, init.core_workers[engine], identity)
    core.send(child.encoder.encode(WorkerReady(rank, runner.num_blocks, device.type, runner.num_states)))
    child.ready()
    runner.grammars = grammars
    if device.type == "cpu":
        serve(core, child.encoder, runner, pack_later(model))
    serve_ahead(core, child.encoder, runner)


def serve(core: zmq.Socket[bytes], encoder: Encoder, runner: ModelRunner, packing: Iterator[None]) -> None:
    """Receive -> launch -> report, forever. Until it ends, `packing` goes on while no step is there, and for as long as
    steps take while one waits."""
    is_packing, balance = True, 0.0  # seconds of steps that packing has not had yet
    while True:
        while is_packing and (not (waits := core.poll(0)) or balance > 0):
            begun = time.monotonic()
            is_packing = next(packing, False) is None
            balance = balance - (time.monotonic() - begun) if waits else 0.0
        step, begun = decode(core.recv()).body, time.monotonic()
        assert isinstance(step, Step)
        core.send(encoder.encode(runner.launch(step).result()))
        balance = min(balance + time.monotonic() - begun, PACKING_SECONDS)


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


def load(model_dir: str, config: EngineConfig, tp: TensorParallel, device: torch.device) -> VisionLanguageModel:
    """This rank's part of the model. Raises ConfigError: the weights cannot be used, or the device has no room for
    them."""
    reach_failpoint("loading-worker")
    try:
        with room_for("the weights", "raise --tensor-parallel-size, or choose --dtype bfloat16", device):
            dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)  # None: the checkpoint's
            spread = config.mm_encoder_tp_mode == "data"
            flags = config.quantization, config.quantize_head
            return load_model(model_dir, tp, dtype, device, config.load_format, spread, *flags)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def load_shared(child: Child, tp: TensorParallel) -> VisionLanguageModel:
    """As `load`, on the CPU, in the same memory as other engines."""
    init, memory = child.spec.init, child.spec.weights
    if memory is not None:
        use_own_pages(LEAST_BYTES)
    model = load(init.model_dir, init.config, tp, torch.device("cpu"))
    if memory is not None:
        try:
            logger.info("%.1f MiB of the weights are shared with other engines", share_weights(model, memory) / 2**20)
        except OSError as error:  # such as a limit for the size of files, which the memory counts as
            logger.warning("not all weights are shared with other engines: %s", error)
    return model


def choose_device(config: EngineConfig, engine: int, rank: int) -> torch.device:
    """The rank's device, made current. Raises ConfigError: there is no CUDA, or fewer devices than workers."""
    available = config.device != "cpu" and torch.cuda.is_available()
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if config.device == "auto" and not available and not is_hidden and NVIDIA_DEVICE.exists():
        logger.warning(
            "serving on the CPU: this machine has an NVIDIA device, but torch %s cannot use it; its driver may be too "
            "old for CUDA %s",
            *(torch.__version__, torch.version.cuda),
        )
    if config.device == "cpu" or (config.device == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError("--device cuda: torch finds no CUDA device here; choose --device cpu or auto")
    index, devices = engine * config.tensor_parallel_size + rank, torch.cuda.device_count()
    if config.distributed_backend == "gloo":
        index %= devices
    if index >= devices:
        raise ConfigError(
            f"worker {engine}.{rank} needs CUDA device {index}, but there are {devices}; lower --tensor-parallel-size "
            "or --data-parallel-size, choose --device cpu, or let workers share devices: --distributed-backend gloo"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    # On a Hopper torch prefers cuDNN's attention kernels, which build a plan for every new shape before they compute;
    # and here every video brings new shapes, and every step of `sdpa`.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def choose_backend(backend: AttentionBackendName, device: torch.device) -> AttentionBackendName:
    """What `--attention-backend` means on this device: `sdpa` of `sdpa.py` or `triton` of `triton_attention.py`.

    Raises ConfigError: it cannot run here.
    """
    obstacle = triton_obstacle(device)
    if backend == "auto":
        if device.type == "cuda" and obstacle is not None:
            logger.warning("serving without the Triton kernels, which is slow: %s", obstacle)
        return "triton" if device.type == "cuda" and obstacle is None else "sdpa"
    if backend == "triton" and obstacle:
        raise ConfigError(f"--attention-backend triton: {obstacle}; choose auto")
    return backend


def choose_collectives(config: EngineConfig, device: torch.device) -> str:
    """The backend of collectives: "shm", or torch.distributed with "nccl" or "gloo". Raises ConfigError: the
    configured one does not work on the device."""
    backend = config.distributed_backend
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "shm"
    if backend == "nccl" and device.type == "cpu":
        raise ConfigError("--distributed-backend: nccl needs CUDA devices, and there is none here; use shm or auto")
    if backend == "shm" and device.type == "cuda":
        raise ConfigError("--distributed-backend: shm is for workers on the CPU; use nccl, gloo or auto")
    return backend


def join_group(init: Init, engine: int, rank: int, device: torch.device) -> TensorParallel:
    """Connect to the engine's other ranks; waits for them. A collective that times out raises on every rank; NCCL's
    watchdog aborts their processes."""
    size, backend = init.config.tensor_parallel_size, choose_collectives(init.config, device)
    if size == 1:
        return TensorParallel()
    path, timeout = Path(init.runtime_dir) / f"ranks-{engine}", init.config.collective_timeout
    if backend == "shm":
        return TensorParallel(rank, size, meet(path, rank, size, init.config.startup_timeout, timeout))
    # Gloo would otherwise listen on whatever address the host's name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Through the store NCCL meets at the first collective, after each rank has loaded its weights.
    store = dist.FileStore(str(path), size)
    store.set_timeout(timedelta(seconds=init.config.startup_timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    return TensorParallel(rank, size)


def receive_media(
    child: Child, init: Init, engine: int, rank: int, device: torch.device, pinned: PinnedMemory | None
) -> MediaInputs:
    """Start the receiver thread at this rank's addresses."""
    address = next(address for address in init.ranks if (address.engine, address.rank) == (engine, rank))
    pin = pinned.pin if pinned else None
    map_slots = partial(CudaMapped, device) if device.type == "cuda" else None
    store = ReadableMemory(stores[0], pin) if (stores := child.spec.media_stores) else None
    ends = address, init.core_workers[engine], child.encoder, child.context
    return MediaInputs(*ends, store, pin, map_slots, init.config.collective_timeout)


def start_grammars(child: Child, init: Init, engine: int, rows: int) -> Grammars:
    """Start the grammar manager, whose reports go to the core. `rows`: most sequences of a step."""
    identity = sockets.identity(f"{child.spec.name} grammars", child.spec.incarnation)
    core = sockets.connect_dealer(child.context, init.core_workers[engine], identity)

    def report(message: GrammarReady) -> None:
        core.send(child.encoder.encode(message), zmq.NOBLOCK)

    return Grammars(Path(init.model_dir) / "tokenizer.json", rows, child.spec.name, report)


def longest_sequence(config: EngineConfig, model: VisionLanguageModel) -> int:
    """Tokens of the longest sequence, unless the KV cache holds less."""
    return config.sequence_tokens(next(model.parameters()).device.type, model.config.text.max_position_embeddings)


def choose_cache_size(config: EngineConfig, model: VisionLanguageModel, use: MemoryUse | None) -> CacheSize:
    """Blocks of the rank's KV cache, and its recurrent states; `use` as for `cache_size`."""
    weight, longest, state = next(model.parameters()), longest_sequence(config, model), model.state_shape
    dtype, device = weight.dtype, weight.device
    size = cache_size(config, model.attention_shape, state, dtype, longest, device, use)
    bits = weight_bits(config.quantization, model.config.quantization)
    computation = f"{str(dtype).removeprefix('torch.')} on {device} with {torch.get_num_threads()} thread(s)"
    kind = computation if bits == DENSE_BITS else f"{bits}-bit decoder, {computation}"
    logger.info("model loaded: %s, %d KV blocks of %d tokens", kind, size.num_blocks, config.block_size)
    if state is not None:
        sequences, mib = config.step_sequences(device.type, recurrent=True), state.nbytes(dtype.itemsize) / 2**20
        counts = f"{sequences} sequences and {size.num_states - sequences} snapshots"
        logger.info("recurrent states: %s of %.2f MiB, %.2f GiB in all", counts, mib, size.num_states * mib / 1024)
    return size


def make_attention(
    config: EngineConfig, model: VisionLanguageModel, backend: AttentionBackendName, size: CacheSize
) -> tuple[AttentionBackend, DecodeGraphs | None]:
    """Attention over a KV cache of the model's device and dtype, beside its recurrent states; and decode steps for up
    to `--max-num-seqs` sequences, not recorded yet, where they can be. Raises ConfigError: the device has no room for
    the cache."""
    weight, block_size = next(model.parameters()), config.block_size
    # Decode steps are recorded on CUDA, with kernels and collectives that wait for nothing on the host.
    waits = dist.is_initialized() and dist.get_backend() != "nccl"
    spare = int(weight.device.type == "cuda" and backend == "triton" and not config.enforce_eager and not waits)
    purpose, states = f"a KV cache of {size.num_blocks} block(s) of {block_size} tokens", None
    with room_for(purpose, "lower --block-size, --gpu-memory-utilization or --kv-cache-memory-bytes", weight.device):
        if model.state_shape is not None:
            states = RecurrentStates(model.state_shape, size.num_states, weight.dtype, weight.device)
        num_blocks = size.num_blocks + spare
        blocks = empty_blocks(model.attention_shape, num_blocks, block_size, weight.dtype, weight.device)
    cache, longest = KVCache(blocks, spare, states), longest_sequence(config, model)
    if backend == "sdpa":
        return AttentionBackend(cache), None
    from mini_engine.worker.attention.decode_graphs import DecodeGraphs
    from mini_engine.worker.attention.triton_attention import TritonBackend

    attention, max_sequences = TritonBackend(cache, longest), config.step_sequences("cuda", states is not None)
    return attention, DecodeGraphs(model, attention, max_sequences, longest) if spare else None


def warm_up(runner: ModelRunner, model: ModelConfig, ranks: int) -> None:
    """Run a small image for each rank, which may have towers of their own (`--mm-encoder-tp-mode data`), and a short
    prompt, so that lazy initialisation happens before the first request."""
    reach_failpoint("warming-up")
    side = 2 * model.vision.spatial_merge_size
    patches = torch.zeros(side * side, model.vision.patch_dim, dtype=torch.uint8)
    runner.encode_patches([patches] * ranks, [(1, side, side)] * ranks)
    # A prefill of two tokens and a step of one, as a decode is; all are in block 0, since the cache may have no other.
    new = NewSequence("warm-up", [0, 0, 0], HUNGRY_SAMPLING, [])
    blocks = [0] * -(-3 // runner.block_size)
    runner.execute(Step(0, started=[new], chunks=[Chunk("warm-up", 0, 2, blocks, False)]))
    runner.execute(Step(0, chunks=[Chunk("warm-up", 2, 1, [], True)]))
    runner.execute(Step(0, finished=["warm-up"]))
    if runner.device.type == "cuda" and triton_obstacle(runner.device) is None:  # what a grammar needs is compiled, too
        scores = torch.zeros(1, model.text.vocab_size, device=runner.device)
        mask_tokens(scores, [0], torch.zeros(1, 1, dtype=torch.int32))
