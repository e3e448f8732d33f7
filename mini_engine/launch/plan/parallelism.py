"""How many engines serve, and with how many threads each: on a CPU, by the model's size against the cores.

An operator has a cost in Python and torch that no second thread shortens; what it reads and computes, threads divide.
So threads help as long as each has more of a layer's work than that cost. Cores beyond that are of more use to another
engine, which works on other requests.
"""

import dataclasses
from pathlib import Path

from mini_engine.config import EngineConfig
from mini_engine.free_memory import available_memory, is_x86_without_bfloat16, usable_cores
from mini_engine.model.config import ModelConfig
from mini_engine.model.quantization import Quantization, bytes_per_weight

# Weights of a decoder layer that are worth a thread. A core streams them in 1.1 ms (11 GB/s), three times as long as
# Python and torch take for the layer's operators, and threads that wait for each other at each operator cost some, too.
# Measured on two cores, 8 requests at a time, videos and texts, requests per second of two engines to two threads: 1.04
# and 1.32 at 4 MiB a layer, 1.22 and 1.23 at 6, 1.22 and 1.07 at 14, 0.83 and 0.92 at 24.
THREAD_BYTES = 12 << 20
ENGINE_BYTES = 512 << 20  # of memory, for the processes of an engine beside its weights
MAX_ENGINES = 8  # unless a flag says: one API server prepares no more requests of small models; not measured
GPUS = [Path("/dev", name) for name in ("nvidiactl", "nvmap", "dxg", "kfd")]  # NVIDIA's, Tegra's, WSL's, AMD's


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """What this host runs."""

    engines: int
    threads: int  # of torch's operators in each worker
    reason: str

    def describe(self, settled: EngineConfig) -> str:
        """A line for the log."""
        sizes = f"{self.engines} engine(s) x {settled.tensor_parallel_size} worker(s) x {self.threads} thread(s)"
        cache = f"{settled.cpu_cache_bytes / 2**20:.0f} MiB of KV cache"
        return f"{sizes} on the CPU, each worker with at least {cache}: {self.reason}"


def choose_parallelism(config: EngineConfig, model: ModelConfig, omp_threads: str) -> Parallelism:
    """For this host. `omp_threads`: the variable OMP_NUM_THREADS, which counts where it is a number above 0."""
    given, cores = int(omp_threads) if omp_threads.isdigit() else 0, usable_cores()
    if runs_on_cpu(config):
        return on_cores(config, model, given, cores, available_memory())
    # Threads only prepare what the device does.
    threads = given or max(1, (cores - 1) // (config.engines * config.tensor_parallel_size))
    return Parallelism(config.engines, threads, "the workers may run on a GPU")


def runs_on_cpu(config: EngineConfig) -> bool:
    """Whether the workers certainly do."""
    return config.device == "cpu" or (config.device == "auto" and not has_gpu())


def has_gpu() -> bool:
    """Whether there is a device that may be a GPU; torch may be unable to use it."""
    return any(path.exists() for path in GPUS)


def weight_bytes(config: EngineConfig, model: ModelConfig) -> tuple[int, int]:
    """Bytes of the weights, within a few percent, and of a number of the activations."""
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    itemsize, held = 4 if dtype in ("float32", "float") else 2, _quantization(config, model)
    packs_head = itemsize == 2 and runs_on_cpu(config) and is_x86_without_bfloat16()
    return model.weight_bytes(itemsize, held.bits, held.head_bits, packs_head), itemsize


def _quantization(config: EngineConfig, model: ModelConfig) -> Quantization:
    """How most of the decoder's matrices are held."""
    return Quantization.choose(config.quantization, config.quantize_head, model.quantization, None)


def on_cores(config: EngineConfig, model: ModelConfig, given: int, cores: int, memory: int) -> Parallelism:
    """For workers on this many cores of a CPU. `given`: the threads of each by OMP_NUM_THREADS, or 0; `memory`: bytes
    that are free."""
    weights, itemsize = weight_bytes(config, model)
    weight = bytes_per_weight(_quantization(config, model).bits, itemsize)
    ranks, layer_bytes = config.tensor_parallel_size, model.text.token_parameters * weight
    useful = max(1, round(layer_bytes / ranks / THREAD_BYTES))
    fitting = memory // 2 // (ENGINE_BYTES + weights)
    auto = max(1, min(cores // (ranks * max(given, useful)), fitting, MAX_ENGINES))
    engines = config.data_parallel_size or auto
    threads = given or max(1, min(cores // (engines * ranks), 2 * useful - 1))  # cores that make no engine go to all
    flags = [config.data_parallel_size and "--data-parallel-size", given and "OMP_NUM_THREADS"]
    work = f"{cores} core(s), of which a decoder layer of {layer_bytes / 2**20:.1f} MiB can use {ranks * useful}"
    reason = ", ".join([work, *(f"{flag} is set" for flag in flags if flag)])
    return Parallelism(engines, threads, reason)
