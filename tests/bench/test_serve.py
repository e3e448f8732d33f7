"""`bench.py serve` against a live server of the bundled model: what it says agrees with itself and with the server."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mini_engine.bench import serve
from mini_engine.bench.cli import parse
from mini_engine.bench.client import arrivals
from mini_engine.bench.metrics import COUNTS
from mini_engine.bench.prompts import draws
from mini_engine.demo import questions, videos
from tests.e2e.running_server import ROOT, alive, descendants


def moved(server, before: dict[str, float], name: str) -> float:
    """By how much a counter of the server has grown, over all its labels."""
    return sum(value - before.get(key, 0.0) for key, value in server.metrics().items() if key.partition("{")[0] == name)


def test_table_file_and_counters_agree(bench, server, root, tmp_path: Path):
    before = server.metrics()
    ran = bench(
        "--base-url", root, "--num-prompts", 24, "--num_warmups", 0, "--unique-ratio", 0.5, "--seed", 3,
        "--metric-percentiles", "50,90,99", "--goodput", "ttft:100000", "e2el:100000", "--save-result",
        "--save-detailed", "--result-dir", tmp_path, "--result-filename", "found.json", "--metadata", "machine=here",
        "--plot", tmp_path / "p.png",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    results = ran.results
    result = json.loads((tmp_path / "found.json").read_text())

    # the server's own counters
    assert moved(server, before, "request_success_total") == results["completed"] == 24
    assert moved(server, before, "prompt_tokens_total") == results["total_input_tokens"]
    assert moved(server, before, "generation_tokens_total") == results["total_output_tokens"]
    # Of requests that bring the same medium at once, two may decode it.
    assert 12 <= moved(server, before, "media_decodes_total") < 24
    assert 1000 * moved(server, before, "e2e_request_latency_seconds_sum") / 24 <= results["mean_e2el_ms"]

    # the table and the last line
    for key in COUNTS.keys() - {"request_rate"}:
        if results[key] is not None:  # a peak, of a run of less than a second
            assert ran.row(COUNTS[key]) == pytest.approx(results[key], abs=0.006), key
    for statistic in ("Mean", "Median", "P50", "P90", "P99"):
        for metric in ("TTFT", "TPOT", "ITL", "E2EL"):
            key = f"{statistic.lower()}_{metric.lower()}_ms"
            assert ran.row(f"{statistic} {metric} (ms):") == pytest.approx(results[key], abs=0.006)
    assert results["request_goodput"] == results["request_throughput"]
    assert results["accuracy"]["known"] == 24 and results["accuracy"]["right"] >= 22
    assert f"{results['accuracy']['right']} of 24" in ran.out
    assert results["max_concurrent_requests"] <= 8

    # the file
    assert result["machine"] == "here" and result["hardware"]["cores"] and result["versions"]["python"]
    assert {key: result[key] for key in results if key != "model"} == {k: v for k, v in results.items() if k != "model"}
    assert sum(result["output_lens"]) == results["total_output_tokens"]
    assert np.mean(result["ttfts"]) * 1000 == pytest.approx(results["mean_ttft_ms"])
    assert np.std(np.concatenate(result["itls"])) * 1000 == pytest.approx(results["std_itl_ms"], abs=1e-5)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert result["environment_of"] == ran.last["environment_of"] == "client", "the server was there before"

    # the stages of each request are its time, but for the way to the client
    for ttft, itls, stages in zip(result["ttfts"], result["itls"], result["stages"], strict=True):
        assert 0 < sum(stages.values()) <= ttft + sum(itls) + 0.01
    assert set(results["stages_ms"]) == set(result["stages"][0])
    assert sum(stage["share"] for stage in results["stages_ms"].values()) == pytest.approx(1, abs=1e-4)


def test_no_server_listens(bench):
    ran = bench("--port", 1)
    assert ran.status == 1 and ran.out == ""
    (line,) = ran.err.splitlines()
    assert "http://127.0.0.1:1" in line and "serve.py" in line and "--launch" in line


PUBLISHED = {
    "sharegpt": """--endpoint /v1/chat/completions --backend openai-chat --model MODEL --dataset-name sharegpt
        --dataset-path FILE --save-result --save-detailed --disable-shuffle --num-warmups 20 --num-prompts 1000
        --max-concurrency 400 --sharegpt-output-len 128""",
    "hf": """--endpoint-type openai-chat --endpoint /v1/chat/completions --dataset-name hf --dataset-path PATH
        --hf-split train --model MODEL --max-concurrency 4 --num-prompts 32 --hf-output-len 128""",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_command_lines_for_vllm_are_taken_as_they_stand(name: str):
    args = parse(PUBLISHED[name].split())
    serve.check(args)
    assert (args.regime, args.backend, args.output_len) == ("serve", "openai-chat", 128)
    assert math.isinf(args.request_rate) and args.launch is None


def test_requests_are_sent_as_they_arrive(bench, root, tmp_path: Path):
    ran = bench("--base-url", root, "--dataset-name", "random", "--input-len", 8, "--output-len", 1, "--seed", 5,
                "--num-prompts", 12, "--max-concurrency", 12, "--request-rate", 20, "--burstiness", 0.5,
                "--save-result", "--save-detailed", "--result-dir", tmp_path,
                "--result-filename", "r.json")  # fmt: skip
    assert ran.status == 0, ran.err
    sent = np.array(json.loads((tmp_path / "r.json").read_text())["start_times"])
    late = sent - arrivals(12, 20, 0.5, draws(5, "arrivals"))
    assert late.min() >= 0 and np.median(late) < 0.2


def test_sharegpt_as_users_of_vllm_type_it_twice(bench, server, root, media_dir: Path, tmp_path: Path):
    """With videos that the file names by URL, as the server may read them; the second time from its caches."""
    conversations, answers = [], []
    for number in range(6):
        clip = videos.render(10**9 + 500 + number)
        (media_dir / f"{number}.mp4").write_bytes(videos.encode(clip))
        asked = questions.ask([clip], None, number)
        url = {"type": "video_url", "video_url": {"url": (media_dir / f"{number}.mp4").as_uri()}}
        turns = [{"from": "human", "value": [url, {"type": "text", "text": asked.text}]}]
        conversations.append({"conversations": [*turns, {"from": "gpt", "value": asked.answer}]})
        answers.append(asked.answer)
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(conversations))
    command = f"""--endpoint /v1/chat/completions --backend openai-chat --model {server.model} --dataset-name sharegpt
        --dataset-path {path} --save-result --save-detailed --disable-shuffle --num-warmups 2 --num-prompts 4
        --max-concurrency 400 --sharegpt-output-len 128 --base-url {root} --percentile-metrics ttft"""
    decoded, texts = [], []
    for folder in ("cold", "warm"):
        before = server.metrics()
        ran = bench(*command.split(), "--result-dir", tmp_path / folder)
        assert ran.status == 0, ran.err
        assert "Mean TTFT" in ran.out and "Mean E2EL" not in ran.out
        (path,) = (tmp_path / folder).glob("openai-chat-infqps-concurrency400-mini-engine-demo-*.json")
        texts.append(json.loads(path.read_text())["generated_texts"])
        decoded.append(moved(server, before, "media_decodes_total"))
    assert decoded == [6, 0], "four and two to warm up"
    assert texts[0] == texts[1] and sum(map(str.__eq__, texts[0], answers[:4])) >= 3


@pytest.mark.parametrize("killed", [False, True])
def test_a_server_of_its_own_is_not_left_behind(killed: bool):
    command = [sys.executable, "bench.py", "--launch", "--block-size 8", "--num-prompts", "2" if not killed else "5000"]
    ran = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    family: set[int] = set()
    while ran.poll() is None:
        family.update(descendants(ran.pid))
        if killed and len(family) >= 5:
            ran.kill()
        time.sleep(0.1)
    out, _ = ran.communicate()
    assert len(family) >= 4, "serve.py and its children were to be seen"
    deadline = time.monotonic() + 60
    while left := [pid for pid in family if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    if not killed:
        found = json.loads(out.splitlines()[-1])
        assert ran.returncode == 0 and found["environment_of"] == "all" and found["results"]["completed"] == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--dataset-path x.json", "--dataset-path has no effect on --dataset-name synthetic-video; only on sharegpt"),
        ("--dataset-name random --unique-ratio 0", "--unique-ratio has no effect on --dataset-name random"),
        ("--dataset-name sharegpt", "--dataset-name sharegpt needs --dataset-path"),
        ("--dataset-name random-mm", "--dataset-name random-mm needs --random-mm-bucket-config"),
        ("--burstiness 2", "--burstiness needs --request-rate"),
        ("--base-url http://x --port 5", "--launch, --base-url, and --host with --port exclude each other"),
        ("ab --a '' --b '' --port 80", "--launch, --base-url, and --host with --port exclude each other"),
        ("--save-detailed", "need --save-result"),
        ('--launch "\'"', "--launch: No closing quotation"),
        ("ab --a '' --b --max-num-seqs=0", "--b: --max-num-seqs: '0' is not an integer of at least 1"),
        ("sweep --flag no-such-flag --values 1,2", "--flag: --no-such-flag: unknown"),
        ("sweep --flag max-num-seqs --values 1,2 --port 80", "--flag: --max-num-seqs is not a flag of this client"),
    ],
)
def test_flags_that_do_not_fit_say_why(bench, flags: str, said: str):
    ran = bench(*shlex.split(flags))
    assert ran.status == 2 and ran.out == ""
    assert said in ran.err and len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--request-rate fast", "--request-rate: invalid float value: 'fast'"),
        ("--goodput itl:5", "--goodput: itl:5 is not ttft, tpot or e2el"),
        ("--max-concurency 5", "unrecognized arguments: --max-concurency 5"),
        ("sweep --flag x", "required: --values"),
    ],
)
def test_a_value_that_cannot_be_used_is_a_line_of_argparse(bench, flags: str, said: str, capfd):
    with pytest.raises(SystemExit, match="2"):
        bench(*shlex.split(flags))
    assert said in capfd.readouterr().err.splitlines()[-1]
