"""`bench.py serve` against a live server of the bundled model: what it says agrees with itself and with the server."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from mini_engine.bench import cli
from mini_engine.bench.datasets.sample import draws
from mini_engine.bench.serving import load
from mini_engine.bench.serving.arrivals import arrivals
from mini_engine.bench.serving.bodies import cancel_plan
from mini_engine.bench.serving.client import Outcome
from mini_engine.bench.serving.settings import settings_of
from mini_engine.bench.serving.vllm import REFUSED
from mini_engine.demo import questions, videos
from tests.e2e.running_server import ROOT, alive, descendants
from tests.transport.conftest import eventually

LABELS = {
    "Successful requests:": "completed",
    "Failed requests:": "failed",
    "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput",
    "Output token throughput (tok/s):": "output_throughput",
    "Peak output token throughput (tok/s):": "max_output_tokens_per_s",
    "Peak concurrent requests:": "max_concurrent_requests",
    "Total Token throughput (tok/s):": "total_token_throughput",
}


def moved(server, before: dict[str, float], name: str) -> float:
    """By how much a counter of the server has grown, over all its labels."""
    return sum(
        value - before.get(key, 0.0)
        for key, value in server.metrics().items()
        if key.partition("{")[0] == f"mini_engine:{name}"
    )


def test_table_files_and_counters_agree(bench, server, root, tmp_path: Path):
    before = server.metrics()
    ran = bench(
        "--base-url", root, "--num-prompts", 24, "--num_warmups", 0, "--unique-ratio", 0.5, "--seed", 3,
        "--metric-percentiles", "50,90,99", "--goodput", "ttft:100000", "e2el:100000", "--save-result",
        "--save-detailed", "--result-dir", tmp_path, "--result-filename", "found.json", "--metadata", "machine=here",
        "--plot", tmp_path / "p.png",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    figures = ran.figures
    result = json.loads((tmp_path / "found.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]

    # the server's own counters
    assert moved(server, before, "request_success_total") == figures["completed"] == 24
    assert moved(server, before, "prompt_tokens_total") == figures["total_input_tokens"]
    assert moved(server, before, "generation_tokens_total") == figures["total_output_tokens"]
    # Of requests that bring the same medium at once, two may decode it.
    assert 12 <= moved(server, before, "media_decodes_total") < 24
    assert 1000 * moved(server, before, "e2e_request_latency_seconds_sum") / 24 <= figures["mean_e2el_ms"]

    # the table and the last line
    for label, key in LABELS.items():
        if figures[key] is None:  # a peak, of a run of less than a second
            continue
        assert ran.row(label) == pytest.approx(figures[key], abs=0.006), label
    for statistic in ("Mean", "Median", "P50", "P90", "P99"):
        for metric in ("TTFT", "TPOT", "ITL", "E2EL"):
            key = f"{statistic.lower()}_{metric.lower()}_ms"
            assert ran.row(f"{statistic} {metric} (ms):") == pytest.approx(figures[key], abs=0.006)
    assert figures["request_goodput"] == figures["request_throughput"]
    assert figures["accuracy"]["known"] == 24 and figures["accuracy"]["right"] >= 22
    assert f"{figures['accuracy']['right']} of 24" in ran.out
    assert figures["max_concurrent_requests"] <= 8

    # the files
    assert result["machine"] == "here" and result["hardware"]["cores"] and result["versions"]["python"]
    assert {key: result[key] for key in LABELS.values()} == {key: figures[key] for key in LABELS.values()}
    assert result["generated_texts"] == [line["text"] for line in lines]
    assert sum(result["output_lens"]) == figures["total_output_tokens"] == sum(line["output_tokens"] for line in lines)
    assert sum(line["right"] for line in lines) == figures["accuracy"]["right"]
    assert np.mean(result["ttfts"]) * 1000 == pytest.approx(figures["mean_ttft_ms"])
    assert np.percentile([line["e2el"] for line in lines], 90) * 1000 == pytest.approx(figures["p90_e2el_ms"])
    gaps = [itl for line in lines for itl in line["itls"]]
    assert np.std(gaps) * 1000 == pytest.approx(figures["std_itl_ms"])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert result["surroundings_of"] == ran.last["surroundings_of"] == "client", "the server was there before"

    # the stages of each request are its time, but for the way to the client
    for line in lines:
        assert 0 < sum(line["stages"].values()) <= line["e2el"]
    assert set(figures["stages_ms"]) == set(lines[0]["stages"])
    assert sum(stage["share"] for stage in figures["stages_ms"].values()) == pytest.approx(1, abs=1e-4)
    bar = re.search(r"requests: 100%.* 24/24 .* (\d+) tok/s, 0 failed", ran.err)
    assert bar and 0 < int(bar[1])


def test_the_bar_says_the_tokens_a_second_so_far(monkeypatch, capfd):
    now = [10.0]
    monkeypatch.setattr(load.time, "perf_counter", lambda: now[0])
    bar = load.Progress(2, "requests", True)
    for number, error in enumerate((None, "broken")):
        now[0] += 2
        bar.note(Outcome(number, output_tokens=30, error=error))
    bar.close()
    assert " 2/2 " in (said := capfd.readouterr().err) and "15 tok/s, 1 failed" in said


def test_without_flags(bench, server, root):
    """All defaults but the port, which the tests cannot choose."""
    assert settings_of(cli.build_parser().parse_args(cli.as_typed([]))).root == "http://127.0.0.1:8000"
    ran = bench("--port", root.rpartition(":")[2])
    assert ran.status == 0, ran.err
    assert ran.figures["completed"] == ran.figures["accuracy"]["known"] == 100
    assert ran.figures["accuracy"]["share"] >= 0.9
    assert ran.figures["max_concurrent_requests"] == 8
    assert ran.figures["stages_ms"]["encode"]["mean"] > 0


def test_what_is_refused_as_vllms_is_not_taken_and_help_names_the_default_regime():
    parser = cli.build_parser()
    assert not set(REFUSED) & set(parser.commands["serve"].flags)
    assert "`bench.py serve --help` shows its flags" in parser.format_help()


def test_nobody_listens(bench):
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


def test_published_command_lines_are_taken_as_they_stand():
    sharegpt, hf = (settings_of(cli.parse(PUBLISHED[name].split())) for name in ("sharegpt", "hf"))
    for settings in (sharegpt, hf):
        assert (settings.backend, settings.endpoint, settings.model) == ("openai-chat", "/v1/chat/completions", "MODEL")
        assert settings.root == "http://127.0.0.1:8000" and math.isinf(settings.request_rate)
        assert settings.data.output_tokens == 128 and settings.launch is None
    assert (sharegpt.data.name, sharegpt.data.path, sharegpt.data.shuffle) == ("sharegpt", "FILE", False)
    assert (sharegpt.data.warm_ups, sharegpt.data.count, sharegpt.max_concurrency) == (20, 1000, 400)
    assert sharegpt.output.save_result and sharegpt.output.save_detailed
    assert (hf.data.name, hf.data.path, hf.data.split, hf.data.shuffle) == ("hf", "PATH", "train", True)
    assert (hf.data.count, hf.max_concurrency, hf.output.save_result) == (32, 4, False)


def test_requests_are_sent_as_they_arrive(bench, root, tmp_path: Path):
    ran = bench("--base-url", root, "--dataset-name", "text", "--output-len", 1, "--num-prompts", 12, "--seed", 5,
                "--max-concurrency", 12, "--num-warmups", 1, "--request-rate", 20, "--burstiness", 0.5, "--save-result",
                "--save-detailed", "--result-dir", tmp_path, "--result-filename", "r.json")  # fmt: skip
    assert ran.status == 0, ran.err
    sent = np.array(json.loads((tmp_path / "r.json").read_text())["start_times"])
    late = sent - arrivals(12, 20, 0.5, draws(5, "arrivals"))
    assert late.min() >= 0 and late.max() < 0.2 + ran.figures["client"]["lag_max_ms"] / 1000


def test_the_share_that_is_cancelled_of_short_answers(bench, root):
    """An answer of the bundled model is of a token or two, of the 32 that it might have."""
    ran = bench("--base-url", root, "--num-prompts", 20, "--num-warmups", 0, "--cancel-rate", 0.25)
    assert (ran.status, ran.figures["cancelled"], ran.figures["completed"]) == (0, 5, 15)
    assert "--cancel-rate" not in ran.err


def clips(folder: Path, numbers: range) -> list[dict[str, str]]:
    """Records with a video each, beside their file, a question and the right answer. No other test has the same."""
    records = []
    for number in numbers:
        clip = videos.render(10**9 + 500 + number)
        (folder / f"{number}.mp4").write_bytes(videos.encode(clip))
        question = questions.ask([clip], None, number)
        records.append({"video": f"{number}.mp4", "question": question.text, "expected": question.answer})
    return records


def test_hf_twice_the_second_time_from_the_caches(bench, server, root, tmp_path: Path):
    """The command of vLLM's users, run twice, and the texts of both runs compared."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in clips(tmp_path, range(6))))
    command = f"""--endpoint-type openai-chat --endpoint /v1/chat/completions --dataset-name hf
        --dataset-path {tmp_path} --hf-split train --model {server.model} --max-concurrency 4 --num-prompts 6
        --hf-output-len 16 --num-warmups 0 --base-url {root} --save-result --save-detailed --result-dir {tmp_path}"""
    texts, decoded = [], []
    for name in ("cold.json", "warm.json"):
        before = server.metrics()
        ran = bench(*command.split(), "--result-filename", name)
        assert ran.status == 0, ran.err
        assert ran.figures["completed"] == 6 and ran.figures["accuracy"]["right"] >= 5
        decoded.append(moved(server, before, "media_decodes_total"))
        result = json.loads((tmp_path / name).read_text())
        texts.append(result["generated_texts"])
        assert result["config"]["hf_output_len"] == 16
    assert decoded == [6, 0]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


