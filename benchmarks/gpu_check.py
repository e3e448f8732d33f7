"""`bench.py gpu --check`: whether everything that the engine needs of a CUDA device works, in a few minutes, offline.

The checks run one after the other, each in a process of its own, since an error of a kernel is one of all later calls
of its process. Each prints PASS or FAIL and the reason.
"""

import contextlib
import itertools
import multiprocessing
import os
import queue
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cli import Report
from benchmarks.runner import checkpoint, decode, make_runner, take
from mini_engine.config import BUNDLED_MODEL
from mini_engine.kernels import ops
from mini_engine.launch.cli import parse
from mini_engine.launch.process_setup import die_with_parent
from mini_engine.matmul.in_float32 import HalfMatrix
from mini_engine.messages import DeviceSlots, Grammar, MediaItem, MessageId, NewSequence, SamplingParams, TensorHandle
from mini_engine.model.config import VisionConfig
from mini_engine.transport.arena import ReadableMemory
from mini_engine.transport.cuda_memory import CudaMapped, CudaStaging, check, use_cuda
from mini_engine.transport.page_allocator import PAGE_BYTES
from mini_engine.transport.shared_memory import create_sparse
from mini_engine.worker.pinning import PinnedMemory
from mini_engine.worker.sampling.grammar import Grammars

DEVICE = torch.device("cuda", 0)
SECONDS = 150  # that one check may take
# Of two layers, against float32 on the CPU: the root mean square of a difference by that of the values.
BOUNDS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
STEPS = 14  # of a run, two of them prompts
# The grammar never ends; token 0 follows it, too.
GRAMMAR = Grammar(b"capitals", r"start: /[!A-Z]+/", b"", 1)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "image": {"temperature": 0.0},
    "top_p": {"top_p": 0.9, "logprobs": 3, "prompt_logprobs": 2},
    "penalised": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "top_k": 20, "logit_bias": {7: 2.0},
                  "min_tokens": 4, "stop_token_ids": [3]},
    "grammar": {"grammar": GRAMMAR.digest, "stop_token_ids": [3]},
}  # fmt: skip


def run(checks: Mapping[str, Callable[[], str]]) -> Report:
    """Run and print them. A check returns what it found, raises what is wrong, and is killed after SECONDS."""
    fork = multiprocessing.get_context("fork")  # this process has not used CUDA, which would not survive that
    results: list[dict[str, Any]] = []
    for name, work in checks.items():
        begun, (receiver, sender) = time.monotonic(), fork.Pipe(duplex=False)
        process = fork.Process(target=_attempt, args=(sender, work, os.getpid()))
        process.start()
        sender.close()
        try:
            passed, reason = receiver.recv()
            process.join()
        except EOFError:
            process.join()
            passed, reason = False, f"exit status {process.exitcode} (-{signal.SIGALRM:d}: no result in {SECONDS} s)"
        seconds = round(time.monotonic() - begun, 1)
        print(f"{'PASS' if passed else 'FAIL'}  {name}: {reason} ({seconds} s)", flush=True)
        results.append({"name": name, "passed": passed, "reason": reason, "seconds": seconds})
    return Report({"checks": results}, [result["name"] for result in results if not result["passed"]])


def _attempt(sender: Connection, work: Callable[[], str], parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)  # it ends the process, even inside of CUDA
    try:
        sender.send((True, work()))
    except Exception as error:  # noqa: BLE001  whatever it is, it is the result
        lines = str(error).strip().splitlines() or [""]  # CUDA's go on with advice
        sender.send((False, f"{type(error).__name__}: {lines[0]}"))


