import asyncio
import base64
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mini_engine.api.chat import MediaRef
from mini_engine.api.media_loader import MediaLoader
from mini_engine.media.errors import MediaError
from mini_engine.media.fetch import MediaPolicy
from mini_engine.media.processor import MediaProcessor
from tests.api.peers import eventually
from tests.api.serving import HASH_KEYS, image
from tests.media import clips


def video_ref(number: int = 1, **clip: Any) -> MediaRef:
    url = "data:video/mp4;base64," + base64.b64encode(clips.encode(**clip)).decode()
    return MediaRef("video", url, f"video {number}")


def image_ref(number: int = 1, side: int = 56) -> MediaRef:
    return MediaRef("image", image(side)["image_url"]["url"], f"image {number}")


BROKEN = MediaRef("video", "data:video/mp4;base64,AAAA", "video 9")


class Gated:
    """A processor that waits at its door: a barrier that holds an item at a known stage."""

    def __init__(self, processor: MediaProcessor):
        self.processor = processor
        self.inside = 0
        self.most = 0
        self.door = threading.Event()
        self.lock = threading.Lock()

    def process_image(self, *args: Any, **more: Any) -> Any:
        return self._through(self.processor.process_image, *args, **more)

    def process_video(self, *args: Any, **more: Any) -> Any:
        return self._through(self.processor.process_video, *args, **more)

    def _through(self, process: Callable[..., Any], *args: Any, **more: Any) -> Any:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self.door.wait(5)
        with self.lock:
            self.inside -= 1
        return process(*args, **more)


def loader(processor: Any, sampling: Any, threads: int = 2) -> MediaLoader:
    return MediaLoader(processor, MediaPolicy(None, 1 << 20), sampling, HASH_KEYS, threads)


def test_items_come_in_order(processor: MediaProcessor) -> None:
    one = loader(processor, processor.default_sampling)
    items = asyncio.run(one.load([image_ref(1, 112), video_ref(), image_ref(2, 56)]))
    assert [item.processed.modality for item in items] == ["image", "video", "image"]
    assert [items[0].processed.grid_thw, items[2].processed.grid_thw] == [(1, 8, 8), (1, 4, 4)]
    one.close()


def test_a_bad_item_fails_the_load_by_its_name(processor: MediaProcessor) -> None:
    one = loader(processor, processor.default_sampling)
    with pytest.raises(MediaError, match="video 9"):
        asyncio.run(one.load([image_ref(), BROKEN]))
    one.close()


def test_no_more_items_at_work_than_threads(processor: MediaProcessor) -> None:
    async def scenario() -> None:
        gated = Gated(processor)
        one = loader(gated, processor.default_sampling)
        loading = asyncio.create_task(one.load([image_ref(number) for number in range(5)]))
        await eventually(lambda: gated.inside == 2)
        gated.door.set()
        assert len(await loading) == 5
        assert gated.most == 2
        one.close()

    asyncio.run(scenario())


def test_a_cancelled_load_does_not_start_what_was_in_line(processor: MediaProcessor) -> None:
    async def scenario() -> None:
        gated = Gated(processor)
        one = loader(gated, processor.default_sampling, threads=1)
        loading = asyncio.create_task(one.load([image_ref(number) for number in range(4)]))
        await eventually(lambda: gated.inside == 1)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        gated.door.set()
        assert len(await one.load([image_ref()])) == 1  # the thread is free for others
        assert gated.most == 1
        one.close()

    asyncio.run(scenario())


def test_equal_items_have_equal_hashes(processor: MediaProcessor) -> None:
    one = loader(processor, processor.default_sampling)
    first, again, other, video = asyncio.run(
        one.load([image_ref(1), image_ref(2), image_ref(3, side=112), video_ref()])
    )
    assert first.media_hash == again.media_hash
    assert len({item.media_hash for item in (first, other, video)}) == 3
    assert {len(item.media_hash) for item in (first, other, video)} == {16}
    one.close()
