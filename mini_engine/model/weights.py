"""Builds a rank's part of a model and fills it: from safetensors files, reading of each tensor only what this rank
holds, or with random values.

Which parts these are the layers say (`layers.WeightSlice`); which names a family's checkpoints use says its spec.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from mini_engine.free_memory import available_memory
from mini_engine.kernels.quantized import MatrixPart
from mini_engine.model.checkpoint import CheckpointError, Progress, Stored, find_tensors, read_into, shorten
from mini_engine.model.config import ModelConfig
from mini_engine.model.layers import WeightSlice, pack_weights, pieces_of
from mini_engine.model.model_spec import canonical_name
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.quantization import SUPPORTED, Quantization, StoredQuantization
from mini_engine.model.quantized_files import StoredMatrix, is_unused, stored_matrices
from mini_engine.model.vision_language import VisionLanguageModel

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DUMMY_SPREAD = 0.035  # of uniform values: their deviation is 0.02, as transformers starts these models
# A tensor is read, or made, in runs of whole rows, so that what is held beside the parameters stays small.
RUN_VALUES = 4 << 20

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
        ValueError: unsupported architecture or setting, heads that do not divide.
    """
    config = ModelConfig.from_dir(path)
    stored = None
    if load_format != "dummy":
        tensors = find_tensors(Path(path), canonical_name)
        stored = {name: matrix.kind for name, matrix in stored_matrices(tensors, config.quantization).items()}
    held = Quantization.choose(quantization, quantize_head, config.quantization, stored)
    dtype = dtype or getattr(torch, config.dtype)
    model = VisionLanguageModel(config, Placement(tp, dtype, device, spread_tower, held))
    if device.type == "cpu":
        _check_room(model, path)
    if load_format == "dummy":
        fill_randomly(model)
    else:
        load_weights(model, path, canonical_name, config.quantization)
    pack_weights(model)
    return model.eval()


def load_weights(
    model: nn.Module,
    path: str | Path,
    canonical_name: Callable[[str], str],
    quantization: StoredQuantization | None = None,
) -> None:
    """Fill all parameters from a directory. `canonical_name` turns a checkpoint's name of a weight into that of the
    layers; `quantization` is that of the files. All names and shapes are checked before anything is read. Raises
    CheckpointError naming what is missing, unexpected or wrong, and if a matrix that serves twice is stored twice with
    different values."""
    tensors = find_tensors(Path(path), canonical_name)
    matrices = stored_matrices(tensors, quantization)
    pieces = list(pieces_of(model))
    _check(pieces, tensors, matrices, path)
    by_file: dict[Path, list[WeightSlice]] = {}
    progress = Progress("weights read", sum(piece.target.nbytes for piece in pieces))
    for piece in pieces:
        if (matrix := matrices.get(piece.module)) is not None and piece.is_matrix:
            _read_quantised(matrix, piece)
            progress.add(piece.target.nbytes)
        else:
            by_file.setdefault(tensors[piece.source].file, []).append(piece)
    for path_of_file, group in by_file.items():
        with FileIO(path_of_file) as file:
            for piece in sorted(group, key=lambda piece: tensors[piece.source].offset):
                for index, target in _in_runs(piece):
                    _read(file, tensors[piece.source], index, target)
                    progress.add(target.nbytes)
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
    pieces = list(pieces_of(model))
    progress = Progress("random weights made", sum(piece.target.nbytes for piece in pieces))
    for piece in pieces:
        is_norm = len(piece.shape) == 1 and piece.source.endswith(".weight")
        for index, target in _in_runs(piece):
            values = _noise(piece, index).float().mul_(DUMMY_SPREAD / 2**15).add_(float(is_norm))
            target.copy_(values)
            progress.add(target.nbytes)


