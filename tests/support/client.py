"""Questions about freshly rendered videos, whose right answers are known, and requests that run beside a test."""

import base64
import dataclasses
import http.client
import json
import select
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from mini_engine.batch import llm
from mini_engine.batch.server_handle import ServerHandle
from mini_engine.demo import videos
from tests.support.running_server import RunningServer, message
from training import questions

ENDLESS = {"max_tokens": 60_000, "ignore_eos": True, "stream": True}  # for minutes


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with its media as (part type, url), and the one right answer."""

    text: str
    answer: str
    urls: list[tuple[str, str]]
    more: dict[str, object] = dataclasses.field(default_factory=dict)  # fields of the request


TEXT = Question("tell me", "", [])


def data_url(data: bytes) -> str:
    return f"data:;base64,{base64.b64encode(data).decode()}"


def video_url(clip: videos.Clip, container: str = "mp4", codec: str = "h264") -> str:
    return data_url(videos.encode(clip, container, codec))


def image_url(picture: videos.Clip) -> str:
    return data_url(videos.encode_image(picture))


def ask_video(seed: int, kind: str | None = None) -> Question:
    """A question about the video rendered from `seed`; training uses seeds below 10**8."""
    formats = ("mp4", "h264"), ("mp4", "mpeg4"), ("mp4", "vp9"), ("mkv", "h264"), ("mkv", "mpeg4"), ("webm", "vp9")
    clip = videos.render(10**9 + seed)
    question = questions.ask([clip], kind, seed)
    return Question(question.text, question.answer, [("video_url", video_url(clip, *formats[seed % 6]))])


def ask_small(seed: int) -> Question:
    """What is in a short video of 96 by 96 pixels. All of them become as many patches, and tokens."""
    clip = videos.render(10**9 + seed, width=96, height=96, num_frames=16, fps=8)
    question = questions.ask([clip], "describe", seed)
    return Question(question.text, question.answer, [("video_url", video_url(clip))])


def ask_large(seed: int) -> Question:
    """The same video in larger frames, and more of them: so many bytes are copied to the media store in a thread."""
    size = {"shortest_edge": 3136, "longest_edge": 40_000_000}
    more = {"mm_processor_kwargs": {"size": size}, "media_io_kwargs": {"video": {"num_frames": 16}}}
    return dataclasses.replace(ask_small(seed), more=more)


def ask_image(seed: int) -> Question:
    picture = videos.render_image(10**9 + seed)
    question = questions.ask([picture], None, seed)
    return Question(question.text, question.answer, [("image_url", image_url(picture))])


def ask_two(seed: int) -> Question:
    """Two videos in one prompt, to be described in order: a swap of their tensors shows."""
    clips = [videos.render(10**9 + seed + part) for part in (0, 1)]
    question = questions.ask(clips, "list", seed)
    return Question(question.text, question.answer, [("video_url", video_url(clip)) for clip in clips])


def use_server(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `LLM` that is made asks this server, and starts none of its own."""
    monkeypatch.setattr(llm, "ServerHandle", lambda flags, **more: ServerHandle(server.base_url, **more))  # noqa: ARG005


def answers_of(server: RunningServer, questions: Sequence[Question], at_once: int = 8, **more: object) -> list[str]:
    """Each over a new connection, so that the kernel picks the API server again."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda question: ClientRequest(server, None, question, **more).answer(), questions))


class ClientRequest:
    """A running request at one API server, or at any."""

    def __init__(self, server: RunningServer, api: str | None, question: Question, **more: object):
        self.question = question
        self._connection = server.connect(api)
        self._response: http.client.HTTPResponse | None = None
        body = {"model": server.model, "messages": [message(question.text, question.urls)], "temperature": 0}
        body |= question.more | more
        headers = {"Content-Type": "application/json"}
        try:
            self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        except BaseException:
            self._connection.close()
            raise

    def reply(self) -> dict:
        """The whole response, which has to be a 200."""
        response = self._connection.getresponse()
        body = json.loads(response.read())
        self._connection.close()
        assert response.status == 200, body
        return body

    def answer(self) -> str:
        """The answer's text."""
        return self.reply()["choices"][0]["message"]["content"]

    def response(self) -> http.client.HTTPResponse:
        """Of which the events that were waited for are read."""
        self._response = self._response or self._connection.getresponse()
        return self._response

    def read_events(self, count: int) -> None:
        """Wait for that many events of a stream that is not at its end."""
        while count:
            line = self.response().readline()
            assert line and b"[DONE]" not in line, "the stream has ended"
            count -= line.startswith(b"data: ")

    def has_nothing_yet(self) -> bool:
        """Whether no byte was received."""
        return not select.select([self._connection.sock], [], [], 0)[0]

    def hang_up(self) -> None:
        """Close the connection. Without effect when closed."""
        if self._response is not None:
            self._response.close()
        self._connection.close()
