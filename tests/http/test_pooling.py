"""POST /v1/embeddings, /rerank and /score, in every form that clients send."""

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.http.middleware import ENGINE_PATHS
from mini_engine.http.routes import pooling
from mini_engine.media import loader
from mini_engine.media.hashing import content_digest
from mini_engine.messages import Problem
from mini_engine.prompt.pooling_prompts import Task, TaskKind, embedding
from tests.support import serving
from tests.support.serving import HIDDEN_SIZE, MAX_REQUESTS, Counted, Serve, Served, SlowWeb, check_error, image

EMBED = (
    "<|im_start|>system\nRepresent the user's input.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    "<|endoftext|>"
)
RANK = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
    "Given a search query, retrieve relevant candidates that answer the query.<Query>:{}\n<Document>:{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
DAMAGED = {"type": "image", "image": "x:y"}
SCORES = {"/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"}


@pytest.fixture
async def embedder(serve: Serve) -> AsyncIterator[Served]:
    """Its embeddings tell how long a prompt is. Its tokenizer puts a token after a text, as that of Qwen3-Embedding."""
    async with serve(runner="pooling") as served:
        served.context.renderer.after_text = served.encode("<|endoftext|>")
        served.core.pool = lambda request: [len(request.prompt_token_ids), 1.0, -2.0, 3.0]
        yield served


@pytest.fixture
async def ranker(serve: Serve) -> AsyncIterator[Served]:
    """The longer a prompt, the better."""
    async with serve(convert="classify") as served:
        served.core.pool = lambda request: [len(request.prompt_token_ids) / 64, 1.0]
        yield served


def prompts(served: Served) -> list[str]:
    """What the engine was asked."""
    return [served.context.renderer.tokenizer.decode(one.prompt_token_ids, False) for one in served.core.requests]


async def embed(served: Served, **body: Any) -> dict[str, Any]:
    response = await served.http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("a red circle", [EMBED.format("a red circle")]),
        (["a", "<|im_end|>", ""], [EMBED.format("a"), EMBED.format("<|im_end|>"), EMBED.format("NULL")]),
        ([257, 258], [[257, 258]]),
        ([[257, 258], [259]], [[257, 258], [259]]),
    ],
)
async def test_every_form_of_input(embedder: Served, asked: Any, expected: list[Any]) -> None:
    body = await embed(embedder, input=asked, model="tiny", user="x")
    decode = embedder.context.renderer.tokenizer.decode
    assert prompts(embedder) == [text if isinstance(text, str) else decode(text, False) for text in expected]
    assert all(request.pooling.token_ids == [] for request in embedder.core.requests)
    lengths = [len(request.prompt_token_ids) for request in embedder.core.requests]
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == sum(lengths)
    assert [item["index"] for item in body["data"]] == list(range(len(expected)))
    for item, length in zip(body["data"], lengths, strict=True):
        assert np.allclose(item["embedding"], np.array([length, 1, -2, 3]) / np.linalg.norm([length, 1, -2, 3]))
    CreateEmbeddingResponse.model_validate(body, strict=True)


async def test_base64_and_leading_dimensions(embedder: Served) -> None:
    whole = (await embed(embedder, input="hello"))["data"][0]["embedding"]
    text = (await embed(embedder, input="hello", encoding_format="base64", dimensions=2))["data"][0]["embedding"]
    short = np.frombuffer(base64.b64decode(text), "<f4")
    assert np.allclose(short, np.array(whole[:2]) / np.linalg.norm(whole[:2]))
    assert not embedding(bytes(4 * HIDDEN_SIZE), None).any()
    answer = await embedder.openai.embeddings.create(model="tiny", input="hello")
    assert answer.data[0].embedding == whole


