"""`bench.py gpu --check`: whether everything that the engine needs of a CUDA device works, in a few minutes, offline.

The checks run one after the other, each in a process of its own, since an error of a kernel is one of all later calls
of its process. Each prints PASS or FAIL and the reason.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mini_engine.bench.cli import Report
from mini_engine.bench.runner import checkpoint, decode, make_runner, take
from mini_engine.cli import parse
from mini_engine.config import BUNDLED_MODEL
from mini_engine.kernels import ops
from mini_engine.messages import (
    DeviceSlots,
    Grammar,
    GrammarReady,
    MediaItem,
    MessageId,
    NewSequence,
    SamplingParams,
    TensorHandle,
)
from mini_engine.model.config import VisionConfig
from mini_engine.process_setup import die_with_parent
from mini_engine.transport.arena import ReadableMemory, WritableMemory
from mini_engine.transport.cuda_memory import CudaMapped, CudaStaging, check, use_cuda
from mini_engine.transport.memory import create_sparse
from mini_engine.transport.pages import PAGE_BYTES
from mini_engine.worker.grammar import Grammars
from mini_engine.worker.pinning import PinnedMemory

DEVICE = torch.device("cuda", 0)
SECONDS = 150  # that one check may take
# Of two layers, against float32 on the CPU: the root mean square of a difference by that of the values.
BOUNDS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
STEPS = 14  # of a run, two of them prompts
DIGEST, LARK = b"yes or no", 'start: "yes" | "no"'
SAMPLING: dict[str, dict[str, Any]] = {
    "forced": {"temperature": 0.0, "logit_bias": {9: 1e4}},  # the same token, whatever the rounding
    "forced image": {"temperature": 0.0, "logit_bias": {9: 1e4}},
    "greedy": {"temperature": 0.0},
    "image": {"temperature": 0.0},
    "top_p": {"top_p": 0.9, "logprobs": 3},
    "penalised": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "top_k": 20, "logit_bias": {7: 2.0},
                  "min_tokens": 4, "stop_token_ids": [3]},
    "grammar": {"grammar": DIGEST, "stop_token_ids": [3]},
}  # fmt: skip


class Result(NamedTuple):
    """Of one check."""

    name: str
    passed: bool
    reason: str
    seconds: float


def run(checks: Mapping[str, Callable[[], str]], seconds: int = SECONDS) -> Report:
    """Run and print them; see `run_checks`."""
    results, failures = [], []
    for result in run_checks(checks, seconds):
        name, passed, reason, taken = result
        print(f"{'PASS' if passed else 'FAIL'}  {name}: {reason} ({taken:.1f} s)", flush=True)
        results.append(result._asdict())
        failures += [] if passed else [name]
    return Report({"checks": results}, failures)


def run_checks(checks: Mapping[str, Callable[[], str]], seconds: int) -> Iterator[Result]:
    """Results in order. A check returns what it found and raises what is wrong; it is killed after so many seconds."""
    fork = multiprocessing.get_context("fork")  # this process has not used CUDA, which would not survive that
    for name, work in checks.items():
        begun, (results, result) = time.monotonic(), fork.Pipe(duplex=False)
        process = fork.Process(target=_attempt, args=(result, work, seconds, os.getpid()))
        process.start()
        result.close()
        try:
            passed, reason = results.recv()
        except EOFError:
            process.join()
            passed, reason = False, f"the process exited with status {process.exitcode}"
            if process.exitcode == -signal.SIGALRM:
                reason = f"no result after {seconds} s"
        process.join()
        yield Result(name, passed, reason, time.monotonic() - begun)


def _attempt(result: Connection, work: Callable[[], str], seconds: int, parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)  # it ends the process, even inside of CUDA
    try:
        result.send((True, work()))
    except Exception as error:  # noqa: BLE001  whatever it is, it is the result
        result.send((False, first_line(error)))


def first_line(error: BaseException) -> str:
    """What an error says, in one line: CUDA's go on with advice."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


# --- the device ------------------------------------------------------------------------------------------------------


