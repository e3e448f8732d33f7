"""POST /tokenize and /detokenize."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mini_engine.media.processor import MediaProcessor
from tests.api.serving import MAX_MODEL_LEN, image, serve, words

TEXTS = ["hello", "a red circle", "caf\u00e9 \U0001f388", "<|im_start|>user", "an <|image_pad|>", ""]


def test_there_and_back(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor)) as served:
            served.context.renderer.max_tokens = MAX_MODEL_LEN
            for text in [*TEXTS, "some words " * 3000]:
                sent = {"prompt": text, "return_token_strs": True}
                response = await served.http.post("/tokenize", json=sent)
                if len(text) > 10_000:
                    assert response.status_code == 400 and f"{MAX_MODEL_LEN}" in response.text
                    continue
                body = response.json()
                assert body["tokens"] == processor.hf_processor.tokenizer(text)["input_ids"]
                assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), MAX_MODEL_LEN)
                assert processor.hf_processor.tokenizer.convert_tokens_to_ids(body["token_strs"]) == body["tokens"]
                back = await served.http.post("/detokenize", json={"model": "tiny", "tokens": body["tokens"]})
                assert back.json() == {"prompt": text}

    asyncio.run(scenario())


def test_a_conversation_as_the_engine_gets_it(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor)) as served:
            for content in ("what?", [image(), {"type": "text", "text": "what?"}]):
                await served.ask(content)
                messages = [{"role": "user", "content": content}]
                body = (await served.http.post("/tokenize", json={"model": "tiny", "messages": messages})).json()
                engines = served.core.requests[-1]
                counted = iter([item.num_tokens for item in engines.media])
                expanded = [
                    token
                    for one in body["tokens"]
                    for token in [one] * (next(counted) if one == processor.hf_processor.image_token_id else 1)
                ]
                assert expanded == engines.prompt_token_ids
                assert body["token_strs"] is None

    asyncio.run(scenario())


MESSAGES = [{"role": "user", "content": "x"}]
BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
    ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "add_special_tokens"),
    ("/tokenize", {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, 400, "add_generation_prompt"),
    ("/tokenize", {"prompt": "x", "frobnicate": 1}, 400, "frobnicate"),
    ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
    ("/detokenize", {"tokens": ["1"]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_errors(
    processor: MediaProcessor, tmp_path: Path, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor)) as served:
            response = await served.http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text

    asyncio.run(scenario())
