"""The bundled model through the runner: greedy words equal to transformers', in one batch cut into chunks."""

from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from mini_engine.config import EngineConfig
from mini_engine.demo import evaluate, videos
from mini_engine.demo.model import WEIGHTS
from mini_engine.messages import MediaItem, Modality, NewSequence, SamplingParams, Step
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.weights import load_model
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from mini_engine.worker.paged_attention import SdpaBackend
from mini_engine.worker.worker import choose_dtype
from tests.oracle import exact_seconds
from tests.worker import script, tiny

SEED = 2_000_000_500  # beyond what training and its evaluation draw from
COUNT = 24
NUM_BLOCKS = 512


def shown(seed: int) -> list[evaluate.Media]:
    """A video and an image, other ones for each seed."""
    clip, picture = videos.render(seed, num_frames=24, fps=12), videos.render_image(seed + 1)
    video = evaluate.Media(clip.colour, clip.shape, clip.motion, clip.frames, 12.0)
    return [video, evaluate.Media(picture.colour, picture.shape, None, picture.pixels[None])]


def as_request(name: str, inputs: Any, media: tiny.MemoryMedia, normalise: Normalisation) -> NewSequence:
    """A processor's output, its floats turned back into the bytes that they came from."""
    tokens = inputs["input_ids"][0].tolist()
    items: list[MediaItem] = []
    kinds: list[tuple[Modality, int, str, str]] = [
        ("image", 1, "pixel_values", "image_grid_thw"),
        ("video", 2, "pixel_values_videos", "video_grid_thw"),
    ]
    mean, std = (torch.tensor(x).view(1, 3, 1) for x in (normalise.mean, normalise.std))
    for modality, kind, values, grids in kinds:
        if values in inputs:
            (grid,) = [tuple(grid) for grid in inputs[grids].tolist()]
            pixels = (inputs[values].unflatten(1, (3, -1)) * std + mean) / normalise.rescale
            seconds = float(inputs["second_per_grid_ts"][0]) if modality == "video" else None
            offset = (inputs["mm_token_type_ids"][0] == kind).nonzero()[0].item()
            handle = media.put(pixels.round().to(torch.uint8).flatten(1))
            key = bytes([*name.encode(), kind])
            items.append(MediaItem(modality, int(offset), len(pixels) // 4, grid, seconds, handle, key))
    items.sort(key=lambda item: item.offset)
    return NewSequence(name, tokens, SamplingParams(max_tokens=COUNT, seed=0, temperature=0.0), items)


@exact_seconds
@pytest.mark.parametrize(
    ("budget", "dtype"), [(16, "float"), (1000, "float32"), (1000, "bfloat16"), (1000, "float16"), (16, "half")]
)
def test_the_words_are_those_of_transformers(budget, dtype):
    """Those of float32, whatever the number format: on what it was taught the bundled model is sure enough."""
    theirs = AutoModelForImageTextToText.from_pretrained(WEIGHTS, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(WEIGHTS)
    wanted = choose_dtype(EngineConfig(dtype=dtype))
    ours = load_model(WEIGHTS, TensorParallel(), wanted, torch.device("cpu"))
    cache = KVCache.allocate(ours.attention_shape, NUM_BLOCKS, 16, wanted, torch.device("cpu"))
    normalise, media = Normalisation.from_dir(WEIGHTS), tiny.MemoryMedia()
    requests: list[NewSequence] = []
    expected: dict[str, list[int]] = {}
    for i, kind in enumerate((slice(0, 1), slice(1, 2), slice(0, 2), slice(0, 0))):
        inputs = evaluate.processed(processor, shown(SEED + 10 * i)[kind], "Describe what you see.")
        requests.append(as_request(str(i), inputs, media, normalise))
        output = theirs.generate(**inputs, max_new_tokens=COUNT, do_sample=False, top_k=None)
        expected[str(i)] = output[0, inputs["input_ids"].shape[1] :].tolist()
    runner = ModelRunner(ours, SdpaBackend(cache), media, normalise, TensorParallel())
    tokens = script.run(runner, script.write_steps(requests, COUNT, budget, 16, NUM_BLOCKS))
    # The script goes on past the end token, `generate` does not.
    assert {name: ids[: len(expected[name])] for name, ids in tokens.items()} == expected


def test_a_second_question_behind_the_blocks_and_rows_of_the_first():
    """For the second, nothing is encoded and only what follows the common prefix is computed."""
    processor = AutoProcessor.from_pretrained(WEIGHTS)
    ours = load_model(WEIGHTS, TensorParallel(), torch.float32, torch.device("cpu"))
    normalise, media = Normalisation.from_dir(WEIGHTS), tiny.MemoryMedia()

    def run(steps: list[Step]) -> dict[str, list[int]]:
        cache = KVCache.allocate(ours.attention_shape, NUM_BLOCKS, 16, torch.float32, torch.device("cpu"))
        cache.storage.fill_(float("nan"))
        return script.run(ModelRunner(ours, SdpaBackend(cache), media, normalise, TensorParallel()), steps)

    def ask(name: str, question: str) -> NewSequence:
        return as_request(name, evaluate.processed(processor, shown(SEED)[:1], question), media, normalise)

    questions = {"first": "Describe what you see.", "second": "What colour is it?"}
    alone = {}
    for name, question in questions.items():
        alone |= run(script.write_steps([ask(name, question)], COUNT, 16, 16, NUM_BLOCKS))
    assert alone["first"] != alone["second"]
    first, second = (ask(name, question) for name, question in questions.items())
    (item,) = first.media
    pairs = zip(first.prompt_token_ids, second.prompt_token_ids, strict=False)
    same = next(i for i, (ours_token, other) in enumerate(pairs) if ours_token != other)
    assert same > item.offset + item.num_tokens
    second = msgspec.structs.replace(
        second, media=[msgspec.structs.replace(second.media[0], media_hash=item.media_hash)]
    )
    for blocks in (same // 16, item.offset // 16 + 1):  # behind the video, and within it
        assert run(script.share_prefix(first, second, blocks, COUNT, 16)) == alone
        first = ask("first", questions["first"])
