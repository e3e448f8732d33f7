"""Endpoints about the server itself, and a host that gives it no more descriptors, memory or threads."""

import asyncio
import errno
import logging
import re
import resource

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from mini_engine.engine_client.engines import METRICS_SECONDS
from mini_engine.http.error_responses import report_error
from mini_engine.http.routes.operations import RESET_SECONDS, STATS_SECONDS, log_stats
from mini_engine.media.sources.http_fetch import fetch_http
from mini_engine.media.sources.policy import MediaPolicy
from mini_engine.messages import ControlReply, EngineStats
from mini_engine.protocol.api_errors import DecoderUnavailable, shutting_down
from mini_engine.protocol.request_clock import RequestClock
from tests.support.patience import cancelled, eventually, settle, skip
from tests.support.serving import Counted, Serve, Served, check_error


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("POST", "/v1/images", "/openapi.json lists"),
        ("GET", "/v1", "/openapi.json lists"),
        ("GET", "/redoc", "/openapi.json lists"),  # FastAPI's second page about the same
        # That which differs in /v1 or a slash; no redirect to where the header `Host` says.
        ("GET", "/live/", "did you mean /live?"),
        ("GET", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("GET", "/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("GET", "/v1/tokenize", "did you mean /tokenize?"),
        # The chats of other interfaces.
        *(("POST", path, "conversations go to /v1/chat/completions")
          for path in ("/v1/messages", "/api/chat")),
    ],
)  # fmt: skip
async def test_unknown_path_names_what_may_be_meant(served: Served, method: str, path: str, says: str) -> None:
    response = await served.http.request(method, path, headers={"host": "elsewhere"})
    check_error(response, 404, "unknown_url", f"Not Found: {method} {path}; {says}")
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/chat/completions", "POST"), ("GET", "/tokenize", "POST"), ("DELETE", "/v1/models", "GET, HEAD")],
)
async def test_another_method_names_those_that_are_allowed(
    served: Served, method: str, path: str, allowed: str
) -> None:
    response = await served.http.request(method, path)
    check_error(response, 405, "method_not_allowed", f"Method Not Allowed: {method} {path}; /openapi.json lists")
    assert set(response.headers["allow"].split(", ")) == set(allowed.split(", "))


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/metrics", "/version", "/", "/openapi.json"])
async def test_head_is_get_without_its_body(served: Served, path: str) -> None:
    got, head = [await served.http.request(method, path) for method in ("GET", "HEAD")]
    assert got.content and not head.content
    assert (head.status_code, head.headers["content-type"]) == (got.status_code, got.headers["content-type"])


# --- health ----------------------------------------------------------------------------------------------------------


async def test_health_of_an_engine_that_hangs(serve: Serve) -> None:
    async with serve(health_timeout=0.3) as served:

        async def health() -> tuple[int, str | None]:
            """Status and error code."""
            response = await served.http.get("/health")
            return response.status_code, response.json()["error"]["code"] if response.content else None

        served.core.replies_to.discard("ping")
        clock = asyncio.get_running_loop().time
        begun = clock()
        assert set(await asyncio.gather(*(health() for _ in range(3)))) == {(503, "timeout")}
        assert clock() - begun >= 0.3
        head = await served.http.head("/health")
        assert (head.status_code, head.content) == (503, b"")
        assert served.core.controls["ping"] == [1], "health requests share a ping, while it is unanswered"
        assert (await served.http.get("/live")).status_code == 200
        served.core.replies_to.add("ping")
        await served.core.send(ControlReply(1))
        assert await health() == (200, None)
        served.core.replies_to.discard("ping")
        assert await health() == (503, "timeout")


# --- metrics and caches ----------------------------------------------------------------------------------------------


async def test_metrics_are_those_of_the_engines_at_this_moment(served: Served) -> None:
    counted = Counted("prefix_cache_hits_total{engine=0}")
    served.core.stats = EngineStats(prefix_cache_queries=10, prefix_cache_hits=4)
    for reads in (1, 2):
        scraped = await served.http.get("/metrics")
        assert 'mini_engine:prefix_cache_hits_total{engine="0",model_name="tiny"}' in scraped.text
        assert scraped.headers["content-type"].startswith("text/plain")
        assert counted.since() == [4 * reads]


