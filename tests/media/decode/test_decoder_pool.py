"""Decoder processes: what their endings mean to a request, that nothing of them is left, and what bounds them."""

import asyncio
import contextlib
import itertools
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mini_engine.config import EngineConfig
from mini_engine.media.decode import decoder
from mini_engine.media.decode.decoder import Announced, Decoded, DecodeFailed, Job
from mini_engine.media.decode.decoder_pool import KEPT_BYTES, DecodedItem, DecoderPool
from mini_engine.media.decode.item_limits import DecodeLimits
from mini_engine.media.frame_sampling import VideoFacts, VideoSampling
from mini_engine.metrics import REGISTRY
from mini_engine.protocol.api_errors import DecoderUnavailable, MediaError, out_of
from tests.media.decode.test_image import FORMATS, saved, tall
from tests.support import clips, corpus
from tests.support.decoding import decode_image, decode_video
from tests.support.patience import PATIENCE, cancelled, eventually, settle
from tests.support.processes import FailPoint, alive, descendants, memory

GOOD = clips.encode(20)
SAMPLING = VideoSampling(num_frames=8)


class Decoders:
    """A pool, and the processes it has."""

    def __init__(self, max_busy: int = 2, name: str = "test", **limits: Any):
        self.pool = DecoderPool(name, max_busy, DecodeLimits.of(EngineConfig(**limits)), 1 << 28)
        self.counted: list[int] = []
        self.pool.count_decoded = self.counted.append

    def decode(self, data: bytes = GOOD, owner: str = "a", modality: str = "video") -> Awaitable[DecodedItem]:
        item = f"{modality} 1"
        job = Job(item, len(data), None if modality == "image" else SAMPLING)
        return self.pool.decode(job, data, owner)

    async def check(self, data: bytes = GOOD, modality: str = "video") -> None:
        """It is decoded as in this process."""
        decoding = await self.decode(data, "another", modality)
        frames, facts = decode_video(data, SAMPLING) if modality == "video" else ([decode_image(data)], None)
        np.testing.assert_array_equal(decoding.frames, frames)
        assert decoding.video == facts
        decoding.release()

    def pids(self) -> set[int]:
        """Of those that have started."""
        return {pid for pid in descendants(os.getpid()) if command(pid).startswith("mini-engine: decoder of test")}

    async def settled(self, count: int) -> set[int]:
        """The processes, once there are `count`."""
        await eventually(lambda: len(self.pids()) == count)
        return self.pids()


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def exits(reason: str) -> float:
    return REGISTRY.get_sample_value("mini_engine:media_decoder_exits_total", {"reason": reason}) or 0.0


@contextlib.asynccontextmanager
async def running(**more: Any) -> AsyncIterator[Decoders]:
    """A pool that decodes a good video right, and of which nothing is left afterwards."""
    descriptors, decoders = set(os.listdir("/proc/self/fd")), Decoders(**more)
    try:
        await decoders.check()
        yield decoders
        await eventually(lambda: sum(decoders.counted) == 0)
    finally:
        decoders.pool.close()
    await eventually(lambda: set(os.listdir("/proc/self/fd")) == descriptors)
    assert not [pid for pid in descendants(os.getpid()) if "decoder of test" in command(pid)]


@pytest.fixture
def failpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FailPoint]:
    """It holds the next decoder that decodes a frame, once it is armed."""
    monkeypatch.setenv("MINI_ENGINE_FAILPOINTS", str(tmp_path))
    point = FailPoint(tmp_path, "decoding")
    yield point
    point.release()


