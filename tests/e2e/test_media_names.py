"""Names of media with several API servers and engines: what one was sent all know, after its death too."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from tests.support.client import ClientRequest, Question, ask_two
from tests.support.processes import eventually
from tests.support.running_server import START_SECONDS, RunningServer

PAIRS = {(f"first {number}", f"second {number}"): ask_two(9300 + 2 * number) for number in range(4)}


def asking(
    server: RunningServer, api: str, uuids: Sequence[str], question: Question, whole: bool = False
) -> ClientRequest:
    """About items by name, with their data or alone."""
    parts = [
        {"type": kind, kind: {"url": url} if whole else None, "uuid": uuid}
        for uuid, (kind, url) in zip(uuids, question.urls, strict=True)
    ]
    content = [*parts, {"type": "text", "text": question.text}]
    return ClientRequest(server, api, question, messages=[{"role": "user", "content": content}], cache_salt="mine")


def test_names_are_known_to_all_api_servers_and_survive_the_one_that_was_sent_the_data() -> None:
    """On two engines: videos that were named apart meet in one conversation."""
    with RunningServer("-tp", "2", "-dp", "2", "--api-server-count", "3") as server:
        for uuids, both in PAIRS.items():
            for uuid, url in zip(uuids, both.urls, strict=True):
                apart = Question("Well?", "", [url], more={"max_tokens": 1})
                asking(server, "api 0", [uuid], apart, whole=True).reply()
        for number, (uuids, both) in enumerate(PAIRS.items()):
            assert asking(server, f"api {1 + number % 2}", uuids, both).answer() == both.answer
        assert server.total("media_decodes_total") == server.total("media_named_hits_total") == 2 * len(PAIRS)
        assert server.total("ipc_messages_total") > 2 * 2 * len(PAIRS), "copies, too, are written for both ranks"
        os.kill(server.pids()["api 0"], signal.SIGKILL)
        decodes = server.total("media_decodes_total", "api 1")
        eventually(lambda: "replacement ready" in server.log, START_SECONDS)
        for api, (uuids, both) in zip(("api 0", "api 1", "api 2", "api 0"), PAIRS.items(), strict=True):
            assert asking(server, api, uuids, both).answer() == both.answer
        assert server.total("media_decodes_total", "api 1") == decodes
        server.get("/reset_caches", method="POST")
        lost = asking(server, "api 2", uuids, both)
        assert lost.response().status == 404 and b"media_not_found" in lost.response().read()
        lost.hang_up()
        server.assert_at_rest("api 1")
