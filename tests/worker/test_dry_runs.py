"""A worker's start, then prompts and decode steps of its real `ModelRunner`, on a CUDA device that does not exist: its
tensors are fake, those of the host real, and Triton binds the arguments of a launch and stops there. No number is
computed. What a device punishes is an error: see the assertions.

With -s each run prints its launches: Triton's kernels, and operators that are neither views nor copies from the host.
"""

from __future__ import annotations

import contextlib
import queue
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mini_engine.bench.gpu_check import DIGEST, requests, shorten
from mini_engine.bench.runner import CONFIGS, checkpoint, decode, made_up_media, plain_requests, take
from mini_engine.cli import parse
from mini_engine.config import BUNDLED_MODEL
from mini_engine.kernels import ops
from mini_engine.messages import Grammar, GrammarReady, MediaCachePlan, NewSequence
from mini_engine.model.config import ModelConfig
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker import memory, worker
from mini_engine.worker.grammar import Grammars
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from tests.kernels.devices import INTERPRETED
from tests.worker import script

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a device that does not exist")

DEVICE, TOTAL = torch.device("cuda", 0), 80 << 30
MOVE, COPY, ATTENTION = (
    getattr(torch.ops.aten, n).default for n in ("_to_copy", "copy_", "scaled_dot_product_attention")
)
NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view"}
KINDS = ("greedy", "image", "top_p", "penalised", "grammar")
PIXELS = ("--mm-processor-kwargs", '{"size": {"shortest_edge": 3136, "longest_edge": 12845056}}')  # the hub's
NO_MEDIA = ["--limit-mm-per-prompt", '{"image": 0, "video": 0}']


