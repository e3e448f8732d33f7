"""A worker's start and steps on a CUDA device that does not exist: no hidden wait, no tensor on the wrong device, no
kernel first compiled while serving, no more memory than is reserved. The device's tensors are fake, the host's real;
Triton binds the arguments of a launch and stops there. With -s each run prints its launches: Triton's kernels, and
operators but views and copies from the host."""

import contextlib
import re
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_check import SAMPLING, grammars, requests, shorten
from benchmarks.runner import CONFIGS, checkpoint, decode, made_up_media, plain_requests, take
from mini_engine.config import BUNDLED_MODEL, ConfigError
from mini_engine.launch.cli import parse
from mini_engine.model.parallel import TensorParallel
from mini_engine.worker import worker
from tests.support import script
from tests.support.devices import INTERPRETED

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a device that does not exist")

DEVICE, TOTAL, TARGET = torch.device("cuda", 0), 80 << 30, triton.backends.compiler.GPUTarget("cuda", 90, 32)
PROPERTIES = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
MOVE, COPY, THREADS = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.get_num_threads()
PIXELS = ("--mm-processor-kwargs", '{"size": {"shortest_edge": 3136, "longest_edge": 12845056}}')  # the hub's
DATA = ["--mm-encoder-tp-mode", "data"]


class Device(TorchDispatchMode):
    """What was launched on it, and its memory. `serving`: the start may copy as it likes. `ahead`: each step continues
    the one before. `recording`: a CUDA graph; a copy into it would be that of now for ever."""

    used = property(lambda self: sum(self._live.values()))

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.specialisations = Counter[str](), set[str]()
        self.serving = self.ahead = self.recording = False
        self.peak, self._live = 0, dict[int, int]()  # bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":  # what device a tensor is on
            return func(*args)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode operators arrive whole that consist of others
                return func.decompose(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        host = [x for x in tensors if not isinstance(x, FakeTensor) and x.ndim]
        target = torch.device(kwargs.get("device") or "meta").type
        if target != "cuda" and not any(isinstance(x, FakeTensor) for x in tensors):
            kwargs.pop("pin_memory", None)
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in (MOVE, COPY) and (host or target == "cpu"):
            assert not self.serving or kwargs.get("non_blocking") or args[2:] == (True,), "a copy waits for the device"
            if func is COPY and not isinstance(args[0], FakeTensor):
                with unset_fake_temporarily():
                    return args[0].zero_()
            assert not self.serving or hasattr(host[0], "pinned"), "a copy of pageable memory"
            assert not self.recording, "a copy from the host in a CUDA graph"
            if func is MOVE:  # FakeTensorMode would compute it anew each time
                func, args = torch.empty, (host[0].shape,)
                kwargs = {"dtype": kwargs.get("dtype", host[0].dtype), "device": DEVICE}
        else:
            assert not host, f"{func}: operands on the host and on the device"
            self.launches["operators"] += not func.is_view and not re.search("empty|_unsafe_view", func.name())
        for x in tree_leaves(result := func(*args, **kwargs)):
            if isinstance(x, FakeTensor) and x.is_cuda and (storage := x.untyped_storage())._cdata not in self._live:
                self._live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage._cdata)
                self.peak = max(self.peak, self.used)
        return result

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **fixed: Any) -> None:
        on_host = [x for x in args if isinstance(x, Tensor) and getattr(x, "fake_device", None) != DEVICE]
        assert not on_host, f"{kernel}: an operand on the host"
        assert all(0 < size < 65536 for size in grid[1:]) and 0 < grid[0] < 2**31, (kernel, grid)
        bind, more = kernel.device_caches[0][4], {"debug": False, "instrumentation_mode": ""}
        read = lambda x: SimpleNamespace(dtype=x.dtype, data_ptr=lambda: x.storage_offset() * x.element_size())  # noqa: E731
        _, specialisation, _ = bind(*(read(x) if isinstance(x, Tensor) else x for x in args), **fixed, **more)
        for parameter, (kind, attribute) in zip(kernel.params, specialisation, strict=True):
            is_free = kind[0] != "*" or parameter.do_not_specialize_on_alignment
            assert is_free or attribute == "D", f"{kernel}: {parameter.name} is not aligned"
        self.launches["kernels"] += 1
        self.specialisations.add(f"{kernel} {specialisation} {fixed}")

    @contextlib.contextmanager
    def record(self, graph: Any, **_: Any) -> Any:
        before, self.recording = Counter(self.launches), True
        yield
        self.recording, launched = False, self.launches - before
        graph.replay = lambda: self.launches.update(launched)

    def event(self, **_: Any) -> Any:
        before: list[int] = []  # launches

        def synchronize() -> None:
            assert not self.ahead or self.launches["kernels"] > before[-1], "the device waits for the host"

        return SimpleNamespace(record=lambda: before.append(self.launches["kernels"]), synchronize=synchronize)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    device = Device()
    for name, replacement in {
        "get_device_capability": lambda _: (9, 0), "get_device_properties": lambda _: PROPERTIES,
        "device_count": lambda: 8, "mem_get_info": lambda _: (TOTAL - device.used, TOTAL),
        "memory_reserved": lambda _: device.used, "max_memory_reserved": lambda _: device.peak,
        "reset_peak_memory_stats": lambda _: setattr(device, "peak", device.used),
        **dict.fromkeys(("empty_cache", "synchronize", "graph_pool_handle"), lambda _=None: None),
        "Event": device.event, "CUDAGraph": SimpleNamespace, "graph": device.record,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(Tensor, "pin_memory", lambda host: vars(copy := host.clone()).update(pinned=True) or copy)
    attend = lambda q, *_, **__: q.transpose(1, 2).clone().transpose(1, 2)  # noqa: E731  torch would ask the driver
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(triton.JITFunction, "run", lambda *args, **fixed: device.launch(*args, **fixed))
    driver = SimpleNamespace(get_current_target=lambda: TARGET, get_current_device=lambda: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    with FakeTensorMode(allow_non_fake_inputs=True), device, torch.inference_mode():
        yield device
    worker.triton_obstacle.cache_clear()
    torch.set_flush_denormal(False)


def start(flags: list[str], rank: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The worker's main function without its connections. The memory that it measured, and the runner."""
    config, made, profile = parse([*flags, *PIXELS, "--max-num-seqs", "8"], {}), list[Any](), worker.profile
    for name, replacement in {
        "PinnedMemory": lambda _: MagicMock(to_device=lambda x: torch.empty(x.shape, dtype=x.dtype, device=DEVICE)),
        "receive_media": lambda *_: made_up_media(), "start_grammars": lambda *_: None,
        "join_group": lambda *_: TensorParallel(rank, config.tensor_parallel_size, MagicMock()),
        "profile": lambda *args: made.append(profile(*args)) or made[0],
        "choose_device": lambda *_: DEVICE, "serve_ahead": lambda core, encoder, runner: made.append(runner),
        **dict.fromkeys(("gc", "sockets"), MagicMock()), "os": MagicMock(environ={"OMP_NUM_THREADS": THREADS}),
    }.items():  # fmt: skip
        monkeypatch.setattr(worker, name, replacement)
    monkeypatch.setattr("mini_engine.model.weights.fill_randomly", lambda model: None)  # there are no numbers
    worker._run(MagicMock(**{"spec.init": MagicMock(config=config, model_dir=config.model), "spec.index": f"0.{rank}"}))
    return made


def test_a_kv_cache_beyond_the_device_is_refused_before_the_worker_loads_something(device, monkeypatch):
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes: a KV cache of 80.0 GiB .* does not fit, 80.0 GiB"):
        start([BUNDLED_MODEL, "--kv-cache-memory-bytes", "80G"], 0, monkeypatch)
    assert not device.used


def test_a_small_cache_and_a_model_without_its_tower_leave_nothing_to_compile(device, monkeypatch):
    with checkpoint("Qwen3.5-35B-A3B", lambda raw: shorten(raw) or raw["text_config"].update(num_experts=16)) as flags:
        flags += ["--num-gpu-blocks-override", "8", "--max-model-len", "128", "-q", "int4"]
        flags += ["--limit-mm-per-prompt", '{"image": 0, "video": 0}']
        [runner] = start(flags, 0, monkeypatch)
    met = set(device.specialisations)
    take(decode(runner, plain_requests(1, 100)), 2)
    assert not device.specialisations - met, "kernels first compiled while requests are served"


ONE_LAYER = lambda raw: shorten(raw) or raw.get("text_config", raw).update(num_hidden_layers=1)  # noqa: E731


@pytest.mark.parametrize("name, size, rank, flags, change", [
    ("Qwen3.5-35B-A3B", 1, 0, [], shorten), ("Qwen3-VL-30B-A3B-Instruct", 2, 0, ["-q", "int4"], ONE_LAYER),
    ("Qwen2.5-VL-7B-Instruct", 4, 1, [*DATA, "-q", "int8"], ONE_LAYER),
    *(pytest.param(path.stem, size, 0, flags, None, marks=pytest.mark.slow) for path in CONFIGS.glob("*.json")
      for size, flags in ((1, []), (2, []), (2, DATA), (4, []), (4, DATA))),
])  # fmt: skip
def test_a_worker(name, size, rank, flags, change, device, monkeypatch):
    """All kinds of requests at once, chunks beside single tokens, and preemption; then each kind alone."""
    with checkpoint(name, change) as model_flags, grammars() as known:
        use, runner = start([*model_flags, *flags, "-tp", str(size)], rank, monkeypatch)
        runner.grammars = None if rank else known
        met, held, device.serving = set(device.specialisations), device.used, True
        vision, longest = runner._model.config.vision, runner._model.config.text.max_position_embeddings
        script.run(runner, script.write_steps(requests(vision, *SAMPLING), 6, 160, (2, 7), runner.block_size), 1)
        after_prefix = plain_requests(1, longest - 100), longest - 200, 1
        cases = [("2,048 tokens", plain_requests(1, 2048), 0, 1), ("100 tokens after a long prefix", *after_prefix)]
        cases += [(kind, requests(vision, *[kind] * 3), 0, 4) for kind in SAMPLING if kind != "image"]  # decode steps
        for case, new, cached, count in cases:
            with contextlib.closing(decode(runner, new, cached)) as launched:
                for number in range(count):  # the third has a new block
                    before, device.ahead = Counter(device.launches), number > 1
                    next(launched)
                device.ahead = False
            print(f"{name}, {size} ranks, {case}", dict(device.launches - before), sep=", ")
    assert not device.specialisations - met, "kernels first compiled while requests are served"
    assert device.peak - held <= use.step + use.media
