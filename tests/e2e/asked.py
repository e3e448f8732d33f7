"""Freshly rendered videos with a question whose right answer is known."""

from __future__ import annotations

import base64
import dataclasses

from mini_engine.demo import questions, videos

FORMATS = [("mp4", "h264"), ("mp4", "mpeg4"), ("mp4", "vp9"), ("mkv", "h264"), ("mkv", "mpeg4"), ("webm", "vp9")]
MIME = {"mp4": "video/mp4", "mkv": "video/x-matroska", "webm": "video/webm"}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question with its media as (part type, url), and the one right answer."""

    text: str
    answer: str
    urls: list[tuple[str, str]]
    codec: str = ""
    more: dict[str, object] = dataclasses.field(default_factory=dict)  # fields of the request


def video_url(clip: videos.Clip, container: str = "mp4", codec: str = "h264") -> str:
    data = base64.b64encode(videos.encode(clip, container, codec)).decode()
    return f"data:{MIME[container]};base64,{data}"


def image_url(picture: videos.Picture) -> str:
    return f"data:image/png;base64,{base64.b64encode(videos.encode_image(picture)).decode()}"


def ask_video(seed: int, kind: str | None = None, formats: list[tuple[str, str]] = FORMATS) -> Asked:
    """A question about the video rendered from `seed`; training uses seeds below 10**8."""
    container, codec = formats[seed % len(formats)]
    clip = videos.render(10**9 + seed)
    question = questions.ask([clip], kind, seed)
    return Asked(question.text, question.answer, [("video_url", video_url(clip, container, codec))], codec)


def ask_small(seed: int) -> Asked:
    """What is in a short video of 96 by 96 pixels. All of them become as many patches, and tokens."""
    clip = videos.render(10**9 + seed, width=96, height=96, num_frames=16, fps=8)
    question = questions.ask([clip], "describe", seed)
    return Asked(question.text, question.answer, [("video_url", video_url(clip))])


def ask_large(seed: int) -> Asked:
    """The same video in larger frames, and more of them: so many bytes are copied to the media store in a thread."""
    size = {"shortest_edge": 3136, "longest_edge": 40_000_000}
    more = {"mm_processor_kwargs": {"size": size}, "media_io_kwargs": {"video": {"num_frames": 16}}}
    return dataclasses.replace(ask_small(seed), more=more)


def ask_image(seed: int) -> Asked:
    picture = videos.render_image(10**9 + seed)
    question = questions.ask([picture], None, seed)
    return Asked(question.text, question.answer, [("image_url", image_url(picture))])


def ask_two(seed: int) -> Asked:
    """Two videos in one prompt, to be described in order: a swap of their tensors shows."""
    clips = [videos.render(10**9 + seed + part) for part in (0, 1)]
    question = questions.ask(clips, "list", seed)
    return Asked(question.text, question.answer, [("video_url", video_url(clip)) for clip in clips])
