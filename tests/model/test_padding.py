"""Inner sizes that are made longer with zeros, as on CUDA: the same model."""

import pytest
import torch

from mini_engine.model import parallel
from mini_engine.model.layers import MLP, pieces_of
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.quantized_files import find_weights
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.model.weights import fill_randomly, load_weights
from tests.model.reference import reference_logits

EVERY_FAMILY = True
CPU = torch.device("cpu")
GRANULE = 36  # the families' inner sizes of 96 and 48 are no multiples of it, nor their halves and quarters


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not set is no zero by chance."""
    make = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **more: make(*args, **more).fill_(float("nan")))


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parallel.GRANULES, "cpu", GRANULE)


def build(checkpoint, rank: int = 0, size: int = 1) -> VisionLanguageModel:
    return VisionLanguageModel(checkpoint.config, Placement(TensorParallel(rank, size), torch.float32, CPU))


def load(checkpoint, rank: int = 0, size: int = 1) -> VisionLanguageModel:
    model = build(checkpoint, rank, size)
    load_weights(model, checkpoint.path, find_weights(checkpoint.path, text=checkpoint.config.text))
    return model


def check_padding(model: VisionLanguageModel) -> None:
    """There is some, in every MLP, and it is zero. Unsets the model."""
    for mlp in model.modules():
        if isinstance(mlp, MLP):
            assert mlp.down.weight.shape[1] % GRANULE == 0
            assert mlp.up.weight.shape[0] == mlp.down.weight.shape[1] * len(mlp.up.rows)
    for piece in pieces_of(model):
        piece.target.zero_()
    assert sum(p.numel() for p in model.parameters()) > sum(piece.target.numel() for piece in pieces_of(model))
    assert not any(parameter.any() for parameter in model.parameters())


def test_logits_equal_transformers(padded, checkpoint, oracle, prompts):
    model = load(checkpoint)
    for name in ("text", "image then video"):
        with torch.inference_mode():
            (ours,) = reference_logits(model, [prompts[name]])
        torch.testing.assert_close(ours, oracle(checkpoint.oracle, prompts[name]), atol=1e-5, rtol=0)
    check_padding(model)


@pytest.mark.parametrize("random", [False, True])
def test_each_rank_holds_the_same_as_without(random, checkpoint, monkeypatch):
    size = 4
    for rank in range(size):
        plain, padded = [], []
        for granule, pieces in ((1, plain), (GRANULE, padded)):
            monkeypatch.setitem(parallel.GRANULES, "cpu", granule)
            model = build(checkpoint, rank, size) if random else load(checkpoint, rank, size)
            if random:
                fill_randomly(model)
            pieces += pieces_of(model)
        for piece, other in zip(plain, padded, strict=True):
            assert (piece.source, piece.shape, piece.index) == (other.source, other.shape, other.index)
            assert torch.equal(piece.target, other.target)
        check_padding(model)
