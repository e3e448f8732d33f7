"""Equal tokens, whatever the chunk sizes, caches, preemption, concurrency, async scheduling and ranks."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.client import ClientRequest, Question, ask_image, ask_two, ask_video
from tests.support.running_server import RunningServer

STORY = {"max_tokens": 80, "ignore_eos": True}  # six that run together do not fit into "few blocks"; all prompts do


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    """Long answers, videos, images, two videos in a prompt, text, sampled text; some media repeat."""
    stories = [Question(f"story {number}", "", [], more=STORY) for number in range(6)]
    seeded = {"temperature": 2, "max_tokens": 32, "ignore_eos": True}
    sampled = [Question("tell me a story", "", [], more=seeded | {"seed": seed}) for seed in range(4)]
    videos = [ask_video(seed) for seed in range(6)]
    again = [Question("What is it?", "", video.urls) for video in videos[:3]]
    texts = ["hello", "tell me what you can do", "zebra " * 60, "0123456789 " * 30]
    images, pairs = [ask_image(seed) for seed in range(3)], [ask_two(2 * seed) for seed in range(3)]
    return [*stories, *sampled, *videos, *again, *images, *pairs, *(Question(text, "", []) for text in texts)]


def answers(server: RunningServer, questions: list[Question], at_once: int) -> list[list[str]]:
    """The tokens of each answer, one by one."""

    def ask(question: Question) -> list[str]:
        more = {"max_tokens": 40, **question.more}
        (choice,) = ClientRequest(server, None, question, logprobs=True, **more).reply()["choices"]
        return [entry["token"] for entry in choice["logprobs"]["content"]]

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, questions))


@pytest.fixture(scope="module")
def alone(questions: list[Question]) -> list[list[str]]:
    """Each request by itself, nothing cached, one step at a time."""
    flags = ["--no-enable-prefix-caching", "--no-async-scheduling", "--encoder-cache-tokens", "600"]
    with RunningServer(*flags) as server:
        tokens = answers(server, questions, 1)
    assert len({tuple(each) for each in tokens[6:10]}) > 1, "the seed has no effect"
    return tokens


def check_tokens(server: RunningServer, questions: list[Question], alone: list[list[str]]) -> tuple[bool, bool]:
    """Of all, cold and warm, and of the last twice, whose prefix no other takes between. Whether a request was
    preempted, and whether a prefix was found."""
    names = ("num_preemptions_total", "prefix_cache_hits_total")
    before = [server.total(name) for name in names]
    assert server.get("/reset_caches", method="POST").status == 200
    for _ in range(2):
        assert answers(server, questions, len(questions)) == alone
    for _ in range(2):
        assert answers(server, questions[-1:], 1) == alone[-1:]
    preempted, hit = (server.total(name) > old for name, old in zip(names, before, strict=True))
    return preempted, hit


def test_tokens_are_equal_in_a_batch_one_step_ahead_with_prefixes_cached(server, questions, alone):
    assert check_tokens(server, questions, alone) == (False, True)


def test_tokens_are_equal_with_two_ranks_few_blocks_and_small_chunks(questions, alone):
    flags = ["-tp", "2", "--mm-encoder-tp-mode", "data", "--max-num-batched-tokens", "48"]
    with RunningServer(*flags, "--num-gpu-blocks-override", "32", "--max-model-len", "500") as server:
        assert check_tokens(server, questions, alone) == (True, True)