async def test_a_decoder_does_one_job_after_another_in_the_same_memory() -> None:
    async with running(max_busy=1) as decoders:
        (first,) = await decoders.settled(2) - {max(decoders.pids())}
        large = clips.remuxed(clips.encode(1, 2000, 1700, codec="mpeg4"), "mp4", times=8)
        for data in (GOOD, clips.encode(9, 32, 16), large, GOOD):
            await decoders.check(data)
        assert first in decoders.pids()
        frames = [8 * 48 * 64 * 3, 8 * 16 * 32 * 3, 8 * 1700 * 2000 * 3]
        counted = list(itertools.accumulate(decoders.counted))
        assert [each for each in counted if each] == [frames[0], frames[0], frames[1], frames[2], frames[0]]
        assert memory(os.getpid(), "RssShmem") < 2 * KEPT_BYTES < frames[2]  # what is more is freed


async def test_a_decoder_is_small_and_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    async with running() as decoders:
        for pid in await decoders.settled(2):
            proc = Path(f"/proc/{pid}")
            maps, status, limits = ((proc / name).read_text() for name in ("maps", "status", "limits"))
            assert "libav" in maps and "torch" not in maps and "transformers" not in maps
            private = re.findall(r"^Private_\w+: +(\d+) kB$", (proc / "smaps_rollup").read_text(), re.MULTILINE)
            assert sum(map(int, private)) < 60 << 10
            assert re.search(r"^Threads:\t1\nSigQ(.*\n)+CapPrm:\t0+\n(.*\n)+NoNewPrivs:\t1$", status, re.MULTILINE)
            for name, most in (("core file size", 1), ("file size", 0)):
                assert re.search(rf"^Max {name} +{most} +{most} ", limits, re.MULTILINE)
            assert re.search(r"^Max open files +16 +16 ", limits, re.MULTILINE)
            assert (proc / "oom_score_adj").read_text() == "1000\n"
            assert b"secret" not in (proc / "environ").read_bytes()


async def test_every_kind_of_file_is_decoded_in_the_sandbox() -> None:
    """What each needs has been loaded: nothing can be any more."""
    videos = [clips.cached(codec, container, 31, g="5") for codec, container in clips.ALL]
    images = [saved(tall(), format) for format in FORMATS]

    async with running(max_busy=1) as decoders:
        for data in videos:
            await decoders.check(data)
        for data in images:
            await decoders.check(data, "image")


