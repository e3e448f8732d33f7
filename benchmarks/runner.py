"""A worker's `ModelRunner` by itself, and the steps that an engine core would send it."""

import contextlib
import dataclasses
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mini_engine.config import BUNDLED_MODEL, EngineConfig
from mini_engine.launch.plan.startup_checks import resolve_model
from mini_engine.matmul.in_float32 import HalfMatrix
from mini_engine.matmul.quantized import Int4Matrix, Int8Matrix
from mini_engine.messages import (
    Chunk,
    EncodeItem,
    NewSequence,
    SampledToken,
    SamplingParams,
    StateStart,
    Step,
    TensorHandle,
)
from mini_engine.model.experts import MixtureOfExperts
from mini_engine.model.layers import pack_later
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.quantization import DENSE_BITS, bytes_per_weight
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker import worker
from mini_engine.worker.cache_sizes import CacheSize
from mini_engine.worker.model_runner import Launched, ModelRunner
from mini_engine.worker.normalisation import Normalisation

# `config.json` of checkpoints on the hub, shortened to what is read; that of Qwen3.5 is assembled.
CONFIGS = Path(__file__).parent / "configs"


@contextlib.contextmanager
def checkpoint(name: str, change: Callable[[Any], None] | None = None) -> Iterator[list[str]]:
    """Flags of serve.py for a model: of CONFIGS, changed by `change`, with random weights and the bundled model's
    tokenizer and processor, in a directory that exists as long as the context; otherwise `name` itself."""
    if not (CONFIGS / f"{name}.json").is_file():
        yield [name]
        return
    raw = json.loads((CONFIGS / f"{name}.json").read_text())
    if change is not None:
        change(raw)
    with tempfile.TemporaryDirectory() as folder:
        for file in Path(BUNDLED_MODEL).glob("*[!s]"):  # without the weights, *.safetensors
            Path(folder, file.name).symlink_to(file)
        Path(folder, "config.json").unlink()
        Path(folder, "config.json").write_text(json.dumps(raw))
        yield [folder, "--load-format", "dummy"]


