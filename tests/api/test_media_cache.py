"""Requests whose media the engine keeps, and what this server holds until an engine has accepted a request."""

from __future__ import annotations

import pytest

from mini_engine.messages import NewRequest
from tests.api.patience import cancelled, eventually, settle
from tests.api.serving import ANSWER, Counted, Served, check_error, image

COUNTED = ("mm_cache_queries_total{engine=0}", "mm_cache_hits_total{engine=0}", "media_decodes_total")


def has_tensors(request: NewRequest) -> list[bool]:
    return [item.patches is not None for item in request.media]


async def test_hits_count_towards_the_limit_of_a_prompt(served: Served) -> None:
    served.core.keeps = True
    sides = (84, 112, 140)  # 9, 16 and 25 tokens
    for side in sides:
        await served.ask([image(side)])
    counted = Counted(*COUNTED)
    check_error(await served.post([image(side) for side in sides]), 400, "media_too_large")
    assert counted.since() == [3, 3, 0]


@pytest.mark.parametrize("losses", [1, 2])
async def test_lost_tensors_are_sent_once_more(served: Served, losses: int) -> None:
    served.core.accepts = False
    counted = Counted("ipc_fallbacks_total{reason=lost}", *COUNTED)
    asking = served.asking([image(), image(112)])
    for number in range(1, losses + 1):
        await served.core.turn_down(await served.core.has_requests(number))
    if losses == 1:
        await served.core.accept(await served.core.has_requests(2))
        assert (await asking).json()["choices"][0]["message"]["content"] == "".join(ANSWER)
    else:
        check_error(await asking, 503, "engine_unavailable", "could not be handed")
        assert (await asking).headers["retry-after"] == "5" and served.core.finishes == []
        await eventually(lambda: served.core.unreserved == [served.core.look_ups[0].request_id])
    assert [has_tensors(request) for request in served.core.requests] == [[True, True]] * 2
    assert counted.since() == [1, 2, 0, 2]


async def test_late_tensors_are_not_sent_again(served: Served) -> None:
    served.core.accepts = False
    asking = served.asking([image()])
    await served.core.turn_down(await served.core.has_requests(), late=True)
    check_error(await asking, 503, "engine_unavailable", "could not be handed")
    assert len(served.core.requests) == 1 and served.core.finishes == []


async def test_place_in_decoding_is_held_until_the_request_is_accepted(served: Served) -> None:
    served.core.accepts = False
    served.core.hold = True
    admission = served.context.admission
    asking = served.asking([image(), image(112)])
    request = await served.core.has_requests()
    await settle()
    assert admission.num_admitted == 2
    await served.core.accept(request)
    await eventually(lambda: admission.num_admitted == 0)
    assert not asking.done()
    await served.core.end(request, "length")
    assert (await asking).status_code == 200


async def test_output_accepts_a_request(served: Served) -> None:
    served.core.accepts = False
    for count, content in enumerate(("hello", [image()]), 1):
        asking = served.asking(content)
        request = await served.core.has_requests(count)
        await served.core.output(request, served.encode("a red"))
        await eventually(lambda: served.context.admission.num_admitted == 0)
        await served.core.end(request, "length")
        assert (await asking).json()["choices"][0]["message"]["content"] == "a red"


async def test_error_of_the_engine_before_it_accepts(served: Served) -> None:
    served.core.accepts = False
    asking = served.asking([image()])
    await served.core.end(await served.core.has_requests(), "error", "the media are lost")
    check_error(await asking, 500, "internal_error", "the media are lost")


async def test_abort_that_crosses_a_turn_down(served: Served) -> None:
    served.core.accepts = False
    asking = served.asking([image()], n=2)
    request = await served.core.has_requests()
    served.core.running.clear()  # turned down, but this server has not received that when its client leaves
    await cancelled(asking)
    await served.core.has_aborted(request.request_id, request.siblings[0].request_id)
    assert not served.at_rest()
    await served.core.turn_down(request)
    await eventually(served.at_rest)
    assert len(served.core.requests) == 1
