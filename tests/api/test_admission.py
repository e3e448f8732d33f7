"""How much is admitted at once, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mini_engine.api.admission import MediaAdmission, RequestAdmission
from mini_engine.api.errors import ApiError
from tests.api.patience import cancelled, settle
from tests.api.serving import Counted, metric


class Crowd:
    """Requests for places, which hold them until `leave`."""

    def __init__(self, limit: int):
        self.admission = MediaAdmission(limit, 1000)
        self.entered: list[int] = []  # numbers of items
        self.leave = asyncio.Event()

    async def hold(self, items: int) -> None:
        async with self.admission.places(items):
            self.entered.append(items)
            await self.leave.wait()

    async def come(self, *items: int) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self.hold(one)) for one in items]
        await settle()
        return tasks

    async def go(self, tasks: list[asyncio.Task[None]]) -> None:
        self.leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert self.admission.num_admitted == self.admission.num_waiting == 0


async def test_large_request_is_not_overtaken() -> None:
    crowd = Crowd(4)
    tasks = await crowd.come(3, 2, 1, 0)
    assert crowd.entered == [3, 0]  # 2 waits for places, 1 behind it although it would fit; 0 needs none
    assert crowd.admission.num_waiting == 2
    await crowd.go(tasks)
    assert sorted(crowd.entered) == [0, 1, 2, 3]


async def test_more_items_than_the_limit_run_alone() -> None:
    crowd = Crowd(2)
    tasks = await crowd.come(9, 1)
    assert crowd.entered == [9]
    await crowd.go(tasks)
    assert crowd.entered == [9, 1]


async def test_cancelled_wait_leaves_its_places_to_the_next() -> None:
    crowd = Crowd(2)
    tasks = await crowd.come(1, 2, 1)
    assert crowd.entered == [1]
    await cancelled(tasks[1])
    await settle()
    assert crowd.entered == [1, 1]
    await crowd.go(tasks)


@pytest.fixture
async def admission() -> AsyncIterator[MediaAdmission]:
    """For 1000 bytes, of which none are in flight at the end."""
    made = MediaAdmission(8, 1000)
    yield made
    assert made.inflight_bytes == metric("inflight_media_bytes") == 0


async def test_bytes_are_reserved_counted_as_they_arrive_and_released(admission: MediaAdmission) -> None:
    counted = Counted("requests_rejected_total{reason=inflight_media}")
    with admission.reserve(500) as first:
        first.receive(100)
        with admission.reserve(400), admission.reserve(0):
            assert admission.inflight_bytes == metric("inflight_media_bytes") == 1000
            for attempt in (lambda: first.receive(1), admission.reserve(1).__enter__):
                with pytest.raises(ApiError, match="1000 of the 1000 of --max-inflight-media-gb are in use") as caught:
                    attempt()
                assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "1")
            assert counted.since() == [2]
            first.correct(510)
            with admission.reserve(90):
                assert metric("inflight_media_bytes") == 1000


async def test_media_that_can_never_fit_are_a_400(admission: MediaAdmission) -> None:
    with admission.reserve(600) as reservation:
        for attempt in (
            lambda: reservation.receive(401),
            lambda: reservation.correct(1001),
            admission.reserve(1001).__enter__,
        ):
            with pytest.raises(ApiError, match="1001 bytes together, more than the 1000 of --max-inflight") as caught:
                attempt()
            assert (caught.value.status, caught.value.body.code) == (400, "media_too_large")


def test_unfinished_requests_are_limited() -> None:
    requests = RequestAdmission(1)
    with requests.admit(), pytest.raises(ApiError, match="1 unfinished requests") as caught, requests.admit():
        pass
    assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "1")
    assert requests.unfinished == 0
