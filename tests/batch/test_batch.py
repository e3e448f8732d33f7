"""Files of requests: `python -m mini_engine.batch`."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mini_engine.batch.__main__ import main
from mini_engine.batch.request_files import AnswerFile, answer_row, ids_of
from mini_engine.batch.row_file import RowFile
from mini_engine.batch.server_handle import Reply
from mini_engine.config import ConfigError
from mini_engine.failpoints import VARIABLE
from tests.support.client import ask_small
from tests.support.processes import FailPoint, alive, descendants
from tests.support.running_server import message

REQUEST = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def write(path: Path, *lines: object) -> Path:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path.write_text(text, errors="surrogateescape")
    return path


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([REQUEST, "", {**REQUEST, "url": "/v1/images/generations"}], "line 3"),
        (["\udcff"], "line 1"),
        ([{**REQUEST, "body": {"stream": True}}], "no 'stream'"),
        ([REQUEST, REQUEST], "'a'"),
    ],
)
def test_unusable_requests(tmp_path: Path, lines: list, named: str):
    with pytest.raises(ConfigError, match=named):
        ids_of(write(tmp_path / "in.jsonl", *lines))


def test_what_is_kept_of_earlier_answers(tmp_path: Path):
    path, other = tmp_path / "out.jsonl", tmp_path / "out.jsonl.tmp"
    other.write_text("of the user")
    first = AnswerFile(path, retry_failed=False)
    for status in (200, 400, 401, 403, 404, 429, 500, 503, 0):
        first.append(answer_row(f"{status}", Reply(status, {"error": {"message": "x\ny"}})))
    statuses = (f"status {status}: " for status in (400, 401, 403, 404, 429, 500, 503))
    assert first.failures == {f"{status}x": 1 for status in (*statuses, "")}
    with pytest.raises(ConfigError, match="another process"):
        AnswerFile(path, retry_failed=False)
    first.close()
    with path.open("a") as file:
        file.write('{"id":"batch_re')
    for retry_failed, kept, num_failed in ((False, {"200", "400", "404"}, 2), (True, {"200"}, 0)):
        answers = AnswerFile(path, retry_failed)
        assert answers.done == kept and answers.failed == num_failed
        answers.close()
        assert {json.loads(line)["custom_id"] for line in path.read_text().splitlines()} == kept
    assert other.read_text() == "of the user" and {*tmp_path.iterdir()} == {path, other}


def test_an_error_without_a_text_is_a_failure(tmp_path: Path):
    for _ in range(2):  # written, then read
        answers = AnswerFile(tmp_path / "a", retry_failed=False)
        if not answers.done:
            answers.append(answer_row("a", Reply(400, {"error": {"message": ""}})))
        assert answers.failed == 1 and answers.failures == {"status 400: ": 1}
        answers.close()


@pytest.mark.parametrize("url", ["", "/v1", "localhost:8000", "http://", "ftp://x", "http://x:99999", "http://[::1"])
def test_a_base_url_that_is_none_is_refused_before_any_server_starts(url: str, tmp_path: Path, capsys):
    requests = write(tmp_path / "in", REQUEST)
    assert main(["-i", str(requests), "-o", str(tmp_path / "out"), "--base-url", url]) == 2
    assert f"{url!r} is no URL of a server" in capsys.readouterr().err


def test_what_is_no_file_of_answers_stays_as_it_is(tmp_path: Path):
    path = tmp_path / "a"
    foreign = {"custom_id": "a", "response": {"status_code": 400, "body": None}}
    for text in ("{}", json.dumps(foreign)):  # no torn line either
        path.write_text(text)
        with pytest.raises(ConfigError, match="line 1"):
            AnswerFile(path, retry_failed=False)
        assert path.read_text() == text and list(tmp_path.iterdir()) == [path]
    path.unlink()
    os.mkfifo(path)
    for use in (ids_of, lambda path: AnswerFile(path, retry_failed=False)):
        with pytest.raises(ConfigError, match="no regular file"):
            use(path)
    assert path.is_fifo()


def test_a_link_to_the_answers_and_their_mode_stay(tmp_path: Path):
    path, link = tmp_path / "a", tmp_path / "link"
    path.touch(0o600)
    link.symlink_to(path)
    AnswerFile(link, retry_failed=False).close()
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o600


def test_a_row_may_name_a_file_whose_name_is_no_utf_8(tmp_path: Path):
    row, rows = {"file": os.fsdecode(b"caf\xe9 \xe2\x82\xac")}, list[dict]()
    for _ in range(2):
        file = RowFile(tmp_path / "out.jsonl", b"{", lambda row: not rows.append(row))
        file.append(row)
        file.close()
    assert rows == [row]


def test_a_run_that_is_interrupted_is_continued_by_another_server(server, tmp_path: Path, capsys):
    """The second chat is held until the program is stopped, so that it and those behind it have no answers."""
    (video,) = ask_small(1).urls
    chats = [
        {"custom_id": name, "url": "/v1/chat/completions", "body": {"messages": [message("hello", urls)]}}
        for name, urls in (("chat", []), ("video", [video]))
    ]
    wrong = {**REQUEST, "custom_id": "wrong", "body": {"prompt": "x", "n": 0}}
    requests = write(tmp_path / "in.jsonl", *chats, REQUEST, wrong)
    path = tmp_path / "out.jsonl"
    flags = ["-i", str(requests), "-o", str(path), "--max-concurrency", "1"]
    environ = {**os.environ, VARIABLE: str(tmp_path)}
    with FailPoint(tmp_path, "decoding") as point:
        first = subprocess.Popen(
            [sys.executable, "-m", "mini_engine.batch", *flags, "-dp", "1"],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environ,
        )
        point.wait()
        processes = descendants(first.pid)
        os.killpg(first.pid, signal.SIGINT)
        _, log = first.communicate(timeout=60)
    assert first.returncode == 130 and "the same command goes on" in log, log
    assert re.search(r"1/4 .* 0 failed, .*prefill \d+%", log), log
    assert not any(map(alive, processes)) and path.read_bytes().count(b"\n") == 1
    assert main([*flags, "--base-url", f"{server.url}/"]) == 1  # which ends in /v1/
    log = capsys.readouterr().err
    assert re.search(r"100%.*, 1 failed", log), log
    assert log.endswith("asks all of them again\n    1 x status 400: Invalid 'n': expected `int` >= 1.\n")
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert [*by_id] == ["chat", "video", "a", "wrong"] and len(answers) == 4
    assert by_id.pop("wrong")["response"]["status_code"] == 400
    assert all(answer["response"]["status_code"] == 200 and answer["error"] is None for answer in by_id.values())
    assert not any("metrics" in answer["response"]["body"] for answer in by_id.values())
