"""A stderr that is not read delays nothing, and missing lines are counted. `tests/faults/` shows one that fails."""

import json
import logging
import os
import re
import select
import subprocess
import sys
import time

import pytest

from mini_engine.log import QUEUE_LINES, JsonFormatter, LineQueue, TextFormatter, about


def test_a_pipe_that_is_not_read_delays_nothing_and_missing_lines_are_counted():
    read, write = os.pipe()
    handler = LineQueue(write)

    def log_lines(count: int) -> None:
        for _ in range(count):
            handler.handle(logging.LogRecord("x", logging.INFO, __file__, 1, "%s", ("x" * 200,), None))

    begun = time.monotonic()
    log_lines(2 * QUEUE_LINES)
    assert time.monotonic() - begun < 5 and handler.dropped > 0
    seen = b""
    for lines in (0, 1):
        log_lines(lines)
        while select.select([read], [], [], 1)[0]:  # until nothing has come for a second
            seen += os.read(read, 1 << 16)
    missing = sum(map(int, re.findall(rb"\((\d+) lines of the log could not be written here\)\n", seen)))
    assert missing == handler.dropped
    assert seen.count(b"x" * 200 + b"\n") + missing == 2 * QUEUE_LINES + 1


def test_fields_about_a_request_are_an_object_in_json_and_the_end_of_a_text():
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "req-1: %d", (200,), None)
    vars(record).update(about("req-1", {"client": "192.0.2.1", "key_number": 2}, status=200))
    fields = json.loads(JsonFormatter("api 0").format(record))
    names = ("message", "request_id", "client", "key_number", "status")
    assert [fields[name] for name in names] == ["req-1: 200", "req-1", "192.0.2.1", 2, 200]
    text = TextFormatter("api 0").format(record)
    assert text.endswith(" INFO    api 0 | req-1: 200 (client 192.0.2.1, key_number 2)")


@pytest.mark.parametrize("end", ["", "; raise SystemExit(3)", "; logging.shutdown(); os._exit(0)"])
def test_last_lines_of_a_process_are_written(end):
    code = "import logging, os; from mini_engine import log; log.setup('api 0', 'info', 'text'); "
    code += "logging.getLogger('x').info('the last'); logging.getLogger('x').debug('not shown')" + end
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO    api 0 \| the last\n", ended.stderr), ended.stderr
