"""The files of a checkpoint: any that is missing, damaged or of another kind is named, with the remedy."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_engine.model.architectures import canonical_name
from mini_engine.model.checkpoint import INDEX_FILE, CheckpointError, find_tensors
from tests.support.checkpoints import load


@pytest.fixture
def sharded(checkpoint, tmp_path) -> Path:
    checkpoint.oracle.save_pretrained(tmp_path, max_shard_size="100KB")
    return tmp_path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        find_tensors(path, canonical_name)
    return str(error.value)


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def same_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(mine, other) for mine, other in pairs)


def test_files_without_an_index_are_all_read(sharded, checkpoint):
    (sharded / INDEX_FILE).unlink()
    assert len(shards(sharded)) > 2
    assert same_weights(load(sharded), load(checkpoint.path))


def test_missing_files_are_named(sharded):
    first, second, *_ = shards(sharded)
    first.unlink()
    second.unlink()
    assert f"2 of the {2 + len(shards(sharded))} files that {INDEX_FILE} names are missing: " in refusal(sharded)
    assert f"{first.name}, {second.name}; download them" in refusal(sharded)


@pytest.mark.parametrize("kept", [7, -1])
def test_a_file_that_is_cut_short_is_named(sharded, kept):
    broken = shards(sharded)[1]
    broken.write_bytes(broken.read_bytes()[:kept])
    assert f"{broken} is truncated or not a safetensors file" in refusal(sharded)
    assert "download it again" in refusal(sharded)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_named(make, tmp_path):
    make(tmp_path / "model.safetensors")
    assert "model.safetensors is truncated or not a safetensors file (it is not a regular file)" in refusal(tmp_path)


def test_a_file_that_cannot_be_opened_is_named(sharded, monkeypatch):
    def refuse(self, mode):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr("mini_engine.model.checkpoint._read_index", lambda path: {})
    assert f"{shards(sharded)[0]} cannot be read (Permission denied); check its permissions" in refusal(sharded)


@pytest.mark.parametrize(
    "lie",
    [
        {"data_offsets": [4, 8]},  # another tensor's bytes
        {"data_offsets": [-4, 0]},
        {"data_offsets": [1 << 40, (1 << 40) + 4]},
        {"dtype": "F64"},
        {"shape": [2]},
        {"shape": "x"},
        {"data_offsets": [0.5, 4.5]},
    ],
)
def test_a_header_that_does_not_fit_the_bytes_is_named(lie, tmp_path):
    header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    header["b"] = {"dtype": "F16", "shape": [1, 2], "data_offsets": [4, 8]}
    file = tmp_path / "model.safetensors"
    for changed in (header, header | {"a": header["a"] | lie}):
        text = json.dumps(changed).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        if changed is header:
            assert [tensor.offset - len(text) - 8 for tensor in find_tensors(tmp_path, str).values()] == [0, 4]
    assert f"{file} is truncated or not a safetensors file" in refusal(tmp_path)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"[]", b'{"a": [0, 4]}', b"\xff"])
def test_a_header_of_another_kind_is_named(text, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert "is truncated or not a safetensors file" in refusal(tmp_path)


def test_the_index_says_which_of_two_files_holds_a_tensor(sharded, checkpoint):
    index = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    name, other = "model.norm.weight", next(file for file in shards(sharded) if file.name != index["model.norm.weight"])
    save_file(load_file(other) | {name: torch.zeros(64)}, other)
    assert same_weights(load(sharded), load(checkpoint.path))
    (sharded / INDEX_FILE).unlink()
    assert "model.language_model.norm.weight is in " in refusal(sharded)
    assert "remove the files that do not belong" in refusal(sharded)
