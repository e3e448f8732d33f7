"""The decoder processes of one API server. `decoder.py` is the other end.

A job has a permit (`fair_semaphore.py`) and a `DecoderProcess`, until its frames are released. A spare decoder stands
ready, or starts by itself: whether one lives is checked when a job takes it. Use the pool from the event loop's thread
only, which has to outlive the processes that it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from mini_engine import metrics
from mini_engine.config import flag_of
from mini_engine.fair_semaphore import FairSemaphore, Permit
from mini_engine.media.decode import decoder
from mini_engine.media.decode.decoder import Announced, Decoded, DecodeFailed, Job, Reply, Shape, Started
from mini_engine.media.decode.item_limits import MAX_ASPECT_RATIO, DecodeLimits
from mini_engine.media.frame_sampling import VideoFacts
from mini_engine.protocol.api_errors import DecoderUnavailable, MediaError, out_of
from mini_engine.transport.shared_memory import create_sparse

logger = logging.getLogger(__name__)

STOP_SECONDS = 0.5  # from the stop flag, which the decode loop reads at each frame, to SIGKILL
STARVED_SHARE = 0.25  # of its wall time: a decode that got less processor time says nothing of its item
START_SECONDS = 60.0  # within which a decoder that a job waits for must be ready
QUEUE_TIMEOUTS = 4  # a job waits for a permit for at most so many times --media-decode-timeout
MAX_MESSAGES = 4  # of a job: a video's frames are announced for the seek and for up to two walks
KEPT_BYTES = 32 << 20  # of each memory between jobs: 34 frames of 640x480
INLINE_BYTES = 1 << 20  # larger items are copied into the input memory by a thread

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# All else of the environment, which may hold secrets, is not for decoders. These find the packages.
ENVIRONMENT = """HOME LD_LIBRARY_PATH MINI_ENGINE_FAILPOINTS PYTHONDONTWRITEBYTECODE PYTHONHOME PYTHONNOUSERSITE
PYTHONPATH PYTHONPYCACHEPREFIX PYTHONSAFEPATH PYTHONUSERBASE""".split()

_replies = msgspec.msgpack.Decoder(Reply)


@dataclass(frozen=True, eq=False)
class DecodedItem:
    """A decoded item. Its frames are its decoder's memory until `release`, which any thread may call: then the decoder
    takes its next job. For frames of a gigabyte it takes up to 0.1 s."""

    frames: NDArray[np.uint8]  # [T, H, W, 3], RGB, contiguous, upright
    video: VideoFacts | None  # None: an image, or the frames of the job
    release: Callable[[], None]


class DecoderPool:
    """At most `max_busy` busy decoders, and as many again for slow items. Further jobs are queued."""

    def __init__(self, name: str, max_busy: int, limits: DecodeLimits, max_input_bytes: int):
        """`name` is the API server's, for the titles of the processes. No process is started yet."""
        self.limits, self.max_busy, self.is_closed = limits, max_busy, False
        # Called with the bytes by which the decoded frames in memory grow, before they are allocated, or shrink.
        self.count_decoded: Callable[[int], None] = lambda _: None
        self._name, self._max_input_bytes = name, max_input_bytes
        self._permits = FairSemaphore(max_busy, slow_limit=max_busy)
        self._decoders: set[DecoderProcess] = set()
        self._idle: list[DecoderProcess] = []  # perhaps still starting; the last one's memory is the warmest
        self._background: set[asyncio.Task[None]] = set()

    def launch(self) -> None:
        """Launch a decoder, which imports its libraries while this process does something else. It needs no event loop.
        Raises OSError."""
        if self.is_closed:
            raise OSError("the pool is closed")
        child = DecoderProcess(self._name, self.limits, self._max_input_bytes, lambda size: self.count_decoded(size))
        self._decoders.add(child)
        self._idle.append(child)

    async def start(self) -> None:
        """Wait until a decoder is ready, with a spare on its way. Raises OSError."""
        first = await self._take_decoder()
        if first.missing:
            logger.warning("media decoders run without a part of their sandbox: %s", ", ".join(first.missing))
        self._keep_idle(first)

    async def decode(self, job: Job, data: bytes, owner: str) -> DecodedItem:
        """Decode the item `data` for the request `owner`. Cancelling it stops the decode within STOP_SECONDS.

        Raises:
            MediaError: the item is damaged, unsupported or beyond a limit; or it crashed its decoder, took too long or
                needed too much memory.
            DecoderUnavailable: no decoder was free in time, or it was killed or starved from outside.
            OSError: the host has no process, descriptor or memory for it, see `out_of`.
        """
        permit, child = await self._acquire(job.item, owner)
        loop = asyncio.get_running_loop()

        def release() -> None:
            with contextlib.suppress(RuntimeError, ValueError):  # the loop, or the decoder, has been closed meanwhile
                child.shrink()
                loop.call_soon_threadsafe(self._release, permit, child)

        work = asyncio.ensure_future(child.decode(job, data))
        try:
            await asyncio.wait({work})  # cancelling it does not cancel `work`
            return DecodedItem(*work.result(), release)
        except asyncio.CancelledError:
            if not self.is_closed:
                child.stop()
                self._run_in_background(_release_when_stopped(child, work, release))
            raise
        except BaseException:
            release()
            raise
        finally:
            del work  # its error would keep itself alive, and the mapping of the frames

    def close(self) -> None:
        """Kill all decoders and wait for them. Running jobs are lost."""
        self.is_closed = True
        with contextlib.suppress(RuntimeError):  # the loop has ended
            for child in self._decoders:  # some start: the next descriptor with this number must not be read for them
                asyncio.get_running_loop().remove_reader(child.connection)
        self._idle.clear()
        for child in self._decoders:
            child.close()
        self._decoders.clear()

    async def _acquire(self, item: str, owner: str) -> tuple[Permit, DecoderProcess]:
        seconds = QUEUE_TIMEOUTS * self.limits.media_decode_timeout
        try:
            permit = await self._permits.acquire(owner, seconds)
        except TimeoutError:
            raise DecoderUnavailable(item, f"no media decoder was free within {seconds:g} s; retry later") from None
        try:
            return permit, await self._take_decoder()
        except BaseException as error:
            permit.release()
            if isinstance(error, OSError) and not out_of(error):
                raise DecoderUnavailable(item, "no media decoder could be started; retry later") from error
            raise

    async def _take_decoder(self) -> DecoderProcess:
        """An idle decoder, or else a new one, with a spare on its way. Raises OSError."""
        is_new = False
        while not is_new:
            if is_new := not self._idle:
                self.launch()
            child = self._idle.pop()
            try:
                is_ready = await child.is_ready()
            except BaseException:
                self._discard(child)
                self._ensure_spare()  # it may have been the spare
                raise
            if is_ready:
                self._ensure_spare()
                return child
            self._retire(child, "killed")
        raise OSError("a media decoder process did not start")

    def _release(self, permit: Permit, child: DecoderProcess) -> None:
        if not self.is_closed:
            child.count_frames(0)
            permit.release()
            self._keep_idle(child)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Nothing waits for `work`; the pool keeps a reference to it."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _ensure_spare(self) -> None:
        if not self._idle and not self.is_closed:
            try:
                self.launch()
            except OSError as error:  # the next job tries again, and reports it
                logger.warning("a spare media decoder cannot be started: %s", error)

    def _keep_idle(self, child: DecoderProcess) -> None:
        if child.ending is None and len(self._idle) <= self.max_busy:  # with the spare
            self._idle.append(child)
        else:
            self._retire(child, child.ending or "surplus")
            self._ensure_spare()

    def _retire(self, child: DecoderProcess, ending: metrics.DecoderEnding) -> None:
        metrics.media_decoder_exits_total.labels(ending).inc()
        if ending not in ("surplus", "cancelled"):
            logger.warning("media decoder %d replaced: %s", child.pid, ending)
        self._discard(child)

    def _discard(self, child: DecoderProcess) -> None:
        self._decoders.discard(child)
        self._run_in_background(asyncio.to_thread(child.close))


