"""Builds a rank's part of a model and fills it: from safetensors files, reading of each tensor only what this rank
holds, or with random values.

Which parts these are the layers say (`layers.WeightSlice`); which names a family's checkpoints use says its spec.
"""

import itertools
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from mini_engine.free_memory import available_memory
from mini_engine.matmul.quantized import Codes, Int8Matrix, MatrixPart, QuantizedMatrix
from mini_engine.model.checkpoint import FLOATS, CheckpointError, Progress, Stored, read_tensor, shorten
from mini_engine.model.config import ModelConfig
from mini_engine.model.layers import WeightSlice, pack_weights, single_threads, weight_slices_of
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.quantization import SUPPORTED, Quantization
from mini_engine.model.quantized_files import StoredMatrix, find_weights, is_empty_bias
from mini_engine.model.vision_language import VisionLanguageModel

logger = logging.getLogger(__name__)

DUMMY_SPREAD = 0.035  # of uniform values: their deviation is 0.02, as transformers starts these models
# A tensor is read, or made, in runs of whole rows, so that what is held beside the parameters stays small.
RUN_VALUES = 4 << 20
READERS = 8  # threads at most, each with a run of its own

LoadFormat = Literal["auto", "safetensors", "dummy"]


def load_model(
    path: str | Path,
    tp: TensorParallel,
    dtype: torch.dtype | None,
    device: torch.device,
    load_format: LoadFormat = "auto",
    spread_tower: bool = False,
    quantization: str = "none",
    quantize_head: str = "int8",
) -> VisionLanguageModel:
    """Build the model of a directory and fill it.

    Args:
        path: holds `config.json` and, unless `load_format` is "dummy", the safetensors.
        tp: this rank's place.
        dtype: of the parameters; None takes the checkpoint's own.
        device: where they are made. On a CPU the bytes are read straight into them, unless the dtype differs or a rank
            holds some columns only: then, as for another device, they come in small runs.
        load_format: "dummy" fills with random values instead, the same model whatever the number of ranks.
        spread_tower: whether this rank holds the whole vision tower; see `Placement`.
        quantization, quantize_head: the flags of these names; dense weights are quantised run by run.

    Raises:
        FileNotFoundError: config.json is not there.
        CheckpointError: the weights are not there, cannot be read or do not match.
        ValueError: unsupported architecture or setting.
    """
    config = ModelConfig.from_dir(path)
    tensors = stored = None
    if load_format != "dummy":
        tensors = find_weights(Path(path), config.quantization, config.text)
        stored = {weight.name: weight.kind for weight in tensors.values() if isinstance(weight, StoredMatrix)}
    held = Quantization.choose(quantization, quantize_head, config.quantization, stored)
    dtype = dtype or getattr(torch, config.dtype)
    model = VisionLanguageModel(config, Placement(tp, dtype, device, spread_tower, held))
    if device.type == "cpu":
        _check_room(model, path)
    if tensors is None:
        fill_randomly(model)
    else:
        load_weights(model, path, tensors)
    pack_weights(model)
    return model.eval()


def load_weights(model: nn.Module, path: str | Path, tensors: dict[str, Stored | StoredMatrix]) -> None:
    """Fill all parameters from `tensors`, which `find_weights` has found in a directory. All names and shapes are
    checked before anything is read. Raises CheckpointError naming what is missing, unexpected or wrong, and if a matrix
    that serves twice is stored twice with different values."""
    pieces = list(weight_slices_of(model))
    _check(pieces, tensors, path)
    progress = Progress("weights read", sum(piece.target.nbytes for piece in pieces))
    in_order = sorted(pieces, key=lambda piece: _place(tensors[piece.source]))
    with single_threads(min(READERS, torch.get_num_threads())) as pool:
        for _ in pool.map(lambda piece: _fill(piece, tensors[piece.source], progress), in_order):
            pass  # what one raises ends the others
    for piece in pieces:
        if piece.twin in tensors and not _is_same(piece, tensors[piece.twin]):
            raise CheckpointError(
                f"{piece.twin} in {path} differs from {piece.source}, which its config.json ties it to; set "
                f"tie_word_embeddings to false there to use both, or remove {piece.twin} from the files"
            )


def fill_randomly(model: nn.Module) -> None:
    """Fill all parameters with small random values, norms with values near one. A value depends on its tensor's name
    and its place in the whole tensor alone, so that any number of ranks hold the parts of the same model; nothing that
    another rank holds is computed. The numbers are made on the device."""
    pieces = list(weight_slices_of(model))
    progress = Progress("random weights made", sum(piece.target.nbytes for piece in pieces))
    for piece in pieces:
        is_norm = len(piece.shape) == 1 and piece.source.endswith(".weight")
        for index, target in _in_runs(piece):
            noise = _noise(piece, index)
            if isinstance(target, MatrixPart):
                target.copy_(_as_codes(noise, target.matrix))
            else:
                target.copy_(noise.float().mul_(DUMMY_SPREAD / 2**15).add_(float(is_norm)))
            progress.add(target.nbytes)


def _check(pieces: list[WeightSlice], tensors: dict[str, Stored | StoredMatrix], path: str | Path) -> None:
    shapes = {piece.source: piece.shape for piece in pieces}
    shapes |= {piece.twin: piece.shape for piece in pieces if piece.twin in tensors}
    used = {name: tensors[name] for name in shapes if name in tensors}
    dtypes = {name: stored.dtype for name, stored in used.items() if isinstance(stored, Stored)}
    # Frequencies are computed, and the layers of `mtp` serve speculative decoding.
    ignored = {name for name in tensors if name.endswith(".inv_freq") or name.startswith("mtp.")}
    others = [name for name in tensors if name not in shapes and name not in ignored]
    names = {
        "missing": [name for name in shapes if name not in tensors],
        "unexpected": [name for name in others if not is_empty_bias(name, tensors)],
        "wrong shape": [f"{n} is {t.shape}, not {shapes[n]}" for n, t in used.items() if t.shape != shapes[n]],
        "not floating point": [f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS],
    }
    if problems := [f"{kind}: {shorten(of_kind)}" for kind, of_kind in names.items() if of_kind]:
        raise CheckpointError(
            f"the weights in {path} do not fit its config.json; {'; '.join(problems)}; "
            f"take all files from one checkpoint, dense or quantised as {SUPPORTED}"
        )


