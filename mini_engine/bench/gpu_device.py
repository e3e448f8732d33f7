"""The measurements of regime `gpu`, on one device; this file imports torch.

What is timed is the time on the clock from the first launch to the device's end, the host's work included.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from mini_engine.bench import gpu_work
from mini_engine.bench.transport_rank import PAGE
from mini_engine.bench.transport_transfer import Payload, Ranks, Way
from mini_engine.bench.worker_alone import NoMedia
from mini_engine.config import AttentionBackendName
from mini_engine.messages import Chunk, NewSequence, SamplingParams, Step
from mini_engine.model.config import ModelConfig
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.model.weights import fill_randomly
from mini_engine.transport.arena import checksum
from mini_engine.transport.cuda_memory import CudaStaging, StagingSlots
from mini_engine.transport.tensor_ipc import PROBE_BYTES
from mini_engine.worker.attention import KVCache
from mini_engine.worker.model_runner import Launched, ModelRunner
from mini_engine.worker.normalisation import Normalisation
from mini_engine.worker.worker import choose_backend, leave_out_cudnn, make_backend

COPY_BYTES = 4 << 30
SIDE = 8192
PREFILL_TOKENS = 8192
# A video of 640x360, which the processor makes 644x364, in patches of 14 pixels and 2 frames.
VIDEO_GRID = (8, 26, 46)
SHORT_PROMPT = 50
REPETITION_PENALTY = 1.05
TRANSFER_MEGABYTES = (1, 11.2, 64)  # the second is that video's patches
TRANSFER = Way(
    "torch_shm",
    ("cold", "reused"),
    lambda nbytes: StagingSlots(CudaStaging(torch.device("cuda", 0)), 2, max(nbytes, PROBE_BYTES)),
)


class Model:
    """A model with random weights in bfloat16, its cache full of random keys and values, and its runner.

    Args:
        raw: what stands in its config.json.
        most: sequences at once, beside one prompt.
        longest: the longest, in tokens.
        graphs: whether decode steps are replayed, where attention allows it.

    Raises:
        ConfigError: the attention cannot run here, or with such blocks.
    """

    def __init__(
        self, raw: dict[str, Any], device: torch.device, most: int, longest: int, graphs: bool,
        attention: AttentionBackendName = "auto", block_size: int = 16,
    ) -> None:  # fmt: skip
        self.attention = choose_backend(attention, device)
        leave_out_cudnn()
        self.config = ModelConfig.from_dict(raw)
        model = VisionLanguageModel(self.config, Placement(TensorParallel(), torch.bfloat16, device))
        fill_randomly(model)
        longest = max(longest, PREFILL_TOKENS)
        self._per_sequence = -(-longest // block_size)
        blocks = (most + 1) * self._per_sequence
        cache = KVCache.allocate(model.attention_shape, blocks, block_size, torch.bfloat16, device, spare=1)
        cache.storage.normal_()
        backend = make_backend(self.attention, cache, longest)
        steps = None
        if graphs and self.attention == "triton":
            from mini_engine.worker.decode_graphs import DecodeGraphs
            from mini_engine.worker.triton_attention import TritonBackend

            assert isinstance(backend, TritonBackend)
            steps = DecodeGraphs(model, backend, most, longest)
            steps.capture()
        self.runner = ModelRunner(model, backend, NoMedia(), Normalisation(), TensorParallel(), None, steps)
        self._names = itertools.count()

    def begin(self, batch: int, prompt: int, beside: int = 0, **sampling: Any) -> Sequence[Begun]:
        """New sequences with prompts of so many tokens, `beside` others that are there already."""
        params = SamplingParams(**{"max_tokens": 1 << 20, "seed": 0, "temperature": 0.0, **sampling})
        tokens = [7 + i % 1000 for i in range(prompt)]
        tables = [range(i * self._per_sequence, (i + 1) * self._per_sequence) for i in range(beside, beside + batch)]
        return [Begun(NewSequence(f"bench-{next(self._names)}", tokens, params, []), list(each)) for each in tables]


class Begun(NamedTuple):
    """A sequence, and its blocks."""

    new: NewSequence
    blocks: list[int]

    def chunk(self, start: int, count: int) -> Chunk:
        """Its first one, which ends its prompt."""
        return Chunk(self.new.request_id, start, count, self.blocks, True)


class Decoding:
    """Sequences that decode together. Their caches count as filled, as after a hit in the prefix cache."""

    def __init__(self, model: Model, batch: int, context: int, **sampling: Any) -> None:
        self._model = model
        begun = model.begin(batch, context, **sampling)
        self._names = [one.new.request_id for one in begun]
        self._number = itertools.count(context)
        first = [one.chunk(context - 1, 1) for one in begun]
        model.runner.execute(Step(0, started=[one.new for one in begun], chunks=first))

    def run(self, steps: int, prompt: int = 0) -> None:
        """So many steps, each launched before the last has ended. Where `prompt` is not 0, each takes in one of so many
        tokens, and ends that of the step before."""
        launched: Launched | None = None
        finished: list[str] = []
        for _ in range(steps):
            start = next(self._number)
            chunks = [Chunk(name, start, 1, [], True) for name in self._names]
            beside = self._model.begin(1, prompt, len(self._names)) if prompt else []
            chunks += [one.chunk(0, prompt) for one in beside]
            started = [one.new for one in beside]
            following = self._model.runner.launch(Step(0, finished=finished, started=started, chunks=chunks))
            finished = [new.request_id for new in started]
            if launched is not None:
                launched.result()
            launched = following
        assert launched is not None
        launched.result()
        if finished:
            self._model.runner.execute(Step(0, finished=finished))

    def end(self) -> None:
        """Forget the sequences."""
        self._model.runner.execute(Step(0, finished=self._names))


class Device:
    """One device, its rates measured when this is made: bytes and operations a second."""

    def __init__(self, device: torch.device) -> None:
        self.name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._device = device
        self.copy_rate = self._copy_rate()
        self.matrix_rate = self._matrix_rate()

    def describe(self) -> dict[str, Any]:
        """For the JSON object."""
        return {"name": self.name, "copy_bytes_per_s": self.copy_rate, "matrix_flop_per_s": self.matrix_rate}

    def decode(self, model: Model, batch: int, context: int, steps: int, repeats: int) -> dict[str, Any]:
        """A row on decode steps."""
        return self._decode("decode", Decoding(model, batch, context), model, (batch, context), (steps, repeats))

    def penalties(self, model: Model, batch: int, context: int, steps: int, repeats: int) -> dict[str, Any]:
        """A row on decode steps whose logits depend on all tokens before."""
        decoding = Decoding(model, batch, context, repetition_penalty=REPETITION_PENALTY)
        return self._decode("penalties", decoding, model, (batch, context), (steps, repeats))

    def mixed(self, model: Model, batch: int, context: int, steps: int, repeats: int) -> dict[str, Any]:
        """A row on decode steps with a short prompt in each."""
        decoding = Decoding(model, batch, context)
        return self._decode("mixed", decoding, model, (batch, context), (steps, repeats), SHORT_PROMPT)

    def _decode(
        self, part: str, decoding: Decoding, model: Model, size: tuple[int, int], timed: tuple[int, int],
        prompt: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        (batch, context), (steps, repeats) = size, timed
        decoding.run(steps, prompt)
        seconds = self._median(partial(decoding.run, steps, prompt), repeats, warm_up=False) / steps
        decoding.end()
        mean = context + steps * (2 + repeats) // 2
        moved = gpu_work.decode_bytes(model.config, batch, mean, 2)
        return _row(part, batch, context, seconds, moved, None, moved / seconds / self.copy_rate)

    def prefill(self, model: Model, repeats: int) -> dict[str, Any]:
        """A row on one prompt."""
        flops = gpu_work.prefill_flops(model.config, PREFILL_TOKENS)

        def prompt() -> None:
            [one] = model.begin(1, PREFILL_TOKENS)
            model.runner.execute(Step(0, started=[one.new], chunks=[one.chunk(0, PREFILL_TOKENS)]))
            model.runner.execute(Step(0, finished=[one.new.request_id]))

        seconds = self._median(prompt, repeats)
        return _row("prefill", 1, PREFILL_TOKENS, seconds, None, flops, flops / seconds / self.matrix_rate)

    def vision(self, model: Model, repeats: int) -> dict[str, Any]:
        """A row on one video."""
        t, h, w = VIDEO_GRID
        shape = (t * h * w, model.config.vision.patch_dim)
        patches = torch.randint(0, 256, shape, dtype=torch.uint8, device=self._device)
        flops = gpu_work.vision_flops(model.config.vision, [VIDEO_GRID])
        seconds = self._median(lambda: model.runner.encode_patches([patches], [VIDEO_GRID]), repeats)
        return _row("vision", 1, None, seconds, None, flops, flops / seconds / self.matrix_rate)

    def grids(self, model: Model, repeats: int) -> dict[str, Any]:
        """A row on videos that are smaller than that one, each by another height or width."""
        t, h, w = VIDEO_GRID
        sizes = [(t, down, across) for down in range(h, 0, -2) for across in range(w - 2, 0, -2)][: repeats + 1]
        patches = torch.randint(0, 256, (t * h * w, model.config.vision.patch_dim), dtype=torch.uint8)
        patches, unseen = patches.to(self._device), iter(sizes)

        def encode() -> None:
            _, down, across = grid = next(unseen)
            model.runner.encode_patches([patches[: t * down * across]], [grid])

        seconds = self._median(encode, len(sizes) - 1)
        flops = round(statistics.mean(gpu_work.vision_flops(model.config.vision, [grid]) for grid in sizes[1:]))
        return _row("grids", 1, None, seconds, None, flops, flops / seconds / self.matrix_rate)

    def _copy_rate(self) -> float:
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self._device).zero_()
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / self._median(lambda: target.copy_(source), 10)

    def _matrix_rate(self) -> float:
        left, right = torch.randn(2, SIDE, SIDE, dtype=torch.bfloat16, device=self._device)
        out = torch.empty_like(left)

        def products() -> None:
            for _ in range(10):
                torch.mm(left, right, out=out)

        return 10 * 2 * SIDE**3 / self._median(products, 10)

    def _median(self, work: Callable[[], object], repeats: int, warm_up: bool = True) -> float:
        """Seconds until the device has done it."""
        if warm_up:
            work()
        samples = []
        for _ in range(repeats):
            self._finish()
            begun = time.perf_counter()
            work()
            self._finish()
            samples.append(time.perf_counter() - begun)
        return statistics.median(samples)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class CudaPayload(Payload):
    """A payload whose tensor lies on the CUDA device."""

    def __init__(self, nbytes: int):
        super().__init__(nbytes)
        self._host = self.tensor
        self.tensor = self._host.cuda()

    def renew(self) -> int:
        self._host[::PAGE] += 1
        self.tensor.copy_(self._host)
        torch.cuda.synchronize()
        return checksum(self._host)


def transfers(repeats: int) -> list[dict[str, Any]]:
    """Rows on tensors handed to another process."""
    rows = []
    with Ranks(1, "cuda") as ranks:
        for megabytes in TRANSFER_MEGABYTES:
            payload = CudaPayload(int(megabytes * 1e6))
            # The second of each pair: what is set up at the first use of a slot is not to count.
            seconds = statistics.median(list(ranks.transfers(TRANSFER, 1, payload))[-1].total for _ in range(repeats))
            rows.append(
                {
                    "megabytes": megabytes,
                    "ms": round(1000 * seconds, 3),
                    "gigabytes_per_second": round(payload.nbytes / seconds / 1e9, 2),
                }
            )
    return rows


def _row(
    part: str, batch: int, context: int | None, seconds: float, moved: int | None, flops: int | None, share: float
) -> dict[str, Any]:
    return {
        "part": part,
        "batch": batch,
        "context": context,
        "ms": round(1000 * seconds, 3),
        "gigabytes": None if moved is None else round(moved / 1e9, 2),
        "teraflop": None if flops is None else round(flops / 1e12, 2),
        "share": round(share, 3),
    }
