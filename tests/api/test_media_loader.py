"""`MediaLoader`: order, hashes, limits on work at once, and work that several requests share."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mini_engine.api.chat import MediaRef
from mini_engine.api.media_loader import FetchedItem, MediaLoader
from mini_engine.api.media_settings import KeyedSettings
from mini_engine.api.timings import RequestClock
from mini_engine.media.errors import MediaError
from mini_engine.media.policy import MediaPolicy
from mini_engine.media.processor import MediaProcessor, ProcessedItem
from tests.api.patience import PATIENCE, cancelled, eventually, settle
from tests.api.serving import Counted, GatedProcessor, image, media_loader, media_settings, video


def video_ref(number: int = 1) -> MediaRef:
    return MediaRef("video", video()["video_url"]["url"], f"video {number}")


def image_ref(number: int = 1, side: int = 56) -> MediaRef:
    return MediaRef("image", image(side)["image_url"]["url"], f"image {number}")


def broken_ref(number: int) -> MediaRef:
    return MediaRef("video", "data:video/mp4;base64," + base64.b64encode(b"xxxx").decode(), f"video {number}")


async def fetch(one: MediaLoader, refs: list[MediaRef]) -> list[FetchedItem]:
    """By the settings of a server without flags."""
    processor: Any = one.processor
    whole = processor.processor if isinstance(processor, GatedProcessor) else processor
    keyed = KeyedSettings.of(media_settings(whole).server, ("tiny", None))
    return await one.fetch(refs, keyed, await one.download(refs, lambda _: None))


async def load(one: MediaLoader, *refs: MediaRef) -> list[ProcessedItem]:
    """Both steps; equal items come once for each."""
    fetched = await fetch(one, list(refs))
    processed = await one.process(fetched, RequestClock())
    return [processed[item.media_hash] for item in fetched]


@pytest.fixture
async def gated(processor: MediaProcessor) -> GatedProcessor:
    return GatedProcessor(processor)


@pytest.fixture(params=[2])
async def loader(gated: GatedProcessor, request: pytest.FixtureRequest) -> AsyncIterator[MediaLoader]:
    """With so many threads."""
    made = media_loader(gated, MediaPolicy(None, 1 << 20, ["127.0.0.1"]), threads=request.param)
    yield made
    gated.door.set()
    made.close()


one_thread = pytest.mark.parametrize("loader", [1], indirect=True)


async def test_no_more_items_are_processed_than_there_are_threads(loader: MediaLoader, gated: GatedProcessor) -> None:
    loading = asyncio.create_task(load(loader, *(image_ref(number, 56 + number) for number in range(5))))
    await eventually(lambda: gated.inside == 2)
    await settle()
    gated.door.set()
    assert len(await loading) == 5 and gated.most == 2


@one_thread
async def test_fetching_does_not_wait_for_processing(loader: MediaLoader, gated: GatedProcessor) -> None:
    """Whether an item is cached is known by its hash, so hashing has threads of its own."""
    loading = asyncio.create_task(load(loader, image_ref()))
    await eventually(lambda: gated.inside == 1)
    async with asyncio.timeout(PATIENCE):
        assert len(await fetch(loader, [image_ref(2, 70), image_ref(3, 84)])) == 2
    assert gated.inside == 1 and not loading.done()
    gated.door.set()
    await loading


@one_thread
async def test_cancelled_load_does_not_start_what_was_queued(loader: MediaLoader, gated: GatedProcessor) -> None:
    counted = Counted("media_decodes_total")
    loading = asyncio.create_task(load(loader, *(image_ref(number, 56 + number) for number in range(4))))
    await eventually(lambda: gated.inside == 1)
    await cancelled(loading)
    gated.door.set()
    await load(loader, image_ref(5, 70))
    assert gated.most == 1 and counted.since() == [1]


# --- shared work -----------------------------------------------------------------------------------------------------


async def test_equal_items_are_processed_once(loader: MediaLoader, gated: GatedProcessor) -> None:
    counted = Counted("media_decodes_total")
    loading = [asyncio.create_task(load(loader, image_ref(1), image_ref(2))) for _ in range(2)]
    await eventually(lambda: gated.inside == 1)
    await settle()
    gated.door.set()
    (first, same), (other, _) = await asyncio.gather(*loading)
    assert first is same is other
    assert gated.most == 1 and counted.since() == [1]
    assert await load(loader, image_ref()) != [first], "nothing is kept"


async def test_request_that_leaves_does_not_cancel_the_other(loader: MediaLoader, gated: GatedProcessor) -> None:
    first, second = (asyncio.create_task(load(loader, image_ref())) for _ in range(2))
    await eventually(lambda: gated.inside == 1)
    await settle()
    await cancelled(first)
    gated.door.set()
    assert len(await second) == 1 and gated.most == 1


async def test_work_ends_with_the_last_request_and_begins_again_for_the_next(
    loader: MediaLoader, gated: GatedProcessor
) -> None:
    counted = Counted("media_decodes_total")
    leaving = [asyncio.create_task(load(loader, image_ref())) for _ in range(2)]
    await eventually(lambda: gated.inside == 1)
    await settle()
    for task in leaving:
        await cancelled(task)
    coming = asyncio.create_task(load(loader, image_ref()))
    await eventually(lambda: gated.inside == 2)
    gated.door.set()
    assert len(await coming) == 1 and counted.since() == [1]


async def test_failure_is_shared_and_named_for_each(loader: MediaLoader) -> None:
    counted = Counted("media_decodes_total")
    items = [await fetch(loader, [broken_ref(number)]) for number in (9, 2)]
    failures = await asyncio.gather(*(loader.process(one, RequestClock()) for one in items), return_exceptions=True)
    first, second = map(str, failures)
    assert first.startswith("video 9: ") and second == first.replace("video 9", "video 2")
    assert [type(failure) for failure in failures] == [MediaError, MediaError] and counted.since() == [0]
