import asyncio
import base64
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mini_engine.api.chat import MediaRef
from mini_engine.api.media_loader import FetchedItem, MediaLoader
from mini_engine.api.media_settings import KeyedSettings
from mini_engine.api.timings import RequestClock
from mini_engine.media.errors import MediaError
from mini_engine.media.policy import MediaPolicy
from mini_engine.media.processor import MediaProcessor, ProcessedItem
from mini_engine.metrics import REGISTRY
from tests import clips
from tests.api.patience import PATIENCE
from tests.api.peers import eventually
from tests.api.serving import image, media_loader, media_settings
from tests.web import WebServer, response


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
        self.step, self.patch_size = processor.step, processor.patch_size
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
        assert self.door.wait(PATIENCE)
        with self.lock:
            self.inside -= 1
        return process(*args, **more)


async def fetch(one: MediaLoader, refs: list[MediaRef]) -> list[FetchedItem]:
    """By the settings of a server without flags."""
    processor: Any = one.processor
    whole = processor.processor if isinstance(processor, Gated) else processor
    keyed = KeyedSettings.of(media_settings(whole).server, ("tiny", None))
    return await one.fetch(refs, [keyed] * len(refs), await one.download(refs, lambda _: None))


async def load(one: MediaLoader, refs: list[MediaRef]) -> list[ProcessedItem]:
    """Both steps; equal items come once for each."""
    fetched = await fetch(one, refs)
    processed = await one.process(fetched, RequestClock())
    return [processed[item.media_hash] for item in fetched]


def loader(processor: Any, threads: int = 2) -> MediaLoader:
    return media_loader(processor, threads=threads)


def test_items_come_in_order(processor: MediaProcessor) -> None:
    one = loader(processor)
    items = asyncio.run(load(one, [image_ref(1, 112), video_ref(), image_ref(2, 56)]))
    assert [item.modality for item in items] == ["image", "video", "image"]
    assert [items[0].grid_thw, items[2].grid_thw] == [(1, 8, 8), (1, 4, 4)]
    one.close()


def test_an_item_of_a_web_server(processor: MediaProcessor) -> None:
    policy = MediaPolicy(None, 1 << 20, ["127.0.0.1"])
    one = media_loader(processor, policy, 1)
    png = base64.b64decode(image()["image_url"]["url"].partition(",")[2])
    with WebServer(response(png)) as web:
        refs = [MediaRef("image", f"http://127.0.0.1:{web.port}/a.png", "image 1"), image_ref(2)]
        first, second = asyncio.run(fetch(one, refs))
    assert first.media_hash == second.media_hash
    one.close()


def test_one_who_leaves_frees_the_thread_that_fetches_for_it(processor: MediaProcessor) -> None:
    policy = MediaPolicy(None, 1 << 20, ["127.0.0.1"])
    one = media_loader(processor, policy, 1)
    asked, go = threading.Event(), threading.Event()

    def never_end(connection: socket.socket, _: str) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        asked.set()
        assert go.wait(PATIENCE)

    async def scenario(port: int) -> None:
        loading = asyncio.create_task(fetch(one, [MediaRef("image", f"http://127.0.0.1:{port}/", "image 1")]))
        await asyncio.to_thread(asked.wait, PATIENCE)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        async with asyncio.timeout(20):  # the only thread is free long before --media-fetch-timeout
            await fetch(one, [image_ref()])

    with WebServer(never_end) as web:
        asyncio.run(scenario(web.port))
        go.set()
    one.close()


def test_a_bad_item_fails_the_load_by_its_name(processor: MediaProcessor) -> None:
    one = loader(processor)
    with pytest.raises(MediaError, match="video 9"):
        asyncio.run(load(one, [image_ref(), BROKEN]))
    one.close()


def test_no_more_items_at_work_than_threads(processor: MediaProcessor) -> None:
    async def scenario() -> None:
        gated = Gated(processor)
        one = loader(gated)
        loading = asyncio.create_task(load(one, [image_ref(number, 56 + number) for number in range(5)]))
        await eventually(lambda: gated.inside == 2)
        gated.door.set()
        assert len(await loading) == 5
        assert gated.most == 2
        one.close()

    asyncio.run(scenario())


