"""Embeddings and scores of a running server: those of transformers, by the libraries that people use."""

import json
import re
import runpy
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors

from mini_engine import LLM, Image
from mini_engine.demo import videos
from mini_engine.media.processor import MediaProcessor
from mini_engine.prompt.pooling_prompts import EMBED, JUDGE, RANK
from tests.e2e.test_families import SMALL_STEPS, Family
from tests.support.client import data_url, image_url, use_server
from tests.support.running_server import ROOT, RunningServer

TEXTS = [f"a red circle moving left {number} times" for number in range(32)]
IMAGES = [("image_url", videos.encode_image(videos.render_image(4 * 10**9 + number))) for number in range(3)]
CLIP = videos.encode(videos.render(4 * 10**9, width=96, height=64, num_frames=14, fps=8), "mp4", "h264")
VIDEO = ("video_url", CLIP)
Content = list[str | tuple[str, bytes]]  # texts, and files with their kinds


class PoolingFamily(Family):
    """A family whose tokenizer puts a token after each text, as that of Qwen3-Embedding does; the reference."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        path = str(self.folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(path)
        end = "<|endoftext|>", tokenizer.token_to_id("<|endoftext|>")
        tokenizer.post_processor = processors.TemplateProcessing(f"$A {end[0]}", special_tokens=[end])
        tokenizer.save(path)
        (self.folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Pooling"}]))
        self.processor = MediaProcessor(self.folder)
        self.hf = self.processor.hf_processor

    def state(self, system: str, content: Content) -> torch.Tensor:
        """The last hidden state of a prompt's last token."""
        parts = [{"type": "text", "text": x} if isinstance(x, str) else {"type": x[0][:-4]} for x in content]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": parts}]
        inputs = self.inputs(messages, [part for part in content if not isinstance(part, str)])
        return self.model.model(**inputs).last_hidden_state[0, -1]

    @torch.inference_mode()
    def embedding(self, *content: str | tuple[str, bytes], system: str = EMBED) -> np.ndarray:
        return torch.nn.functional.normalize(self.state(system, [*content]), dim=0).numpy()

    @torch.inference_mode()
    def score(self, query: Content, document: Content) -> float:
        content = [f"<Instruct>: {RANK}", "<Query>:", *query, "\n<Document>:", *document]
        yes, no = (self.model.lm_head.weight[self.hf.tokenizer.get_vocab()[answer]] for answer in ("yes", "no"))
        return float(torch.sigmoid(self.state(JUDGE, content) @ (yes - no)))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> PoolingFamily:
    return PoolingFamily("qwen3_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def embedder(family: PoolingFamily) -> Iterator[RunningServer]:
    with RunningServer(str(family.folder), *SMALL_STEPS, "--allowed-local-media-path", str(family.folder)) as server:
        yield server


@pytest.fixture(scope="module")
def ranker(family: PoolingFamily) -> Iterator[RunningServer]:
    flags = [*SMALL_STEPS, "--allowed-local-media-path", str(family.folder), "--convert", "classify"]
    with RunningServer(str(family.folder), *flags) as server:
        yield server


def parts(content: Content) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": part[0], part[0]: {"url": data_url(part[1])}}
        for part in content
    ]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(["what is it?"], id="text"),
        pytest.param([IMAGES[0]], id="image"),
        pytest.param([VIDEO, "a red circle"], id="video"),
        pytest.param([IMAGES[1], "and", VIDEO, IMAGES[2]], id="several"),
        pytest.param(["the blue square stands still " * 40], id="long"),
    ],
)
def test_embeddings_equal_transformers(family: PoolingFamily, embedder: RunningServer, content: Content) -> None:
    """The second time from the caches, a third time under another instruction, for which the media are there."""

    def embed(**more: Any) -> Any:
        body = {"messages": [{"role": "user", "content": parts(content)}], **more}
        return embedder.client.post("/embeddings", body=body, cast_to=object)["data"][0]["embedding"]

    for _ in range(2):
        np.testing.assert_allclose(embed(), family.embedding(*content), atol=1e-5)
    before = embedder.metrics()
    other = family.embedding(*content, system="Retrieve the shape.")
    np.testing.assert_allclose(embed(instruction="Retrieve the shape"), other, atol=1e-5)
    after = embedder.metrics()
    gained = {key: after[key] - before[key] for key in after if key in before}
    hits, queries = (gained[f'encoder_cache_{name}_total{{engine="0"}}'] for name in ("hits", "queries"))
    assert hits == queries == sum(not isinstance(part, str) for part in content)
    assert gained["media_decodes_total"] == 0
    assert gained['http_requests_total{handler="/v1/embeddings",method="POST",status="2xx"}'] == 1
    assert gained["request_prompt_tokens_count"] == 1 and gained["request_generation_tokens_count"] == 0


