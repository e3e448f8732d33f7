"""Names of media with several API servers and engines: what one was sent all know, after its death too."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from tests.support.client import ClientRequest, Question, ask_image, ask_small, ask_two
from tests.support.processes import eventually
from tests.support.running_server import START_SECONDS, RunningServer

QUESTIONS = {f"clip-{number}": ask_small(9200 + number) for number in range(4)}


def asking(
    server: RunningServer,
    api: str | None,
    uuids: Sequence[str],
    question: Question,
    whole: bool = False,
    salt: str = "mine",
) -> ClientRequest:
    """About items by name, with their data or alone."""
    parts = [
        {"type": kind, kind: {"url": url} if whole else None, "uuid": uuid}
        for uuid, (kind, url) in zip(uuids, question.urls, strict=True)
    ]
    content = [*parts, {"type": "text", "text": question.text}]
    return ClientRequest(server, api, question, messages=[{"role": "user", "content": content}], cache_salt=salt)


def assert_not_found(request: ClientRequest) -> None:
    response = request.response()
    assert response.status == 404 and b"media_not_found" in response.read()
    request.hang_up()


def test_names_are_known_to_all_api_servers_and_survive_the_one_that_was_sent_the_data() -> None:
    """Four names, so that some have their home at the engine that has the item, and others at the other one."""
    with RunningServer("-tp", "2", "-dp", "2", "--api-server-count", "3") as server:
        for uuid, question in QUESTIONS.items():
            assert asking(server, "api 0", [uuid], question, whole=True).answer() == question.answer
        for api in ("api 1", "api 2"):
            for uuid, question in QUESTIONS.items():
                assert asking(server, api, [uuid], question).answer() == question.answer
        assert server.total("media_decodes_total") == len(QUESTIONS)
        assert server.total("media_named_hits_total") == 2 * len(QUESTIONS)
        os.kill(server.pids()["api 0"], signal.SIGKILL)
        decodes = server.total("media_decodes_total", "api 1")
        eventually(lambda: "replacement ready" in server.log, START_SECONDS)
        for api, (uuid, question) in zip(("api 0", "api 1", "api 2", "api 0"), QUESTIONS.items(), strict=True):
            assert asking(server, api, [uuid], question).answer() == question.answer
        assert server.total("media_decodes_total", "api 1") == decodes
        uuid, question = next(iter(QUESTIONS.items()))
        assert_not_found(asking(server, "api 1", [uuid], question, salt="another"))
        server.get("/reset_caches", method="POST")
        assert_not_found(asking(server, "api 2", [uuid], question))
        server.assert_at_rest("api 1")


def test_names_of_two_conversations_meet_in_one_and_one_goes_on_without_its_first_picture() -> None:
    """Items are copied to the engine that the first of them prefers."""
    with RunningServer("-tp", "1", "-dp", "2", "--api-server-count", "2") as server:
        for seed in range(9300, 9340, 2):
            both = ask_two(seed)
            for uuid, url in zip("ab", both.urls, strict=True):
                asking(server, "api 0", uuid, Question("Well?", "", [url], more={"max_tokens": 1}), whole=True).reply()
            shown = server.metrics()
            if all(shown[f'mm_cache_queries_total{{engine="{engine}"}}'] for engine in (0, 1)):
                break
        decodes = server.total("media_decodes_total")
        for api in ("api 1", "api 0"):  # then the copy is stored
            assert asking(server, api, "ab", both).answer() == both.answer
        assert (server.total("mm_store_copies_total"), server.total("media_decodes_total")) == (1, decodes)
        for seed in range(9400, 9420):
            first, second = ask_image(seed), ask_image(seed + 100)
            both = Question("Well?", "", [*first.urls, *second.urls], more={"max_tokens": 1})
            asking(server, "api 0", "ab", both, whole=True).reply()
            assert asking(server, "api 1", "b", second).answer() == second.answer
            if server.total("mm_store_copies_total") > 1:
                break
        assert server.total("mm_store_copies_total") == 2
        assert server.total("media_decodes_total") == decodes + 2 * (seed - 9399)
        server.assert_at_rest()
