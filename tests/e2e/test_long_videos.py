"""Videos of cameras and broadcasts, with a Qwen2.5-VL in published layout with a context of 16,384 tokens."""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.test_families import Family
from tests.support import clips
from tests.support.client import data_url
from tests.support.running_server import RunningServer, message

pytestmark = pytest.mark.slow


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
    with RunningServer(str(folder), "--max-model-len", "16384") as running:
        yield running


@pytest.mark.parametrize(
    ("size", "rate", "group", "groups", "turn", "frames", "seconds"),
    [
        pytest.param((3840, 2160), 30, 15, 6, 0, 6, 0.5, id="4k, 3 seconds"),
        pytest.param((3840, 2160), 30, 30, 60, 0, 120, 0.5, id="4k, a minute"),
        pytest.param((1920, 1080), 30, 30, 60, 90, 120, 0.5, id="phone, a minute"),
        pytest.param((1280, 720), 24, 240, 360, 0, 184, 3600 / 184, id="720p, an hour"),
    ],
)
def test_videos_fit_without_further_flags(server, size, rate, group, groups, turn, frames, seconds):
    """Of `groups` times the same `group` pictures, shown turned by `turn` degrees, the model is to see `frames` with
    `seconds` between them."""
    options = {"preset": "ultrafast", "bf": "2", "g": str(group)}
    url = data_url(clips.remuxed(clips.encode(group, *size, rate, options=options), "mp4", times=groups, degrees=turn))
    reply = server.client.with_options(timeout=600).chat.completions.create(
        model=server.model, messages=[message("What happens?", [("video_url", url)])], max_tokens=16
    )
    (video,) = reply.usage.media
    assert (video["type"], video["frames"]) == ("video", frames)
    assert video["seconds_per_frame"] == pytest.approx(seconds, abs=0.02)
    width, height = reversed(size) if turn else size
    assert video["width"] / video["height"] == pytest.approx(width / height, rel=0.1)
    assert video["tokens"] == video["width"] * video["height"] * frames // (2 * 28 * 28)
    limit = min(0.9 * 16384, 768 * frames / 2)
    assert 0.6 * limit <= video["tokens"] <= limit
    assert video["tokens"] < reply.usage.prompt_tokens < 16384
