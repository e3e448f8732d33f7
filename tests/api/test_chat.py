"""Chat messages to token ids, with a place for each image and video; and what cannot become a prompt."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from mini_engine.api.chat import ChatRenderer, MediaRef, collect_media
from mini_engine.api.errors import ApiError
from mini_engine.api.protocol import ChatMessage
from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import CachedMedia, MediaItem
from tests import tiny_processor


@pytest.fixture(scope="module")
def hf(processor: MediaProcessor) -> Any:
    return processor.hf_processor


@pytest.fixture(scope="module")
def renderer(hf: Any) -> ChatRenderer:
    return ChatRenderer(hf)


def image(url: str = "data:image/png;base64,AA") -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def video(url: str = "data:video/mp4;base64,AA") -> dict:
    return {"type": "video_url", "video_url": {"url": url}}


def text(content: str) -> dict:
    return {"type": "text", "text": content}


def render(renderer: ChatRenderer, messages: list[dict]) -> list[int]:
    return renderer.render(msgspec.convert(messages, list[ChatMessage]))


def collect(messages: list[dict], limits: dict[str, int] | None = None) -> list[MediaRef]:
    return collect_media(msgspec.convert(messages, list[ChatMessage]), limits or {})


def user(*content: Any) -> list[dict]:
    return [{"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}]


def test_collect_in_order_and_named() -> None:
    messages = user(video("a"), text("x"), image("b"), video("c"))
    messages += user({"type": "image_url", "image_url": {"url": "d"}})
    assert [(ref.modality, ref.url, ref.name) for ref in collect(messages)] == [
        ("video", "a", "video 1"),
        ("image", "b", "image 1"),
        ("video", "c", "video 2"),
        ("image", "d", "image 2"),
    ]


def test_limits() -> None:
    messages = user(video(), image(), image()) + user(video())
    assert len(collect(messages, {"video": 2})) == 4
    with pytest.raises(ApiError, match="has 2 video items, more than the 1 that --limit-mm-per-prompt allows"):
        collect(messages, {"video": 1})
    with pytest.raises(ApiError, match="has 2 image items, more than the 0"):
        collect(messages, {"video": 2, "image": 0})


@pytest.mark.parametrize(
    "messages",
    [
        user("look: <|video_pad|>"),
        user(video(), text("<|vision_start|>")),
        user(text("a"), text("<|image"), text("_pad|>")),
        [{"role": "system", "content": "<|image_pad|>"}, *user("x")],
        [*user("x"), {"role": "assistant", "content": "<|vision_end|>"}, *user("y")],
    ],
)
def test_text_cannot_pass_for_media(renderer: ChatRenderer, messages: list[dict]) -> None:
    with pytest.raises(ApiError, match=r"the text holds <\|.*\|>, which stands for media"):
        render(renderer, messages)


def test_developer_role_becomes_system_where_the_template_knows_none(hf: Any, renderer: ChatRenderer) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *user("x")]
    assert "<|im_start|>system" in hf.tokenizer.decode(render(renderer, messages))
    knows = ChatRenderer(hf, tiny_processor.CHAT_TEMPLATE + "{# developer #}")
    assert "<|im_start|>developer" in hf.tokenizer.decode(render(knows, messages))


def test_other_templates(hf: Any) -> None:
    plain = ChatRenderer(hf, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert hf.tokenizer.decode(render(plain, user("hello"))) == "hello"
    deaf = ChatRenderer(hf, "{% for m in messages %}no media here{% endfor %}")
    with pytest.raises(ApiError, match="wrote 0 placeholders for 1 media items"):
        render(deaf, user(video()))
    strict = ChatRenderer(
        hf, "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"
    )
    with pytest.raises(ApiError, match="the chat template refuses these messages: one message only"):
        render(strict, user("a") + user("b"))
    with pytest.raises(ApiError, match="chat template"):
        ChatRenderer(hf, "{% for %}")


def source(modality: Any, num_tokens: int, text: str | None = None) -> tuple[bytes, CachedMedia]:
    return b"hash", CachedMedia(b"hash", modality, num_tokens, (1, 2, 2), None, text)


def places(media: list[MediaItem]) -> list[tuple[list[int], int]]:
    return [(item.offsets, item.num_tokens) for item in media]


def test_placeholders_become_as_long_as_their_items(hf: Any, renderer: ChatRenderer) -> None:
    picture, clip = hf.image_token_id, hf.video_token_id
    wanted = [source("video", 3), source("video", 1), source("image", 2)]
    token_ids, media = renderer.expand([1, clip, clip, 2, picture], wanted)
    assert token_ids == [1, clip, clip, clip, clip, 2, picture, picture]
    assert places(media) == [([1], 3), ([4], 1), ([6], 2)]


def test_text_between_the_runs_of_an_item(hf: Any, renderer: ChatRenderer) -> None:
    clip = hf.video_token_id
    times = [hf.tokenizer.encode(f"<{time} seconds>") for time in ("0.5", "12.5")]
    written = "<0.5 seconds><|video_pad|><12.5 seconds><|video_pad|>"
    token_ids, media = renderer.expand([1, clip, clip, 2], [source("video", 6, written), source("video", 2)])
    first = 1 + len(times[0])
    second = first + 3 + len(times[1])
    assert token_ids == [1, *times[0], *[clip] * 3, *times[1], *[clip] * 3, *[clip] * 2, 2]
    assert places(media) == [([first, second], 6), ([second + 3], 2)]


def test_threads_at_once(renderer: ChatRenderer) -> None:
    conversations = [user("What is it? Grüße, 世界 🎈"), user(text("Compare"), video(), text("with"), image())]
    expected = [render(renderer, messages) for messages in conversations]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda one: render(renderer, one), conversations * 50)) == expected * 50
