"""A CUDA device that does not exist: its tensors are fake, those of the host real, and Triton binds the arguments of a
launch and stops there. No number is computed. What a device punishes is an error: see the assertions."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from mini_engine.kernels import ops

DEVICE, TOTAL = torch.device("cuda", 0), 80 << 30
MOVE, COPY, ATTENTION = (
    getattr(torch.ops.aten, n).default for n in ("_to_copy", "copy_", "scaled_dot_product_attention")
)
NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view"}


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
            is_free = kind[0] != "*" or parameter.do_not_specialize_on_alignment
            assert is_free or attribute == "D", f"{name}: {parameter.name} is not aligned"
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
        "get_device_properties": lambda _=None: SimpleNamespace(
            multi_processor_count=132, shared_memory_per_block_optin=232448
        ),
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
