"""Every family through the runner: 64 tokens of a batch of mixed requests are those of transformers' `generate`."""

from pathlib import Path

import pytest
import torch

from mini_engine.messages import NewSequence
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.model.weights import load_model
from mini_engine.worker.attention import KVCache, SdpaBackend
from mini_engine.worker.batch import SequenceState
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from tests.model.families import FAMILIES
from tests.worker import script, tiny

COUNT, NUM_BLOCKS, BLOCK_SIZE = 64, 256, 16
ALONE = TensorParallel()


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def model(folder) -> VisionLanguageModel:
    return load_model(folder, ALONE, None, torch.device("cpu"))


def family_of(folder: Path) -> str:
    return folder.name.rstrip("0123456789")


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, list[int]]:
    media = tiny.MemoryMedia()
    requests = tiny.mixed_requests(media, family_of(folder))
    return {new.request_id: tiny.generate(folder, media, new, COUNT) for new in requests}


def run(model: VisionLanguageModel, folder: Path, requests: list[NewSequence], media, budget: int, preempt_at=()):
    cache = KVCache.allocate(model.attention_shape, NUM_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    cache.storage.fill_(float("nan"))
    runner = ModelRunner(model, SdpaBackend(cache), media, Normalisation.from_dir(folder), ALONE)
    return script.run(runner, script.write_steps(requests, COUNT, budget, BLOCK_SIZE, NUM_BLOCKS, preempt_at))


@pytest.mark.parametrize(("budget", "preempt_at"), [(7, (9,)), (100_000, ())])
def test_tokens_are_those_of_transformers(budget, preempt_at, model, folder, expected):
    """Chunks of seven tokens end inside of items, and between the runs of one."""
    media = tiny.MemoryMedia()
    requests = tiny.mixed_requests(media, family_of(folder))
    assert run(model, folder, requests, media, budget, preempt_at) == expected


def test_the_requests_differ(expected):
    """Were all continuations alike, the test above could not see a swap."""
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)


@pytest.mark.parametrize("folder", ["qwen3_vl"], indirect=True)
def test_rows_that_stop_at_the_first_columns_are_noticed(folder, monkeypatch, expected):
    """Of a family whose rows have more: then the deeper features are lost."""
    model = load_model(folder, ALONE, None, torch.device("cpu"))
    size = model.config.text.hidden_size
    assert model.config.vision.row_size == 3 * size
    encode = model.encode_vision
    monkeypatch.setattr(model, "encode_vision", lambda *args: [rows[:, :size] for rows in encode(*args)])
    media = tiny.MemoryMedia()
    requests = tiny.mixed_requests(media, family_of(folder))
    tokens = run(model, folder, requests, media, 100_000)
    assert tokens["text"] == expected["text"]
    assert tokens["image"] != expected["image"] and tokens["video"] != expected["video"]


def test_pieces_of_an_item_lie_on_its_placeholders(model, folder):
    """Whatever the chunk, each placeholder gets the row of its own number."""
    media = tiny.MemoryMedia()
    new = next(each for each in tiny.mixed_requests(media, family_of(folder)) if each.request_id == "two")
    sequence = SequenceState(new, model.config)
    rows = {item.media_hash: torch.arange(item.num_tokens) for item in new.media}
    length = len(new.prompt_token_ids)
    wanted = {tiny.IMAGE: iter(rows[new.media[1].media_hash].tolist())}
    wanted[tiny.VIDEO] = iter(rows[new.media[0].media_hash].tolist())
    whole = {at: next(wanted[token]) for at, token in enumerate(new.prompt_token_ids) if token in wanted}
    for start in range(0, length, 3):
        for stop in range(start, length + 1, 5):
            pieces = sequence.embeddings_within(start, stop, rows)
            found = {first + i: row for first, part in pieces for i, row in enumerate(part.tolist())}
            assert found == {at: row for at, row in whole.items() if start <= at < stop}
