import asyncio

import pytest

from mini_engine.api.admission import MediaAdmission, RequestAdmission
from mini_engine.api.errors import ApiError
from mini_engine.metrics import REGISTRY


async def hold(admission: MediaAdmission, items: int, entered: list[int], leave: asyncio.Event) -> None:
    async with admission.in_line(items):
        entered.append(items)
        await leave.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_large_request_is_not_overtaken() -> None:
    async def scenario() -> None:
        admission, entered, leave = MediaAdmission(4, 1000, 100), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, items, entered, leave)) for items in (3, 2, 1, 0)]
        await settle()
        assert entered == [3, 0]  # 2 waits for room, 1 behind it although it would fit; none needs none
        assert len(admission.waiting) == 2
        leave.set()
        await asyncio.gather(*tasks)
        assert sorted(entered) == [0, 1, 2, 3]
        assert admission.admitted == 0

    asyncio.run(scenario())


def test_more_items_than_the_limit_are_let_through_alone() -> None:
    async def scenario() -> None:
        admission, entered, leave = MediaAdmission(2, 1000, 100), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, items, entered, leave)) for items in (9, 1)]
        await settle()
        assert entered == [9]
        leave.set()
        await asyncio.gather(*tasks)
        assert admission.admitted == 0

    asyncio.run(scenario())


def test_cancelling_gives_the_place_to_the_next() -> None:
    async def scenario() -> None:
        admission, entered, leave = MediaAdmission(2, 1000, 100), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, items, entered, leave)) for items in (1, 2, 1)]
        await settle()
        assert entered == [1]
        tasks[1].cancel()
        await settle()
        assert entered == [1, 1]
        tasks[2].cancel()
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert admission.admitted == len(admission.waiting) == 0

    asyncio.run(scenario())


def test_cancelling_in_the_moment_of_being_let_in_takes_nothing() -> None:
    async def scenario() -> None:
        admission, entered, leave = MediaAdmission(1, 1000, 100), [], asyncio.Event()
        first = asyncio.create_task(hold(admission, 1, entered, leave))
        second = asyncio.create_task(hold(admission, 1, entered, asyncio.Event()))
        await settle()
        leave.set()
        await first  # its leaving has let the second in, which has not run yet
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert admission.admitted == 0

    asyncio.run(scenario())


def rejected(reason: str) -> float:
    return REGISTRY.get_sample_value("mini_engine:requests_rejected_total", {"reason": reason}) or 0.0


def gauge() -> float | None:
    return REGISTRY.get_sample_value("mini_engine:inflight_media_bytes")


def refused(admission: MediaAdmission, *sizes: int | None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        with admission.reserve(sizes):
            pass
    return caught.value


def test_bytes_are_reserved_at_once_and_given_back() -> None:
    admission, before = MediaAdmission(8, 1000, 100), rejected("inflight_media")
    with admission.reserve([300, None, 200]) as first:
        assert admission.inflight_bytes == gauge() == 600  # 100 for what is not known
        with admission.reserve([400]):
            error = refused(admission, 1)
            assert (error.status, error.headers["Retry-After"]) == (429, "1")
            assert error.body.type == "rate_limit_error"
            assert "1000 of the 1000 of --max-inflight-media-gb are taken" in error.body.message
            assert rejected("inflight_media") == before + 1
            with admission.reserve([]):  # needs none
                pass
            first.correct(510)
            assert admission.inflight_bytes == gauge() == 910
            with admission.reserve([90]):
                assert gauge() == 1000
    assert admission.inflight_bytes == gauge() == 0


def test_what_other_servers_are_to_send_leaves_room_for_what_is_here() -> None:
    admission = MediaAdmission(8, 1000, 250)
    with admission.reserve([None, None]) as first, admission.reserve([None]):
        error = refused(admission, None)
        assert "750 of the 750 for what is being fetched from other servers" in error.body.message
        with admission.reserve([250]):
            assert "1000 of the 1000" in refused(admission, 1).body.message
        first.correct(100)  # it is here now
        with admission.reserve([None, None]):
            assert admission.inflight_bytes == 850
        with admission.reserve([650]):
            pass
    assert (admission.inflight_bytes, admission.unknown_bytes) == (0, 0)


def test_bytes_that_fit_never_are_no_matter_of_waiting() -> None:
    admission = MediaAdmission(8, 1000, 600)
    error = refused(admission, 900, 101)
    assert (error.status, error.body.code) == (400, "media_too_large")
    assert "1001" in error.body.message and "--max-inflight-media-gb" in error.body.message
    with admission.reserve([None, None]) as alone:  # may have 1200: served when there are no others like it
        assert admission.inflight_bytes == 750
        assert refused(admission, None).status == 429
        alone.correct(1000)
        with pytest.raises(ApiError) as caught:
            alone.correct(1001)
        assert caught.value.status == 400
    assert admission.inflight_bytes == gauge() == 0


def test_what_comes_beyond_the_reservation_takes_room_as_it_comes() -> None:
    admission, before = MediaAdmission(8, 1000, 600), rejected("inflight_media")
    with admission.reserve([50, None, None]) as large:  # of its up to 1250 bytes 800 are reserved
        large.receive(750)
        assert (admission.inflight_bytes, admission.unknown_bytes) == (800, 750)
        large.receive(10)
        assert (admission.inflight_bytes, admission.unknown_bytes, gauge()) == (810, 750, 810)
        with admission.reserve([190]):
            assert refused(admission, 1).status == 429
            for _ in range(2):  # at each call
                with pytest.raises(ApiError, match="at least 811 bytes .*: 1000 of the 1000 of --max-in") as caught:
                    large.receive(1)
                assert (caught.value.status, caught.value.body.code) == (429, "overloaded")
        assert rejected("inflight_media") == before + 2
        assert admission.inflight_bytes == 810
    assert (admission.inflight_bytes, admission.unknown_bytes) == (0, 0)


def test_the_block_that_passes_the_limit_ends_the_request() -> None:
    admission = MediaAdmission(8, 1000, 600)
    with admission.reserve([50, None, None]) as large:
        large.receive(950)
        assert admission.inflight_bytes == 1000
        with pytest.raises(ApiError, match="have 1001 bytes together, more than the 1000 of --max-inf") as caught:
            large.receive(1)
        assert (caught.value.status, caught.value.body.code) == (400, "media_too_large")
    assert admission.inflight_bytes == gauge() == 0


def test_bytes_are_given_back_on_every_way_out() -> None:
    admission = MediaAdmission(1, 1000, 100)
    with pytest.raises(RuntimeError), admission.reserve([10, None]) as reservation:
        reservation.correct(20)
        raise RuntimeError
    assert admission.inflight_bytes == admission.unknown_bytes == 0
    with pytest.raises(RuntimeError), admission.reserve([10, None]):
        raise RuntimeError
    assert admission.inflight_bytes == admission.unknown_bytes == 0


def test_unfinished_requests() -> None:
    requests, before = RequestAdmission(2), rejected("queued_requests")
    with requests.admit():
        with requests.admit():
            for attempt in (requests.check, requests.admit().__enter__):
                with pytest.raises(ApiError, match="2 unfinished requests") as caught:
                    attempt()
                assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "1")
            assert rejected("queued_requests") == before + 2
        requests.check()
    assert requests.unfinished == 0
