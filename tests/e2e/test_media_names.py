"""Names of media with several API servers and engines: what one was sent all know, after its death too."""

from __future__ import annotations

import io
import os
import signal

from PIL import Image

from tests.support.client import ClientRequest, Question, ask_small
from tests.support.processes import eventually
from tests.support.running_server import START_SECONDS, RunningServer
from tests.support.web import WebServer, response

QUESTIONS = {f"clip-{number}": ask_small(9200 + number) for number in range(4)}


def asking(
    server: RunningServer, api: str | None, uuid: str, question: Question, whole: bool = False, salt: str = "mine"
) -> ClientRequest:
    """About the item by name, with its data or alone."""
    ((kind, url),) = question.urls
    part = {"type": kind, kind: {"url": url} if whole else None, "uuid": uuid}
    content = [part, {"type": "text", "text": question.text}]
    return ClientRequest(server, api, question, messages=[{"role": "user", "content": content}], cache_salt=salt)


def assert_not_found(request: ClientRequest) -> None:
    response = request.response()
    assert response.status == 404 and b"media_not_found" in response.read()
    request.hang_up()


def test_names_are_known_to_all_api_servers_and_survive_the_one_that_was_sent_the_data() -> None:
    """Four names, so that some have their home at the engine that has the item, and others at the other one."""
    with RunningServer("-tp", "2", "-dp", "2", "--api-server-count", "3") as server:
        for uuid, question in QUESTIONS.items():
            assert asking(server, "api 0", uuid, question, whole=True).answer() == question.answer
        for api in ("api 1", "api 2"):
            for uuid, question in QUESTIONS.items():
                assert asking(server, api, uuid, question).answer() == question.answer
        assert server.total("media_decodes_total") == len(QUESTIONS)
        assert server.total("media_named_hits_total") == 2 * len(QUESTIONS)
        os.kill(server.pids()["api 0"], signal.SIGKILL)
        decodes = server.total("media_decodes_total", "api 1")
        eventually(lambda: "replacement ready" in server.log, START_SECONDS)
        for api, (uuid, question) in zip(("api 0", "api 1", "api 2", "api 0"), QUESTIONS.items(), strict=True):
            assert asking(server, api, uuid, question).answer() == question.answer
        assert server.total("media_decodes_total", "api 1") == decodes
        uuid, question = next(iter(QUESTIONS.items()))
        assert_not_found(asking(server, "api 1", uuid, question, salt="another"))
        server.get("/reset_caches", method="POST")
        assert_not_found(asking(server, "api 2", uuid, question))
        server.assert_at_rest("api 1")


def test_url_that_has_changed_is_kept_where_its_name_is_looked_for() -> None:
    """At the engine that the new content prefers, which is not that of the old one."""
    contents = []
    for grey in (0, 40):
        Image.new("L", (84, 84), grey).save(file := io.BytesIO(), "PNG")
        contents.append(file.getvalue())
    with (
        WebServer(lambda connection, _: connection.sendall(response(contents[0]))) as web,
        RunningServer("-tp", "1", "-dp", "2", "--allowed-media-domains", "127.0.0.1") as server,
    ):
        url = ("image_url", f"http://127.0.0.1:{web.port}/")
        question = Question("What is it?", "", [url], more={"max_tokens": 1})
        for _ in range(2):
            asking(server, None, "a", question, whole=True).reply()
        assert web.dialled == 1
        contents.pop(0)
        small = Question("What is it?", "", [url], more={"max_tokens": 1, "mm_processor_kwargs": {"max_pixels": 3136}})
        for whole in (True, False):
            asking(server, None, "a", small, whole).reply()
        assert web.dialled == 2
