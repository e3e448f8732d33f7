import asyncio

from mini_engine.api.admission import MediaAdmission


async def hold(admission: MediaAdmission, items: int, entered: list[int], leave: asyncio.Event) -> None:
    async with admission.admit([0] * items):
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
        assert admission.waiting == 2
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
        assert admission.admitted == admission.waiting == 0

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
