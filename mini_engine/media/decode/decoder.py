"""A decoder process: decodes one image or video at a time for its API server. `decoder_pool.py` is the other end.

A crafted file can make FFmpeg or Pillow crash, hang or allocate gigabytes. Here the kernel bounds that, and only this
process is lost. It never imports torch or transformers: it takes 30 MB of its own and 0.2 s to start.

    API server                                        decoder process
      encoded bytes -> input memory
      Job -------------------------------------------->
      <---------------------------- Announced(T, H, W)   once the file is probed
      <------------------------ Decoded | DecodeFailed   the frames are in the output memory

Each message is one datagram of a socket pair. Both memories are memfds of the API server, which every job uses again:
the output memory is as large as the limits allow, and its pages exist once they are written. The first page of the
input memory holds the stop flag, the encoded bytes follow.
"""

import gc
import importlib
import math
import mmap
import os
import resource
import socket
import sys
from typing import Annotated, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray
from setproctitle import setproctitle

from mini_engine.failpoints import DIRECTORY
from mini_engine.launch.process_setup import die_with_parent, ignore_stop_signals, keep_freed_memory
from mini_engine.media.decode.item_limits import DecodeLimits, Guard
from mini_engine.media.decode.sandbox import enter_sandbox
from mini_engine.media.frame_sampling import VideoFacts, VideoSampling
from mini_engine.protocol.api_errors import MediaError

DATA_OFFSET = mmap.PAGESIZE  # of the encoded bytes in the input memory
Size = Annotated[int, msgspec.Meta(ge=1)]
Shape = tuple[Size, Size, Size]  # frames, height, width
DATAGRAM_BYTES = 208 << 10  # what the kernel lets a unix socket send at once by default

_DESCRIPTORS = 16
_KEPT_BYTES = 16 << 20  # of freed memory, for the next item


class DecoderSpec(msgspec.Struct, frozen=True):
    """Arguments of a decoder process."""

    parent_pid: int
    title: str  # of the process
    connection: int  # descriptors
    input: int
    output: int
    limits: DecodeLimits
    max_input_bytes: int


class Job(msgspec.Struct, frozen=True):
    """Decode the image, or the sampled frames of the video, in the input memory; errors call it `item`."""

    item: str
    num_bytes: Size
    sampling: VideoSampling | None = None  # None: an image, or frames
    allow_partial: bool = False
    frames: list[Size] = []  # a video of images, one after another: the bytes of each


class Started(msgspec.Struct, frozen=True, tag=True):
    """The decoder can take a job. `missing`: the parts of its sandbox that the kernel refuses, and why."""

    missing: list[str]


class Announced(msgspec.Struct, frozen=True, tag=True):
    """The maximum of the frames that follow: uint8 [T, H, W, 3] at the start of the output memory."""

    shape: Shape


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """The job is done: the frames are there, of a video as many as `video` has timestamps."""

    video: VideoFacts | None  # None: an image, or frames


class DecodeFailed(msgspec.Struct, frozen=True, tag=True):
    """The job failed: the item is at fault, or its decoding takes more memory than is allowed."""

    problem: str | None  # the error's text without the item's name; None: too little memory


Reply = Started | Announced | Decoded | DecodeFailed


class _Decoder:
    def __init__(self, spec: DecoderSpec):
        self._limits = spec.limits
        self._connection = socket.socket(fileno=spec.connection)
        self._input = spec.input
        self._flag = mmap.mmap(spec.input, DATA_OFFSET, mmap.MAP_SHARED, mmap.PROT_READ)
        self._output = np.frombuffer(mmap.mmap(spec.output, spec.limits.most_output_bytes), np.uint8)
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        # Address space, since the kernel bounds nothing else of a process: what it has now counts as its own.
        self._own_bytes = self._read_status("VmSize")
        self._most_bytes = self._own_bytes + spec.max_input_bytes + spec.limits.media_decoder_memory

    def serve(self, missing: list[str]) -> None:
        """Process jobs until the API server closes the connection. `missing`: see `Started`."""
        self._send(Started(missing))
        jobs = msgspec.msgpack.Decoder(Job)
        while message := self._connection.recv(DATAGRAM_BYTES):
            self._send(self._decode(jobs.decode(message)))
            gc.collect()  # frames whose side data were read refer to themselves

    def _decode(self, job: Job) -> Decoded | DecodeFailed:
        # Not at the head of this file, which the API server imports: no FFmpeg is loaded there.
        from mini_engine.media.decode.animation import decode_animation, is_animation
        from mini_engine.media.decode.image import decode_frames, decode_image
        from mini_engine.media.decode.video import decode_video

        limit = self._own_bytes + job.num_bytes + self._limits.media_decoder_memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, self._most_bytes))
        peak_before, video = self._read_status("VmPeak"), None
        guard = Guard(job.item, self._limits, job.allow_partial, should_stop=lambda: self._flag[0] != 0)
        try:
            data = mmap.mmap(self._input, job.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=DATA_OFFSET)
            if job.sampling is not None:
                decode = decode_animation if is_animation(data) else decode_video
                _, video = decode(data, job.sampling, guard, self._allocate)
            elif job.frames:
                decode_frames(data, job.frames, guard, self._allocate)
            else:
                decode_image(data, guard, self._allocate)
            return Decoded(video)
        except MediaError as error:
            # After a failed allocation FFmpeg may report damage: was less than a quarter of the memory left?
            is_short = self._read_status("VmPeak") > max(peak_before, limit - self._limits.media_decoder_memory // 4)
            return DecodeFailed(None if is_short else error.problem)
        except MemoryError:
            return DecodeFailed(None)

    def _allocate(self, shape: Shape) -> NDArray[np.uint8]:
        """See `frame_array.Allocate`."""
        self._send(Announced(shape))
        return self._output[: 3 * math.prod(shape)].reshape(*shape, 3)

    def _send(self, reply: Reply) -> None:
        self._connection.send(msgspec.msgpack.encode(reply))

    def _read_status(self, name: str) -> int:
        """Bytes, by a line of the process's status: `VmSize` is its address space, `VmPeak` the most that it had."""
        return int(os.pread(self._status, 4096, 0).partition(f"{name}:".encode())[2].split()[0]) << 10


def main() -> NoReturn:
    """Main function of a decoder process; its argument is a `DecoderSpec` as JSON."""
    ignore_stop_signals()
    spec = msgspec.json.decode(sys.argv[1], type=DecoderSpec)
    die_with_parent(spec.parent_pid)
    for name in ("animation", "image", "video"):
        importlib.import_module(f"mini_engine.media.decode.{name}")
    gc.freeze()  # what is loaded stays: the collector need not walk over it
    keep_freed_memory(_KEPT_BYTES)
    decoder = _Decoder(spec)
    missing = enter_sandbox(_DESCRIPTORS, DIRECTORY)
    setproctitle(spec.title)
    decoder.serve(missing)
    os._exit(0)


if __name__ == "__main__":
    main()
