"""Files: whether they can be written is known before anything runs; that they cannot costs none of the figures."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from mini_engine.bench.files import check_file, check_folder, write
from mini_engine.config import ConfigError
from tests.bench.misbehaving import MisbehavingServer


def test_what_can_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    check_file("--x", tmp_path / "file")
    check_file("--x", tmp_path / "new")
    check_folder("--x", tmp_path / "new" / "newer")
    check_folder("--x", Path())
    assert os.listdir(tmp_path) == ["file"], "nothing is made"
    for wrong in (tmp_path, tmp_path / "none" / "file", tmp_path / "file" / "x"):
        with pytest.raises(ConfigError, match="^--x: .* is (not )?a directory"):
            check_file("--x", wrong)
    for wrong in (tmp_path / "file", tmp_path / "file" / "new"):
        with pytest.raises(ConfigError, match="^--x: .*file is not a directory"):
            check_folder("--x", wrong)


@pytest.mark.skipif(os.geteuid() == 0, reason="may write everywhere")
def test_what_may_not_be_written(tmp_path: Path):
    tmp_path.chmod(0o500)
    for check, path in ((check_file, tmp_path / "x"), (check_folder, tmp_path / "x")):
        with pytest.raises(ConfigError, match="choose another place"):
            check("--x", path)


def test_one_that_fails_does_not_keep_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    def full() -> list[Path]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/b")

    def good() -> list[Path]:
        return [tmp_path]

    assert write([full, good]) == ["/a/b was not written: No space left on device"]
    assert capfd.readouterr().err == f"bench.py: wrote {tmp_path}\n"


def test_the_last_line_comes_before_files_that_cannot_be_written(bench, monkeypatch, tmp_path: Path):
    def full(self: Figure, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Figure, "savefig", full)
    data, result, output = (tmp_path / name for name in ("p.jsonl", "r.json", "last.json"))
    data.write_text('{"prompt": "ok"}\n')
    with MisbehavingServer() as server:
        ran = bench("--base-url", server.url, "--dataset-name", "custom", "--dataset-path", data, "--num-prompts", 1,
                    "--num-warmups", 0, "--plot", tmp_path / "p.png", "--save-result", "--result-dir", tmp_path,
                    "--result-filename", "r.json", "--output", output, "--disable-tqdm")  # fmt: skip
    assert ran.status == 1 and ran.figures["completed"] == 1 and not ran.last["failures"]
    assert ran.err.splitlines() == [
        f"bench.py: wrote {output}",
        f"bench.py: wrote {result}",
        f"bench.py: {tmp_path / 'p.png'} was not written: No space left on device",
    ]
    assert json.loads(output.read_text()) == ran.last and json.loads(result.read_text())["completed"] == 1
