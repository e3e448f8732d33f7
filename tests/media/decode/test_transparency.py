"""Transparent parts of videos become white."""

import io
import tracemalloc

import av
import numpy as np
import pytest
from PIL import Image

from mini_engine.media.frame_sampling import VideoSampling
from tests.support import clips
from tests.support.decoding import decode_video

EIGHT = VideoSampling(num_frames=8)


@pytest.mark.parametrize(("codec", "container", "kind"), [("apng", "apng", "rgba"), ("qtrle", "mov", "argb")])
def test_transparency_is_laid_over_white(codec: str, container: str, kind: str) -> None:
    """But where all is transparent it is ignored, unless another frame of the video is not."""
    for alphas in ((0, 128, 255, 255), (0, 0, 0, 0)):
        pixels = np.zeros((16, 64, 4), np.uint8)
        pixels[..., 3] = np.repeat(alphas, 16)
        buffer = io.BytesIO()
        with av.open(buffer, "w", format=container) as output:
            stream = clips.video_stream(output, codec, 64, 16, 10, {})
            stream.pix_fmt = kind
            for place, shown in enumerate((np.zeros_like(pixels), pixels)):
                picture = av.VideoFrame.from_ndarray(shown, "rgba").reformat(format=kind)
                picture.pts = place
                output.mux(stream.encode(picture))
            output.mux(stream.encode(None))
        clear, frame = decode_video(buffer.getvalue(), EIGHT).frames
        assert frame[8, [4, 20, 36, 60], 1].tolist() == ([255, 127, 0, 0] if any(alphas) else [0, 0, 0, 0])
        assert {*clear.flat} == {255 if any(alphas) else 0}


def test_transparency_of_a_palette_is_laid_over_white() -> None:
    picture, buffer = Image.new("P", (64, 16)), io.BytesIO()
    picture.putpalette([200, 0, 0, 0, 0, 200])
    picture.paste(1, (32, 0, 64, 16))
    picture.save(
        buffer, "PNG", save_all=True, append_images=[picture.transpose(Image.Transpose.ROTATE_180)], transparency=0
    )
    frames = decode_video(buffer.getvalue(), EIGHT).frames
    assert frames[:, 8, [3, 60]].tolist() == [[[255] * 3, [0, 0, 200]], [[0, 0, 200], [255] * 3]]


def test_transparency_of_a_frame_is_laid_over_white_once() -> None:
    """Though FFmpeg makes the next frames of an animated PNG of the one that it has returned."""
    picture, buffer = Image.new("RGBA", (64, 16), (0, 0, 0, 128)), io.BytesIO()
    changed = [picture.copy(), picture.copy()]
    for place, each in enumerate(changed, 1):
        each.paste((255, 0, 0, 255), (0, 0, 8 * place, 8))
    picture.save(buffer, "PNG", save_all=True, append_images=changed, blend=1)
    assert decode_video(buffer.getvalue(), EIGHT).frames[:, 8, 40].tolist() == [[127] * 3] * 3


def test_transparency_takes_little_memory_beside_the_frames() -> None:
    """As the memory of a decoder process is limited, and an 8K frame takes much of it."""
    side, buffer = 1024, io.BytesIO()
    with av.open(buffer, "w", format="mov") as output:
        stream = clips.video_stream(output, "qtrle", side, side, 10, {})
        stream.pix_fmt = "argb"
        output.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((side, side, 4), 128, np.uint8), "argb")))
        output.mux(stream.encode(None))
    tracemalloc.start()
    frames = decode_video(buffer.getvalue(), EIGHT).frames
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert {*frames.flat} == {191} and peak < 1.5 * frames.nbytes
