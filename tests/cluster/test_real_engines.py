"""Three nodes with an engine of the bundled model each. The tests share the nodes."""

import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import AuthenticationError, OpenAI

pytest.importorskip("ray", reason="needs the extra [ray]")

from tests.cluster.running_cluster import SECONDS, RunningCluster, processes  # noqa: E402 - imports Ray
from tests.support.client import Question, ask_small  # noqa: E402
from tests.support.processes import alive, eventually, parent  # noqa: E402
from tests.support.running_server import message  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own
HOSTS, VIDEOS = 3, 36
KEY = "a-key"
ENGINE = "mini_engine.launch"  # in the supervisors' command lines


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with RunningCluster(hosts=HOSTS, api_key=KEY) as running:
        yield running
        left = processes(ENGINE)
    assert left and not any(map(alive, left))


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{cluster.port}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def ask(client: OpenAI, asked: Question) -> str:
    messages = [message(asked.text, asked.urls)]
    reply = client.chat.completions.create(model="mini-engine-demo", messages=messages, temperature=0)
    return reply.choices[0].message.content


def test_each_video_is_decoded_by_one_engine_and_answered_right(cluster: RunningCluster, client: OpenAI) -> None:
    questions = [ask_small(seed) for seed in range(VIDEOS)] * 4
    with ThreadPoolExecutor(4) as pool:  # as many do not exceed the bound on a host's load
        answers = list(pool.map(lambda asked: ask(client, asked), questions))
    right = sum(answer == asked.answer for answer, asked in zip(answers, questions, strict=True))
    assert right >= 0.9 * len(answers)
    decodes = cluster.metric("mini_engine:media_decodes_total")
    assert len(decodes) == HOSTS and sum(decodes.values()) == VIDEOS and all(decodes.values())


def test_every_endpoint_answers_through_the_front(cluster: RunningCluster, client: OpenAI) -> None:
    assert client.models.list().data[0].id == "mini-engine-demo"
    fields = {"model": "mini-engine-demo", "prompt": "tell me", "max_tokens": 8, "temperature": 0}
    text = client.completions.create(**fields).choices[0].text
    assert text == "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True))
    status, body = cluster.ask("/tokenize", {"model": "mini-engine-demo", "prompt": "tell me"})
    assert status == 200 and b"tokens" in body
    assert cluster.ask("/health")[0] == 200
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.port}/") as page:  # the playground, without the key
        assert b"<html" in page.read()
    with pytest.raises(AuthenticationError):
        client.with_options(api_key="another").models.list()


def test_requests_are_answered_while_a_killed_engine_is_replaced(cluster: RunningCluster, client: OpenAI) -> None:
    victim = processes(ENGINE)[0]
    replica = parent(victim)
    os.kill(victim, signal.SIGKILL)

    eventually(
        lambda: not alive(replica)
    )  # the replica ends when no process of the engine is left; until then a request may get a 502
    assert all(ask(client, ask_small(seed)) for seed in range(VIDEOS))

    def check() -> None:
        assert len(cluster.metric("mini_engine:media_decodes_total")) == HOSTS

    eventually(check, SECONDS)
    assert len(processes(ENGINE)) == HOSTS and victim not in processes(ENGINE)
