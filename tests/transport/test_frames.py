"""Frames survive every split, and a stream that is cut leaves no descriptor behind."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.transport.base import TransportError
from mini_engine.transport.frames import HEADER, MAX_ENVELOPE, FrameParser, close_all, read_chunk, send_frame


def descriptor() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def frame(body: bytes, descriptors: int = 0) -> bytes:
    return HEADER.pack(len(body), descriptors) + body


STREAM = frame(b"one") + frame(b"", 1) + frame(b"three" * 3, 1) + frame(b"four")


def test_one_byte_at_a_time() -> None:
    parser, taken = FrameParser(), []
    second, third = len(frame(b"one")), len(frame(b"one") + frame(b"", 1))
    expected = []
    for index in range(len(STREAM)):
        fds = [descriptor()] if index in (second, third) else []
        expected += fds
        taken += list(parser.feed(STREAM[index : index + 1], fds))
    assert [each.envelope for each in taken] == [b"one", b"", b"three" * 3, b"four"]
    assert [each.descriptors for each in taken] == [[], expected[:1], expected[1:], []]
    assert not any(each.lost for each in taken)
    close_all(expected)


@pytest.mark.parametrize("end", range(len(STREAM)))
def test_cut_at_every_byte(end: int) -> None:
    parser, fds = FrameParser(), [descriptor(), descriptor()]
    taken = list(parser.feed(STREAM[:end], fds))
    handed_out = [fd for each in taken for fd in each.descriptors]
    parser.close()
    assert [is_open(fd) for fd in fds] == [fd in handed_out for fd in fds]
    close_all(handed_out)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=6), st.integers(1, 3))
def test_any_split(cuts: list[int], repeats: int) -> None:
    parser, taken, stream = FrameParser(), [], STREAM.replace(b"\x01", b"\x00") * repeats
    places = [0, *sorted(cuts), len(stream)]
    for start, end in zip(places, places[1:], strict=False):
        taken += [each.envelope for each in parser.feed(stream[start:end])]
    assert taken == [b"one", b"", b"three" * 3, b"four"] * repeats


def test_a_lost_descriptor_shows() -> None:
    (taken,) = FrameParser().feed(frame(b"x", 1))
    assert taken.lost and taken.descriptors == []


@pytest.mark.parametrize("head", [HEADER.pack(MAX_ENVELOPE + 1, 0), HEADER.pack(3, 2), b"\xff" * HEADER.size])
def test_broken_framing(head: bytes) -> None:
    parser = FrameParser()
    feed = parser.feed(frame(b"good") + head)
    assert next(feed).envelope == b"good"
    with pytest.raises(TransportError):
        next(feed)


def test_descriptors_cross_a_socket() -> None:
    left, right = socket.socketpair()
    fd = descriptor()
    with left, right:
        right.setblocking(False)
        assert read_chunk(right).data == b""
        send_frame(left, b"first")
        send_frame(left, b"second", [fd])
        send_frame(left, b"third")
        parser, taken = FrameParser(), []
        while len(taken) < 3:
            chunk = read_chunk(right)
            taken += parser.feed(chunk.data, chunk.descriptors)
        assert [len(each.descriptors) for each in taken] == [0, 1, 0]
        (received,) = taken[1].descriptors
        assert not os.get_inheritable(received) and os.fstat(received).st_rdev == os.fstat(fd).st_rdev
        close_all([fd, received])
        left.close()
        with pytest.raises(TransportError, match="closed"):
            read_chunk(right)


def test_a_full_socket_is_an_error_and_a_closed_one_too() -> None:
    left, right = socket.socketpair()
    with left, right:
        with pytest.raises(TransportError, match="does not read"):
            while True:
                send_frame(left, b"x" * 1000)
        right.close()
        with pytest.raises(TransportError, match="gone"):
            send_frame(left, b"x")
        with pytest.raises(TransportError, match="gone"):
            send_frame(left, b"x")
        with pytest.raises(TransportError, match="too long"):
            send_frame(left, bytes(MAX_ENVELOPE + 1))
