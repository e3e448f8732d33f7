"""Log probabilities of prompts, as evaluation harnesses ask for them: transformers', whatever the steps."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from mini_engine.config import BUNDLED_MODEL
from tests.support.client import ask_image
from tests.support.running_server import RunningServer, message

TEXTS = [
    "Describe the video.",
    "Which way does it move?",
    "<|im_start|>user\nhello<|im_end|>\n",
    "a red circle é " * 40,
]


def post(server: RunningServer, path: str, **body: Any) -> Any:
    return server.client.post(server.base_url + path, body={"model": server.model, **body}, cast_to=object)


@pytest.fixture(scope="module")
def scores(server: RunningServer) -> list[tuple[list[int], torch.Tensor]]:
    """The tokens of each text, and the log probabilities `[tokens - 1, vocab_size]` of what follows them."""
    model = AutoModelForImageTextToText.from_pretrained(BUNDLED_MODEL).eval()
    prompts = [post(server, "/tokenize", prompt=text)["tokens"] for text in TEXTS]
    with torch.no_grad():
        return [(ids, model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)) for ids in prompts]


def assert_scored(server: RunningServer, scores: list[tuple[list[int], torch.Tensor]]) -> None:
    """By what lm-evaluation-harness reads of a batch of token ids: the own log probabilities but the last, which is an
    answer's, and whether the most likely one is larger."""
    asked = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    choices = post(server, "/v1/completions", prompt=[ids for ids, _ in scores], **asked)["choices"]
    for text, (ids, expected), choice in zip(TEXTS, scores, choices, strict=True):
        listed = choice["logprobs"]
        assert choice["text"].startswith(text) and len(listed["tokens"]) == len(ids) + 1
        own = torch.tensor(listed["token_logprobs"][1:-1])
        torch.testing.assert_close(own, expected.gather(1, torch.tensor([ids[1:]]).T)[:, 0], atol=1e-3, rtol=0)
        best = torch.tensor([max(likely.values()) for likely in listed["top_logprobs"][1:-1]])
        torch.testing.assert_close(best, expected.amax(1), atol=1e-3, rtol=0)


def test_texts_are_scored_as_by_transformers_alone_in_a_batch_and_cached(server, scores):
    for _ in range(2):
        assert_scored(server, scores)
    for score, text in zip(scores, TEXTS, strict=True):
        (choice,) = post(server, "/v1/completions", prompt=text, echo=True, max_tokens=0, prompt_logprobs=2)["choices"]
        assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (text, "length", None)
        first, *others = choice["prompt_logprobs"]
        ids, expected = score
        assert first is None
        for likely, token_id, row in zip(others, ids[1:], expected, strict=True):
            assert set(likely) == {str(token_id), *map(str, row.topk(2).indices.tolist())}
            assert abs(likely[str(token_id)]["logprob"] - row[token_id]) < 1e-3


def test_texts_are_scored_by_two_ranks_in_small_chunks_beside_answers(scores):
    flags = ["-tp", "2", "--max-num-batched-tokens", "24", "--num-gpu-blocks-override", "32", "--max-model-len", "500"]
    with RunningServer(*flags) as small, ThreadPoolExecutor(8) as pool:
        story = {"prompt": "tell me a story", "max_tokens": 120, "ignore_eos": True}
        stories = [pool.submit(post, small, "/v1/completions", **story) for _ in range(5)]
        for done in [pool.submit(assert_scored, small, scores) for _ in range(3)]:
            done.result()
        assert [each.result()["usage"]["completion_tokens"] for each in stories] == [120] * 5
        assert small.total("num_preemptions_total") > 0


def test_prompt_of_a_chat_is_listed_with_the_placeholders_of_its_media(server):
    question = ask_image(1)
    chat = {"messages": [message(question.text, question.urls)], "max_tokens": 4, "temperature": 0}
    listed = [post(server, "/v1/chat/completions", prompt_logprobs=0, **chat) for _ in range(2)]
    assert listed[0]["prompt_logprobs"] == listed[1]["prompt_logprobs"]
    assert len(listed[0]["prompt_logprobs"]) == listed[0]["usage"]["prompt_tokens"]
    plain = post(server, "/v1/chat/completions", **chat)
    assert plain["choices"] == listed[0]["choices"] and plain["usage"]["prompt_tokens_details"]["cached_tokens"]
