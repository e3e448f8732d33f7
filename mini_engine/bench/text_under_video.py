"""How long a one-token text request takes on an idle server, and beside clients that send videos.

The regime. `serve.py` runs with one client process beside it. Text: one request after the other, each a different
question with `max_tokens` 1, with a random pause of 0 to 100 ms between them, so that they do not fall into step with
the engine. Load: some clients (8), each sending one video after the other, H.264, 640x480, 5 s, no two alike, rendered
before the clock starts, with a question about it. A text request counts as loaded if it was sent after the first
answer about a video, and before a client found no video left. By default the server takes ten frames of each video at
their full size, some 2,000 tokens, as a model of useful size would; `--video-sizing model` leaves it to the model's own
preprocessor, and the bundled one's shrinks them to a few dozen tokens. The bundled model was not trained on
full frames: it answers them, but not all of them rightly.

What it should cost. An idle text request is HTTP, a chat template, one prefill of some 20 tokens: about 5 ms. Under
load it waits for the step that runs (one at a time, and with one step ahead another), and shares its own step with
the decodes and a chunk of a prompt. On a server that puts a whole video, vision tower and prefill, into one step, it
waits for several of them: over 100 times the idle latency. With budgets for both it is a few chunks: at most 10 times.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mini_engine.bench.blocking_client import Client, NoAnswer, Reply, chat_body
from mini_engine.bench.datasets import synthetic
from mini_engine.bench.report import Latencies, percentile, say, table
from mini_engine.bench.served import Served
from mini_engine.demo import videos

WIDTH, HEIGHT, SECONDS = 640, 480, 5
PAUSE_SECONDS = 0.1
WARM_UP_TEXTS = 5
TARGET_RATIO = 10.0
FRAMES = 10
SIZINGS: dict[str, list[str]] = {  # flags of serve.py
    "full": [
        "--media-io-kwargs",
        json.dumps({"video": {"num_frames": FRAMES}}),
        "--mm-processor-kwargs",
        json.dumps({"size": {"shortest_edge": 3136, "longest_edge": FRAMES * WIDTH * HEIGHT}}),
    ],
    "model": [],
}


@dataclass(frozen=True)
class Setting:
    """What is sent."""

    clients: int
    videos: int
    texts: int  # while idle
    sizing: str  # a key of SIZINGS
    seed: int


@dataclass(frozen=True)
class Question:
    """A ready request about one video, and its one right answer."""

    body: bytes
    answer: str


@dataclass
class Load:
    """Clients that send `questions`, each the next one that nobody has sent, until none is left."""

    url: str
    questions: list[Question]
    clients: int
    replies: list[tuple[Question, Reply]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ended: float | None = None  # when the first client found no question left

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._line = iter(self.questions)
        self.under_way = threading.Event()  # there is an answer, or there will be none
        self._threads = [threading.Thread(target=self._run) for _ in range(self.clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # leave no client waiting in line behind an error
            with self._lock:
                self._line = iter(())
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            with Client(self.url) as client:
                while (question := self._take()) is not None:
                    self._note(question, client.ask(question.body))
        except NoAnswer as error:
            with self._lock:
                self.errors.append(f"video: {error}")
        finally:
            self._stop()

    def _take(self) -> Question | None:
        with self._lock:
            return next(self._line, None)

    def _note(self, question: Question, reply: Reply) -> None:
        with self._lock:
            self.replies.append((question, reply))
            if reply.error is not None:
                self.errors.append(f"video: {reply.error}")
        self.under_way.set()

    def _stop(self) -> None:
        """The load is no longer whole."""
        with self._lock:
            self.ended = self.ended or time.perf_counter()
        self.under_way.set()


def measure(flags: Sequence[str], setting: Setting, failures: list[str]) -> dict[str, Any]:
    """Serve, measure, stop; returns the figures and adds to `failures` what went wrong."""
    pauses = random.Random(setting.seed)
    say(f"rendering {setting.videos} videos", "core latency")
    clips = render(setting.videos + 1, setting.seed)
    say("starting the server", "core latency")
    with Served([*SIZINGS[setting.sizing], *flags]) as server, Client(server.url) as client:
        name = client.model()
        warm_up, *asked = [Question(chat_body(name, text, data), answer) for data, text, answer in clips]
        client.ask(warm_up.body)
        text = (chat_body(name, f"Say a word about number {number}.", max_tokens=1) for number in range(10**9))
        for _ in range(WARM_UP_TEXTS):
            client.ask(next(text))
        say("text requests on the idle server", "core latency")
        idle = []
        for _ in range(setting.texts):
            time.sleep(pauses.uniform(0, PAUSE_SECONDS))
            idle.append(client.ask(next(text)))
        say("text requests beside videos", "core latency")
        busy = []
        with Load(server.url, asked, setting.clients) as load:
            load.under_way.wait()
            while load.ended is None:
                busy.append(client.ask(next(text)))
                time.sleep(pauses.uniform(0, PAUSE_SECONDS))
        server.check_alive()
    failures += [f"text: {reply.error}" for reply in idle + busy if reply.error] + load.errors
    if not busy:
        failures.append("no text request was sent beside videos: raise --videos")
    return {"model": name, **_figures(idle, busy, load)}


def _figures(idle: list[Reply], busy: list[Reply], load: Load) -> dict[str, Any]:
    text_idle = Latencies.of([reply.seconds for reply in idle if reply.error is None])
    text_busy = Latencies.of([reply.seconds for reply in busy if reply.error is None])
    done = [(question, reply) for question, reply in load.replies if reply.error is None]
    begun = min((reply.begun for _, reply in load.replies), default=0.0)
    seconds = max((reply.begun + reply.seconds for _, reply in load.replies), default=0.0) - begun
    ratio = text_busy.p50 / text_idle.p50 if text_busy.p50 and text_idle.p50 else None
    return {
        "clients": load.clients,
        "text_idle_ms": asdict(text_idle),
        "text_busy_ms": asdict(text_busy),
        "ratio_p50": None if ratio is None else round(ratio, 2),
        "target_ratio_p50": TARGET_RATIO,
        "video_ms": asdict(Latencies.of([reply.seconds for _, reply in done])),
        "video_prompt_tokens_p50": percentile([reply.prompt_tokens for _, reply in done], 0.5) if done else None,
        "videos_right": sum(reply.text == question.answer for question, reply in done),
        "videos_per_second": round(len(done) / seconds, 3) if seconds else None,
        "load_seconds": round(seconds, 3),
    }


def describe(figures: dict[str, Any]) -> str:
    """The table for people."""
    rows = [
        [name, *figures[key].values()]
        for name, key in (
            ("text, idle server", "text_idle_ms"),
            ("text, beside videos", "text_busy_ms"),
            ("video", "video_ms"),
        )
    ]
    return "\n".join(
        [
            "",
            f"core latency: one-token text requests beside {figures['clients']} clients that send "
            f"{WIDTH}x{HEIGHT} videos of {SECONDS} s",
            "One text request at a time, from the first byte sent to the last received; videos one after the other",
            "by each client, no two alike. Milliseconds.",
            "",
            table(["", "count", "p50", "p90", "p99"], rows),
            "",
            f"text beside videos / idle, p50:  {figures['ratio_p50']} (target: at most {TARGET_RATIO:g})",
            f"videos: {figures['videos_per_second']} a second over {figures['load_seconds']} s; prompt tokens, p50: "
            f"{figures['video_prompt_tokens_p50']}; right answers: {figures['videos_right']} "
            f"of {figures['video_ms']['count']}",
        ]
    )


def render(count: int, seed: int) -> list[tuple[bytes, str, str]]:
    """`count` MP4 files, each with a question and its answer; no two alike, and none alike for another seed."""
    first = synthetic.FIRST_SEED + seed * synthetic.SEEDS_EACH
    return synthetic.make(lambda number: _render_one(first + number), count)


def _render_one(seed: int) -> tuple[bytes, str, str]:
    scene = videos.make_scene(seed, width=WIDTH, height=HEIGHT)
    shown = synthetic.show("video", seed, width=WIDTH, height=HEIGHT, num_frames=SECONDS * scene.fps)
    question = synthetic.question_about(shown, seed)
    return shown.medium.data, question.text, question.answer