def make_runner(
    config: EngineConfig, batches: Sequence[tuple[int, int]], threads: int = 1
) -> tuple[ModelRunner, VisionLanguageModel]:
    """The runner of a worker alone, with a KV cache and recurrent states for each of `batches`: a number of sequences,
    and most tokens of each; and its model. The contents of media are made up."""
    torch.set_num_threads(threads)
    model_dir, device, tp = resolve_model(config), worker.choose_device(config, 0, 0), TensorParallel()
    model = worker.load(model_dir, config, tp, device)
    list(pack_later(model))
    backend = worker.choose_backend(config.attention_backend, device)
    most = max(batch for batch, _ in batches)
    size = CacheSize(max(batch * -(-longest // config.block_size) for batch, longest in batches), most)
    config = dataclasses.replace(config, max_num_seqs=most)
    attention, graphs = worker.make_attention(config, model, backend, size)
    runner = ModelRunner(model, attention, made_up_media(), Normalisation.from_dir(model_dir), tp, None, graphs)
    if graphs is not None:
        graphs.capture()
    return runner, model


def made_up_media() -> Any:
    """Stands where `MediaInputs` stands, with bytes of its own for any handle."""

    def rows(handle: TensorHandle, first: int, stop: int) -> torch.Tensor:
        values = torch.arange(first * handle.shape[1], stop * handle.shape[1]) * 7919 >> 5
        return values.to(torch.uint8).view(stop - first, -1)

    return SimpleNamespace(store=None, rows=rows, check=lambda: None, release=lambda _: None)


def plain_requests(batch: int, context: int) -> list[NewSequence]:
    """`batch` prompts of `context` tokens that differ, greedy."""
    params = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)
    prompts = [[(31 * place + 7 * number) % 199 + 7 for place in range(context)] for number in range(batch)]
    return [NewSequence(f"bench-{number}", prompt, params, []) for number, prompt in enumerate(prompts)]


def decode(
    runner: ModelRunner, requests: Sequence[NewSequence], cached: int = 0, parts: int = 1
) -> Generator[list[SampledToken], None, None]:
    """Sequences that decode together, a step for each item: the tokens of the step before. The first `parts` steps are
    the prompts, of which the cache counts as filled with the first `cached` tokens. A step is launched before the
    tokens of the one before are taken, as in a worker."""
    names, count = [request.request_id for request in requests], len(requests)
    blocks = [iter(range(number, runner.num_blocks, count)) for number in range(count)]  # those yet to fill
    starts, held, hashes = [cached] * count, [0] * count, {item.media_hash for new in requests for item in new.media}
    states = [StateStart(name, slot, None) for slot, name in enumerate(names)] if runner.num_states else []
    items = [(new.request_id, i, item.grid_thw[0]) for new in requests for i, item in enumerate(new.media)]
    encode = [EncodeItem(name, i, 0, num_grids) for name, i, num_grids in items]
    step = Step(0, started=[*requests], states=states, encode=encode)
    before: Launched | None = None
    try:
        for number in itertools.count(1):
            for i, request in enumerate(requests):
                start, length = starts[i], len(request.prompt_token_ids)
                stop = cached + (length - cached) * number // parts if number <= parts else length + number - parts
                starts[i], needed = stop, -(-stop // runner.block_size)
                mine = list(itertools.islice(blocks[i], needed - held[i]))
                step.chunks.append(Chunk(names[i], start, stop - start, mine, stop >= length))
                held[i] = needed
            launched = runner.launch(step)
            tokens = before.result().tokens if before is not None else []
            step, before = Step(number), launched
            yield tokens
    finally:
        runner.execute(Step(0, finished=names, evict=[*hashes]))


def num_weights(module: torch.nn.Module) -> int:
    """Of the module and all that it consists of."""
    return sum(count for _, count in weights_by_name(module))


def weights_by_name(module: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """Names and numbers of weights of its parameters and packed matrices."""
    yield from ((name, parameter.numel()) for name, parameter in module.named_parameters())
    yield from ((name, math.prod(matrix.shape)) for name, matrix in _packed(module))


def weight_bytes(module: torch.nn.Module, itemsize: int) -> int:
    """Of the same in memory, where a dense weight has `itemsize` bytes."""
    dense = itemsize * sum(parameter.numel() for parameter in module.parameters())
    bits = {HalfMatrix: DENSE_BITS, Int8Matrix: 8, Int4Matrix: 4}
    packed = [matrix for _, matrix in _packed(module)]
    return dense + int(sum(math.prod(m.shape) * bytes_per_weight(bits[type(m)], itemsize) for m in packed))


def token_weights(model: VisionLanguageModel) -> int:
    """Of decoder and head, those that one token is multiplied with."""
    sizes, mixtures = model.config.text.experts, sum(map(num_weights, _mixtures(model)))
    unread = mixtures - mixtures * sizes.top_k // sizes.count if sizes else 0
    return num_weights(model.decoder) + num_weights(model.head) - unread


def read_bytes(model: VisionLanguageModel, tokens: int, itemsize: int) -> int:
    """`weight_bytes` of decoder and head that a step of so many tokens reads: of experts the share that is chosen, if
    each token chooses at random."""
    sizes, mixtures = model.config.text.experts, sum(weight_bytes(each, itemsize) for each in _mixtures(model))
    unread = mixtures * (1 - sizes.top_k / sizes.count) ** tokens if sizes else 0
    return weight_bytes(model.decoder, itemsize) + weight_bytes(model.head, itemsize) - int(unread)


def _mixtures(model: VisionLanguageModel) -> list[torch.nn.Module]:
    """The experts of each layer, without those that all tokens share."""
    return [module.experts for module in model.decoder.modules() if isinstance(module, MixtureOfExperts)]


def _packed(module: torch.nn.Module) -> list[tuple[str, HalfMatrix | Int8Matrix | Int4Matrix]]:
    """Names and matrices of which the weights are no parameter."""
    named = module.named_modules()
    return [(name, matrix) for name, matrix in named if isinstance(matrix, HalfMatrix | Int8Matrix | Int4Matrix)]


def take(steps: Iterator[object], count: int) -> None:
    """Do so many of the steps."""
    for _ in range(count):
        next(steps)
