"""Log lines that cannot be written: nobody waits, nobody fails, and what is missing is counted."""

from __future__ import annotations

import fcntl
import os
import select

import pytest

from mini_engine.log import Output

LINE = b"a line\n"


@pytest.fixture
def pipe():
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            pass


def read_all(fd: int) -> bytes:
    parts = []
    while True:
        try:
            parts.append(os.read(fd, 1 << 20))
        except BlockingIOError:
            return b"".join(parts)


def test_a_pipe_that_nobody_reads_holds_nobody_up(pipe):
    read, write = pipe
    output = Output(write)
    room = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
    for _ in range(2 * room // len(LINE)):
        output.write(LINE)
    kept = read_all(read).count(LINE)
    output.write(LINE)
    missing = 2 * room // len(LINE) - kept
    assert missing > 0
    assert read_all(read) == b"(%d lines of the log could not be written here)\n" % missing + LINE


def test_lines_longer_than_a_pipe_takes_at_once_are_written_whole(pipe):
    read, write = pipe
    long = b"x" * (3 * select.PIPE_BUF) + b"\n"
    Output(write).write(long + LINE)
    assert read_all(read) == long + LINE


def test_a_reader_that_has_gone_is_no_error(pipe):
    read, write = pipe
    output = Output(write)
    os.close(read)
    output.write(LINE)
    os.close(write)
    output.write(LINE)


def test_a_full_disk_is_no_error():
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left"):
            os.write(fd, LINE)
        Output(fd).write(LINE)
    finally:
        os.close(fd)
