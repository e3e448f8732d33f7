"""`bench.py serve` against a live server of the bundled model: what it says agrees with itself and with the server."""

import contextlib
import json
import pty
import shlex
from pathlib import Path

import numpy as np
import pytest

from benchmarks.client import arrivals
from benchmarks.datasets import draws
from benchmarks.metrics import ROWS
from mini_engine.demo import videos
from training import questions


def moved(server, before: dict[str, float], name: str) -> float:
    """By how much a counter of the server has grown, over all its labels."""
    return sum(value - before.get(key, 0.0) for key, value in server.metrics().items() if key.partition("{")[0] == name)


def test_table_file_and_counters_agree(bench, server, tmp_path: Path):
    before = server.metrics()
    flags = f"--base-url {server.base_url} --num-prompts 24 --num_warmups 0 --unique-ratio 0.5 --seed 3"
    shown = "--metric-percentiles 50,99.9 --goodput ttft:100000 e2el:100000 --metadata machine=here"
    saved = f"--save-result --save-detailed --result-dir {tmp_path} --result-filename found.json"
    ran = bench(*f"{flags} {shown} {saved}".split())
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
    names = {key: name for key, name in ROWS.items() if key != "request_rate"}  # which is infinite
    for metric in ("ttft", "tpot", "itl"):
        for name in ("mean", "median", "p50", "p99.9"):
            names[f"{name}_{metric}_ms"] = f"{name.capitalize()} {metric.upper()} (ms)"
    for key, name in names.items():  # a run shorter than a second has no peak
        assert ran.row(name) == "-" if results[key] is None else float(ran.row(name)) == round(results[key], 2), key
    assert "E2EL" not in ran.out and "Request rate configured" not in ran.out
    assert results["request_goodput"] == results["request_throughput"]
    assert results["accuracy"]["known"] == 24 and results["accuracy"]["right"] >= 22
    assert ran.row("Correct answers") == f"{results['accuracy']['right']} of 24"
    assert results["max_concurrent_requests"] <= 8

    # the file
    assert result["machine"] == "here" and result["hardware"]["cores"] and result["versions"]["python"]
    assert {key: result[key] for key in results} == results
    assert sum(result["output_lens"]) == results["total_output_tokens"]
    assert np.mean(result["ttfts"]) * 1000 == pytest.approx(results["mean_ttft_ms"])
    assert np.std(np.concatenate(result["itls"])) * 1000 == pytest.approx(results["std_itl_ms"], abs=1e-5)
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


def test_a_second_run_measures_the_cache_only_with_the_same_seed(bench, server):
    flags = ["--base-url", server.base_url, "--dataset-name", "synthetic-image", "--num-prompts", 6, "--num-warmups", 0]
    before = server.metrics()
    for seed, share in ((["--seed", 11], 0.0), (["--seed", 11], 1.0), ([], 0.0), ([], 0.0)):
        ran = bench(*flags, *seed)
        assert ran.results["cached_media_share"] == share
        assert ("The server had cached the media of 100% of the requests" in ran.out) is (share == 1)
    assert moved(server, before, "media_decodes_total") == 18


def test_a_terminal_shows_json_only_when_asked_to(bench, server):
    for url, flags, shown in ((server.base_url, [], False), (server.url, ["--json"], True)):
        master, slave = pty.openpty()
        with open(slave, "w") as terminal, contextlib.redirect_stdout(terminal):
            bench("--base-url", url, "--num-prompts", 1, "--num-warmups", 0, *flags)
        text = ""
        with open(master, "rb", buffering=0) as screen, contextlib.suppress(OSError):  # which says that this was all
            while block := screen.read(1 << 16):
                text += block.decode()
        assert text.startswith("============ Serving Benchmark Result ============\r\n")
        assert ("{" in text) is shown


def test_requests_are_sent_as_they_arrive(bench, server, tmp_path: Path):
    flags = f"--base-url {server.base_url} --dataset-name random --input-len 8 --output-len 1 --seed 5 --num-prompts 12"
    traffic = "--max-concurrency 12 --request-rate 20 --burstiness 0.5"
    saved = f"--save-result --save-detailed --result-dir {tmp_path} --result-filename r.json"
    ran = bench(*f"{flags} {traffic} {saved}".split())
    assert ran.status == 0, ran.err
    sent = np.array(json.loads((tmp_path / "r.json").read_text())["start_times"])
    late = sent - arrivals(12, 20, 0.5, draws(5, "arrivals"))
    assert late.min() >= 0 and np.median(late) < 0.2


def test_a_command_line_of_vllm(bench, server, tmp_path: Path):
    records, answers = [], []
    for number in range(6):
        clip = videos.render(10**9 + 500 + number)
        (tmp_path / f"{number}.mp4").write_bytes(videos.encode(clip))
        asked = questions.ask([clip], None, number)
        turns = [{"from": "human", "value": asked.text}, {"from": "gpt", "value": asked.answer}]
        records.append({"conversations": turns, "video": f"{number}.mp4"})
        answers.append(asked.answer)
    (tmp_path / "sharegpt.json").write_text(json.dumps(records))
    command = f"""--endpoint /v1/chat/completions --endpoint-type openai-chat --model {server.model} --num_warmups 2
        --dataset-name sharegpt --dataset-path {tmp_path}/sharegpt.json --save-result --save-detailed --disable-shuffle
        --num-prompts 4 --max-concurrency 400 --sharegpt-output-len 128 --percentile-metrics ttft"""
    before = server.metrics()
    ran = bench(*command.split(), "--base-url", server.base_url, "--result-dir", tmp_path / "results")
    assert ran.status == 0, ran.err
    assert "Mean TTFT (ms):" in ran.out and "Mean TPOT (ms):" not in ran.out
    (path,) = (tmp_path / "results").glob("openai-chat-infqps-concurrency400-mini-engine-demo-*.json")
    assert sum(map(str.__eq__, json.loads(path.read_text())["generated_texts"], answers)) >= 3
    assert moved(server, before, "media_decodes_total") == 6, "four and two to warm up"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--dataset-path x.json", "--dataset-path has no effect on --dataset-name synthetic-video; only on sharegpt"),
        ("--dataset-name sharegpt", "--dataset-name sharegpt needs --dataset-path"),
        ("--base-url http://x --port 5", "--launch, --base-url, and --host with --port exclude each other"),
        ("--save-detailed", "need --save-result"),
        ("ab --a '' --b --max-num-seqs=0", "--b: --max-num-seqs: '0' is not an integer of at least 1"),
        ("sweep --flag no-such-flag --values 1,2", "--flag: --no-such-flag: unknown"),
        ("sweep --flag max-num-seqs --values 1,2 --port 80", "--flag: --max-num-seqs is not a flag of this client"),
    ],
)
def test_flags_that_do_not_fit_say_why(bench, flags: str, said: str):
    ran = bench(*shlex.split(flags))
    assert ran.status == 2 and ran.out == ""
    assert said in ran.err and len(ran.err.splitlines()) == 1
