"""What a rank's memory grows by while it loads: its own part, not the file's size, and no second copy."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.model.made import write_config, write_weights

PROGRAM = Path(__file__).with_name("loading_program.py")
ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20


@dataclass
class Loaded:
    held: int
    grown: int


def load(path: Path, rank: int, size: int, *more: str) -> Loaded:
    command = [sys.executable, str(PROGRAM), str(rank), str(size), str(path), *(more or ["auto"])]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return Loaded(**json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout))


def test_each_of_two_ranks_takes_its_share(tmp_path):
    """Of layers, and of a token table many times as large as what may be mapped at once; it is compared with a head."""
    write_config(tmp_path, hidden=512, layers=2, vocab_size=25_000, tie_word_embeddings=True)
    nbytes = sum(tensor.nbytes for tensor in write_weights(tmp_path, with_head=True).values())
    second = load(tmp_path, 1, 2, "auto", str(8 * MIB))
    assert second.held < 0.55 * nbytes
    assert second.held < second.grown < second.held + 24 * MIB


def test_random_values_take_no_more_than_their_model(tmp_path):
    write_config(tmp_path, hidden=512, vocab_size=50_000, dtype="bfloat16")
    loaded = load(tmp_path, 0, 1, "dummy", str(8 * MIB))
    assert loaded.held > 96 * MIB
    assert loaded.grown < loaded.held + 24 * MIB
