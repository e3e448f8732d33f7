"""Videos of cameras and broadcasts, with a Qwen2.5-VL in published layout with a context of 16,384 tokens."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.test_families import Family
from tests.support import clips
from tests.support.client import data_url
from tests.support.running_server import RunningServer, message

CONTEXT = 16384

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Clip:
    """Equal groups of pictures, and what the model is to see of them."""

    width: int
    height: int
    rate: int
    group: int  # frames
    groups: int
    frames: int  # sampled
    seconds: float  # between them
    turn: int = 0  # degrees


CLIPS = {
    "4k, 3 seconds": Clip(3840, 2160, 30, 15, 6, 6, 0.5),
    "4k, a minute": Clip(3840, 2160, 30, 30, 60, 120, 0.5),
    "phone, a minute": Clip(1920, 1080, 30, 30, 60, 120, 0.5, turn=90),
    "720p, an hour": Clip(1280, 720, 24, 240, 360, 184, 3600 / 184),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("model")
    Family("qwen2_5_vl", folder)
    (folder / "video_preprocessor_config.json").unlink()
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    del processor["size"]
    processor |= {"min_pixels": 3136, "max_pixels": 12845056}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 128000
    (folder / "config.json").write_text(json.dumps(config))
    with RunningServer(str(folder), "--max-model-len", str(CONTEXT)) as running:
        yield running


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_videos_fit_without_further_flags(server: RunningServer, clip: Clip) -> None:
    options = {"preset": "ultrafast", "bf": "2", "g": str(clip.group)}
    group = clips.encode(clip.group, clip.width, clip.height, clip.rate, options=options)
    url = data_url(clips.remuxed(group, "mp4", times=clip.groups, degrees=clip.turn))
    reply = server.client.with_options(timeout=600).chat.completions.create(
        model=server.model, messages=[message("What happens?", [("video_url", url)])], max_tokens=16
    )
    (video,) = reply.usage.media
    assert (video["type"], video["frames"]) == ("video", clip.frames)
    assert video["seconds_per_frame"] == pytest.approx(clip.seconds, abs=0.02)
    shape = clip.height / clip.width if clip.turn else clip.width / clip.height
    assert video["width"] / video["height"] == pytest.approx(shape, rel=0.1)
    assert video["tokens"] == video["width"] * video["height"] * clip.frames // (2 * 28 * 28)
    limit = min(0.9 * CONTEXT, 768 * clip.frames / 2)
    assert 0.6 * limit <= video["tokens"] <= limit
    assert video["tokens"] < reply.usage.prompt_tokens < CONTEXT
