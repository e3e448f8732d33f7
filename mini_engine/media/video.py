"""Bytes of a video file -> the sampled frames as RGB, with PyAV, in memory.

Decoding walks the file once. First the packets are read, which costs next to nothing and tells how many frames there
should be and when; that predicts which frames the sampling takes. Then every packet is decoded, and only the predicted
frames are converted to RGB. Sampling over what really was decoded has the last word: should it ask for frames that
were not kept (headers and packets can lie), a second walk fetches those. Memory holds the file's packets and the kept
frames, never all frames.

Each call decodes on its own thread only: the caller decides how many run at once. Knows nothing of models or requests.
"""

import io
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import av
import av.container
import av.video
import numpy as np
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from mini_engine.media.errors import DecodeCancelled, MediaError
from mini_engine.media.matroska import declared_size
from mini_engine.media.sampling import VideoSampling

# FFmpeg's names. Others stay shut: a playlist (hls, dash, concat) is a list of addresses that FFmpeg would go and open.
_CONTAINERS = "mov,matroska,avi,gif"
_UNREADABLE = "cannot be read as a video; send H.264, H.265, VP8, VP9, AV1 or MPEG-4 in mp4, mov, mkv, webm or avi"
_CUT_SHORT = "the file is cut short or damaged: {}; send the whole file"


@dataclass(frozen=True)
class DecodeLimits:
    """What one decode may cost. Exceeding a limit is a MediaError that names the limit's field."""

    max_frames_walked: int = 54_000  # half an hour at 30 frames per second
    max_frames_kept: int = 768  # as many as the Qwen-VL processors take
    max_pixels_per_frame: int = 4096 * 4096
    max_pixels_kept: int = 512 << 20  # over all kept frames: 1.5 GiB of RGB
    max_decode_seconds: float = 30.0  # wall time


