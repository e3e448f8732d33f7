"""Which requests are accepted, and how they end: API keys, request ids, drain, CORS, a proxy's path, logs."""

import asyncio
import collections
import logging
import re
from typing import Any

import httpx
import openai
import pytest

from mini_engine.metrics import REGISTRY
from tests.support.patience import PATIENCE, cancelled, eventually
from tests.support.serving import CHAT_HEAD, Serve, Served, chat_body, check_error, choices_of, image

PAGE = "https://page.test"
KEYS = ["first-key", "sch\u00fcssel"]


# --- API keys, request ids -------------------------------------------------------------------------------------------


async def test_without_a_valid_key_all_but_health_checks_is_a_401(serve: Serve) -> None:
    async with serve(api_key=KEYS) as served:
        for key in KEYS:
            for scheme in (b"Bearer ", b"bearer   "):
                headers: Any = {b"Authorization": scheme + key.encode()}
                assert (await served.http.get("/version", headers=headers)).json()["version"]
                assert (await served.http.get("/nowhere", headers=headers)).status_code == 404
        for wrong in ("", "Bearer", "Bearer first-ke", "Bearer first-key2", "Basic first-key", "first-key"):
            headers = {"Authorization": wrong} if wrong else {}
            for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/nowhere", "/health/", "/%2Fhealth"):
                response = await served.http.get(path, headers=headers)
                check_error(response, 401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
                assert not any(key in response.text for key in KEYS)
            for path in ("/health", "/live"):
                assert (await served.http.get(path, headers=headers)).status_code == 200
                assert (await served.http.head(path, headers=headers)).status_code == 200
            assert (await served.http.post("/reset_caches", headers=headers)).status_code == 401
        with pytest.raises(openai.AuthenticationError, match="API key"):
            await served.ask()
        assert not served.core.requests and not served.core.controls["reset_caches"]
        served.openai.api_key = "first-key"
        assert (await served.ask()).choices


@pytest.mark.parametrize(("proxies", "count"), [("127.0.0.1", 2), ("192.0.2.0/24", 1)])
async def test_a_client_is_the_address_that_an_allowed_proxy_says(serve: Serve, proxies: str, count: int) -> None:
    async with serve(forwarded_allow_ips=[proxies]) as served:
        for address in ("192.0.2.1", "192.0.2.2", "192.0.2.1"):
            await served.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Forwarded-For": address})
        first, second, third = (request.client for request in served.core.requests)
        assert first == third and len({first, second}) == count


async def test_every_response_has_a_request_id_of_its_own(served: Served) -> None:
    table: list[tuple[str, dict[str, Any], str, int]] = [
        ("/v1/chat/completions", chat_body(), "chatcmpl-", 200),
        ("/v1/chat/completions", chat_body(stream=True), "chatcmpl-", 200),
        ("/v1/chat/completions", chat_body(n=0), "chatcmpl-", 400),
        ("/v1/completions", {"prompt": "x"}, "cmpl-", 200),
        ("/tokenize", {}, "req-", 400),
        ("/nowhere", {}, "req-", 404),
    ]
    ids = set()
    for path, body, prefix, status in table:
        response = await served.http.post(path, json=body)
        (request_id,) = response.headers.get_list("x-request-id")
        assert response.status_code == status and request_id.startswith(prefix), path
        ids.add(request_id)
    assert len(ids) == len(table)


# --- drain and stop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_drain_finishes_what_runs_and_refuses_the_rest(
    served: Served, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    served.core.hold = True
    asking = asyncio.create_task(served.ask(stream=stream))
    request = await served.core.has_requests()
    reader, _ = await served.connect(CHAT_HEAD + b"content-length: 9\r\n\r\n{")
    await eventually(lambda: served.context.bodies.used == 1)
    draining = asyncio.create_task(served.requests.drain())
    assert b" 503 " in await asyncio.wait_for(reader.readline(), PATIENCE), "half a body delays the drain"
    for response in (await served.post(), await served.http.get("/health"), await served.http.get("/v1/models")):
        check_error(response, 503, "shutting_down")
        assert int(response.headers["retry-after"]) > 0
    refused = [text for text in caplog.messages if ": 503 shutting_down: " in text]
    assert len(refused) == 2 and all(text.startswith("chatcmpl-") for text in refused), "no line for each probe"
    for path in ("/live", "/metrics"):
        assert (await served.http.get(path)).status_code == 200
    assert len(served.core.requests) == 1 and not draining.done()
    await served.core.end(request, "length")
    assert (await choices_of(await asking)).reasons == ["length"]
    await asyncio.wait_for(draining, PATIENCE)


async def test_drain_waits_for_a_refusal_that_the_client_does_not_read(serve: Serve) -> None:
    async with serve(max_text_bytes=100) as served:
        reader, writer = await served.connect(CHAT_HEAD + b"content-length: 1000\r\n\r\n{")
        await eventually(lambda: served.context.bodies.used == 1)
        (connection,) = served.server.server_state.connections
        connection.flow.pause_writing()
        writer.write(bytes(200))
        await eventually(lambda: not served.context.bodies.used)
        draining = asyncio.create_task(served.requests.drain())
        assert await served.http.get("/live") and not draining.done()
        connection.flow.resume_writing()
        assert b" 413 " in await asyncio.wait_for(reader.readline(), PATIENCE)
        await asyncio.wait_for(draining, PATIENCE)


async def test_request_that_does_not_end_is_answered_when_the_server_ends(served: Served) -> None:
    served.core.hold = True
    reader, _ = await served.connect_chat()
    await served.core.has_requests()
    served.server.should_exit = True
    assert b" 503 " in await asyncio.wait_for(reader.readline(), PATIENCE)


# --- browsers and proxies --------------------------------------------------------------------------------------------


async def test_other_hosts_are_refused_but_for_health_checks(served: Served) -> None:
    headers = {"host": "evil.test"}
    for path in ("/version", "/metrics", "/", "/nowhere"):
        check_error(await served.http.get(path, headers=headers), 421, "invalid_http", "--allowed-hosts")
    assert (await served.http.get("/health", headers=headers)).status_code == 200


async def preflight(served: Served, **headers: str) -> httpx.Response:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    return await served.http.options("/v1/chat/completions", headers={"Origin": PAGE, **asked, **headers})


async def test_without_allowed_origins_no_page_may_read_answers(served: Served) -> None:
    response = await served.http.get("/v1/models", headers={"Origin": PAGE})
    assert response.status_code == 200 and "access-control-allow-origin" not in response.headers
    assert (await preflight(served)).status_code == 405


async def test_page_of_an_allowed_origin_may_read_answers(serve: Serve) -> None:
    async with serve(allowed_origins=[PAGE], allow_credentials=True, api_key=["k"]) as served:
        allowed = await preflight(served)  # without a key, as browsers send it
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert allowed.headers["access-control-allow-credentials"] == "true"
        refused = await served.http.get("/v1/models", headers={"Origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
        headers = {"Origin": PAGE, "Authorization": "Bearer k"}
        answer = await served.http.post("/v1/chat/completions", json=chat_body(), headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert (await preflight(served, Origin="https://other.test")).status_code == 400


async def test_preflight_of_other_methods_is_refused(serve: Serve) -> None:
    async with serve(allowed_origins=["*"], allowed_methods=["GET"], allowed_headers=["x-mine"]) as served:
        assert (await preflight(served)).status_code == 400
        mine = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-mine"}
        assert (await preflight(served, **mine)).status_code == 200


async def test_paths_are_served_below_the_root_path(serve: Serve) -> None:
    async with serve(root_path="/engine", api_key=["k"]) as served:
        key = {"Authorization": "Bearer k"}
        for prefix in ("", "/engine"):  # whether the proxy removes it or not
            assert (await served.http.get(f"{prefix}/health")).status_code == 200
            assert (await served.http.get(f"{prefix}/v1/models")).status_code == 401
            assert (await served.http.get(f"{prefix}/v1/models", headers=key)).status_code == 200
            answer = await served.http.post(f"{prefix}/v1/chat/completions", json=chat_body(), headers=key)
            assert answer.headers["x-request-id"].startswith("chatcmpl-")
        assert (await served.http.get("/enginehealth")).status_code == 401
        assert "/engine/openapi.json" in (await served.http.get("/docs", headers=key)).text


# --- the log ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "mini_engine.http.middleware")
    return caplog


async def test_log_has_a_line_for_each_request(serve: Serve, log: pytest.LogCaptureFixture) -> None:
    async with serve(enable_log_requests=True, root_path="/engine", api_key=["secret"]) as served:
        served.http.headers["authorization"] = "Bearer secret"
        answer = await served.post("a private matter")
        await served.http.get("/engine/health")
        missing = await served.http.get("/now%0Ahere?private=1")
        outside = await served.http.get("/v1/models", headers={"authorization": "Bearer other"})
        served.core.hold = True
        served.openai.api_key = "secret"
        stream = await served.ask(stream=True)
        await anext(stream)
        await stream.close()
        await eventually(lambda: len(log.records) == 4)
        usage = answer.json()["usage"]
        *lines, last = [record.getMessage() for record in log.records]
        tokens = f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens, model tiny"
        assert [re.sub(r" after \d+\.\d{3} s", "", line) for line in lines] == [
            f"{answer.headers['x-request-id']} POST /v1/chat/completions: 200, {tokens}",
            f"{missing.headers['x-request-id']} GET /now%0Ahere: 404",
            f"{outside.headers['x-request-id']} GET /v1/models: 401",
        ]
        assert last.startswith(served.core.requests[1].request_id) and last.endswith(", model tiny, cut off")
        assert not any(word in " ".join([*lines, last]) for word in ("private", "secret"))
        assert [record.caller.get("key_number") for record in log.records] == [1, 1, None, 1]


async def test_log_says_who_asked(serve: Serve, log: pytest.LogCaptureFixture) -> None:
    log.set_level(logging.INFO, "mini_engine.http.error_responses")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"x-forwarded-for": "192.0.2.1", "x-request-id": "job 7, client evil" + "x" * 200}
    headers["traceparent"] = f"00-{trace}-00f067aa0ba902b7-01"
    caller = {"client": "192.0.2.1", "x_request_id": "job7,clientevil" + "x" * 113, "trace_id": trace}
    async with serve(enable_log_requests=True, api_key=KEYS) as served:
        served.http.headers["authorization"] = f"Bearer {KEYS[0]}"
        body = chat_body(n=2, model="alias", max_tokens=3)
        answer = await served.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == caller["x_request_id"]
        assert answer.json()["id"] == served.core.requests[0].request_id
        prompts = {"prompt": ["x", "x y"], "max_tokens": 2}
        await served.http.post("/v1/completions", json=prompts, headers={"traceparent": f"00-{'0' * 32}-{'1' * 16}-01"})
        assert (await served.http.post("/v1/completions", json={}, headers=headers)).status_code == 400
        await eventually(lambda: len(log.records) == 4)
    chat, completion, refusal, _ = log.records
    usage = answer.json()["usage"]
    seconds = chat.facts.pop("seconds")
    assert 0 < seconds < PATIENCE
    assert chat.facts == {
        "request_id": answer.json()["id"], **caller, "key_number": 1, "method": "POST", "path": "/v1/chat/completions",
        "status": 200, "model": "alias", **{name: usage[name] for name in ("prompt_tokens", "completion_tokens")},
    }  # fmt: skip
    assert completion.caller == {"client": "127.0.0.1", "key_number": 1}
    sizes = [len(request.prompt_token_ids) for request in served.core.requests[1:]]
    assert (completion.facts["prompt_tokens"], len(sizes)) == (sum(sizes), 2)
    assert refusal.caller == {**caller, "key_number": 1}, "of the line with the error"
    assert refusal.facts["code"] == "missing_required_parameter"


async def test_log_of_slow_requests_has_their_stages(serve: Serve, log: pytest.LogCaptureFixture) -> None:
    """Those that were cut off, too."""
    async with serve(log_slow_requests=3600) as served:
        await served.post()
    assert not log.records
    async with serve(log_slow_requests=0) as served:
        served.gate.door.clear()
        leaving, staying = [served.asking([image(side)]) for side in (56, 57)]
        await eventually(lambda: served.gate.inside == 2)
        await asyncio.sleep(0.02)
        await cancelled(leaving)
        await eventually(lambda: len(log.records) == 1)
        served.gate.door.set()
        await staying
        served.core.hold = True
        asking = served.asking()
        await served.core.output(await served.core.has_requests(2), [65])
        await asyncio.sleep(0.02)
        await cancelled(asking)
        await eventually(lambda: len(log.records) == 3)
    stages = {"media_decode": "cut off", "process": None, "generation": "cut off"}
    for record, (stage, end) in zip(log.records, stages.items(), strict=True):
        spent = record.facts["stages"]
        assert spent[stage] > 0.01 and record.facts.get("end") == end
        assert f", {stage} {spent[stage]:.3f} s" in record.getMessage()
        assert sum(spent.values()) == pytest.approx(record.facts["seconds"], abs=0.01)


async def test_responses_are_counted_by_route_and_kind_of_status(serve: Serve) -> None:
    def counted() -> collections.Counter[tuple[str, ...]]:
        (family,) = [family for family in REGISTRY.collect() if family.name == "http_requests"]
        samples = [sample for sample in family.samples if sample.name == "http_requests_total"]
        return collections.Counter({tuple(sample.labels.values()): sample.value for sample in samples})

    before = counted()
    async with serve(api_key=["k"], root_path="/engine") as served:
        await served.post()
        served.http.headers["authorization"] = "Bearer k"
        for path in ("/engine/v1/models/tiny", "/v1/models/other", "/a", "/b?c"):
            await served.http.get(path)
        await served.http.request("BREW", "/v1/chat/completions")
        await served.requests.drain()
        await served.post()
        since = counted() - before
    assert since == {
        ("/v1/chat/completions", "POST", "4xx"): 1,
        ("/v1/models/{name:path}", "GET", "2xx"): 1,
        ("/v1/models/{name:path}", "GET", "4xx"): 1,
        ("none", "GET", "4xx"): 2,
        ("/v1/chat/completions", "other", "4xx"): 1,
        ("/v1/chat/completions", "POST", "5xx"): 1,
    }


async def test_stream_that_fails_is_logged_as_one(serve: Serve, log: pytest.LogCaptureFixture) -> None:
    async with serve(enable_log_requests=True) as served:
        served.core.hold = True
        stream = await served.ask(stream=True)  # it has begun: before, the error would be the response
        await served.core.end(await served.core.has_requests(), "error")
        with pytest.raises(openai.APIError, match="has aborted"):
            [chunk async for chunk in stream]
        await eventually(lambda: bool(log.records))
    (record,) = log.records
    assert record.getMessage().endswith(", model tiny, with an error in its stream")


async def test_debug_log_has_a_line_for_each_hop_of_a_request(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mini_engine")
    await served.post([image(), {"type": "text", "text": "a private matter"}])
    assert (await served.post(max_tokens=0)).status_code == 400
    request_id = served.core.requests[0].request_id
    *hops, refused = [record.getMessage() for record in caplog.records]
    words = [line.removeprefix(request_id + " ").split(",")[0].split(":")[0] for line in hops]
    assert words == ["fetched", "sent to engine 0", "finished"]
    assert re.fullmatch(r"chatcmpl-\w+: 400 invalid_value: Invalid 'max_tokens': .*", refused)
    assert {record.facts["request_id"] for record in caplog.records[:-1]} == {request_id}
    assert "private" not in " ".join(hops)
