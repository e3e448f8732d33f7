"""Chat messages to token ids, with a place for each image and video; and what cannot become a prompt."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from mini_engine.api.chat import ChatRenderer, MediaRef, PlacedItem, Placeholder, collect_media
from mini_engine.api.errors import ChatError
from mini_engine.api.protocol import ChatMessage
from mini_engine.media.processor import MediaProcessor
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


CONVERSATIONS = [
    user("What is it? Grüße, 世界 🎈"),
    user(text("What is it?"), text(" Tell me.")),
    user(image(), text("What colour?")),
    user(text("Compare"), video(), text("with"), image(), text("and"), video()),
    [
        {"role": "system", "content": "Be brief."},
        *user(video(), text("Which way does it move?")),
        {"role": "assistant", "content": "left"},
        *user(image(), image(), text("And these?")),
    ],
]


def as_template(messages: list[dict]) -> list[dict]:
    """The messages as Hugging Face templates know them."""

    def as_part(part: dict) -> dict:
        return part if part["type"] == "text" else {"type": part["type"].removesuffix("_url")}

    return [
        message if isinstance(message["content"], str) else message | {"content": list(map(as_part, message["content"]))}
        for message in messages
    ]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_ids_equal_those_of_the_processors_full_call(hf: Any, renderer: ChatRenderer, messages: list[dict]) -> None:
    refs = collect(messages)
    pixels = np.random.default_rng(0)
    media: dict[str, list[np.ndarray]] = {"image": [], "video": []}
    lengths = []
    for index, ref in enumerate(refs):
        shape = (60 + 40 * index, 90, 3)
        if ref.modality == "image":
            media["image"].append(pixels.integers(0, 256, shape, dtype=np.uint8))
            grid = hf.image_processor(media["image"][-1:], return_tensors="pt")["image_grid_thw"]
        else:
            media["video"].append(pixels.integers(0, 256, (4 + 2 * index, *shape), dtype=np.uint8))
            grid = hf.video_processor(media["video"][-1:], return_tensors="pt")["video_grid_thw"]
        lengths.append(Placeholder(ref.modality, int(grid.prod()) // 4))

    ours = renderer.expand(render(renderer, messages), lengths)

    prompt = hf.apply_chat_template(as_template(messages), tokenize=False, add_generation_prompt=True)
    images, videos = (media[kind] or None for kind in ("image", "video"))
    theirs = hf(text=[prompt], images=images, videos=videos, do_sample_frames=False)
    assert ours.token_ids == list(theirs["input_ids"][0])
    token_of = {"image": hf.image_token_id, "video": hf.video_token_id}
    for item, wanted in zip(ours.items, lengths, strict=True):
        stretch = ours.token_ids[item.offset : item.offset + item.length]
        assert stretch == [token_of[wanted.modality]] * wanted.num_tokens
        assert ours.token_ids[item.offset - 1] != token_of[wanted.modality]
    assert sum(item.length for item in ours.items) == sum(id in token_of.values() for id in ours.token_ids)


def test_collect_in_order_and_named() -> None:
    messages = user(video("a"), text("x"), image("b"), video("c"), {"type": "image", "image": "d"})
    messages += user({"type": "video", "url": "e"}, {"type": "image_url", "image_url": "f"})
    assert [(ref.modality, ref.url, ref.name) for ref in collect(messages)] == [
        ("video", "a", "video 1"),
        ("image", "b", "image 1"),
        ("video", "c", "video 2"),
        ("image", "d", "image 2"),
        ("video", "e", "video 3"),
        ("image", "f", "image 3"),
    ]


def test_limits() -> None:
    messages = user(video(), image(), image()) + user(video())
    assert len(collect(messages, {"video": 2})) == 4
    with pytest.raises(ChatError, match="has 2 video items, more than the 1 that --limit-mm-per-prompt allows"):
        collect(messages, {"video": 1})
    with pytest.raises(ChatError, match="has 2 image items, more than the 0"):
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
    with pytest.raises(ChatError, match=r"the text holds <\|.*\|>, which stands for media"):
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
    with pytest.raises(ChatError, match="wrote 0 placeholders for 1 media items"):
        render(deaf, user(video()))
    strict = ChatRenderer(
        hf, "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"
    )
    with pytest.raises(ChatError, match="the chat template refuses these messages: one message only"):
        render(strict, user("a") + user("b"))
    with pytest.raises(ValueError, match="chat template"):
        ChatRenderer(hf, "{% for %}")


def test_expand(hf: Any, renderer: ChatRenderer) -> None:
    picture, clip = hf.image_token_id, hf.video_token_id
    wanted = [Placeholder("video", 3), Placeholder("video", 1), Placeholder("image", 2)]
    expanded = renderer.expand([1, clip, clip, 2, picture], wanted)
    assert expanded.token_ids == [1, clip, clip, clip, clip, 2, picture, picture]
    assert expanded.items == [PlacedItem(1, 3), PlacedItem(4, 1), PlacedItem(6, 2)]
    for items in ([], [("image", 3)], [("video", 0)], [("video", 1), ("video", 1)]):
        with pytest.raises(ValueError, match="item"):
            renderer.expand([1, clip], [Placeholder(*item) for item in items])


def test_text_between_the_runs_of_an_item(hf: Any, renderer: ChatRenderer) -> None:
    clip = hf.video_token_id
    times = [hf.tokenizer.encode(f"<{time} seconds>") for time in ("0.5", "12.5")]
    text = "<0.5 seconds><|video_pad|><12.5 seconds><|video_pad|>"
    expanded = renderer.expand([1, clip, clip, 2], [Placeholder("video", 6, text), Placeholder("video", 2)])
    first = 1 + len(times[0])
    second = first + 3 + len(times[1])
    assert expanded.token_ids == [1, *times[0], *[clip] * 3, *times[1], *[clip] * 3, *[clip] * 2, 2]
    assert expanded.items == [PlacedItem(first, 6, [second]), PlacedItem(second + 3, 2)]


def test_threads_at_once(renderer: ChatRenderer) -> None:
    expected = [render(renderer, messages) for messages in CONVERSATIONS]
    with ThreadPoolExecutor(len(CONVERSATIONS)) as pool:
        assert list(pool.map(lambda one: render(renderer, one), CONVERSATIONS * 30)) == expected * 30