def _check_room(model: nn.Module, path: str | Path) -> None:
    """Raises CheckpointError if there is no memory for the parameters of this rank: on a CPU nothing else would say so
    before the kernel kills a process. Those of other ranks may be in use already, so they do not count."""
    needed = sum(tensor.nbytes for tensor in itertools.chain(model.parameters(), model.buffers()))
    if needed > (free := available_memory()):
        raise CheckpointError(
            f"the weights of {path} take {needed / 2**30:.1f} GiB of a worker by its config.json, but "
            f"{free / 2**30:.1f} GiB of memory are free; choose a smaller model, "
            "--quantization int8 or int4, --dtype bfloat16, or free some"
        )


def _place(stored: Stored | StoredMatrix) -> tuple[Path, int]:
    codes = stored.codes if isinstance(stored, StoredMatrix) else stored
    return codes.file, codes.offset


@torch.inference_mode()  # in which the caller may have made the parameters; each thread has a mode of its own
def _fill(piece: WeightSlice, stored: Stored | StoredMatrix, progress: Progress) -> None:
    if isinstance(stored, StoredMatrix):
        _fill_from_codes(piece, stored)
        progress.add(piece.target.nbytes)
    else:
        for index, target in _in_runs(piece):
            _read(stored, index, target)
            progress.add(target.nbytes)
    if isinstance(piece.target, MatrixPart) and not piece.target.is_finite():
        raise CheckpointError(
            f"{piece.source} has weights or scales that are infinite or not a number in --dtype; download the "
            "files again, or choose --dtype bfloat16"
        )


def _fill_from_codes(piece: WeightSlice, matrix: StoredMatrix) -> None:
    """The codes of a quantised target are those of the files, but FP8's are rounded to 8-bit integers."""
    target, (rows, *others) = piece.target, piece.index
    columns = others[0] if others else slice(0, piece.shape[1])
    unit = target.matrix.group if isinstance(target, MatrixPart) else 1
    for part_rows, values in matrix.parts(rows, columns, unit):
        if isinstance(target, MatrixPart):
            target[part_rows].copy_(values)
        else:
            target[part_rows] = values if isinstance(values, Tensor) else values.dequantize(target.dtype)


def _is_same(piece: WeightSlice, stored: Stored | StoredMatrix) -> bool:
    """Whether this rank's part of `stored`, in the dtype of the parameters, is what the piece was filled with."""
    if isinstance(stored, StoredMatrix):
        return False
    for index, target in _in_runs(piece):
        assert isinstance(target, Tensor)  # a token table
        part = torch.empty_like(target)
        _read(stored, index, part)
        if not torch.equal(part, target):
            return False
    return True


def _read(stored: Stored, index: tuple[slice, ...], target: Tensor | MatrixPart) -> None:
    """Fill `target` with a part of a tensor, straight where it is laid out alike."""
    rows, *others = index
    if isinstance(target, Tensor) and not others and target.is_contiguous() and target.device.type == "cpu":
        if target.dtype is FLOATS[stored.dtype]:
            read_tensor(stored, rows, target)
            return
    target.copy_(read_tensor(stored, rows)[(slice(None), *others)])


def _in_runs(piece: WeightSlice) -> Iterator[tuple[tuple[slice, ...], Tensor | MatrixPart]]:
    """The piece in runs of rows: the part of the checkpoint's tensor, and the view that it fills."""
    rows, *others = piece.index
    step = max(1, RUN_VALUES // max(1, torch.Size(piece.shape[1:]).numel()))
    for start in range(rows.start, rows.stop, step):
        run = slice(start, min(start + step, rows.stop))
        yield (run, *others), piece.target[run.start - rows.start : run.stop - rows.start]


def _as_codes(noise: Tensor, matrix: QuantizedMatrix) -> Codes:
    """The first bits of `_noise`: rounding as many values as a large model has takes minutes."""
    if isinstance(matrix, Int8Matrix):
        return Codes((noise >> 8).to(torch.int8), torch.full((len(noise), 1), DUMMY_SPREAD / 2**7))
    scales = torch.full((len(noise), noise.shape[1] // matrix.group), DUMMY_SPREAD / 2**3)
    return Codes((noise >> 12).add_(8).to(torch.uint8), scales, scales / 2)


def _noise(piece: WeightSlice, index: tuple[slice, ...]) -> Tensor:
    """Integers, uniform from -2**15 to 2**15 - 1, of this part of the piece's tensor: the high half of a product of two
    odd random numbers, one of the row and one of the column, modulo 2**32."""
    generator = torch.Generator().manual_seed(zlib.crc32(piece.source.encode()))

    def odd(count: int) -> Tensor:
        drawn = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
        return drawn.to(torch.int32) | 1

    device, inner = piece.target.device, piece.shape[1:]
    of_row, of_column = odd(piece.shape[0]), odd(torch.Size(inner).numel())
    of_row = of_row[index[0]].to(device).view(-1, *[1] * len(inner))
    of_column = of_column.view(inner)[index[1:]].to(device)
    return (of_row * of_column).bitwise_right_shift_(16)