def test_sharegpt_as_users_of_vllm_type_it(bench, server, root, media_dir: Path, tmp_path: Path):
    """With videos that the file names by URL, as the server may read them."""
    records = clips(media_dir, range(6, 10))
    turns = [
        [{"from": "human", "value": [{"type": "video_url", "video_url": {"url": (media_dir / one["video"]).as_uri()}},
                                     {"type": "text", "text": one["question"]}]},
         {"from": "gpt", "value": one["expected"]}]
        for one in records
    ]  # fmt: skip
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": each} for each in turns]))
    command = f"""--endpoint /v1/chat/completions --backend openai-chat --model {server.model} --dataset-name sharegpt
        --dataset-path {path} --save-result --save-detailed --disable-shuffle --num-warmups 2 --num-prompts 4
        --max-concurrency 400 --sharegpt-output-len 128"""
    before = server.metrics()
    ran = bench(*command.split(), "--base-url", root, "--result-dir", tmp_path / "new", "--percentile-metrics", "ttft")
    assert ran.status == 0, ran.err
    (path,) = (tmp_path / "new").glob("openai-chat-infqps-concurrency400-mini-engine-demo-*.json")
    texts = json.loads(path.read_text())["generated_texts"]
    assert sum(text == one["expected"] for text, one in zip(texts, records, strict=True)) >= 3
    assert "Mean TTFT" in ran.out and "Mean E2EL" not in ran.out
    assert moved(server, before, "request_success_total") == 6, "two to warm up"