def driver() -> str:
    """Versions; that Triton's kernels can run."""
    torch.cuda.init()  # whose error says why there is no device
    obstacle = ops.triton_obstacle(DEVICE)
    assert obstacle is None, obstacle
    import triton

    with use_cuda(DEVICE) as runtime:
        cuda = [check(runtime.cudaDriverGetVersion()), check(runtime.cudaRuntimeGetVersion())]
    found = re.search(r"Module\D+([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    major, minor = torch.cuda.get_device_capability()
    return (
        f"{torch.cuda.get_device_name()} (sm_{major}{minor}), driver {found and found[1]}, CUDA {cuda[0]} (driver), "
        f"{cuda[1]} (bindings), {torch.version.cuda} (torch), torch {torch.__version__}, Triton {triton.__version__}"
    )


def compiler() -> str:
    """Triton builds a kernel and its launcher, with nothing in its cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        x = torch.randn(4, 256, device="cuda")
        torch.testing.assert_close(ops.silu_mul(x).cpu(), ops.silu_mul(x.cpu()))
        built = sorted({file.suffix for file in Path(folder).rglob("*.*")})
    return f"built {', '.join(built)}"


def attributes() -> str:
    """Host memory can be registered."""
    found = {}
    with use_cuda(DEVICE) as runtime:
        for name in ("HostRegisterSupported", "HostRegisterReadOnlySupported", "IpcEventSupport"):
            kind = getattr(runtime.cudaDeviceAttr, f"cudaDevAttr{name}")
            found[name] = check(runtime.cudaDeviceGetAttribute(kind, DEVICE.index))
    text = ", ".join(f"{name} {value}" for name, value in found.items())
    assert found["HostRegisterSupported"] and found["IpcEventSupport"], text
    return text


def peers() -> str:
    """A copy from each device to each other one, directly or through the host."""
    count, direct = torch.cuda.device_count(), 0
    assert count, "there is no device"
    for one, other in itertools.permutations(range(count), 2):
        x = torch.arange(1 << 20, device=f"cuda:{one}")
        assert torch.equal(x.to(f"cuda:{other}").cpu(), x.cpu()), f"a copy from device {one} to {other} is wrong"
        direct += torch.cuda.can_device_access_peer(one, other)
    return f"{count} device(s), direct access for {direct} of {count * (count - 1)} pairs"


# --- the model -------------------------------------------------------------------------------------------------------


def requests(vision: VisionConfig, *names: str) -> list[NewSequence]:
    """A request for each of these ways to choose tokens; those of images have one."""
    grid, made = (1, 8, 12), []
    count = grid[1] * grid[2]
    handle = TensorHandle(MessageId(0, 0), (count, vision.patch_dim), "uint8")
    image = MediaItem("image", [5], count // vision.merge_unit, grid, None, handle, bytes(16))
    for number, name in enumerate(names):
        prompt = [(37 * place + 11 * number) % 701 for place in range(70 + 41 * number)]
        params = SamplingParams(max_tokens=2 * STEPS, seed=number, **SAMPLING[name])
        made.append(NewSequence(name, prompt, params, [image] if "image" in name else []))
    return made


def shorten(raw: Any) -> None:
    """Leave two layers, of two kinds where there are two, in the decoder and in the tower of a config.json."""
    text, vision = raw.get("text_config", raw), raw["vision_config"]
    text["num_hidden_layers"] = vision["depth"] = 2
    for config, key, value in (
        (text, "layer_types", ["linear_attention", "full_attention"]),
        (vision, "fullatt_block_indexes", [1]),
        (vision, "deepstack_visual_indexes", [0]),
    ):
        if key in config:
            config[key] = value


def shrink(raw: Any) -> None:
    """Shorten it, and leave what a CPU computes in seconds; heads are as they are."""
    shorten(raw)
    raw.get("text_config", raw).update(vocab_size=1024, intermediate_size=1024)


def layers(name: str, dtype: str, device: str = "cuda") -> str:
    """All kernels of a model, in its own head sizes, against torch on the CPU."""
    with checkpoint(name, shrink) as flags:
        expected = _outputs([*flags, "--device", "cpu", "--dtype", "float32"])
        kernels = ["--attention-backend", "triton"] if device == "cuda" else []
        return compare(expected, _outputs([*flags, "--device", device, "--dtype", dtype, *kernels]), BOUNDS[dtype])


def compare(expected: Sequence[tuple[str, Tensor]], found: Sequence[tuple[str, Tensor]], bound: float) -> str:
    """Outputs of modules, in order, of two runs. Raises AssertionError for the first that differs by more."""
    most = 0.0
    for (name, x), (_, y) in zip(expected, found, strict=True):
        if x.shape == y.shape:  # padded columns may be more
            error = float((x - y).norm() / x.norm())
            assert error <= bound, f"the output of {name} differs by {error:.1e}, more than {bound:g}"
            most = max(most, error)
    return f"{len(expected)} outputs of modules differ by at most {most:.1e}"


def _outputs(flags: list[str]) -> list[tuple[str, Tensor]]:
    """Of each module with one output, at each call, on the host; the decode's input tokens are the same in all runs."""
    runner, model = make_runner(parse([*flags, "--enforce-eager"]), [(4, 256)])
    outputs: list[tuple[str, Tensor]] = []

    def keep(name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            outputs.append((name, output.to("cpu", torch.float32, copy=True)))  # sums are made in place

    for name, module in model.named_modules():
        module.register_forward_hook(partial(keep, name))
    with contextlib.closing(decode(runner, requests(model.config.vision, "forced", "forced image"), parts=2)) as steps:
        take(steps, STEPS)
    return outputs


def tokens(device: str = "cuda") -> str:
    """CUDA graphs, single launches, torch's attention and the CPU choose the same tokens."""
    ways = {"graphs": [], "eager": ["--enforce-eager"], "sdpa": ["--attention-backend", "sdpa"]}
    ready, found = queue.SimpleQueue[GrammarReady](), dict[str, dict[str, list[int]]]()
    grammars = Grammars(Path(BUNDLED_MODEL, "tokenizer.json"), 8, "check", ready.put)
    try:
        grammars.update([Grammar(DIGEST, LARK, b"", 1)], [])
        assert not (problem := ready.get(timeout=60).problem), problem
        for way, flags in {"CPU": ["--device", "cpu"], **ways}.items():
            flags = ["--device", device, "--dtype", "float32", *flags]  # of two the last counts
            runner, model = make_runner(parse([BUNDLED_MODEL, *flags]), [(8, 352)])
            runner.grammars = grammars
            with contextlib.closing(decode(runner, requests(model.config.vision, *SAMPLING), parts=2)) as steps:
                for token in itertools.chain(*itertools.islice(steps, STEPS)):
                    assert not token.problem, token.problem
                    found.setdefault(token.request_id, {}).setdefault(way, []).append(token.token_id)
    finally:
        grammars.close()
    for name, chosen in found.items():
        for way, output in chosen.items():
            assert output == chosen["CPU"], f"{name}: {way} chose {output}, the CPU {chosen['CPU']}"
    return f"{len(SAMPLING)} requests, {STEPS - 2} tokens each, the same on the CPU and by {', '.join(ways)}"


def synchronisation() -> str:
    """A decode step waits for nothing, with graphs and without."""
    for flags in ([], ["--enforce-eager"]):
        runner, model = make_runner(parse([BUNDLED_MODEL, "--dtype", "bfloat16", *flags]), [(4, 256)])
        new = requests(model.config.vision, "greedy", "top_p", "penalised")
        with contextlib.closing(decode(runner, new)) as steps:
            take(steps, STEPS)  # compiles and allocates
            torch.cuda.set_sync_debug_mode("error")
            try:
                take(steps, STEPS)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return f"none in {2 * STEPS} decode steps"


# --- memory ----------------------------------------------------------------------------------------------------------


def pinned_copies() -> str:
    """Shared memory is registered in three parts, and a tensor that lies in all of them is copied."""
    pinned, mib, fd = PinnedMemory(DEVICE), 1 << 20, create_sparse(8 << 20)
    writable, readable = WritableMemory(fd), ReadableMemory(fd, pinned.pin)
    os.close(fd)
    for mark in (2 * mib, 4 * mib, 6 * mib):
        readable.register(mark)
    tensor = torch.randint(0, 256, (7 * mib,), dtype=torch.uint8)
    extents = [(0, 7 * mib // PAGE_BYTES)]
    writable.write(extents, tensor)
    view = readable.read(extents, 0, 7 * mib)
    assert torch.equal(pinned.to_device(view).cpu(), tensor), "the copy is wrong"
    assert view[:mib].is_pinned(), "the memory could not be registered; its copies are right but pageable"
    return "7 MiB over three registrations"


def ipc() -> str:
    """A second process reads a tensor out of this one's device memory."""
    staging, nbytes = CudaStaging(DEVICE), 1 << 20
    memory = staging.allocate(1, nbytes)
    content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    staging.fill(memory, content)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_read_slot, args=(there, staging.export(nbytes)), daemon=True)
    process.start()
    there.close()
    try:
        received = here.recv_bytes()
    except EOFError:
        raise AssertionError("the second process could not read the memory; its error is above") from None
    process.join()
    assert received == content.cpu().numpy().tobytes(), "the second process read something else"
    return f"{nbytes >> 20} MiB"


def _read_slot(pipe: Connection, slots: DeviceSlots) -> None:
    mapped = CudaMapped(torch.device("cuda", slots.device), slots)
    copy = mapped.fetch(1, slots.nbytes)
    copy.synchronize()
    pipe.send_bytes(copy.memory.cpu().numpy().tobytes())
    mapped.close()


KERNELS = (
    ("Qwen2.5-VL-7B-Instruct", ("bfloat16", "float32")),
    ("Qwen3-VL-4B-Instruct", ("float16",)),
    ("Qwen3.5-4B", ("bfloat16", "float32")),
)
CHECKS: dict[str, Callable[[], str]] = {
    "driver and versions": driver,
    "compiler": compiler,
    "attributes": attributes,
    "peers": peers,
    **{f"layers of {name} in {dtype}": partial(layers, name, dtype) for name, dtypes in KERNELS for dtype in dtypes},
    "tokens": tokens,
    "synchronisation": synchronisation,
    "pinned copies": pinned_copies,
    "CUDA IPC": ipc,
}