class Device(TorchDispatchMode):
    """What was launched on it, and its memory. `serving`: the start may copy as it likes. `ahead`: each step continues
    the one before. `recording`: a CUDA graph; a copy into it would be that of now for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.specialisations: set[str] = set()
        self.serving = self.ahead = self.recording = False
        self.peak = 0
        self._live: dict[int, int] = {}  # bytes

    @property
    def used(self) -> int:
        return sum(self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":  # what device a tensor is on
            return func(*args)
        if func is ATTENTION:  # one kernel; torch chooses which by the driver
            self.launches["operators"] += 1
            return torch.empty_like(args[0].transpose(1, 2)).transpose(1, 2)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode operators arrive whole that consist of others
                return func.decompose(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        host = [x for x in tensors if not isinstance(x, FakeTensor) and x.ndim]
        target = torch.device(kwargs.get("device") or "meta").type
        if target != "cuda" and not any(isinstance(x, FakeTensor) for x in tensors):
            with unset_fake_temporarily():
                return func(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})
        if func in (MOVE, COPY) and (host or target == "cpu"):
            waits = not (kwargs.get("non_blocking") or args[2:] == (True,))
            assert not (self.serving and waits), "a copy waits for the device"
            if not isinstance(args[0], FakeTensor) and func is COPY:
                with unset_fake_temporarily():
                    return args[0].zero_()
            assert not self.serving or hasattr(host[0], "pinned"), "a copy of pageable memory"
            assert not self.recording, "a copy from the host in a CUDA graph"
        else:
            assert not host, f"{func}: operands on the host and on the device"
            self.launches["operators"] += not func.is_view and func.overloadpacket.__name__ not in NO_LAUNCH
        for x in tree_leaves(result := func(*args, **kwargs)):
            if isinstance(x, FakeTensor) and x.is_cuda and (storage := x.untyped_storage())._cdata not in self._live:
                self._live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage._cdata)
                self.peak = max(self.peak, self.used)
        return result

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **fixed: Any) -> None:
        """In the place of `JITFunction.run`."""
        name = kernel.fn.__name__
        assert all(x.is_cuda for x in args if isinstance(x, Tensor)), f"{name}: an operand on the host"
        assert all(0 < size < 65536 for size in grid[1:]) and 0 < grid[0] < 2**31, (name, grid)
        bind, more = kernel.device_caches[0][4], {"debug": False, "instrumentation_mode": ""}
        _, specialisation, _ = bind(*map(pointer_of, args), **fixed, **more)
        for parameter, (kind, attribute) in zip(kernel.params, specialisation, strict=True):
            assert kind[0] != "*" or attribute == "D", f"{name}: {parameter.name} is not aligned"
        self.launches["kernels"] += 1
        self.specialisations.add(f"{name} {specialisation} {fixed}")


def pointer_of(x: Any) -> Any:
    """What Triton reads of a tensor."""
    if not isinstance(x, Tensor):
        return x
    return SimpleNamespace(dtype=x.dtype, data_ptr=lambda: x.storage_offset() * x.element_size())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device, target = Device(), GPUTarget("cuda", 90, 32)

    class Event:
        def __init__(self, **_: Any) -> None: ...

        def record(self) -> None:
            self.launched = device.launches["kernels"]

        def synchronize(self) -> None:
            idle = device.launches["kernels"] == self.launched
            assert not (device.ahead and idle), "the host waits for a step, and the device for the next one"

    @contextlib.contextmanager
    def record(graph: Any, **_: Any) -> Iterator[None]:
        before, device.recording = Counter(device.launches), True
        yield
        device.recording, launched = False, device.launches - before
        graph.replay = lambda: device.launches.update(launched)

    def pin(host: Tensor) -> Tensor:
        pinned: Any = host.clone()
        pinned.pinned = True
        return pinned

    for name, value in {
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_properties": lambda _=None: SimpleNamespace(multi_processor_count=132),
        "device_count": lambda: 8,
        "mem_get_info": lambda _=None: (TOTAL - device.used, TOTAL),
        "memory_reserved": lambda _=None: device.used,
        "max_memory_reserved": lambda _=None: device.peak,
        "reset_peak_memory_stats": lambda _=None: setattr(device, "peak", device.used),
        **dict.fromkeys(("empty_cache", "synchronize", "graph_pool_handle"), lambda _=None: None),
        "Event": Event,
        "CUDAGraph": SimpleNamespace,
        "graph": record,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **fixed: device.launch(kernel, *args, **fixed))
    driver = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    ops.triton_obstacle.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True), device, torch.inference_mode():
        yield device
    ops.triton_obstacle.cache_clear()


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    """They know one, which allows any text."""
    ready = queue.SimpleQueue[GrammarReady]()
    made = Grammars(Path(BUNDLED_MODEL, "tokenizer.json"), 64, "tests", ready.put)
    made.update([Grammar(DIGEST, r"start: /(.|\n)*/", b"", 1)], [])
    assert not ready.get(timeout=60).problem
    yield made
    made.close()


def start(flags: list[str], rank: int) -> tuple[ModelRunner, ModelConfig, memory.MemoryUse]:
    """As `worker._run`."""
    config = parse([*flags, *PIXELS, "--max-num-seqs", "16"])
    size, check = config.tensor_parallel_size, Tensor.is_contiguous
    others: Any = SimpleNamespace(all_reduce=check, broadcast=check, all_gather=lambda _, tensor: check(tensor))
    tp = TensorParallel(rank, size, others)
    at = Placement(tp, torch.bfloat16, DEVICE, config.mm_encoder_tp_mode == "data")
    model = VisionLanguageModel(ModelConfig.from_dir(config.model), at).eval()

    def to_device(patches: Tensor) -> Tensor:  # as `PinnedMemory`
        return torch.empty(patches.shape, dtype=patches.dtype, device=DEVICE)

    def runner_with(size: memory.CacheSize) -> ModelRunner:
        attention = worker.make_attention(config, model, worker.choose_backend("auto", DEVICE), size)
        graphs, normalise = worker.make_graphs(config, model, attention), Normalisation.from_dir(config.model)
        return ModelRunner(model, attention, made_up_media(), normalise, tp, to_device, graphs)

    use = memory.profile(config, config.model, MediaCachePlan("off", 0, ""), model.config, DEVICE, runner_with)
    assert use is not None
    runner = runner_with(worker.choose_cache_size(config, model, use))
    worker.record_graphs(runner)
    worker.warm_up(runner, model.config.vision, size)
    return runner, model.config, use


def serve(name: str, runner: ModelRunner, model: ModelConfig, kinds: Sequence[str], device: Device) -> None:
    """Steps of all kinds; prints launches."""

    def count(new: Sequence[NewSequence], cached: int, begin: int, steps: int) -> str:
        with contextlib.closing(decode(runner, new, cached)) as launched:
            take(launched, begin)
            before, device.ahead = Counter(device.launches), begin > 0
            take(launched, steps)
            device.ahead = False
            return ", ".join(f"{(device.launches - before)[what] / steps:.0f} {what}" for what in device.launches)

    # All at once: chunks beside single tokens, and preemption.
    steps = script.write_steps(requests(model.vision, *kinds), 20, 100, runner.block_size, 256, preempt_at=(3, 12))
    script.run(runner, steps, ahead=1)
    longest = model.text.max_position_embeddings
    print(f"\n{name}: 2,048 tokens of prefill", count(plain_requests(1, 2048), 0, 0, 1))
    print("  100 tokens after a long prefix", count(plain_requests(1, longest - 100), longest - 200, 0, 1))
    for kind in kinds:
        [new] = requests(model.vision, kind)
        three = [msgspec.structs.replace(new, request_id=f"{kind} {number}") for number in range(3)]
        print(f"  a decode step, {kind}:", count(three, 0, 2, 17))  # more than a block holds


EVERY = [path.stem for path in sorted(CONFIGS.glob("*.json"))]
FULL = [pytest.param(name, size, 0, [], marks=pytest.mark.slow) for name in EVERY for size in (1, 2, 4)]
SHORT = [
    (EVERY[0], 2, 1, []),
    (EVERY[1], 4, 0, ["--mm-encoder-tp-mode", "data"]),
    (EVERY[2], 1, 0, NO_MEDIA),
    (EVERY[3], 1, 0, []),
]


@pytest.mark.parametrize(("name", "size", "rank", "flags"), SHORT + FULL)
def test_a_worker(name: str, size: int, rank: int, flags: list[str], device: Device, grammars: Grammars) -> None:
    """At published widths, with two layers unless it is slow."""
    with checkpoint(name, shorten if (name, size, rank, flags) in SHORT else None) as model_flags:
        runner, model, use = start([*model_flags, *flags, "-tp", str(size)], rank)
    kinds = [kind for kind in KINDS if kind != "image" or flags is not NO_MEDIA]
    runner.grammars = None if rank else grammars
    met, held, device.serving = set(device.specialisations), device.used, True
    serve(f"{name}, {size} ranks", runner, model, kinds, device)
    assert not device.specialisations - met, "kernels first compiled while requests are served"
    assert device.peak - held <= use.step + use.media
