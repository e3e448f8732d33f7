import asyncio

import pytest

from mini_engine.api.admission import ByteBudget, MediaAdmission, RequestAdmission
from mini_engine.api.errors import ApiError
from mini_engine.metrics import REGISTRY


async def hold(admission: MediaAdmission, items: int, entered: list[int], leave: asyncio.Event) -> None:
    async with admission.places(items):
        entered.append(items)
        await leave.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_large_request_is_not_overtaken() -> None:
    async def scenario() -> None:
        admission, entered, leave = MediaAdmission(4, 1000), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, items, entered, leave)) for items in (3, 2, 1, 0)]
        await settle()
        assert entered == [3, 0]  # 2 waits for places, 1 behind it although it would fit; 0 needs none
        assert admission.num_waiting == 2
        leave.set()
        await asyncio.gather(*tasks)
        assert sorted(entered) == [0, 1, 2, 3]
        assert admission.num_admitted == admission.num_waiting == 0

    asyncio.run(scenario())


def test_more_items_than_the_limit_run_alone() -> None:
    async def scenario() -> None:
        admission, entered, leave = MediaAdmission(2, 1000), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, items, entered, leave)) for items in (9, 1)]
        await settle()
        assert entered == [9]
        leave.set()
        await asyncio.gather(*tasks)
        assert admission.num_admitted == 0

    asyncio.run(scenario())


def test_a_cancelled_wait_leaves_its_places_to_the_next() -> None:
    async def scenario() -> None:
        admission, entered, leave = MediaAdmission(2, 1000), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, items, entered, leave)) for items in (1, 2, 1)]
        await settle()
        assert entered == [1]
        tasks[1].cancel()
        await settle()
        assert entered == [1, 1]
        tasks[2].cancel()
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert admission.num_admitted == admission.num_waiting == 0

    asyncio.run(scenario())


def rejected(reason: str) -> float:
    return REGISTRY.get_sample_value("mini_engine:requests_rejected_total", {"reason": reason}) or 0.0


def gauge() -> float | None:
    return REGISTRY.get_sample_value("mini_engine:inflight_media_bytes")


def test_bytes_are_reserved_counted_as_they_arrive_and_released() -> None:
    admission, before = MediaAdmission(8, 1000), rejected("inflight_media")
    with admission.reserve(500) as first:
        first.receive(100)
        with admission.reserve(400), admission.reserve(0):
            assert admission.inflight_bytes == gauge() == 1000
            for attempt in (lambda: first.receive(1), admission.reserve(1).__enter__):
                with pytest.raises(ApiError, match="1000 of the 1000 of --max-inflight-media-gb are in use") as caught:
                    attempt()
                assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "1")
            assert rejected("inflight_media") == before + 2
            first.correct(510)
            with admission.reserve(90):
                assert gauge() == 1000
    assert admission.inflight_bytes == gauge() == 0


def test_media_that_can_never_fit_are_a_400() -> None:
    admission = MediaAdmission(8, 1000)
    with admission.reserve(600) as reservation:
        for attempt in (lambda: reservation.receive(401), lambda: reservation.correct(1001)):
            with pytest.raises(ApiError, match="1001 bytes together, more than the 1000 of --max-inflight") as caught:
                attempt()
            assert (caught.value.status, caught.value.body.code) == (400, "media_too_large")
    with pytest.raises(ApiError, match="media_too_large|1001 bytes"), admission.reserve(1001):
        pass
    assert admission.inflight_bytes == gauge() == 0


def test_unfinished_requests() -> None:
    requests, before = RequestAdmission(1), rejected("queued_requests")
    with requests.admit():
        with pytest.raises(ApiError, match="1 unfinished requests") as caught, requests.admit():
            pass
        assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "1")
        assert rejected("queued_requests") == before + 1
    assert requests.unfinished == 0


def test_bodies_share_their_room() -> None:
    bodies = ByteBudget(100, "inflight_bodies")
    with bodies.reserve() as one, bodies.reserve() as another:
        one.receive(60)
        with pytest.raises(ApiError, match="60 of the 100 of --max-inflight-media-gb are in use"):
            another.receive(41)
        another.receive(40)
    assert bodies.inflight_bytes == 0