def _check(
    pieces: list[WeightSlice], tensors: dict[str, Stored], matrices: dict[str, StoredMatrix], path: str | Path
) -> None:
    held = {piece.module: piece.shape for piece in pieces if piece.is_matrix and piece.module in matrices}
    of_matrices = {f"{name}.{end}" for name in held for end in matrices[name].tensors if end != "bias"}
    shapes = {piece.source: piece.shape for piece in pieces if not (piece.is_matrix and piece.module in matrices)}
    shapes |= {piece.twin: piece.shape for piece in pieces if piece.twin in tensors}
    used = {name: tensors[name] for name in shapes if name in tensors}
    # Frequencies are computed, and the layers of `mtp` serve speculative decoding.
    ignored = {name for name in tensors if name.endswith(".inv_freq") or name.startswith("mtp.")}
    names = {
        "missing": [name for name in shapes if name not in tensors],
        "unexpected": [
            name
            for name in tensors
            if name not in shapes and name not in ignored and name not in of_matrices
            if not is_unused(name, matrices, tensors)
        ],
        "wrong quantised tensors": [
            problem for name, shape in held.items() for problem in matrices[name].problems(shape)
        ],
        "wrong shape": [f"{n} is {t.shape}, not {shapes[n]}" for n, t in used.items() if t.shape != shapes[n]],
        "not floating point": [f"{n} is {t.dtype}" for n, t in used.items() if t.dtype not in FLOATS],
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


def _read_quantised(matrix: StoredMatrix, piece: WeightSlice) -> None:
    """Fill the piece from a matrix that the files have quantised: the codes of a quantised target are theirs, but FP8's
    are rounded to 8-bit integers."""
    target, (rows, *others) = piece.target, piece.index
    columns = others[0] if others else slice(0, piece.shape[1])
    unit = getattr(getattr(target, "matrix", None), "group", 1)
    for part_rows, part_columns, values in matrix.parts(rows, columns, unit):
        if isinstance(target, MatrixPart):
            target[part_rows].fill(part_columns, values)
        else:
            target[part_rows, part_columns] = values if isinstance(values, Tensor) else values.dequantize().to(target)


def _is_same(piece: WeightSlice, stored: Stored) -> bool:
    """Whether this rank's part of `stored`, in the dtype of the parameters, is what the piece was filled with."""
    with FileIO(stored.file) as file:
        for index, target in _in_runs(piece):
            assert isinstance(target, Tensor)  # a token table
            part = torch.empty_like(target)
            _read(file, stored, index, part)
            if not torch.equal(part, target):
                return False
    return True


def _read(file: FileIO, stored: Stored, index: tuple[slice, ...], target: Tensor | MatrixPart) -> None:
    """Fill `target` with a part of a tensor. Not through a mapping of the file: its page faults cost more than the copy
    does, and the kernel reads ahead less."""
    (rows, *others), dtype, whole = index, FLOATS[stored.dtype], target
    is_direct = target.dtype is dtype and target.device.type == "cpu" and not others and target.is_contiguous()
    if not is_direct or isinstance(whole, MatrixPart):
        whole = torch.empty(rows.stop - rows.start, *stored.shape[1:], dtype=dtype)
    row_bytes = math.prod(stored.shape[1:]) * dtype.itemsize
    read_into(file, stored.offset + rows.start * row_bytes, whole.view(-1).view(torch.uint8).numpy().data)
    if not is_direct:
        target.copy_(whole[(slice(None), *others)])


def _in_runs(piece: WeightSlice) -> Iterator[tuple[tuple[slice, ...], Tensor | MatrixPart]]:
    """The piece in runs of rows: the part of the checkpoint's tensor, and the view that it fills."""
    rows, *others = piece.index
    step = max(1, RUN_VALUES // max(1, torch.Size(piece.shape[1:]).numel()))
    for start in range(rows.start, rows.stop, step):
        run = slice(start, min(start + step, rows.stop))
        yield (run, *others), piece.target[run.start - rows.start : run.stop - rows.start]


def _noise(piece: WeightSlice, index: tuple[slice, ...]) -> Tensor:
    """Integers, uniform from -2**15 to 2**15, of this part of the piece's tensor: the high half of a product of two odd
    random numbers, one of the row and one of the column, modulo 2**32."""
    generator = torch.Generator().manual_seed(zlib.crc32(piece.source.encode()))

    def odd(count: int) -> Tensor:
        drawn = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
        return drawn.to(torch.int32) | 1

    device, inner = piece.target.device, piece.shape[1:]
    of_row, of_column = odd(piece.shape[0]), odd(torch.Size(inner).numel())
    of_row = of_row[index[0]].to(device).view(-1, *[1] * len(inner))
    of_column = of_column.view(inner)[index[1:]].to(device)
    return (of_row * of_column).bitwise_right_shift_(16)
