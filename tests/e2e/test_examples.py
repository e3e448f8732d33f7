"""The scripts of `examples/`, each run as its docstring says; `test_pooling.py` runs the one that searches."""

import json
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mini_engine.demo import videos
from mini_engine.failpoints import VARIABLE
from tests.support.client import use_server
from tests.support.processes import FailPoint, alive, descendants, eventually
from tests.support.running_server import ROOT, RunningServer, environment


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a script in this process; returns what it prints."""

    def run(name: str, *args: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def clip(media_root: Path) -> Path:
    """A red circle that moves left."""
    path = media_root / "a red circle.mp4"
    path.write_bytes(videos.encode(videos.render(10**9, colour="red", shape="circle", motion="left")))
    return path


def test_ask_video(server: RunningServer, clip: Path, run: Callable[..., str]) -> None:
    answer, *timings = run("ask_video.py", clip, "--base-url", server.url).splitlines()
    assert answer == "a red circle moving left"
    assert any(re.fullmatch(r" *generation +\d+\.\d{3} s", line) for line in timings)


def test_tools(server: RunningServer, clip: Path, run: Callable[..., str]) -> None:
    """The model sees the video and the frame that the tool has sent."""
    *calls, answer = run("tools.py", clip, "--force", "--base-url", server.url).splitlines()
    assert re.fullmatch(r'frame_at\({"second": \d+}\)', "".join(calls)) and answer.count("a red circle") == 2


def test_structured(
    server: RunningServer, clip: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server(server, monkeypatch)
    shown = dict(line.split(": ") for line in run("structured.py", clip).splitlines())
    assert shown.keys() == {"motion", "colour", "shape"} and shown["colour"] == "red"


def test_a_killed_caption_folder_leaves_nothing_and_goes_on(
    server: RunningServer,
    media_root: Path,
    tmp_path: Path,
    run: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, out, scratch = media_root / "captions", tmp_path / "captions.jsonl", tmp_path / "scratch"
    shown = {}  # the colour in each file
    pictures = [(kind, None) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PNG", "JPEG")]
    for number, (kind, codec) in enumerate([*videos.PAIRS, *videos.PAIRS, *pictures]):
        clip = videos.render(10**9 + number, num_frames=16) if codec else videos.render_image(10**9 + number)
        path = folder / f"{number % 3}" / f"{number}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(videos.encode(clip, kind, codec) if codec else videos.encode_image(clip, kind))
        shown[str(path.relative_to(folder))] = clip.colour
    (folder / "broken.mp4").write_bytes(path.read_bytes()[:100])
    (folder / "notes.txt").touch()
    kept = dict.fromkeys([*shown][:4], "of an earlier run")
    question = {"question": "What colour is the shape?"}
    earlier = [{"file": file, **question, "text": text} for file, text in kept.items()]
    earlier += [{"file": "broken.mp4", **question, "error": ""}]
    out.write_text("".join(json.dumps(row) + "\n" for row in earlier) + '{"file": "0/0')
    (tmp_path / "queue.py").write_text("raise ImportError('the working directory is not searched')")
    scratch.mkdir()

    def rows() -> list[dict[str, str]]:
        return [json.loads(line) for line in out.read_bytes().splitlines(True) if line.endswith(b"\n")]

    def nothing_is_left() -> None:
        assert not any(map(alive, processes)) and not [*scratch.iterdir()]

    args = ["caption_folder.py", folder, "--out", out, "--question", question["question"]]
    environ = environment([], {"PYTHONPATH": str(ROOT), "TMPDIR": str(scratch), VARIABLE: str(tmp_path)})
    with FailPoint(tmp_path, "processing") as point:  # one of the files is held there
        command = [sys.executable, ROOT / "examples" / args[0], *args[1:]]
        with subprocess.Popen(command, cwd=tmp_path, env=environ) as program:
            point.wait()
            eventually(lambda: len(rows()) == 22)  # captions are written as they come
            processes = descendants(program.pid)
            program.send_signal(signal.SIGKILL)
        eventually(nothing_is_left)
    assert len(processes) > 5
    use_server(server, monkeypatch)
    with pytest.raises(SystemExit, match="1"):  # one is broken
        run(*args)
    assert "with a caption before, 1 failed; 1 with other suffixes ignored: " in capsys.readouterr().err
    assert {row["file"]: row["text"] for row in rows() if "text" in row} == shown | kept
    assert [row["file"] for row in rows() if "error" in row] == ["broken.mp4"] and len(rows()) == 23


def test_caption_folder_refuses_another_question_and_a_folder_without_media(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    out, folder = tmp_path / "captions.jsonl", tmp_path / "folder"
    (folder / "clips.mp4").mkdir(parents=True)
    out.write_text('{"file":"a.png","question":"What?","text":"b"}\n')
    with pytest.raises(SystemExit, match="folder has no images or videos"):
        run("caption_folder.py", folder, "--out", out)
    (folder / "a.png").touch()
    with pytest.raises(SystemExit, match="answers another question, 'What[?]'; choose another"):
        run("caption_folder.py", folder, "--out", out)
    assert out.read_text().count("\n") == 1