def test_media_by_file(bench, root, media_dir: Path):
    ran = bench("--base-url", root, "--dataset-name", "synthetic-image", "--num-prompts", 4, "--num-warmups", 1,
                "--media-transport", "file", "--media-dir", media_dir)  # fmt: skip
    assert ran.status == 0 and ran.figures["accuracy"]["right"] >= 3, ran.out
    assert f"the server must run with --allowed-local-media-path {media_dir}\n" in ran.err
    assert not list(media_dir.glob("mini-engine-*"))


def test_a_killed_bench_leaves_nothing(tmp_path: Path):
    """No server, no file server, no media."""
    short = Path(tempfile.mkdtemp(prefix="me-test-", dir="/tmp"))
    command = [sys.executable, "bench.py", "--launch", "", "--media-transport", "http", "--media-dir", str(short),
               "--num-prompts", "1"]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as ran:
        deadline = time.monotonic() + 300
        while len(family := descendants(ran.pid)) < 4:  # the shell that waits, the file server, serve.py, its children
            assert ran.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert list(short.glob("mini-engine-*/0.mp4"))
        ran.kill()
    deadline = time.monotonic() + 60
    while left := [pid for pid in family if alive(pid)] + list(short.iterdir()):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    short.rmdir()


def test_streams_that_are_cancelled_leave_nothing(bench, server, root, tmp_path: Path):
    """Those would be long: however late a client leaves, the server is not done with them."""
    lengths = [50 if after is None else 20_000 for after in cancel_plan([50] * 20, 0.25, 0)]
    records = [{"prompt": f"Number {number}", "output_tokens": length} for number, length in enumerate(lengths)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    before = server.metrics()
    ran = bench("--base-url", root, "--dataset-name", "custom", "--dataset-path", tmp_path / "p.jsonl",
                "--disable-shuffle", "--num-prompts", 20, "--num-warmups", 0, "--cancel-rate", 0.25, "--seed", 0,
                "--ignore-eos", "--request-rate", 100)  # fmt: skip
    assert ran.status == 0 and (ran.figures["completed"], ran.figures["cancelled"]) == (15, 5)
    assert ran.figures["total_output_tokens"] == 15 * 50
    deadline = time.monotonic() + 60
    while moved(server, before, "request_success_total") < 20 or server.total("num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    aborted = 'mini_engine:request_success_total{finished_reason="abort"}'
    assert server.metrics()[aborted] - before[aborted] == 5


def test_a_server_of_its_own_and_media_by_http(tmp_path: Path):
    """As a process, which starts two others, and leaves neither of them."""
    command = [sys.executable, "bench.py", "--launch", "--block-size 8 --limit-mm-per-prompt '{\"video\": 1}'",
               "--media-transport", "http", "--num-prompts", "6", "--output", str(tmp_path / "last.json")]  # fmt: skip
    ran = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    family: set[int] = set()
    while ran.poll() is None:
        family.update(descendants(ran.pid))
        time.sleep(0.1)
    out, err = ran.communicate()
    assert ran.returncode == 0, out + err
    assert len(family) >= 5 and eventually(lambda: not [pid for pid in family if alive(pid)])
    found = json.loads(out.splitlines()[-1])
    assert found == json.loads((tmp_path / "last.json").read_text())
    assert found["surroundings_of"] == "all"
    assert found["figures"]["completed"] == 6 and found["figures"]["stages_ms"]["fetch"]["mean"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--dataset-path x.json", "--dataset-path cannot be used with --dataset-name synthetic-video: it is made here"),
        ("--disable-shuffle", "--disable-shuffle cannot be used with --dataset-name synthetic-video"),
        ("--dataset-name sharegpt", "--dataset-name sharegpt needs --dataset-path"),
        ("--hf-split train", "--hf-split cannot be used"),
        ("--sharegpt-output-len 5", "--sharegpt-output-len cannot be used"),
        ("--dataset-name hf --dataset-path x --hf-output-len 5 --output-len 6", "mean the same: keep one of them"),
        ("--dataset-name random-mm", "needs --random-mm-bucket-config, such as '{"),
        ("--dataset-name text --unique-ratio 0.5", "texts have no media"),
        ("--dataset-name random --unique-ratio 0", "texts have no media"),
        ("--backend openai", "--backend openai: synthetic-video has media"),
        ("--burstiness 2", "--burstiness is of the times between requests: it needs a --request-rate"),
        ("--base-url http://x --port 5", "leave out --host and --port"),
        ("--launch '' --port 5", "leave out --base-url, --host and --port"),
        ("--save-detailed", "--save-detailed: nothing is written without --save-result"),
        ("--media-dir /tmp", "--media-dir: no files are made with --media-transport data"),
        ("--media-transport file --media-dir /no/such", "--media-dir: /no/such is not a directory"),
        ("--media-transport file --media-port 80", "only with --media-transport http"),
        ("--media-transport file", "Give --media-dir DIR, and start the server with --allowed-local-media-path DIR"),
        (
            "--media-transport http",
            "Give --media-port PORT, and start the server with --allowed-media-domains 127.0.0.1:",
        ),
        ("--launch '--uds /tmp/s'", "--launch: --uds: the client reaches its server by a port"),
        ("ab --a '' --b '' --port 80", "ab starts both servers itself"),
        ("ab --launch --max-num-seqs=0 --a '' --b ''", "--a: --max-num-seqs: 0 is not a whole number"),
        ("ab --a '' --b --max-num-seqs=0", "--b: --max-num-seqs: 0 is not a whole number of at least 1"),
        ("sweep --flag no-such-flag --values 1,2", "--flag: --no-such-flag is a flag neither of this client nor of"),
        ("sweep --flag max-num-seq --values 1,2", "serve.py; did you mean --max-num-seqs?"),
        ("sweep --flag max-concurency --values 1,2", "serve.py; did you mean --max-concurrency?"),
        ("sweep --flag max-num-seqs --values 1,0", "--values: --max-num-seqs: 0 is not a whole number"),
        ("sweep --flag max-concurrency --values 1,x", "--max-concurrency: 'x' is not a whole number"),
        ("--request-rate fast", "--request-rate: 'fast' is not a number"),
        ("--seed x", "--seed: 'x' is not a whole number"),
        ("--goodput ttft:x", "--goodput: 'x' is not a number"),
        ("--extra-body x", "--extra-body: x is not a JSON object, such as {"),
        ("transport --payloads x", "--payloads: 'x' is not a number"),
        ("--base-url localhost:8000", "--base-url: localhost:8000 is not like http://"),
        ("--base-url http://x/v1/", "--endpoint /v1/chat/completions begins with /v1 already: leave it out of the URL"),
        ("--endpoint /v1/completions", "--endpoint /v1/completions is of --backend openai, not of openai-chat"),
        (
            "--dataset-name text --backend openai --endpoint /v1/chat/completions",
            "is of --backend openai-chat, not of openai: choose that one, or leave out --endpoint, which then is /v1/c",
        ),
        ("--max-concurency 5", "unknown flag --max-concurency; did you mean --max-concurrency?"),
        ("sweep --num-prompt 5", "unknown flag --num-prompt; did you mean --num-prompts?"),
        ("--no-such-flag 5", "unknown flag --no-such-flag; bench.py serve --help lists them"),
        ("seve --num-prompts 5", "unknown regime seve; did you mean serve?"),
        ("--backend vlm", "--backend/--endpoint-type: "),
        ("sweep --flag x", "--values"),
        (
            "--ramp_up_strategy linear",
            "--ramp-up-strategy is a flag of vLLM's `bench serve` that is not here: the rate",
        ),
        ("--plot out.jepg", "--plot: out.jepg has none of the endings ."),
        ("sweep --flag max-concurrency --values 1,2 --plot out", "--plot: out has none of the endings"),
        ("--plot /no/such/out.png", "--plot: /no/such is not a directory; make it first"),
        ("--output /no/such/out.json", "--output: /no/such is not a directory; make it first"),
        ("core --output /tmp", "--output: /tmp is a directory; name a file in it"),
        ("--save-result --result-dir /dev/null/x", "--result-dir: /dev/null is not a directory; choose another place"),
        ("--save-result --result-dir / --result-filename tmp", "--result-filename: /tmp is a directory"),
        (
            "--save-result --save-detailed --result-filename r.jsonl",
            "--result-filename: r.jsonl is where --save-detailed writes its lines",
        ),
        ('--launch "\'"', "--launch: these flags cannot be read: "),
        ("gpu --repeats 0", "--repeats: 0 is below 1"),
        ("gpu --batches 1 0", "--batches: 0 is below 1"),
        ("core --repeats 0", "--repeats: 0 is below 1"),
        ("transport --ranks 0", "--ranks: 0 is below 1"),
        ("--label x", "--label: nothing is written without --save-result"),
        ("--launch '' --ready-check-timeout-sec 5", "a server of --launch is waited for as long as it starts"),
        ("--input-len 5", "--input-len cannot be used with --dataset-name synthetic-video"),
        ("--dataset-name text --random-range-ratio 0.5", "--random-range-ratio cannot be used with"),
        ("--no-oversample", "--no-oversample cannot be used with"),
        ("--hf-subset x", "--hf-subset cannot be used with"),
        ("sweep --flag max-num-seqs --values 1,2 --port 80", "--max-num-seqs is no flag of this client"),
    ],
)
def test_flags_of_no_use_say_why(bench, flags: str, said: str):
    ran = bench(*shlex.split(flags))
    assert ran.status == 2 and ran.out == ""
    assert said in ran.err and len(ran.err.splitlines()) == 1