def test_what_is_kept_already_does_not_wait_for_what_is_decoded(processor: MediaProcessor) -> None:
    """Whether it is kept is known by its hash, so hashing has threads of its own."""

    async def scenario() -> None:
        gated = Gated(processor)
        one = loader(gated, threads=1)
        loading = asyncio.create_task(load(one, [image_ref()]))
        await eventually(lambda: gated.inside == 1)
        async with asyncio.timeout(PATIENCE):
            assert len(await fetch(one, [image_ref(2, 70), image_ref(3, 84)])) == 2
        assert gated.inside == 1
        gated.door.set()
        await loading
        one.close()

    asyncio.run(scenario())


def test_a_cancelled_load_does_not_start_what_was_in_line(processor: MediaProcessor) -> None:
    async def scenario() -> None:
        gated = Gated(processor)
        one = loader(gated, threads=1)
        loading = asyncio.create_task(load(one, [image_ref(number, 56 + number) for number in range(4)]))
        await eventually(lambda: gated.inside == 1)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        gated.door.set()
        assert len(await load(one, [image_ref(5, 70)])) == 1  # the thread is free for others
        assert gated.most == 1
        one.close()

    asyncio.run(scenario())


def test_equal_items_have_equal_hashes(processor: MediaProcessor) -> None:
    one = loader(processor)
    first, again, other, video = asyncio.run(
        fetch(one, [image_ref(1), image_ref(2), image_ref(3, side=112), video_ref()])
    )
    assert first.media_hash == again.media_hash
    assert len({item.media_hash for item in (first, other, video)}) == 3
    assert {len(item.media_hash) for item in (first, other, video)} == {16}
    one.close()


def test_equal_items_are_processed_once(processor: MediaProcessor) -> None:
    async def scenario() -> None:
        gated = Gated(processor)
        one = loader(gated)
        decodes = REGISTRY.get_sample_value("mini_engine:media_decodes_total")
        loading = [asyncio.create_task(load(one, [image_ref(1), image_ref(2)])) for _ in range(2)]
        await eventually(lambda: gated.inside == 1 and one._flights != {} and waiters(one) == [2])
        gated.door.set()
        (first, same), (other, _) = await asyncio.gather(*loading)
        assert first is same is other
        assert gated.most == 1
        assert REGISTRY.get_sample_value("mini_engine:media_decodes_total") == decodes + 1
        assert one._flights == {}
        one.close()

    asyncio.run(scenario())


def waiters(one: MediaLoader) -> list[int]:
    return [flight.waiters for flight in one._flights.values()]


def test_one_who_leaves_does_not_cancel_the_other(processor: MediaProcessor) -> None:
    async def scenario() -> None:
        gated = Gated(processor)
        one = loader(gated)
        first, second = (asyncio.create_task(load(one, [image_ref()])) for _ in range(2))
        await eventually(lambda: gated.inside == 1 and waiters(one) == [2])
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await eventually(lambda: waiters(one) == [1])
        gated.door.set()
        assert len(await second) == 1
        assert gated.most == 1
        one.close()

    asyncio.run(scenario())


def test_the_last_who_leaves_gives_the_work_up(processor: MediaProcessor) -> None:
    async def scenario() -> None:
        gated = Gated(processor)
        one = loader(gated)
        leaving = [asyncio.create_task(load(one, [image_ref()])) for _ in range(2)]
        await eventually(lambda: gated.inside == 1 and waiters(one) == [2])
        (flight,) = one._flights.values()
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await eventually(lambda: one._flights == {})
        assert flight.work.cancelled()
        coming = asyncio.create_task(load(one, [image_ref()]))
        await eventually(lambda: gated.inside == 2)  # a start of its own
        gated.door.set()
        assert len(await coming) == 1
        one.close()

    asyncio.run(scenario())


def test_a_failure_is_shared_and_named_for_each(processor: MediaProcessor) -> None:
    async def scenario() -> None:
        one = loader(processor)
        (broken,) = await fetch(one, [BROKEN])
        (renamed,) = await fetch(one, [MediaRef("video", BROKEN.url, "video 2")])
        decodes = REGISTRY.get_sample_value("mini_engine:media_decodes_total")
        failures = await asyncio.gather(
            one.process([broken], RequestClock()), one.process([renamed], RequestClock()), return_exceptions=True
        )
        first, second = map(str, failures)
        assert first.startswith("video 9: ")
        assert second == first.replace("video 9", "video 2")
        assert [type(failure) for failure in failures] == [MediaError, MediaError]
        assert REGISTRY.get_sample_value("mini_engine:media_decodes_total") == decodes
        assert one._flights == {}
        one.close()

    asyncio.run(scenario())
