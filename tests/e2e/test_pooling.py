"""Embeddings and scores of a running server: those of transformers, by the libraries that people use."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from langchain_openai import OpenAIEmbeddings
from tokenizers import Tokenizer, processors

from mini_engine import LLM, Image
from mini_engine.demo import videos
from mini_engine.media.processor import MediaProcessor
from mini_engine.prompt.pooling import EMBED, JUDGE, RANK
from tests.e2e.test_families import SMALL_STEPS, Family
from tests.support.client import image_url
from tests.support.decoding import decode_image, decode_video
from tests.support.full_call import full_call
from tests.support.running_server import RunningServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # not from GitHub
import litellm  # noqa: E402

TEXTS = [f"a red circle moving left {number} times" for number in range(32)]
PICTURES = [videos.encode_image(videos.render_image(4 * 10**9 + number)) for number in range(3)]
CLIP = videos.encode(videos.render(4 * 10**9, width=96, height=64, num_frames=14, fps=8), "mp4", "h264")
POOLING = [{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling"}]
Content = list[tuple[str, Any]]  # kinds of parts, with their texts and files


class PoolingFamily(Family):
    """A family whose tokenizer puts a token after each text, as that of Qwen3-Embedding does; the reference."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        path = str(self.folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(path)
        end = "<|endoftext|>", tokenizer.token_to_id("<|endoftext|>")
        tokenizer.post_processor = processors.TemplateProcessing(f"$A {end[0]}", special_tokens=[end])
        tokenizer.save(path)
        (self.folder / "modules.json").write_text(json.dumps(POOLING))
        self.processor = MediaProcessor(self.folder)
        self.hf = self.processor.hf_processor

    def state(self, system: str, content: Content) -> torch.Tensor:
        """The last hidden state of a prompt's last token."""
        parts = [{"type": kind, "text": value} if kind == "text" else {"type": kind} for kind, value in content]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": parts}]
        prompt = self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        decoders = {"image": decode_image, "video": lambda data: decode_video(data, self.sampling)}
        media = [decoders[kind](data) for kind, data in content if kind != "text"]
        return self.model.model(**full_call(self.processor, *media, text=prompt)).last_hidden_state[0, -1]

    @torch.inference_mode()
    def embedding(self, content: Content, system: str = EMBED) -> np.ndarray:
        return torch.nn.functional.normalize(self.state(system, content), dim=0).numpy()

    @torch.inference_mode()
    def score(self, query: Content, document: Content) -> float:
        content = [("text", f"<Instruct>: {RANK}"), ("text", "<Query>:"), *query, ("text", "\n<Document>:"), *document]
        yes, no = (self.model.lm_head.weight[self.hf.tokenizer.get_vocab()[answer]] for answer in ("yes", "no"))
        return float(torch.sigmoid(self.state(JUDGE, content) @ (yes - no)))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> PoolingFamily:
    return PoolingFamily("qwen3_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def embedder(family: PoolingFamily) -> Iterator[RunningServer]:
    with RunningServer(str(family.folder), *SMALL_STEPS) as server:
        yield server


@pytest.fixture(scope="module")
def ranker(family: PoolingFamily) -> Iterator[RunningServer]:
    with RunningServer(str(family.folder), *SMALL_STEPS, "--convert", "classify") as server:
        yield server


def parts(content: Content) -> list[dict[str, Any]]:
    def url(data: bytes) -> dict[str, str]:
        return {"url": f"data:;base64,{base64.b64encode(data).decode()}"}

    return [
        {"type": "text", "text": value} if kind == "text" else {"type": f"{kind}_url", f"{kind}_url": url(value)}
        for kind, value in content
    ]


def embed(server: RunningServer, content: Content, **more: Any) -> list[float]:
    body = {"messages": [{"role": "user", "content": parts(content)}], **more}
    return server.client.post("/embeddings", body=body, cast_to=object)["data"][0]["embedding"]


CONTENTS: dict[str, Content] = {
    "text": [("text", "what is it?")],
    "image": [("image", PICTURES[0])],
    "video": [("video", CLIP), ("text", "a red circle")],
    "several": [("image", PICTURES[1]), ("text", "and"), ("video", CLIP), ("image", PICTURES[2])],
    "long": [("text", "the blue square stands still " * 40)],
}


@pytest.mark.parametrize("name", CONTENTS)
def test_embeddings_equal_transformers(family: PoolingFamily, embedder: RunningServer, name: str) -> None:
    """The second time from the caches, a third time under another instruction, for which the media are there."""
    content = CONTENTS[name]
    for _ in range(2):
        np.testing.assert_allclose(embed(embedder, content), family.embedding(content), atol=1e-5)
    before = embedder.metrics()
    other = embed(embedder, content, instruction="Retrieve the shape")
    np.testing.assert_allclose(other, family.embedding(content, "Retrieve the shape."), atol=1e-5)
    after = embedder.metrics()
    gained = {key: after[key] - before[key] for key in after if key in before}
    num_media = sum(kind != "text" for kind, _ in content)
    assert gained["media_decodes_total"] == 0
    assert (
        gained['encoder_cache_hits_total{engine="0"}'] == gained['encoder_cache_queries_total{engine="0"}'] == num_media
    )
    assert gained['http_requests_total{handler="/v1/embeddings",method="POST",status="2xx"}'] == 1
    assert gained["request_prompt_tokens_count"] == 1 and gained["request_generation_tokens_count"] == 0


def test_scores_equal_transformers_and_set_the_order(family: PoolingFamily, ranker: RunningServer) -> None:
    query: Content = [("text", "a red circle"), ("image", PICTURES[0])]
    documents: list[Content] = [[("image", picture)] for picture in PICTURES] + [[("text", text)] for text in TEXTS[:4]]
    documents.append([("video", CLIP), ("text", "moving")])
    items = [{"content": parts(document)} for document in documents]
    body = {"query": {"content": parts(query)}, "documents": items}
    results = ranker.client.post("/rerank", body=body, cast_to=object)["results"]
    expected = np.array([family.score(query, document) for document in documents])
    assert [result["index"] for result in results] == np.argsort(-expected, kind="stable").tolist()
    np.testing.assert_allclose([result["relevance_score"] for result in results], -np.sort(-expected), atol=1e-5)


def test_openai_langchain_and_litellm_embed(family: PoolingFamily, embedder: RunningServer) -> None:
    expected = np.array([family.embedding([("text", text)]) for text in TEXTS])
    answer = embedder.client.embeddings.create(model=embedder.model, input=TEXTS)
    np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=1e-5)
    short = embedder.client.embeddings.create(model=embedder.model, input=TEXTS[0], dimensions=8).data[0].embedding
    np.testing.assert_allclose(short, expected[0, :8] / np.linalg.norm(expected[0, :8]), atol=1e-5)
    at: dict[str, Any] = {"base_url": embedder.url, "api_key": "none", "model": embedder.model}
    chain = OpenAIEmbeddings(**at, check_embedding_ctx_length=False)  # or it sends token ids of another tokenizer
    np.testing.assert_allclose(chain.embed_documents(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(chain.embed_query(TEXTS[1]), expected[1], atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # its own about pydantic, by release
def test_litellm(family: PoolingFamily, embedder: RunningServer, ranker: RunningServer) -> None:
    at = {"api_base": embedder.url, "api_key": "none"}
    answer: Any = litellm.embedding(model=f"hosted_vllm/{embedder.model}", input=TEXTS[:3], **at)
    expected = [family.embedding([("text", text)]) for text in TEXTS[:3]]
    np.testing.assert_allclose([item["embedding"] for item in answer.data], expected, atol=1e-5)
    asked: dict[str, Any] = {"model": f"hosted_vllm/{ranker.model}", "query": "red", "documents": TEXTS[:5], "top_n": 2}
    ranked: Any = litellm.rerank(**asked, api_base=ranker.url)
    scores = [family.score([("text", "red")], [("text", text)]) for text in TEXTS[:5]]
    assert [item["index"] for item in ranked.results] == np.argsort(-np.array(scores), kind="stable")[:2].tolist()
    assert ranked.results[0]["document"]["text"] == TEXTS[int(np.argmax(scores))]


def test_from_python(family: PoolingFamily, tmp_path: Any) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PICTURES[0])
    with LLM(str(family.folder), data_parallel_size=1, dtype="float32") as llm:
        answers = llm.embed([TEXTS[0], [Image(path), "it"], [Image(tmp_path / "none.png")]], use_tqdm=False)
        np.testing.assert_allclose(answers[0].vector, family.embedding([("text", TEXTS[0])]), atol=1e-5)
        expected = family.embedding([("image", PICTURES[0]), ("text", "it")])
        np.testing.assert_allclose(answers[1].vector, expected, atol=1e-5)
        assert "no such regular file" in (answers[2].error or "")
        assert "--runner generate" in (llm.chat(["hello"], use_tqdm=False)[0].error or "")
    with LLM(str(family.folder), convert="classify", data_parallel_size=1) as llm:
        ranked = llm.rank("red", [TEXTS[1], [Image(path)], [Image(object())], [Image(tmp_path / "none.png")]])
        expected_scores = {0: family.score([("text", "red")], [("text", TEXTS[1])])}
        expected_scores[1] = family.score([("text", "red")], [("image", PICTURES[0])])
        assert [one.id for one in ranked] == [*sorted(expected_scores, key=lambda i: -expected_scores[i]), 2, 3]
        assert all(abs(one.score - expected_scores[one.id]) < 1e-5 for one in ranked[:2]) and ranked[2].error and ranked[3].error


@pytest.mark.slow
def test_a_thousand_images_are_embedded_as_fast_as_a_token_is_generated() -> None:
    """By the bundled model, for the same prompts, each image new to the server. The best of three runs counts, and as
    fast means within a tenth, by which single runs differ."""
    urls = [image_url(videos.render_image(5 * 10**9 + number)) for number in range(1000)]
    generating, pooling = RunningServer("--runner", "generate"), RunningServer("--runner", "pooling")
    with generating as generator, pooling as embedder, ThreadPoolExecutor(16) as pool:

        def seconds(server: RunningServer, path: str, **fields: Any) -> float:
            def ask(url: str) -> None:
                user = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
                body = {"messages": [{"role": "system", "content": EMBED}, user], **fields}
                server.client.post(path, body=body, cast_to=object)

            assert server.get("/reset_caches", method="POST").status == 200
            begun = time.monotonic()
            list(pool.map(ask, urls))
            return time.monotonic() - begun

        chat, embed = (generator, "/chat/completions"), (embedder, "/embeddings")
        runs = [(seconds(*chat, max_tokens=1), seconds(*embed, encoding_format="base64")) for _ in range(3)]
    generated, embedded = map(min, zip(*runs, strict=True))
    print(f"requests per second: {1000 / generated:.1f} generated, {1000 / embedded:.1f} embedded")
    assert embedded <= 1.1 * generated
