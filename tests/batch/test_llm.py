"""`LLM` with the bundled model."""

import asyncio
import functools
import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import PIL.Image
import pytest

from mini_engine import LLM, Image, Video
from mini_engine.batch.server_handle import ServerError
from mini_engine.config import ConfigError
from mini_engine.demo.videos import encode, encode_image, render, render_image
from tests.support.client import use_server
from tests.support.processes import descendants, memory
from tests.support.running_server import RunningServer

QUESTION = "Describe the video."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Started by a thread that ends, with which the kernel would kill its children."""
    with ThreadPoolExecutor(1) as pool:
        model = pool.submit(LLM, data_parallel_size=1, max_concurrency=4).result()
    with model:
        yield model


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media") / "a clip #1?.mp4"
    path.write_bytes(encode(render(seed=3, colour="red", shape="circle", motion="left")))
    return path


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media") / "picture.png"
    path.write_bytes(encode_image(render_image(seed=3, colour="blue", shape="square")))
    return path


def test_every_form_of_a_prompt(llm: LLM, clip: Path, picture: Path):
    conversation = [{"role": "user", "content": [Video(clip), {"type": "text", "text": QUESTION}]}]
    in_two_turns = [*conversation, {"role": "assistant", "content": "a red circle moving left"}, *conversation]
    videos = [
        [Video(clip), QUESTION], [Video(str(clip)), QUESTION], [Video(clip.read_bytes(), nframes=4), QUESTION],
        [Video(clip.as_uri()), QUESTION], conversation, in_two_turns,
    ]  # fmt: skip
    images = [[Image(source), "Describe the image."] for source in (picture, PIL.Image.open(picture))]
    answers = llm.chat([*videos, *images, "hello"], temperature=0, use_tqdm=False)
    assert [answer.id for answer in answers] == list(range(9))
    assert [answer.text for answer in answers[:5]] == ["a red circle moving left"] * 5
    assert answers[5].text == "first: a red circle moving left; second: a red circle moving left"
    assert [answer.text for answer in answers[6:8]] == ["a blue square"] * 2
    assert answers[2].usage["media"][0]["frames"] == 4 and "prefill" in answers[0].timings
    assert llm.chat(conversation, temperature=0, use_tqdm=False)[0].text == answers[0].text
    assert len(llm.chat(QUESTION, max_tokens=1, use_tqdm=False)) == 1


def test_a_name_stands_for_a_picture(llm: LLM, picture: Path):
    for source in (picture, None):
        prompt = [Image(source, uuid="a"), "Describe the image."]
        assert llm.chat([prompt], temperature=0, cache_salt="mine", use_tqdm=False)[0].text == "a blue square"


def test_an_error_of_one_prompt_is_in_its_answer(llm: LLM, clip: Path, picture: Path):
    nested = functools.reduce(lambda inner, _: [inner], range(5000), [])  # deeper than JSON can be written
    prompts = [
        [Video(clip.parent / "none.mp4"), QUESTION], [Video(picture.read_bytes(), fps=-1), QUESTION], [Image(object())],
        [Image(None)], nested, None, [Video(clip), QUESTION],
    ]  # fmt: skip
    answers = llm.chat(prompts, max_tokens=32, temperature=0, use_tqdm=False)
    assert answers[0].error == "video 1: no such regular file"
    assert "fps" in answers[1].error and "object" in answers[2].error
    assert all(answer.error and not answer.text for answer in answers[:6])
    assert (answers[6].text, answers[6].error) == ("a red circle moving left", None)


def test_the_look_ahead_is_bounded_and_an_end_of_the_loop_aborts_the_others(llm: LLM):
    taken = 0

    def prompts() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "hello"

    for number, answer in enumerate(llm.stream(prompts(), max_tokens=2)):
        assert answer.error is None and taken <= number + 4
        if number == 20:
            break
    slow = llm.submit("hello", max_tokens=60_000, ignore_eos=True)
    quick = llm.submit("hello", max_tokens=1)
    assert quick.result(60).usage["completion_tokens"] == 1
    assert slow.cancel()


def test_a_coroutine_can_wait(llm: LLM):
    async def ask_two() -> list[str]:
        futures = [llm.submit("hello", max_tokens=2, temperature=0) for _ in range(2)]
        return [answer.text for answer in await asyncio.gather(*map(asyncio.wrap_future, futures))]

    first, second = asyncio.run(ask_two())
    assert first == second


def test_a_prompt_is_answered_by_a_model_that_nothing_else_refers_to(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
):
    use_server(server, monkeypatch)
    assert LLM().submit("hello", max_tokens=1).result(60).error is None


def test_a_fork_is_refused_and_harms_nothing(llm: LLM):
    def use(errors: multiprocessing.SimpleQueue) -> None:
        try:
            llm.submit("hello")
        except ServerError as error:
            errors.put(str(error))
        llm.close()

    context = multiprocessing.get_context("fork")
    errors = context.SimpleQueue()
    child = context.Process(target=use, args=(errors,))
    child.start()
    child.join()
    assert "a forked process" in errors.get() and llm.submit("hello", max_tokens=1).result(60).error is None


@pytest.mark.parametrize(
    ("options", "named"),
    [({"max_concurrency": 0}, "at least 1"), ({"max_model_length": 5}, "--max-model-length"), ({"port": 80}, "--port"),
     ({"quantization": "int8", "model": "/nowhere"}, "/nowhere")],
)  # fmt: skip
def test_unusable_options(options: dict, named: str):
    with pytest.raises(ConfigError, match=named):
        LLM(**options)


def test_the_end_of_the_server_is_raised(llm: LLM):  # the last: the others need the server
    answers = llm.stream("hello" for _ in iter(int, 1))
    next(answers)
    (server,) = [pid for pid in descendants(os.getpid()) if b"--uds" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(server, signal.SIGKILL)
    with pytest.raises(ServerError, match="exited with status -9"):
        list(answers)
    with pytest.raises(ServerError, match="exited with status -9"):
        llm.submit("hello").result(60)


@pytest.mark.slow
def test_the_memory_of_a_program_does_not_grow_with_its_prompts():
    def resident() -> int:
        return memory(os.getpid(), "VmRSS")

    with LLM(data_parallel_size=1, log_level="warning") as model:
        prompts = ("hello" if number % 100 == 0 else [Image(object())] for number in range(10**6))
        answers = model.stream(prompts, max_tokens=1)
        num_served = sum(answer.error is None for answer in itertools.islice(answers, 10**5))
        before = resident()
        num_served += sum(answer.error is None for answer in answers)
        assert num_served == 10**4 and resident() - before < 8 << 20