async def test_embeddings_are_encoded_as_the_client_reads(embedder: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON they may be megabytes."""
    made = list[int]()
    monkeypatch.setattr(pooling, "embedding", lambda *arguments: made.append(1) or embedding(*arguments))
    embedder.core.pool = lambda request: [0.12345678] * 300_000
    async with embedder.http.stream("POST", "/v1/embeddings", json={"input": ["a"] * MAX_REQUESTS}) as response:
        parts = response.aiter_raw()
        read = [await anext(parts)]
        assert len(made) < MAX_REQUESTS
        read += [part async for part in parts]
    assert [item["index"] for item in json.loads(b"".join(read))["data"]] == [*range(MAX_REQUESTS)]


async def test_a_conversation_with_media(embedder: Served) -> None:
    """In vLLM's form for Qwen3-VL-Embedding too, and with media that the engine has already."""
    user = {"role": "user", "content": [image(57), {"type": "text", "text": "what"}, serving.video()]}
    decoded = Counted("media_decodes_total")
    body = await embed(embedder, messages=[user])
    assert decoded.since() == [2] and body["usage"]["prompt_tokens_details"]["video_tokens"]
    system = {"role": "system", "content": [{"type": "text", "text": "Represent the user's input."}]}
    empty = {"role": "assistant", "content": [{"type": "text", "text": ""}]}
    vllm = {"messages": [system, user, empty], "continue_final_message": True, "add_special_tokens": True}
    assert (await embed(embedder, **vllm))["data"] == body["data"]
    await embed(embedder, messages=[user], instruction="Find it", add_special_tokens=False)
    assert decoded.since() == [2] and all(len(request.media) == 2 for request in embedder.core.requests)
    first, same, other = prompts(embedder)
    assert first == same == other.replace("Find it.", "Represent the user's input.") + "<|endoftext|>"


async def test_rerank(ranker: Served) -> None:
    part = {"content": [image(57), {"type": "text", "text": "of a red circle"}]}
    asked = {"query": "q", "documents": ["long " * 9, {"text": ""}, part]}
    body = (await ranker.http.post("/rerank", json=asked)).json()
    for path in ("/v1/rerank", "/v2/rerank"):
        ranker.core.kept.clear()
        same = (await ranker.http.post(path, json=asked)).json()
        assert body == same | {name: body[name] for name in ("id", "created")}
    assert [result["index"] for result in body["results"]] == [0, 2, 1]
    assert body["meta"] == {"tokens": {"input_tokens": body["usage"]["prompt_tokens"], "output_tokens": 0}}
    assert [result["document"]["text"] for result in body["results"]] == ["long " * 9, "of a red circle", ""]
    first = ranker.core.requests[:3]
    assert prompts(ranker)[0] == RANK.format("q", "long " * 9) and RANK.format("q", "NULL") in prompts(ranker)
    tokens = [ranker.context.renderer.tokenizer.token_to_id(answer) for answer in ("yes", "no")]
    assert all(request.pooling.token_ids == tokens for request in first)
    lengths = sorted((len(request.prompt_token_ids) for request in first), reverse=True)
    expected = [1 / (1 + math.exp(1 - length / 64)) for length in lengths]
    assert np.allclose([result["relevance_score"] for result in body["results"]], expected)
    few = (await ranker.http.post("/rerank", json=asked | {"top_n": 1, "return_documents": False})).json()
    assert few["results"] == [{name: body["results"][0][name] for name in ("index", "relevance_score")}]


@pytest.mark.parametrize(
    ("asked", "pairs"),
    [
        ({"queries": "a", "documents": "b"}, [("a", "b")]),
        ({"text_1": "a", "text_2": ["b", "c"]}, [("a", "b"), ("a", "c")]),
        (
            {"queries": ["a", "b"], "documents": [{"text": "c", "image": None}, {"content": "d"}]},
            [("a", "c"), ("b", "d")],
        ),
    ],
)
async def test_score(ranker: Served, asked: dict[str, Any], pairs: list[tuple[str, str]]) -> None:
    ranker.core.pool = lambda request: [-2000.0, float(request.request_id[-1] == "1")]
    for path in ("/score", "/v1/score"):
        ranker.core.requests.clear()
        body = (await ranker.http.post(path, json=asked)).json()
        assert prompts(ranker) == [RANK.format(*pair) for pair in pairs]
        assert body["data"] == [{"index": i, "object": "score", "score": 0.0} for i in range(len(pairs))]


async def test_scores_of_an_embedding_server_are_cosines(embedder: Served) -> None:
    """Only a query has the instruction."""
    body = {"instruction": "Find it.", "documents": ["b", "c " * 40]}
    scored = (await embedder.http.post("/score", json=body | {"queries": "a"})).json()["data"]
    asked = prompts(embedder)
    assert "Find it." in asked[0] and asked[1:] == [EMBED.format(text) for text in body["documents"]]
    query, *documents = ([len(request.prompt_token_ids), 1, -2, 3] for request in embedder.core.requests)
    expected = [np.dot(query, each) / np.linalg.norm(query) / np.linalg.norm(each) for each in documents]
    assert np.allclose([item["score"] for item in scored], expected)
    ranked = (await embedder.http.post("/rerank", json=body | {"query": "a"})).json()["results"]
    assert {result["index"]: result["relevance_score"] for result in ranked} == {
        item["index"]: item["score"] for item in scored
    }


@pytest.mark.parametrize("name", [{}, {"uuid": "q"}], ids=["plain", "named"])
async def test_media_of_a_query_are_fetched_hashed_and_decoded_once(
    name: dict[str, str], ranker: Served, web: SlowWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.go.set()
    decoded, hashed = Counted("media_decodes_total"), []
    monkeypatch.setattr(loader, "content_digest", lambda *content: hashed.append(1) or content_digest(*content))
    query = {"content": [web.part | name, image(57), serving.video()]}
    body = {"query": query, "documents": ["d"] * MAX_REQUESTS, "cache_salt": "s"}
    response = await ranker.http.post("/rerank", json=body)
    assert response.status_code == 200, response.text
    assert [len(request.media) for request in ranker.core.requests] == [3] * MAX_REQUESTS
    assert len(web.requests) == 1 and len(hashed) == 3 and decoded.since() == [3]
    if name:  # bound with its URL
        assert (await ranker.http.post("/rerank", json=body)).status_code == 200 and len(web.requests) == 1
        ranker.core.held = "facts"  # the engine has lost the patches
        assert (await ranker.http.post("/rerank", json=body)).status_code == 200
        assert len(web.requests) == 2, "downloaded again once, not for each document"


async def test_too_many_documents_are_refused_before_the_query_is_downloaded(ranker: Served, web: SlowWeb) -> None:
    web.go.set()
    with ranker.context.requests.reserve(2):  # of another request
        body = {"query": {"content": [web.part]}, "documents": ["d"] * (MAX_REQUESTS - 1)}
        check_error(await ranker.http.post("/rerank", json=body), 429, "overloaded")
    assert not web.requests


@pytest.mark.parametrize(("path", "body", "says"), [
    ("/v1/embeddings", {}, "'input' or 'messages'"),
    ("/v1/embeddings", {"input": ["a", 1]}, "cannot be mixed"),
    ("/v1/embeddings", {"input": "a", "dimensions": HIDDEN_SIZE + 1}, f"has {HIDDEN_SIZE}"),
    ("/v1/embeddings", {"input": [[10**6], [10**6]]}, "input[0]: Invalid 'input': token id 1000000 out of range"),
    ("/v1/embeddings", {"input": [257] * (serving.MAX_MODEL_LEN + 1)}, "--max-model-len"),
    ("/v1/embeddings", {"input": ["a"] * (MAX_REQUESTS + 1)}, "--max-num-queued-reqs"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "2049 inputs are more than 2048"),
    ("/v1/embeddings", {"input": ["a"] * 1000, "instruction": "x" * 5000}, "query and instruction, of 5000 characters"),
    ("/v1/embeddings", {"instruction": "x", "messages": [{"role": "system", "content": "y"}]}, "not both"),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": [DAMAGED]}]}, "image 1"),
    ("/score", {"queries": ["a", "b"], "documents": ["c"]}, "2 queries for 1 documents"),
    ("/score", {"queries": "a", "text_1": "b", "documents": "c"}, "either 'queries' or 'text_1'"),
    ("/rerank", {"query": "a"}, "'documents'"),
    ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "Invalid 'documents': expected `array` of length <= 2048"),
    ("/rerank", {"query": "a" * 5000, "documents": ["b"] * 1000}, "each of 1000 inputs"),
    ("/score", {"queries": {"content": [{"type": "text", "text": ""}] * 4096}, "documents": ["b"] * 2048},
     "more than 4194304 characters"),
    ("/rerank", {"query": "a", "documents": [{"content": [DAMAGED]}]}, "documents[0]: image 1"),
    ("/rerank", {"query": "a", "documents": [{"content": [{"type": "image", "uuid": "u"}]}] * 2, "cache_salt": "b"},
     "documents[0]: image 1"),
    ("/rerank", {"query": "a", "documents": [{"text": "b", "image": "c"}]}, "Unknown parameter: 'documents[0].image'"),
    ("/rerank", {"query": "a", "documents": [{"text": "b", "content": "c"}]}, "either `text` or `content`"),
    ("/rerank", {"query": "a", "documents": "b", "stream": True}, "Unknown parameter"),
])  # fmt: skip
async def test_what_is_wrong_is_said(serve: Serve, path: str, body: dict[str, Any], says: str) -> None:
    async with serve(runner="pooling", convert="embed" if path == "/v1/embeddings" else "classify") as served:
        response = await served.http.post(path, json=body)
        status = 404 if "cache_salt" in body else 400
        assert response.status_code == status and says in response.json()["error"]["message"], response.text
        assert not served.core.requests


async def test_token_ids_cannot_have_placeholders(embedder: Served) -> None:
    response = await embedder.http.post("/v1/embeddings", json={"input": embedder.encode("<|image_pad|>")})
    check_error(response, 400, "invalid_value", "placeholder for media")


async def test_a_failure_ends_all_inputs(embedder: Served) -> None:
    embedder.core.hold = True
    asking = asyncio.create_task(embedder.http.post("/v1/embeddings", json={"input": ["a", "b", "c"]}))
    await embedder.core.has_requests(3)
    failing, *others = embedder.core.requests
    await embedder.core.end(failing, "error", Problem("it is too long"))
    check_error(await asking, 400, "invalid_value", "it is too long")
    await embedder.core.has_aborted(*(request.request_id for request in others))


@pytest.mark.parametrize(
    ("settings", "offered"),
    [
        ({}, {"/v1/chat/completions", "/v1/completions", "/v1/responses"}),
        ({"convert": "embed"}, {"/v1/embeddings", *SCORES}),
        ({"runner": "pooling", "convert": "classify"}, SCORES),
    ],
)
async def test_a_server_has_the_endpoints_of_its_task(serve: Serve, settings: Any, offered: set[str]) -> None:
    async with serve(**settings) as served:
        for path in ENGINE_PATHS:
            response = await served.http.post(path, json={})
            if path in offered:
                assert response.status_code == 400
            else:
                check_error(response, 404, "unknown_url", f"{path} needs --runner ")


def vocabulary(*tokens: str) -> SimpleNamespace:
    """Of a tokenizer."""
    return SimpleNamespace(token_to_id={token: number for number, token in enumerate(tokens)}.get)


@pytest.mark.parametrize(
    ("flags", "modules", "kind"),
    [
        ({}, None, "generate"),
        ({}, ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"], "embed"),
        ({}, ["sentence_transformers.models.Transformer", "a.LogitScore"], "classify"),
        ({"runner": "pooling"}, None, "embed"),
        ({"convert": "classify"}, ["a.Pooling"], "classify"),
        ({"runner": "generate"}, ["a.Pooling"], "generate"),
    ],
)
def test_the_checkpoint_sets_the_default_task(
    tmp_path: Path, flags: dict[str, Any], modules: list[str] | None, kind: TaskKind
) -> None:
    if modules is not None:
        (tmp_path / "modules.json").write_text(json.dumps([{"type": name} for name in modules]))
    task = Task.of(EngineConfig(**flags), tmp_path, 8, 2, vocabulary("no", "yes"))
    assert task.kind == kind and task.pooling.token_ids == ([1, 0] if kind == "classify" else [])


def test_flags_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--convert needs --runner"):
        EngineConfig(runner="generate", convert="embed").validate()
    for tokens in (["yes"], ["other", "no", "yes"]):  # the model has two tokens
        with pytest.raises(ConfigError, match="lacks"):
            Task.of(EngineConfig(convert="classify"), tmp_path, 8, 2, vocabulary(*tokens))
    (tmp_path / "modules.json").write_text("no JSON")
    with pytest.raises(ConfigError, match="modules.json"):
        Task.of(EngineConfig(), tmp_path, 8, 2, vocabulary())