def test_scores_equal_transformers_and_set_the_order(family: PoolingFamily, ranker: RunningServer) -> None:
    query: Content = ["a red circle", IMAGES[0]]
    documents: list[Content] = [*([part] for part in (*IMAGES, *TEXTS[:4])), [VIDEO, "moving"]]
    body = {"query": {"content": parts(query)}, "documents": [{"content": parts(document)} for document in documents]}
    results = ranker.client.post("/rerank", body=body, cast_to=object)["results"]
    expected = np.array([family.score(query, document) for document in documents])
    assert [result["index"] for result in results] == np.argsort(-expected, kind="stable").tolist()
    np.testing.assert_allclose([result["relevance_score"] for result in results], -np.sort(-expected), atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # litellm's own about pydantic, by release
def test_openai_langchain_and_litellm(
    family: PoolingFamily, embedder: RunningServer, ranker: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # not from GitHub
    import litellm  # here, as in `test_clients.py`
    from langchain_openai import OpenAIEmbeddings

    model, at = embedder.model, {"api_key": "none"}
    answer = embedder.client.embeddings.create(model=model, input=TEXTS)
    # Without the check it sends texts, not token ids of another tokenizer.
    chain = OpenAIEmbeddings(model=model, base_url=embedder.url, check_embedding_ctx_length=False, **at)
    lite: Any = litellm.embedding(model=f"hosted_vllm/{model}", input=TEXTS, api_base=embedder.url, **at)
    expected = np.array([family.embedding(text) for text in TEXTS])
    for vectors in (
        [item.embedding for item in answer.data],
        [*chain.embed_documents(TEXTS[:-1]), chain.embed_query(TEXTS[-1])],
        [item["embedding"] for item in lite.data],
    ):
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
    asked: dict[str, Any] = {"query": "red", "documents": TEXTS[:5], "top_n": 2, "api_base": ranker.url}
    ranked: Any = litellm.rerank(model=f"hosted_vllm/{ranker.model}", **asked)
    best = np.argsort([-family.score(["red"], [text]) for text in TEXTS[:5]], kind="stable")[:2].tolist()
    assert [(item["index"], item["document"]["text"]) for item in ranked.results] == [(i, TEXTS[i]) for i in best]


def test_from_python(
    family: PoolingFamily, embedder: RunningServer, ranker: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input or a document with an error takes no other with it."""
    picture, absent = Image(family.folder / "a.png"), Image(family.folder / "none.png")
    (family.folder / "a.png").write_bytes(IMAGES[0][1])
    use_server(embedder, monkeypatch)
    with LLM() as llm:
        *answers, failed = llm.embed([TEXTS[0], [picture, "it"], [absent]], use_tqdm=False)
        expected = [family.embedding(TEXTS[0]), family.embedding(IMAGES[0], "it")]
        np.testing.assert_allclose([answer.vector for answer in answers], expected, atol=1e-5)
        assert "no such regular file" in (failed.error or "")
        assert "--runner generate" in (llm.chat(["hello"], use_tqdm=False)[0].error or "")
    use_server(ranker, monkeypatch)
    with LLM() as llm:
        *ranked, unusable, failed = llm.rank("red", [TEXTS[1], [picture], [Image(object())], [absent]])
        scores = [family.score(["red"], [TEXTS[1]]), family.score(["red"], [IMAGES[0]])]
        assert [document.id for document in ranked] == np.argsort(-np.array(scores)).tolist()
        np.testing.assert_allclose([document.score for document in ranked], sorted(scores, reverse=True), atol=1e-5)
        assert (unusable.id, failed.id) == (2, 3) and unusable.error and "no such regular file" in (failed.error or "")


def test_search_clips_embeds_new_files_only(
    family: PoolingFamily, embedder: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_server(embedder, monkeypatch)
    folder, known = family.folder / "clips", family.embedding(TEXTS[0])
    (folder / "sub.png").mkdir(parents=True)
    for name in ("a.mp4", "sub.png/b.mp4", "broken.png", "known.mp4", "drawing.svg"):
        (folder / name).write_bytes(CLIP if name in ("a.mp4", "sub.png/b.mp4") else b"")
    key = f"{(folder / 'known.mp4').stat().st_mtime_ns}:known.mp4"
    np.savez(folder / "embeddings.npz", **{key: known})  # type: ignore[arg-type] # its own argument is a flag
    monkeypatch.setattr(sys, "argv", ["search_clips.py", str(folder), "a red circle"])
    runpy.run_path(str(ROOT / "examples" / "search_clips.py"), run_name="__main__")
    shown = capsys.readouterr()
    assert "broken.png: " in shown.err and not {"sub.png: ", "drawing.svg: "} & {*re.findall(r"\S+: ", shown.err)}
    lines = [line.split() for line in shown.out.splitlines()]
    query = family.embedding("a red circle", system="Retrieve images or text relevant to the user's query.")
    clip, kept = family.embedding(VIDEO) @ query, known @ query
    cosines = {name: float(cosine) for cosine, name in lines}
    assert cosines == pytest.approx({"a.mp4": clip, "sub.png/b.mp4": clip, "known.mp4": kept}, abs=1e-3)
    assert [*cosines.values()] == sorted(cosines.values(), reverse=True)


@pytest.mark.slow
def test_a_thousand_images_are_embedded_as_fast_as_a_token_is_generated() -> None:
    """By the bundled model, for the same prompts, each image new to the server. The best of three runs counts, and as
    fast means within a tenth, by which single runs differ."""
    urls = [image_url(videos.render_image(5 * 10**9 + number)) for number in range(1000)]
    contents = [[{"type": "image_url", "image_url": {"url": url}}] for url in urls]
    messages = [[{"role": "system", "content": EMBED}, {"role": "user", "content": content}] for content in contents]
    generating, pooling = RunningServer("--runner", "generate"), RunningServer("--runner", "pooling")
    with generating as generator, pooling as embedder, ThreadPoolExecutor(16) as pool:

        def seconds(server: RunningServer, path: str, **fields: Any) -> float:
            bodies = [{"messages": conversation, **fields} for conversation in messages]
            assert server.get("/reset_caches", method="POST").status == 200
            begun = time.monotonic()
            list(pool.map(lambda body: server.client.post(path, body=body, cast_to=object), bodies))
            return time.monotonic() - begun

        chat, embed = (generator, "/chat/completions"), (embedder, "/embeddings")
        runs = [(seconds(*chat, max_tokens=1), seconds(*embed, encoding_format="base64")) for _ in range(3)]
    generated, embedded = map(min, zip(*runs, strict=True))
    print(f"requests per second: {1000 / generated:.1f} generated, {1000 / embedded:.1f} embedded")
    assert embedded <= 1.1 * generated