async def _release_when_stopped(child: DecoderProcess, work: asyncio.Future[Any], release: Callable[[], None]) -> None:
    """The decode was asked to stop: the decoder reports in time, or is killed."""
    await asyncio.wait({work}, timeout=STOP_SECONDS)
    if not work.done():
        child.kill("cancelled")
        await asyncio.wait({work})
    work.exception()  # asyncio logs one that is never retrieved
    release()


class DecoderProcess:
    """One decoder process, both memories and its connection. `ending` is why it can take no more jobs; None: it can."""

    def __init__(self, name: str, limits: DecodeLimits, max_input_bytes: int, count_decoded: Callable[[int], None]):
        """Start it. `count_decoded`: see `DecoderPool`. Raises OSError."""
        self.ending: metrics.DecoderEnding | None = None
        self._count_decoded, self._decoded_bytes = count_decoded, 0  # bytes of the frames of its job
        self._has_started, self.missing = False, list[str]()  # parts of its sandbox, once it has started
        self._limits = limits
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            self.connection, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.enter_context(connection)
            ours.enter_context(self.connection).setblocking(False)
            output = create_sparse(limits.most_output_bytes)
            theirs.callback(os.close, output)
            self._output: mmap.mmap | None = mmap.mmap(output, limits.most_output_bytes)
            self._input = ours.enter_context(open(os.memfd_create("mini-engine"), "r+b", buffering=0))
            self._input.truncate(decoder.DATA_OFFSET)
            descriptors = (connection.fileno(), self._input.fileno(), output)
            title = f"mini-engine: decoder of {name}"
            spec = decoder.DecoderSpec(os.getpid(), title, *descriptors, limits, max_input_bytes)
            self._process = subprocess.Popen(
                [sys.executable, "-m", decoder.__name__, msgspec.json.encode(spec).decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={name: value for name, value in os.environ.items() if name in ENVIRONMENT} | ONE_THREAD,
            )
            ours.pop_all()
        self.pid = self._process.pid

    async def is_ready(self) -> bool:
        """Whether it takes a job: it has started, and since then has neither exited nor sent a message without a job.
        Waits while it starts."""
        try:
            if not self._has_started:
                async with asyncio.timeout(START_SECONDS):
                    reply = await self._receive()
                assert isinstance(reply, Started)
                self.missing, self._has_started = reply.missing, True
            self.connection.recv(1, socket.MSG_PEEK)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    async def decode(self, job: Job, data: bytes) -> tuple[NDArray[np.uint8], VideoFacts | None]:
        """Do one job; see `DecoderPool.decode`. The next job writes over the frames."""
        began, seconds = self._processor_seconds(), self._limits.media_decode_timeout
        memory = self._input.fileno()
        try:
            async with asyncio.timeout(seconds):
                os.pwrite(memory, b"\0", 0)  # the stop flag
                if len(data) <= INLINE_BYTES:
                    os.pwrite(memory, data, decoder.DATA_OFFSET)
                else:
                    await asyncio.to_thread(os.pwrite, memory, data, decoder.DATA_OFFSET)
                self.connection.send(msgspec.msgpack.encode(job))
                return await self._result(job)
        except TimeoutError:
            starved = self._processor_seconds() - began < STARVED_SHARE * seconds
            self.kill("timeout")
            problem = f"decoding takes more than {seconds:g} s, the limit of {flag_of('media_decode_timeout')}"
            if starved:
                reason = "since its decoder got little processor time"
                raise DecoderUnavailable(job.item, f"{problem}, {reason}; retry later") from None
            raise MediaError(job.item, f"{problem}; send a shorter or smaller file") from None
        except ConnectionError as error:
            raise await self._explain_exit(job.item) from error
        except BaseException as error:
            if not isinstance(error, MediaError):
                self.kill("crash")  # it may still answer, and that would be taken for the next job's answer
            raise

    def stop(self) -> None:
        """Ask the decode loop to stop. It then reports a failure, unless it has finished."""
        os.pwrite(self._input.fileno(), b"\1", 0)

    def kill(self, ending: metrics.DecoderEnding) -> None:
        """`close` reaps it."""
        self.ending = ending
        self._process.kill()

    def count_frames(self, nbytes: int) -> None:
        """The frames in the output memory take so many bytes from now on."""
        self._count_decoded(nbytes - self._decoded_bytes)
        self._decoded_bytes = nbytes

    def shrink(self) -> None:
        """After a job: free what it took of both memories beyond KEPT_BYTES, whatever it has reported of that."""
        if os.fstat(self._input.fileno()).st_size > decoder.DATA_OFFSET + KEPT_BYTES:
            self._input.truncate(decoder.DATA_OFFSET)
        if self._output is not None and len(self._output) > KEPT_BYTES:
            self._output.madvise(mmap.MADV_REMOVE, KEPT_BYTES)

    def close(self) -> None:
        """Kill the process, wait for its exit and close the descriptors. Blocks."""
        self._process.kill()
        self._process.wait()
        self.connection.close()
        self._input.close()
        self._output = None  # the mapping holds a descriptor

    async def _result(self, job: Job) -> tuple[NDArray[np.uint8], VideoFacts | None]:
        """What the decoder reports. A crafted input may have taken it over, so a message is checked before it is used:
        the decoder can give wrong frames, and affect nothing else."""
        shape = (0, 0, 0)
        for _ in range(MAX_MESSAGES):
            match await self._receive():
                case Announced(shape=announced) if self._is_possible(job, announced):
                    self.count_frames(3 * math.prod(shape := announced))
                case Decoded(video=video) if count := self._count_frames(job, shape[0], video):
                    assert self._output is not None
                    kept = (count, *shape[1:], 3)
                    return np.frombuffer(self._output, np.uint8, math.prod(kept)).reshape(kept), video
                case DecodeFailed(problem=str(problem)):
                    raise MediaError(job.item, problem)
                case DecodeFailed():
                    self.kill("memory")
                    limit = f"the {self._limits.media_decoder_memory} bytes of {flag_of('media_decoder_memory')}"
                    raise MediaError(job.item, f"decoding takes more memory than {limit}; send a smaller file")
                case _:
                    break
        raise ConnectionError("unexpected message")

    def _is_possible(self, job: Job, shape: Shape) -> bool:
        """Whether the limits allow the item to have frames of this shape."""
        limits, (count, height, width) = self._limits, shape
        counts, most_pixels = range(1, limits.max_video_frames_kept + 1), limits.max_frame_pixels
        if job.sampling is None:
            images = max(len(job.frames), 1)
            counts, most_pixels = range(images, images + 1), max(most_pixels, limits.max_image_pixels)
        fits = height * width <= most_pixels and 3 * math.prod(shape) <= limits.most_output_bytes
        return count in counts and fits and max(height, width) <= MAX_ASPECT_RATIO * min(height, width)

    def _count_frames(self, job: Job, announced: int, video: VideoFacts | None) -> int:
        """How many frames are kept of those announced; 0: the item, by its kind and the limits, cannot have these."""
        if job.sampling is None or video is None:
            return announced if job.sampling is None and video is None else 0
        times, limits = [*video.timestamps, self._limits.max_video_seconds], self._limits
        counts = [len(video.timestamps), video.window_frames, video.total_frames, limits.max_video_frames]
        is_possible = counts[0] <= announced and counts == sorted(counts) and times == sorted(times)
        return counts[0] if is_possible else 0

    async def _receive(self) -> Reply:
        message = await asyncio.get_running_loop().sock_recv(self.connection, decoder.DATAGRAM_BYTES)
        try:
            return _replies.decode(message)
        except Exception as error:  # noqa: BLE001 - msgspec raises several kinds
            raise ConnectionError("the decoder closed its connection or sent an invalid message") from error

    async def _explain_exit(self, item: str) -> Exception:
        """The error of a job after its process exited, or is killed here for an invalid message."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, 1)  # its connection is closed, so it is about to exit
        status = self._process.returncode
        if status == -signal.SIGKILL:
            self.ending = self.ending or "killed"
            return DecoderUnavailable(item, "its decoder was killed, perhaps by the OOM killer; retry later")
        self.kill("crash")
        how = "invalid message" if status is None else f"signal {-status}" if status < 0 else f"exit status {status}"
        logger.warning("media decoder %d crashed: %s", self._process.pid, how)
        return MediaError(item, f"crashes its decoder ({how}); send it in another format")

    def _processor_seconds(self) -> float:
        """User and system time of the process so far. The clock's number is that of clock_getcpuclockid(3) on Linux."""
        return time.clock_gettime(~self._process.pid << 3 | 2)