def driver() -> str:
    """Versions; that Triton's kernels can run."""
    torch.cuda.init()  # whose error says why there is no device
    obstacle = ops.triton_obstacle(DEVICE)
    assert obstacle is None, obstacle
    import triton

    with use_cuda(DEVICE) as runtime:
        cuda = [check(runtime.cudaDriverGetVersion()), check(runtime.cudaRuntimeGetVersion())]
    found = re.search(r"\d+\.[\d.]+", Path("/proc/driver/nvidia/version").read_text())
    major, minor = torch.cuda.get_device_capability()
    return (
        f"{torch.cuda.get_device_name()} (sm_{major}{minor}), driver {found and found[0]}, CUDA {cuda[0]} (driver), "
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
    """Host memory can be registered, and one address says where a copy begins, on the host or a device."""
    names = ("HostRegisterSupported", "UnifiedAddressing")
    with use_cuda(DEVICE) as runtime:
        kinds = [getattr(runtime.cudaDeviceAttr, f"cudaDevAttr{name}") for name in names]
        values = [check(runtime.cudaDeviceGetAttribute(kind, DEVICE.index)) for kind in kinds]
    text = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
    assert all(values), text
    return text


def peers() -> str:
    """A copy from each device to each other one, directly or through the host."""
    count, direct = torch.cuda.device_count(), 0
    assert count, "there is no device"
    for source, target in itertools.permutations(range(count), 2):
        x = torch.arange(1 << 20, device=f"cuda:{source}")
        assert torch.equal(x.to(f"cuda:{target}").cpu(), x.cpu()), f"a copy from device {source} to {target} is wrong"
        direct += torch.cuda.can_device_access_peer(source, target)
    return f"{count} device(s), direct access for {direct} of {count * (count - 1)} pairs"


@contextlib.contextmanager
def grammars() -> Iterator[Grammars]:
    """They know GRAMMAR."""
    ready = queue.SimpleQueue[Any]()
    known = Grammars(Path(BUNDLED_MODEL, "tokenizer.json"), 64, "bench", ready.put)
    try:
        known.update([GRAMMAR], [])
        assert not (problem := ready.get(timeout=60).problem), problem
        yield known
    finally:
        known.close()


def requests(vision: VisionConfig, *names: str, **more: Any) -> list[NewSequence]:
    """A request for each of these ways to choose tokens, and `more` of them; "image" has one."""
    grid, made = (1, 8, 12), []
    count = grid[1] * grid[2]
    handle = TensorHandle(MessageId(0, 0), (count, vision.patch_dim))
    image = MediaItem(bytes(16), "image", count // vision.merge_unit, grid, None, offsets=[5], patches=handle)
    for number, name in enumerate(names):
        prompt = [(37 * place + 11 * number) % 701 for place in range(70 + 41 * number)]
        params = SamplingParams(max_tokens=2 * STEPS, seed=number, **SAMPLING[name] | more)
        made.append(NewSequence(f"{name} {number}", prompt, params, [image] if name == "image" else []))
    return made


def shorten(raw: Any) -> None:
    """Leave two layers, of two kinds where there are two, in the decoder and in the tower of a config.json."""
    text, vision = raw.get("text_config", raw), raw["vision_config"]
    text["num_hidden_layers"] = 2
    text["layer_types"] = text.get("layer_types", [])[2:4]
    vision.update(depth=2, fullatt_block_indexes=[1], deepstack_visual_indexes=[0])


def shrink(raw: Any) -> None:
    """Shorten it, and leave what a CPU computes in seconds; heads are as they are."""
    shorten(raw)
    text = raw.get("text_config", raw)
    text.update(vocab_size=1024, intermediate_size=1024)
    if "num_experts" in text:
        text["num_experts"] = text["num_experts_per_tok"]  # a rounding error chooses no other expert


def layers(name: str, dtype: str, *quantized: str) -> str:
    """All kernels of a model, in its own head sizes, against torch on the CPU."""
    most = 0.0
    with checkpoint(name, shrink) as flags:
        expected = _outputs([*flags, *quantized, "--device", "cpu", "--dtype", "float32"])
        found = _outputs([*flags, *quantized, "--device", DEVICE.type, "--dtype", dtype])
    for (module, x), (_, y) in zip(expected, found, strict=True):
        if x.shape == y.shape:  # padded columns may be more
            error = float((x - y).norm() / x.norm())
            assert error <= BOUNDS[dtype], f"the output of {module} differs by {error:.1e}, more than {BOUNDS[dtype]:g}"
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
        if ".experts" in name or isinstance(module, HalfMatrix):  # their rows have no order of their own; packed here
            continue
        module.register_forward_hook(partial(keep, name))
    new = requests(model.config.vision, "greedy", "image", logit_bias={9: 1e4})
    with contextlib.closing(decode(runner, new, parts=2)) as steps:
        take(steps, STEPS)
    return outputs


def tokens() -> str:
    """CUDA graphs, single launches, torch's attention and the CPU choose the same tokens."""
    expected: list[Any] = []  # SampledToken
    ways = ("--device cpu", "--no-enforce-eager", "--enforce-eager", "--attention-backend sdpa")
    with grammars() as known:
        for way in ways:
            flags = ["--device", DEVICE.type, "--dtype", "float32", *way.split()]  # of two the last counts
            runner, model = make_runner(parse([BUNDLED_MODEL, *flags]), [(8, 352)])
            runner.grammars = known
            with contextlib.closing(decode(runner, requests(model.config.vision, *SAMPLING), parts=2)) as steps:
                found = list(itertools.chain(*itertools.islice(steps, STEPS)))
            expected = expected or found
            for token, same in zip(found, expected, strict=True):
                assert not token.problem, token.problem
                text = f"{token.request_id}: {way} chose {token.token_id}, {ways[0]} {same.token_id}"
                assert token.token_id == same.token_id, text
    return f"{len(expected)} of {len(SAMPLING)} requests, the same by {', '.join(ways)}"


def synchronisation() -> str:
    """A decode step waits for nothing, with graphs and without."""
    for flags in ([], ["--enforce-eager"]):
        runner, model = make_runner(parse([BUNDLED_MODEL, "--dtype", "bfloat16", *flags]), [(4, 256)])
        new = requests(model.config.vision, "greedy", "top_p", "penalised")
        with contextlib.closing(decode(runner, new)) as steps:
            take(steps, STEPS)  # compiles and allocates
            torch.cuda.set_sync_debug_mode("error")
            take(steps, STEPS)
            torch.cuda.set_sync_debug_mode("default")
    return f"none in {2 * STEPS} decode steps"


def pinned_copies() -> str:
    """Shared memory is pinned in three parts, and a tensor that lies in all of them, and beyond, is copied."""
    pinned, mib, fd = PinnedMemory(DEVICE), 1 << 20, create_sparse(7 << 20)
    content = torch.randint(0, 256, (7 * mib,), dtype=torch.uint8)
    os.pwrite(fd, content.numpy().data, 0)
    memory = ReadableMemory(fd, pinned.pin)
    for mark in (2 * mib, 4 * mib, 6 * mib):
        memory.pin_up_to(mark)
    view = memory.read([(0, 7 * mib // PAGE_BYTES)], 0, 7 * mib)
    assert torch.equal(pinned.to_device(view).cpu(), content), "the copy is wrong"
    assert view.is_pinned(), "the memory could not be pinned; its copies are right but pageable"
    return "7 MiB over three registrations"


def ipc() -> str:
    """A second process reads a tensor out of this one's device memory."""
    staging, nbytes = CudaStaging(DEVICE), 1 << 20
    memory = staging.allocate(1, nbytes)
    content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    staging.fill(memory, content)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), die_with_parent, (os.getpid(),)) as pool:
        found = pool.submit(_read_slot, staging.export(nbytes)).result()
    assert found == content.cpu().numpy().tobytes(), "the second process read something else"
    return f"{nbytes >> 20} MiB"


def _read_slot(slots: DeviceSlots) -> bytes:
    copy = CudaMapped(torch.device("cuda", slots.device), slots).fetch(1, slots.nbytes)
    copy.synchronize()
    return copy.memory.cpu().numpy().tobytes()


KERNELS = {"Qwen2.5-VL-7B-Instruct": ("bfloat16", "float32", "bfloat16 -q int8"),
           "Qwen3-VL-4B-Instruct": ("float16", "bfloat16 -q int4"), "Qwen3.5-4B": ("bfloat16", "float32"),
           "Qwen3-VL-30B-A3B-Instruct": ("bfloat16", "bfloat16 -q int4")}  # fmt: skip
WORK = (driver, compiler, attributes, peers, tokens, synchronisation, pinned_copies, ipc)
CHECKS: dict[str, Callable[[], str]] = {work.__name__.replace("_", " "): work for work in WORK}
for model_name, dtypes in KERNELS.items():
    CHECKS |= {f"layers of {model_name} in {dtype}": partial(layers, model_name, *dtype.split()) for dtype in dtypes}
