"""Inner sizes that are made longer with zeros, as on CUDA: the same model."""

from collections.abc import Iterator

import pytest
import torch

from mini_engine.model import parallel
from mini_engine.model.layers import MLP, weight_slices_of
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel
from tests.support import script, tiny
from tests.support.checkpoints import load
from tests.support.families import FAMILIES

pytestmark = pytest.mark.parametrize("family", FAMILIES, indirect=True, scope="session")
GRANULE = 36  # the families' inner sizes of 96 and 48 are no multiples of it, nor their halves and quarters


@pytest.fixture(autouse=True)
def unset_memory_is_nan() -> Iterator[None]:
    """No zero by chance."""
    torch.use_deterministic_algorithms(True)  # it fills uninitialised memory
    yield
    torch.use_deterministic_algorithms(False)


def check_padding(model: VisionLanguageModel) -> None:
    """There is some, in every MLP, and it is zero. Unsets the model."""
    for mlp in model.modules():
        if isinstance(mlp, MLP):
            assert mlp.down.weight.shape[1] % GRANULE == 0
            assert mlp.up.weight.shape[0] == mlp.down.weight.shape[1] * len(mlp.up.rows)
    for piece in weight_slices_of(model):
        piece.target.zero_()
    assert sum(p.numel() for p in model.parameters()) > sum(piece.target.numel() for piece in weight_slices_of(model))
    assert not any(parameter.any() for parameter in model.parameters())


def test_logits_equal_transformers(checkpoint, family, monkeypatch):
    monkeypatch.setitem(parallel.GRANULES, "cpu", GRANULE)
    model = load(checkpoint.path)
    tiny.assert_logits(script.logits(model, family, ["text", "image then video"]), checkpoint.oracle, family)
    check_padding(model)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_each_rank_holds_the_same_as_without(load_format, checkpoint, monkeypatch):
    size = 4
    for rank in range(size):
        plain, padded = [], []
        for granule, pieces in ((1, plain), (GRANULE, padded)):
            monkeypatch.setitem(parallel.GRANULES, "cpu", granule)
            model = load(checkpoint.path, tp=TensorParallel(rank, size), load_format=load_format)
            pieces += weight_slices_of(model)
        for piece, other in zip(plain, padded, strict=True):
            assert (piece.source, piece.shape, piece.index) == (other.source, other.shape, other.index)
            assert torch.equal(piece.target, other.target)
        check_padding(model)