class CancelSignal(Protocol):
    """What `threading.Event` offers of this is enough."""

    def is_set(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class DecodedVideo:
    """The sampled frames of a video, and what the processor must know of the whole."""

    frames: NDArray[np.uint8]  # [T, H, W, 3], RGB, contiguous
    frames_indices: NDArray[np.int64]  # [T], places of `frames` among all frames
    fps: float  # of the source, not of the sampling
    total_frames: int  # really decoded, whatever the header says

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.total_frames / self.fps


def decode_video(
    data: bytes,
    sampling: VideoSampling,
    limits: DecodeLimits | None = None,
    *,
    item: str = "video",
    cancelled: CancelSignal | None = None,
) -> DecodedVideo:
    """Decodes a video file in the calling thread. `item` is the item's name in errors, such as "video 1".

    Raises MediaError for a file that cannot be read to its end or exceeds a limit, and DecodeCancelled within a frame's
    time after `cancelled` is set.
    """
    guard = _Guard(item, limits or DecodeLimits(), cancelled)
    if (size := declared_size(data)) is not None and size > len(data):
        raise MediaError(item, _CUT_SHORT.format(f"{len(data)} of {size} bytes are there"))
    try:
        with av.open(
            io.BytesIO(data),
            mode="r",
            metadata_errors="replace",
            container_options={"format_whitelist": _CONTAINERS, "protocol_whitelist": ""},
            # FFmpeg decodes a little while it opens a file: nothing above the limit may be allocated there either.
            options={"max_pixels": str(guard.limits.max_pixels_per_frame)},
        ) as container:
            return _decode(container, sampling, guard)
    except (av.error.FFmpegError, UnicodeDecodeError) as error:
        raise MediaError(item, _UNREADABLE) from error


@dataclass
class _Guard:
    """Holds one decode to its limits."""

    item: str
    limits: DecodeLimits
    cancelled: CancelSignal | None
    started: float = field(default_factory=time.monotonic)

    def tick(self, frames_walked: int) -> None:
        """Called for each packet and frame."""
        if self.cancelled is not None and self.cancelled.is_set():
            raise DecodeCancelled
        if frames_walked > self.limits.max_frames_walked:
            self._exceeded("max_frames_walked", f"more than {self.limits.max_frames_walked} frames", "a shorter video")
        if time.monotonic() - self.started > self.limits.max_decode_seconds:
            seconds = f"{self.limits.max_decode_seconds:g}"
            self._exceeded("max_decode_seconds", f"decoding takes more than {seconds} s", "a shorter or smaller video")

    def check_size(self, width: int, height: int) -> None:
        """Called before anything of this size is allocated."""
        if width * height > self.limits.max_pixels_per_frame:
            most = self.limits.max_pixels_per_frame
            self._exceeded(
                "max_pixels_per_frame", f"{width}x{height} is more than {most} pixels per frame", "a smaller video"
            )

    def check_kept(self, frames: int, width: int, height: int) -> None:
        """Called before the frames of a sampling are kept."""
        if frames > self.limits.max_frames_kept:
            most = self.limits.max_frames_kept
            self._exceeded("max_frames_kept", f"its sampling keeps {frames} frames, more than {most}", "fewer frames")
        if frames * width * height > self.limits.max_pixels_kept:
            kept = f"{frames} frames of {width}x{height} are more than {self.limits.max_pixels_kept} pixels in all"
            self._exceeded("max_pixels_kept", kept, "fewer or smaller frames")

    def _exceeded(self, limit: str, problem: str, remedy: str) -> None:
        raise MediaError(self.item, f"{problem} (limit {limit}); send {remedy}", limit=limit)


@dataclass
class _Walk:
    """One decode of all packets: when each frame is shown, and those that were to be kept."""

    times: list[float | None] = field(default_factory=list)  # seconds; None: the file does not say
    kept: dict[int, av.VideoFrame] = field(default_factory=dict)  # place among all frames -> RGB


def _decode(container: av.container.InputContainer, sampling: VideoSampling, guard: _Guard) -> DecodedVideo:
    stream = container.streams.best("video")
    if not isinstance(stream, av.video.VideoStream):
        raise MediaError(guard.item, "the file holds no video stream")
    if stream.codec_context is None:  # a codec that this FFmpeg does not have
        raise MediaError(guard.item, _UNREADABLE)
    # FFmpeg's own threads multiply with the server's decoder threads, and AUTO has been seen to hang at exit.
    stream.thread_type = "NONE"
    stream.codec_context.thread_count = 1
    guard.check_size(stream.codec_context.width, stream.codec_context.height)
    rate = float(stream.average_rate or stream.guessed_rate or 0) or 24.0
    packets = _read_packets(container, stream, guard)

    stamps = [_time(packet) for packet in packets if packet.size and not packet.is_discard]
    predicted = sampling.indices(_fill_times(stamps, rate)) if stamps else np.zeros(0, np.int64)
    guard.check_kept(len(predicted), stream.codec_context.width, stream.codec_context.height)
    walk = _walk(stream, packets, set(predicted.tolist()), guard)
    if not walk.times:
        raise MediaError(guard.item, _CUT_SHORT.format("no frame can be decoded"))

    times = _fill_times(walk.times, rate)
    indices = sampling.indices(times)
    missing = set(indices.tolist()) - walk.kept.keys()
    if missing:
        guard.check_kept(len(indices), stream.codec_context.width, stream.codec_context.height)
        stream.codec_context.flush_buffers()
        walk.kept.update(_walk(stream, packets, missing, guard).kept)
    frames = _stack([walk.kept[index] for index in indices.tolist()])
    return DecodedVideo(frames, indices, fps=_source_fps(times, rate), total_frames=len(times))


def _read_packets(
    container: av.container.InputContainer, stream: av.video.VideoStream, guard: _Guard
) -> list[av.Packet]:
    """All packets of the stream in decoding order, the last of them empty: it makes the decoder hand out the rest."""
    packets: list[av.Packet] = []
    for packet in container.demux(stream):
        guard.tick(len(packets))
        if packet.is_corrupt:
            raise MediaError(guard.item, _CUT_SHORT.format(f"frame {len(packets)} is incomplete"))
        packets.append(packet)
    # The index of an mp4 tells how many packets there are; most other containers say nothing (0).
    if len(packets) - 1 < stream.frames:
        raise MediaError(guard.item, _CUT_SHORT.format(f"{len(packets) - 1} of {stream.frames} frames are there"))
    return packets


def _walk(stream: av.video.VideoStream, packets: Sequence[av.Packet], keep: Collection[int], guard: _Guard) -> _Walk:
    """Decodes `packets` and converts the frames whose place is in `keep`, scaled to the size of the first of them."""
    walk = _Walk()
    reformatter = VideoReformatter()
    width = height = None
    for packet in packets:
        guard.tick(len(walk.times))
        for frame in stream.decode(packet):
            guard.tick(len(walk.times) + 1)
            if frame.is_corrupt:
                raise MediaError(guard.item, _CUT_SHORT.format(f"frame {len(walk.times)} cannot be decoded"))
            if len(walk.times) in keep:
                guard.check_size(frame.width, frame.height)
                width, height = width or frame.width, height or frame.height
                rgb = reformatter.reformat(frame, width=width, height=height, format="rgb24", threads=1)
                walk.kept[len(walk.times)] = rgb
            walk.times.append(frame.time)
    return walk


def _time(packet: av.Packet) -> float | None:
    return None if packet.pts is None or packet.time_base is None else float(packet.pts * packet.time_base)


def _fill_times(stamps: Sequence[float | None], rate: float) -> list[float]:
    """Times in order of showing. A file in which any is missing (avi) is taken to run at its header's frame rate."""
    times = [stamp for stamp in stamps if stamp is not None]
    return sorted(times) if len(times) == len(stamps) else [place / rate for place in range(len(stamps))]


def _source_fps(times: Sequence[float], header_rate: float) -> float:
    """The header's frame rate where the frames' times bear it out, for it is exact; otherwise the times' own."""
    span = times[-1] - times[0]
    if span <= 0:
        return header_rate
    measured = (len(times) - 1) / span
    return header_rate if abs(measured - header_rate) < 0.02 * header_rate else measured


def _stack(frames: Sequence[av.VideoFrame]) -> NDArray[np.uint8]:
    """RGB frames of one size -> [T, H, W, 3]. One copy: FFmpeg pads the lines of its frames."""
    height, width = frames[0].height, frames[0].width
    stacked = np.empty((len(frames), height, width, 3), np.uint8)
    for row, frame in zip(stacked, frames, strict=True):
        plane = frame.planes[0]
        lines = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
        row[...] = lines[:height, : width * 3].reshape(height, width, 3)
    return stacked
