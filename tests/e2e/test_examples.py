"""The scripts of `examples/`, each run as its docstring says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mini_engine.config import BUNDLED_MODEL
from mini_engine.demo import videos
from mini_engine.failpoints import VARIABLE
from mini_engine.model.config import ModelConfig
from tests.support.processes import FailPoint, eventually
from tests.support.running_server import ROOT, RunningServer, environment

PICTURES = ("png", "jpeg", "webp", "gif", "bmp", "tiff")


def command(name: str, *args: object) -> dict[str, Any]:
    """Arguments of `subprocess` for a script."""
    argv = [sys.executable, str(ROOT / "examples" / name), *map(str, args)]
    return {"args": argv, "env": environment([]) | {"PYTHONPATH": str(ROOT)}}


def output(name: str, *args: object) -> str:
    """What a script prints; its log is pytest's to show."""
    return subprocess.run(**command(name, *args), check=True, stdout=subprocess.PIPE, text=True, timeout=240).stdout


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A red circle that moves left."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    path.write_bytes(videos.encode(videos.render(10**9, colour="red", shape="circle", motion="left")))
    return path


def test_ask_video(server: RunningServer, clip: Path) -> None:
    answer, *timings = output("ask_video.py", clip, "--base-url", server.url).splitlines()
    assert answer == "a red circle moving left"
    assert any(re.fullmatch(r" *generation +\d+\.\d{3} s", line) for line in timings)


def test_tools(server: RunningServer, clip: Path) -> None:
    """The model sees the video and the frame that the tool has sent."""
    *calls, answer = output("tools.py", clip, "--force", "--base-url", server.url).splitlines()
    assert re.fullmatch(r'frame_at\({"second": \d+}\)', "".join(calls)) and answer.count("a red circle") == 2


def test_structured(clip: Path) -> None:
    shown = dict(line.split(": ") for line in output("structured.py", clip).splitlines())
    assert shown.keys() == {"motion", "colour", "shape"} and shown["colour"] == "red"


def make_folder(folder: Path) -> dict[str, str]:
    """22 images and videos of all kinds, a broken one and a text; returns the colour that each shows."""
    shown = {}
    for number in range(22):
        path = folder / f"{number % 3}" / f"{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number < 14:
            clip = videos.render(10**9 + number, num_frames=16)
            container, codec = videos.PAIRS[number % len(videos.PAIRS)]
            path, data = path.with_suffix(f".{container}"), videos.encode(clip, container, codec)
        else:
            clip = videos.render_image(10**9 + number)
            kind = PICTURES[number % len(PICTURES)]
            path, data = path.with_suffix(f".{kind.upper()}"), videos.encode_image(clip, kind)
        path.write_bytes(data)
        shown[str(path.relative_to(folder))] = clip.colour
    (folder / "broken.mp4").write_bytes(data[:100])
    (folder / "notes.txt").touch()
    return shown


def test_search_clips_embeds_new_files_only(tmp_path: Path) -> None:
    """The bundled model was not trained for it, so the order says nothing; equal files have equal cosines."""
    (tmp_path / "sub").mkdir()
    for name in ("a.mp4", "sub/b.mp4"):
        (tmp_path / name).write_bytes(videos.encode(videos.render(10**9, num_frames=16)))
    for name in ("broken.png", "known.mp4"):
        (tmp_path / name).touch()
    key = f"{(tmp_path / 'known.mp4').stat().st_mtime_ns}:known.mp4"
    vector = np.eye(ModelConfig.from_dir(BUNDLED_MODEL).text.hidden_size)[0]
    np.savez(tmp_path / "embeddings.npz", **{key: vector})  # type: ignore[arg-type] # its own argument is a flag
    lines = [line.split() for line in output("search_clips.py", tmp_path, "a red circle").splitlines()]
    cosines = {name: float(cosine) for cosine, name in lines}
    assert cosines.keys() == {"a.mp4", "sub/b.mp4", "known.mp4"} and cosines["a.mp4"] == cosines["sub/b.mp4"]
    assert 1 >= max(cosines.values()) >= min(cosines.values()) >= -1
    assert [*cosines.values()] == sorted(cosines.values(), reverse=True)


def test_caption_folder_goes_on_and_has_each_file_once(tmp_path: Path) -> None:
    shown, out = make_folder(tmp_path / "in"), tmp_path / "captions.jsonl"
    kept = dict.fromkeys([*shown][:4], "of an earlier run")
    earlier = [*({"file": file, "text": text} for file, text in kept.items()), {"file": "broken.mp4", "error": ""}]
    out.write_text("".join(json.dumps(row) + "\n" for row in earlier) + '{"file": "0/0')

    def rows() -> list[dict[str, str]]:
        return [json.loads(line) for line in out.read_bytes().splitlines(True) if line.endswith(b"\n")]

    arguments = command("caption_folder.py", tmp_path / "in", "--out", out, "--question", "What colour is the shape?")
    arguments["env"][VARIABLE] = str(tmp_path)
    point = FailPoint(tmp_path, "processing")
    point.arm()  # for one of the files
    with subprocess.Popen(**arguments) as process:
        try:
            point.wait()
            eventually(lambda: len(rows()) == 22)  # answers are written as they come
        finally:
            point.release()
        assert process.wait(240) == 1  # one is broken
    assert {row["file"]: row["text"] for row in rows() if "text" in row} == shown | kept
    assert [row["file"] for row in rows() if "error" in row] == ["broken.mp4"] and len(rows()) == 23
