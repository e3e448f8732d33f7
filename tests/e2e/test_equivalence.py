"""The same words whatever the scheduler does: chunk sizes, caches, preemption, company, one step ahead, ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.asked import Asked, ask_image, ask_two, ask_video
from tests.e2e.running_server import RunningServer, message

NUM_REQUESTS = 40
STORY_TOKENS = 150  # five stories that run together do not fit into "few blocks", though all their prompts do


def text(words: str) -> Asked:
    return Asked(words, "", [])


STORIES = [text(f"story {number}") for number in range(8)]


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    """Long answers, videos, images, two videos in a prompt, and text; some media twice."""
    videos = [ask_video(seed) for seed in range(12)]
    again = [Asked("What is it?", "", one.urls) for one in videos[:6]]
    texts = [text("hello"), text("tell me what you can do"), text("zebra " * 60), text("0123456789 " * 30)]
    images, pairs = [ask_image(seed) for seed in range(5)], [ask_two(2 * seed) for seed in range(5)]
    return [*STORIES, *videos, *again, *images, *pairs, *texts]


def tokens_of(server: RunningServer, one: Asked) -> list[str]:
    """The answer's tokens, one by one."""
    story = one in STORIES
    reply = server.client.chat.completions.create(
        model=server.model, messages=[message(one.text, one.urls)], temperature=0, logprobs=True,
        max_tokens=STORY_TOKENS if story else 40, extra_body={"ignore_eos": story},
    )  # fmt: skip
    return [entry.token for entry in reply.choices[0].logprobs.content]


def answers(server: RunningServer, asked: list[Asked], at_once: int) -> list[list[str]]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda one: tokens_of(server, one), asked))


@pytest.fixture(scope="module")
def alone(asked: list[Asked]) -> list[list[str]]:
    """Each request by itself, nothing cached, one step at a time."""
    assert len(asked) == NUM_REQUESTS
    with RunningServer(
        "--no-enable-prefix-caching", "--no-async-scheduling", "--encoder-cache-tokens", "600"
    ) as server:
        return answers(server, asked, 1)


VARIANTS = {
    "in a batch, one step ahead, prefixes cached": [],
    "one step at a time": ["--no-async-scheduling"],
    "chunks of 16": ["--max-num-batched-tokens", "16"],
    "chunks of 50, prefixes not cached": ["--max-num-batched-tokens", "50", "--no-enable-prefix-caching"],
    "few blocks": ["--num-gpu-blocks-override", "48", "--max-model-len", "700", "--encoder-cache-tokens", "2000"],
    "two ranks": ["-tp", "2"],
    "two ranks, few blocks, small chunks": [
        "-tp", "2", "--num-gpu-blocks-override", "48", "--max-model-len", "700", "--max-num-batched-tokens", "48",
    ],
}  # fmt: skip


SLOW = {"one step at a time", "two ranks"}  # "two ranks, few blocks, small chunks" holds the latter


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in VARIANTS]
)
def test_the_tokens_are_the_same(variant, asked, alone):
    with RunningServer(*VARIANTS[variant]) as server:
        cold = answers(server, asked, NUM_REQUESTS)
        warm = answers(server, asked, NUM_REQUESTS)
        assert [tokens_of(server, asked[-1]) for _ in range(2)] == [alone[-1]] * 2  # whose prefix nobody takes between
        preemptions, hits = server.total("num_preemptions_total"), server.total("prefix_cache_hits_total")
    assert cold == alone
    assert warm == alone
    assert (preemptions > 0) == ("few blocks" in variant)
    assert (hits == 0) == ("not cached" in variant)


def figures(server: RunningServer) -> dict[str, float]:
    names = ("prefix_cache_hits_total", "encoder_cache_queries_total", "encoder_cache_hits_total")
    return {name: server.total(name) for name in names}


def test_a_second_question_about_a_video_skips_the_tower_and_the_shared_prefill():
    one, other = ask_video(101, "colour"), ask_video(102, "colour")
    with RunningServer() as server:
        before = figures(server)
        server.ask(one.text, one.urls)
        first = figures(server)
        assert first["encoder_cache_hits_total"] == before["encoder_cache_hits_total"]
        server.ask("Which way does it move?", one.urls)
        second = figures(server)
        assert second["encoder_cache_hits_total"] == first["encoder_cache_hits_total"] + 1
        assert second["prefix_cache_hits_total"] >= first["prefix_cache_hits_total"] + 16
        server.ask(one.text, other.urls)
        third = figures(server)
        assert third["encoder_cache_queries_total"] == 3 and third["encoder_cache_hits_total"] == 1
        gained = third["prefix_cache_hits_total"] - second["prefix_cache_hits_total"]
        assert gained < 32, "blocks of another video were found"
        server.client.post("/../reset_caches", cast_to=object)
        server.ask(one.text, one.urls)
        assert figures(server)["encoder_cache_hits_total"] == 1


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_samples_of_one_request_share_its_prompt(ranks):
    one = ask_video(7, "describe")
    with RunningServer("-tp", str(ranks), "--no-enable-prefix-caching") as server:
        reply = server.client.chat.completions.create(
            model=server.model, messages=[message(one.text, one.urls)], n=4, temperature=0
        )
        assert [choice.message.content for choice in reply.choices] == [one.answer] * 4
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        assert server.total("encoder_cache_queries_total") == 1
        assert server.total("prefix_cache_hits_total") >= 3 * 16


def test_a_seed_gives_the_same_tokens_in_any_company():
    def sample(server: RunningServer, seed: int) -> str:
        reply = server.client.chat.completions.create(
            model=server.model, messages=[message("tell me a story", [])], temperature=2, seed=seed, max_tokens=32,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return reply.choices[0].message.content

    results = []
    for flags in ([], ["-tp", "2", "--max-num-batched-tokens", "16"]):
        with RunningServer(*flags) as server:
            results.append([sample(server, seed) for seed in range(8)])
            with ThreadPoolExecutor(8) as pool:
                results.append(list(pool.map(lambda seed: sample(server, seed), range(8))))
    assert all(result == results[0] for result in results)
    assert len(set(results[0])) > 1