@pytest.fixture
def lacking() -> str:
    """The parts of the sandbox that this machine lacks; empty: none."""
    ask = "from mini_engine.media.decode.sandbox import enter_sandbox; print(*enter_sandbox(16))"
    return subprocess.check_output([sys.executable, "-c", ask], text=True).strip()


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders run the code that is in their files."""
    monkeypatch.setattr(decoder, "__name__", "tests.media.decode.hostile_code")


def attacks_on_files(file: Path) -> list[str]:
    """What Landlock denies in each version."""
    ways = f"open('{file}')", f"open('{file}', 'r+')", f"open('{file}.new', 'x')", "os.listdir('/')"
    return [*ways, "os.execv('/bin/true', ['true'])", f"call_libc('ptrace', PTRACE_SEIZE, {os.getpid()}, 0, 0)"]


async def attack(attacks: list[str], **more: Any) -> dict[str, str]:
    """How each fails in a decoder that has filled much of its output memory, and decodes right afterwards."""
    lines = ["#", "os.write(2, b'forged line')", "output[: 1 << 27 : mmap.PAGESIZE].fill(1)", *attacks]
    async with running(max_busy=1, **more) as decoders:
        await decoders.pool.start()
        with pytest.raises(MediaError) as error:
            await decoders.decode("\n".join(lines).encode(), modality="image")
        assert max(memory(pid, "RssShmem") for pid in decoders.pids()) < 2 * KEPT_BYTES
        await decoders.check()
    outcomes = msgspec.json.decode(error.value.problem)
    return {attack: outcomes[attack] for attack in attacks}


@pytest.mark.usefixtures("hostile")
async def test_code_in_a_decoder_reaches_nothing(
    lacking: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if "seccomp" in lacking:
        pytest.skip(lacking)
    server, secret, path = os.getpid(), tmp_path / "key", str(tmp_path / "socket")
    secret.write_text("secret")
    attacks = [
        *attacks_on_files(secret),
        f"os.chmod('{secret}', 0o777)",
        f"socket.socket(socket.AF_UNIX).connect('{path}')",
        f"os.kill({server}, signal.SIGWINCH)",
        f"call_libc('tgkill', {server}, {server}, 0)",
        f"fcntl.fcntl(spec.connection, fcntl.F_SETOWN, {server})",
        f"resource.prlimit({server}, resource.RLIMIT_NOFILE)",
        "os.fork() or os._exit(0)",
        "call_libc('syscall', X32 | 1, 2, b'x', 1)",
        "mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)",
        "call_libc('prctl', PR_SET_PDEATHSIG, 0, 0, 0, 0)",  # it would outlive the server
    ]
    clone3 = "call_libc('syscall', CLONE3, struct.pack('=11Q', *[0] * 4, signal.SIGCHLD, *[0] * 6), 88) or os._exit(0)"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        outcomes = await attack([*attacks, clone3])
    assert outcomes == dict.fromkeys(attacks, "EPERM") | {clone3: "ENOSYS"}
    assert "forged" not in capfd.readouterr().err


@pytest.mark.usefixtures("hostile")
async def test_an_answer_that_cannot_be_right_ends_its_decoder() -> None:
    wrong = {  # what no decode of such an item reports
        "image": [
            [Announced((1, 22000, 24000)), Decoded(None)],
            [Announced((1, 1, 60_000_000)), Decoded(None)],
            [Announced((2, 8, 8)), Decoded(None)],
            [Announced((1, 8, 8)), Decoded(VideoFacts([0.0], 1.0, 1, 1))],
            [DecodeFailed("~~~")],  # not UTF-8
        ],
        "video": [
            [Announced((769, 8, 8)), Decoded(VideoFacts([0.0], 1.0, 1, 1))],
            [Announced((1, 8, 8)), Decoded(None)],
            [Announced((1, 8, 8)), Decoded(VideoFacts([0.0, 1.0], 1.0, 2, 2))],
            [Announced((2, 8, 8)), Decoded(VideoFacts([1.0, 0.0], 1.0, 2, 2))],
            [Announced((1, 8, 8)), Decoded(VideoFacts([0.0], 5e-324, 1, 1))],
            [Announced((1, 8, 8)), Decoded(VideoFacts([0.0], 1.0, 1, 2))],
        ],
    }
    files = []
    for modality, answers in wrong.items():
        for replies in answers:
            datagrams = [msgspec.msgpack.encode(reply).replace(b"~~~", b"\xed\xa0\x80") for reply in replies]
            lines = ["#", *(f"os.write(spec.connection, {datagram})" for datagram in datagrams), "os._exit(0)"]
            files.append(("\n".join(lines).encode(), modality))
    async with running(max_busy=len(files)) as decoders:
        counted, sent = exits("crash"), [decoders.decode(data, modality=modality) for data, modality in files]
        errors = await asyncio.gather(*sent, return_exceptions=True)
        assert [str(error) for error in errors if "crashes its decoder" not in str(error)] == []
        assert exits("crash") == counted + len(files)


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("part", ["Landlock", "seccomp"])
async def test_without_a_part_of_the_sandbox_the_rest_holds_and_the_log_names_it(
    part: str, lacking: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if lacking:
        pytest.skip(lacking)
    (tmp_path / "key").write_text("secret")
    outcomes = await attack(attacks_on_files(tmp_path / "key"), name=f"test without {part}")
    assert {*outcomes.values()} <= {"EPERM", "EACCES"}
    assert caplog.messages[0].startswith(f"media decoders run without a part of their sandbox: {part} (")


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_decoder_fails_its_item_alone_and_is_replaced(
    number: signal.Signals, failpoint: FailPoint
) -> None:
    reason, error = {
        signal.SIGSEGV: ("crash", r"^video 1: crashes its decoder \(signal 11\)"),
        signal.SIGKILL: ("killed", "^video 1: its decoder was killed"),
        signal.SIGSTOP: ("timeout", "^video 1: .* 3 s, the limit of --media-decode-timeout, since .* little"),
    }[number]
    async with running(media_decode_timeout=3.0) as decoders:
        before, counted = await decoders.settled(2), exits(reason)
        failpoint.arm()
        lost = asyncio.ensure_future(decoders.decode())
        pid = await asyncio.to_thread(failpoint.wait)
        os.kill(pid, number)
        await decoders.check()
        with pytest.raises(MediaError if number == signal.SIGSEGV else DecoderUnavailable, match=error):
            await lost
        await eventually(lambda: exits(reason) == counted + 1)
        await decoders.check()
        await eventually(lambda: pid not in decoders.pids() and len(decoders.pids()) > 1)
        assert pid in before


async def test_decoders_that_die_idle_cost_no_request_and_are_replaced() -> None:
    async with running() as decoders:
        counted = exits("killed")
        before = await decoders.settled(2)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not any(map(alive, before)))  # with their connections, which outlive their names
        await decoders.check()
        assert exits("killed") == counted + 2
        assert not before & await decoders.settled(2)


async def test_a_decoder_that_dies_while_its_api_server_loads_costs_no_start() -> None:
    decoders, before = Decoders(), {*descendants(os.getpid())}
    decoders.pool.launch()
    (launched,) = {*descendants(os.getpid())} - before
    os.kill(launched, signal.SIGKILL)
    await decoders.pool.start()
    await decoders.check()
    decoders.pool.close()


async def test_a_job_that_is_cancelled_while_its_decoder_starts_leaves_a_spare() -> None:
    decoders, before = Decoders(max_busy=1), {*descendants(os.getpid())}
    waiting = asyncio.ensure_future(decoders.decode())
    await eventually(lambda: {*descendants(os.getpid())} - before)
    (starting,) = {*descendants(os.getpid())} - before
    os.kill(starting, signal.SIGSTOP)
    await cancelled(waiting)
    (spare,) = await decoders.settled(1)
    assert spare != starting
    decoders.pool.close()


async def test_a_decoder_that_cannot_be_started_says_what_the_host_is_out_of() -> None:
    """So that the request is counted as one that the host refuses. The next one is decoded."""
    decoders, (soft, hard) = Decoders(max_busy=1), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # each further one is EMFILE
    try:
        with pytest.raises(OSError) as caught:
            await decoders.decode()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert out_of(caught.value) == "file descriptors"
    await decoders.check()
    decoders.pool.close()


async def test_a_pool_that_is_closed_before_its_spare_starts_starts_none() -> None:
    decoders, before = Decoders(), descendants(os.getpid())
    await decoders.pool.start()
    decoders.pool.close()
    await settle()
    assert descendants(os.getpid()) == before


async def test_a_pool_that_is_closed_while_a_decoder_starts_leaves_no_reader_of_its_descriptor() -> None:
    decoders = Decoders(max_busy=1)
    starting = asyncio.ensure_future(decoders.pool.start())
    await eventually(lambda: len(decoders.pids()) == 1)
    decoders.pool.close()
    ours, theirs = socket.socketpair()  # ours has the number of the connection to the decoder
    with ours, theirs:
        ours.setblocking(False)
        receiving = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(ours, 1))
        await settle()
        theirs.send(b"x")
        assert await asyncio.wait_for(receiving, PATIENCE) == b"x"
    await cancelled(starting)


@pytest.mark.parametrize("stuck", [False, True])
async def test_a_cancelled_decode_stops(stuck: bool, failpoint: FailPoint) -> None:
    """By the flag that the decode loop reads, so that its decoder lives on; or by SIGKILL."""
    async with running(max_busy=1) as decoders:
        counted = exits("cancelled")
        failpoint.arm()
        leaving = asyncio.ensure_future(decoders.decode())
        pid = await asyncio.to_thread(failpoint.wait)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        if not stuck:
            failpoint.release()
        await decoders.check()  # the only permit is free again
        assert exits("cancelled") == counted + stuck
        assert (pid in await decoders.settled(2)) == (not stuck)


async def test_items_of_one_request_leave_permits_to_other_requests() -> None:
    async with running(max_busy=1) as decoders:
        order: list[str] = []

        async def decode(owner: str) -> None:
            decoding = await decoders.decode(owner=owner)
            order.append(owner)
            decoding.release()

        await asyncio.gather(*(decode(owner) for owner in ["many"] * 5 + ["one", "two"]))
        assert sorted(order[1:4]) == ["many", "one", "two"]


async def test_an_item_that_gets_no_permit_in_time_is_unavailable() -> None:
    async with running(max_busy=1, media_decode_timeout=0.3) as decoders:
        endless = [decoders.decode(corpus.mp4_of_associations(), str(number)) for number in range(16)]
        outcomes = await asyncio.gather(*endless, return_exceptions=True)
        late = "video 1: no media decoder was free within 1.2 s; retry later"
        assert late in {str(outcome) for outcome in outcomes if isinstance(outcome, DecoderUnavailable)}


async def test_decoding_needs_little_memory() -> None:
    """For HDR: OpenBLAS ends a process where its first product gets none. And for many frames, one job after another:
    PyAV's frames keep their pictures, of 1.8 MB here, until the garbage collector finds them."""
    hdr = clips.encode_in(18, clips.decode_all(GOOD))
    untagged = clips.remuxed(clips.encode(1, 1280, 960, codec="mpeg4"), "mp4", times=8)

    async with running(max_busy=1, media_decoder_memory=20 << 20) as decoders:
        for data in (hdr, *[untagged] * 10):
            await decoders.check(data)


