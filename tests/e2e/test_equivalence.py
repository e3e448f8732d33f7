"""Equal tokens, whatever the chunk sizes, caches, preemption, concurrency, async scheduling and ranks."""

from concurrent.futures import ThreadPoolExecutor

from tests.support.client import ClientRequest, Question, ask_image, ask_two, ask_video
from tests.support.running_server import RunningServer


def test_tokens_are_equal_alone_and_in_a_batch_with_two_ranks_few_blocks_and_small_chunks(server: RunningServer):
    """Long answers, videos, images, two videos in a prompt, text, sampled text; some media repeat."""
    # Six stories that run together do not fit into the few blocks; all prompts do.
    stories = [Question(f"story {number}", "", [], {"max_tokens": 80, "ignore_eos": True}) for number in range(6)]
    seeded = {"temperature": 2, "max_tokens": 32, "ignore_eos": True}
    sampled = [Question("tell me a story", "", [], seeded | {"seed": seed}) for seed in range(4)]
    videos = [ask_video(seed) for seed in range(6)]
    again = [Question("What is it?", "", video.urls) for video in videos[:3]]
    media = [*videos, *again, *map(ask_image, range(3)), *(ask_two(2 * seed) for seed in range(3))]
    texts = ["hello", "tell me what you can do", "zebra " * 60, "0123456789 " * 30]
    questions = [*stories, *sampled, *media, *(Question(text, "", []) for text in texts)]

    def tokens(server: RunningServer, questions: list[Question], at_once: int) -> list[list[str]]:
        """Of each answer, one by one."""

        def ask(question: Question) -> list[str]:
            more = {"max_tokens": 40, **question.more}
            (choice,) = ClientRequest(server, None, question, logprobs=True, **more).reply()["choices"]
            return [entry["token"] for entry in choice["logprobs"]["content"]]

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(ask, questions))

    # Each request by itself, nothing cached, one step at a time.
    with RunningServer("--no-enable-prefix-caching", "--no-async-scheduling", "--encoder-cache-tokens", "600") as plain:
        alone = tokens(plain, questions, 1)
    assert len({tuple(each) for each in alone[6:10]}) > 1, "the seed has no effect"

    def assert_equal(server: RunningServer, is_preempted: bool) -> None:
        """Of all, cold and warm, and of the last twice, whose prefix no other takes between."""
        names = ("num_preemptions_total", "prefix_cache_hits_total")
        before = [server.total(name) for name in names]
        assert server.get("/reset_caches", method="POST").status == 200
        for _ in range(2):
            assert tokens(server, questions, len(questions)) == alone
        for _ in range(2):
            assert tokens(server, questions[-1:], 1) == alone[-1:]
        grown = [server.total(name) > old for name, old in zip(names, before, strict=True)]
        assert grown == [is_preempted, True]

    assert_equal(server, is_preempted=False)
    flags = ["-tp", "2", "--mm-encoder-tp-mode", "data", "--max-num-batched-tokens", "48"]
    with RunningServer(*flags, "--num-gpu-blocks-override", "32", "--max-model-len", "500") as small:
        assert_equal(small, is_preempted=True)