async def test_queries_of_dashboards_for_vllm_find_their_metrics_and_labels(served: Served) -> None:
    # What the queries of three of vLLM's dashboards for Grafana choose and group by, after their prefix `vllm:`:
    # performance_statistics and query_statistics in examples/observability/dashboards/grafana, and
    # examples/observability/prometheus_grafana/grafana.json.
    histograms = ("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds")
    sizes = ("request_prompt_tokens_bucket", "request_generation_tokens_bucket")
    queries: dict[str, set[str]] = {
        **{f"{name}_{part}": {"model_name"} for name in histograms for part in ("sum", "count")},
        **{name: {"model_name", "le"} for name in (*sizes, *(f"{name}_bucket" for name in histograms))},
        **dict.fromkeys(("prompt_tokens_total", "generation_tokens_total"), {"model_name"}),
        **dict.fromkeys(("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"), {"model_name"}),
        "request_success_total": {"model_name", "finished_reason"},
        **{f"request_{stage}_time_seconds_sum": {"model_name"} for stage in ("queue", "prefill", "decode")},
        "request_max_num_generation_tokens_sum": {"model_name"},
        "iteration_tokens_total_count": set(),
    }
    text = (await served.http.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    labels = {sample.name: sample.labels for sample in samples}
    running = [sample.labels for sample in samples if sample.name == "mini_engine:num_requests_running"]
    assert {"model_name": "tiny", "engine": "0"} in running
    assert not {name for name, needed in queries.items() if not needed <= labels[f"mini_engine:{name}"].keys()}


async def test_metrics_can_be_read_while_an_engine_is_silent_or_gone(served: Served) -> None:
    served.core.replies_to.discard("stats")
    asking = asyncio.create_task(served.http.get("/metrics"))
    await eventually(lambda: bool(served.core.controls["stats"]))
    skip(METRICS_SECONDS)
    assert "mini_engine:num_requests_running" in (await asking).text
    served.context.engines.stop(shutting_down())
    assert "mini_engine:num_requests_running" in (await served.http.get("/metrics")).text


async def test_reset_of_the_caches(served: Served) -> None:
    for headers in ({}, {"content-type": "text/plain"}):  # a page of any origin can send these
        check_error(await served.http.post("/reset_caches", headers=headers), 415, "invalid_http")
    served.http.headers["content-type"] = "application/json"
    assert (await served.http.post("/reset_caches")).status_code == 200
    assert len(served.core.controls["reset_caches"]) == 1
    served.core.replies_to.discard("reset_caches")
    asking = asyncio.create_task(served.http.post("/reset_caches"))
    await eventually(lambda: len(served.core.controls["reset_caches"]) == 2)
    skip(RESET_SECONDS)
    check_error(await asking, 504, "timeout")
    asking = asyncio.create_task(served.http.post("/reset_caches"))
    await eventually(lambda: len(served.core.controls["reset_caches"]) == 3)
    served.context.engines.peer_gone("core 0")
    for response in (await asking, await served.http.post("/reset_caches")):
        check_error(response, 503, "engine_unavailable")


async def test_statistics_are_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mini_engine.http.routes.operations")
    stats = asyncio.create_task(log_stats(served.context.engines))
    await settle()
    served.core.stats = EngineStats(running=1, prompt_tokens=512, media_tokens_encoded=42.5)
    skip(STATS_SECONDS)
    await eventually(lambda: bool(caplog.messages))
    await cancelled(stats)
    rates = r"media [1-9][\d.]* tokens/s, prompts [1-9][\d.]* tokens/s, answers 0.0 tokens/s, 1 running, "
    assert re.match(rates, caplog.messages[0])


# --- a host with too little ------------------------------------------------------------------------------------------


async def test_a_download_without_a_free_descriptor_is_no_fault_of_the_request() -> None:
    """Nor where it cannot be seen: the resolver of an unknown name reports only that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for url in ("http://127.0.0.1:9", "http://unknown.test"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # each further one is EMFILE
        try:
            with pytest.raises(OSError) as caught:
                await fetch_http(url, MediaPolicy(None, 1000, ["127.0.0.1", "unknown.test"]), "image 1", lambda _: None)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        answer = report_error(caught.value, "chatcmpl-1", {}, None)
        assert (answer.status, str(answer)) == (503, "This server is out of file descriptors; retry later.")


def refused_by_torch() -> Exception:
    """What a media thread gets where frames become patches."""
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    return refused.value


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError(errno.ENOMEM, "x"), 503),
        (OSError(errno.ENOBUFS, "x"), 503),
        (MemoryError(), 503),
        (refused_by_torch(), 503),
        (RuntimeError("can't start new thread"), 503),
        (DecoderUnavailable("video 1", "no media decoder was free"), 503),
        (AssertionError("secret"), 500),
    ],
)
async def test_shortage_is_a_503_and_an_unknown_error_is_only_logged(
    error: Exception, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    counted, clock = Counted("request_success_total{finished_reason=error}"), RequestClock()
    answer = report_error(error, "chatcmpl-1", {}, clock)
    assert answer.status == status and counted.since() == [1] and clock.failed
    if status == 500:
        assert answer.body.code == "internal_error" and "chatcmpl-1" in answer.body.message
        assert "secret" not in answer.body.message
        (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "chatcmpl-1" in record.message and record.exc_info is not None
