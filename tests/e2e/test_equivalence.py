"""Equal tokens in every configuration: chunk sizes, caches, preemption, concurrency, async scheduling, ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.asking import Asked, Asking, ask_image, ask_two, ask_video
from tests.e2e.running_server import RunningServer

STORY = {"max_tokens": 150, "ignore_eos": True}  # five that run together do not fit into "few blocks"; all prompts do


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    """Long answers, videos, images, two videos in a prompt, text, sampled text; some media repeat."""
    stories = [Asked(f"story {number}", "", [], more=STORY) for number in range(8)]
    seeded = {"temperature": 2, "max_tokens": 32, "ignore_eos": True}
    sampled = [Asked("tell me a story", "", [], more=seeded | {"seed": seed}) for seed in range(8)]
    videos = [ask_video(seed) for seed in range(12)]
    again = [Asked("What is it?", "", one.urls) for one in videos[:6]]
    texts = ["hello", "tell me what you can do", "zebra " * 60, "0123456789 " * 30]
    images, pairs = [ask_image(seed) for seed in range(5)], [ask_two(2 * seed) for seed in range(5)]
    return [*stories, *sampled, *videos, *again, *images, *pairs, *(Asked(text, "", []) for text in texts)]


def tokens_of(server: RunningServer, one: Asked) -> list[str]:
    """The answer's tokens, one by one."""
    (choice,) = Asking(server, None, one, logprobs=True, **{"max_tokens": 40, **one.more}).reply()["choices"]
    return [entry["token"] for entry in choice["logprobs"]["content"]]


def answers(server: RunningServer, asked: list[Asked], at_once: int) -> list[list[str]]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda one: tokens_of(server, one), asked))


@pytest.fixture(scope="module")
def alone(asked: list[Asked]) -> list[list[str]]:
    """Each request by itself, nothing cached, one step at a time."""
    flags = ["--no-enable-prefix-caching", "--no-async-scheduling", "--encoder-cache-tokens", "600"]
    with RunningServer(*flags) as server:
        tokens = answers(server, asked, 1)
    assert len({tuple(each) for each in tokens[8:16]}) > 1, "the seed has no effect"
    return tokens


FEW_BLOCKS = ["--num-gpu-blocks-override", "48", "--max-model-len", "700"]
VARIANTS = {
    "in a batch, one step ahead, prefixes cached": [],
    "two ranks, few blocks, small chunks": [
        "-tp", "2", "--mm-encoder-tp-mode", "data", *FEW_BLOCKS, "--max-num-batched-tokens", "48"
    ],
    "one step at a time": ["--no-async-scheduling"],
    "chunks of 16": ["--max-num-batched-tokens", "16"],
    "chunks of 50, prefixes not cached": ["--max-num-batched-tokens", "50", "--no-enable-prefix-caching"],
    "few blocks": [*FEW_BLOCKS, "--encoder-cache-tokens", "2000"],
}  # fmt: skip


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=[pytest.mark.slow] if number > 1 else []) for number, name in enumerate(VARIANTS)],
)
def test_tokens_are_equal_in_every_configuration(variant, asked, alone):
    with RunningServer(*VARIANTS[variant]) as server:
        cold = answers(server, asked, len(asked))
        warm = answers(server, asked, len(asked))
        assert [tokens_of(server, asked[-1]) for _ in range(2)] == [alone[-1]] * 2  # no other takes its prefix between
        preemptions, hits = server.total("num_preemptions_total"), server.total("prefix_cache_hits_total")
    assert cold == alone
    assert warm == alone
    assert (preemptions > 0) == ("few blocks" in variant)
    assert (hits == 0) == ("not cached" in variant)
