"""Rendering is a function of the seed, and every codec carries it."""

import subprocess
import sys

import numpy as np
import pytest

from mini_engine.demo import videos
from training import codecs


def test_a_seed_always_gives_the_same_clip():
    first, again, other = videos.render(5), videos.render(5), videos.render(6)
    assert np.array_equal(first.frames, again.frames)
    assert (first.colour, first.shape, first.motion, first.fps) == (again.colour, again.shape, again.motion, again.fps)
    assert first.frames.shape != other.frames.shape or not np.array_equal(first.frames, other.frames)


def test_seeds_reach_every_value():
    scenes = [videos.make_scene(seed) for seed in range(400)]
    assert {scene.colour for scene in scenes} == set(videos.COLOURS) and len(videos.COLOURS) == 8
    assert {scene.shape for scene in scenes} == set(videos.SHAPES)
    assert {scene.motion for scene in scenes} == set(videos.MOTIONS)
    assert {scene.fps for scene in scenes} == set(videos.FRAME_RATES)
    assert all(scene.width % 2 == 0 and scene.height % 2 == 0 and scene.num_frames >= 8 for scene in scenes)
    assert len({(scene.width, scene.height) for scene in scenes}) > 100


@pytest.mark.parametrize("motion", videos.MOTIONS)
@pytest.mark.parametrize("shape", videos.SHAPES)
def test_the_shape_moves_where_the_clip_says(motion, shape):
    clip = videos.render(9, colour="white", shape=shape, motion=motion, noise=0.0, width=128, height=96)
    centres = [np.argwhere(frame.min(axis=-1) > 200).mean(axis=0) for frame in clip.frames[[0, -1]]]
    down, right = centres[1] - centres[0]
    travel = {"left": -right, "right": right, "up": -down, "down": down, "still": 0}[motion]
    across = {"left": down, "right": down, "up": right, "down": right, "still": abs(down) + abs(right)}[motion]
    assert abs(across) < 1
    assert motion == "still" or travel > 0.2 * 96


@pytest.mark.parametrize(("container", "codec"), videos.PAIRS)
def test_every_codec_carries_the_clip(container, codec):
    clip = videos.render(21, num_frames=16, fps=10, width=130, height=98)
    data = videos.encode(clip, container, codec)
    frames, fps = codecs.decode(data)
    assert fps == 10 and frames.shape == clip.frames.shape
    assert np.abs(frames.astype(int) - clip.frames).mean() < 8
    assert len(data) < clip.frames.nbytes / 10
    signature = {"mp4": data[4:8] == b"ftyp", "mkv": b"matroska" in data[:64], "webm": b"webm" in data[:64]}
    assert signature[container]


def test_drawing_imports_no_torch():
    code = "import sys; import mini_engine.demo.videos; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
