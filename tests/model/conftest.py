"""Random tiny checkpoints, and the values that a model holds."""

import torch
from torch import Tensor

from mini_engine.matmul.quantized import MatrixPart
from mini_engine.model.layers import weight_slices_of
from mini_engine.model.vision_language import VisionLanguageModel
from tests.support.checkpoints import checkpoint, checkpoints, deviation, family, model
from tests.support.one_thread import one_thread

__all__ = ["checkpoint", "checkpoints", "deviation", "family", "model", "one_thread"]


def values_of(model: VisionLanguageModel) -> dict[str, Tensor]:
    """The values of a model on one rank that is not packed, by the checkpoint's names, but the head's copy of a tied
    table."""
    tensors: dict[str, Tensor] = {}
    for piece in weight_slices_of(model):
        target = piece.target
        if isinstance(target, MatrixPart):
            target = target.matrix.codes_of(target.rows).dequantize()
        tensors.setdefault(piece.source, torch.empty(piece.shape))[piece.index] = target
    return tensors