async def test_an_attack_is_contained() -> None:
    """It ends within the time of one item, others are answered meanwhile, and nothing stays in this process.

    The loop's clock runs for a small part of the time while the good videos are decoded.
    """
    # Pillow keeps several canvases of 256 MB, 1.7 GB in all, for a lossless picture whose pixels take no bits.
    code = "101" + "0" * 8  # of one symbol
    bits = f"{8191:014b}"[::-1] + f"{8190:014b}"[::-1] + "1000000" + code * 5 + "0" * 6  # the lowest bit first
    pixels = b"\x2f" + int(bits[::-1], 2).to_bytes(len(bits) // 8, "little")
    body = b"WEBPVP8L" + struct.pack("<I", len(pixels)) + pixels + b"\0" * (len(pixels) % 2)
    webp_of_one_colour = b"RIFF" + struct.pack("<I", len(body)) + body
    attacks = [  # modality, file, and what its error names
        ("video", corpus.mp4_of_associations(), "the limit of --media-decode-timeout"),
        ("image", webp_of_one_colour, "bytes of --media-decoder-memory"),
        ("video", corpus.PLAYLISTS["concat"].format("file:///etc/passwd").encode(), "cannot be read"),
    ]
    async with running(media_decode_timeout=0.3, media_decoder_memory=320 << 20) as decoders:
        await asyncio.gather(*(decoders.check() for _ in range(2)))
        before = memory(os.getpid(), "VmRSS")
        sent = [asyncio.ensure_future(decoders.decode(data, "attacker", modality)) for modality, data, _ in attacks]
        while not all(task.done() for task in sent):
            await decoders.check()
        for task, (_, _, named) in zip(sent, attacks, strict=True):
            with pytest.raises((MediaError, DecoderUnavailable), match=named):
                await task
        await eventually(lambda: 1 <= len(decoders.pids()) <= 3)  # as many as may be busy, slow or not, and a spare
        assert memory(os.getpid(), "VmRSS") - before < 64 << 20
