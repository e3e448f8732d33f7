"""Bytes of a video file -> the sampled frames as RGB, upright, with PyAV, in memory.

First the packets are read, which costs next to nothing and tells how many frames there should be and when; that
predicts which frames the sampling takes. If the key frames show that those need few of the packets, these alone are
decoded. Otherwise, and whenever anything comes out that was not predicted, every packet is decoded, and sampling over
what really was decoded has the last word: should it ask for frames that were not kept (headers and packets can lie),
one more walk fetches them. Only sampled frames are converted to RGB. Memory holds the file's packets and the kept
frames.

Each call decodes on its own thread only: the caller decides how many run at once. Knows nothing of models or requests.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import av
import av.container
import av.subtitles.stream  # or PyAV does it at the first video, when the host may have no more to give
import av.video
import numpy as np
from av.stream import Disposition
from numpy.typing import NDArray

from mini_engine.media.claims import claimed_samples
from mini_engine.media.containers import container_of, declared_canvas, declared_size
from mini_engine.media.errors import MediaError
from mini_engine.media.frames import FrameRows
from mini_engine.media.limits import CUT_SHORT, CancelSignal, Damage, DecodeLimits, Guard
from mini_engine.media.matroska import plain_file
from mini_engine.media.packets import (
    can_seek,
    in_order_of_showing,
    read_packets,
    runs_for,
    seconds,
    stamps_from,
    unbroken,
)
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.shortage import check_host

# FFmpeg's decoders, of the hundreds that it has: the others are seldom fuzzed, and some spend minutes on one packet.
_DECODERS = ("h264", "hevc", "vp8", "vp9", "libdav1d", "libaom-av1", "av1", "mpeg4", "gif")
_READABLE = "send a GIF, or H.264, H.265, VP8, VP9, AV1 or MPEG-4 in mp4, mov, mkv, webm or avi"
_UNREADABLE = f"cannot be read as a video; {_READABLE}"
_MOST_STREAMS = 100  # FFmpeg sets up a decoder for each, of up to a megabyte
_TOO_MANY_STREAMS = f"has more than {_MOST_STREAMS} tracks, or is damaged; send it with fewer tracks"
_PROBED_OF_AVI = 1 << 18  # bytes: FFmpeg may keep the packets of so many while it opens one, each at half a kilobyte
_WORTH_SEEKING = 0.75  # decode runs of packets when they are at most this share of all


@dataclass(frozen=True, eq=False)
class DecodedVideo:
    """The sampled frames of a video, and what the processor must know of the whole."""

    frames: NDArray[np.uint8]  # [T, H, W, 3], RGB, contiguous, upright
    frames_indices: NDArray[np.int64]  # [T], places of `frames` among all frames
    timestamps: NDArray[np.float64]  # [T], seconds after the video's first frame
    fps: float  # of the source, not of the sampling
    total_frames: int  # that the file really has, whatever its header says
    window_frames: int  # of these, within the start and end of the sampling
    missing: str | None = None  # what of the file could not be read; None: nothing

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
    allow_partial: bool = False,
) -> DecodedVideo:
    """Decodes a video file in the calling thread. `item` is the item's name in errors, such as "video 1".

    A file of which not all can be read is refused, unless `allow_partial`: then the frames that can be are all frames
    there are, and `missing` of the result says what is not there. Damage in frames that need not be decoded for those
    that are sampled goes unseen.

    Raises MediaError for a file that cannot be read or exceeds a limit, DecodeCancelled within a frame's time after
    `cancelled` is set, and Shortage or MemoryError where there is no memory for it.
    """
    guard = Guard(item, limits or DecodeLimits(), cancelled)
    damage = Damage(item, allow_partial)
    guard.check_size(*declared_canvas(data))
    if (size := declared_size(data, guard.tick)) is not None and size > len(data):
        damage.add(f"{len(data)} of at least {size} bytes are there")
    container_name = container_of(data)
    file: io.RawIOBase | io.BytesIO = io.BytesIO(data)
    if container_name == "matroska":
        file = plain_file(data, item, guard.tick, guard.check_frames, damage.add)
    elif container_name == "mov":
        guard.check_index(claimed_samples(data, guard.tick))
    try:
        with av.open(
            _Source(file, guard),
            mode="r",
            metadata_errors="replace",
            # FFmpeg decodes a little while it opens a file: nothing else may run, and nothing above the limit be
            # allocated, there either.
            container_options={
                # Others stay shut: a playlist (hls, dash, concat) is a list of addresses that FFmpeg would open.
                "format_whitelist": container_name,
                "protocol_whitelist": "",
                "codec_whitelist": ",".join(_DECODERS),
                "ignore_chapters": "1",  # an mp4's may have the same long title a million times
                "max_streams": str(_MOST_STREAMS),
                "use_mfra_for": "0",  # an index of an mp4's fragments at its end: for seeking, and a lie may be long
                **({"probesize": str(_PROBED_OF_AVI)} if container_name == "avi" else {}),
            },
            options={"max_pixels": str(guard.limits.max_frame_pixels)},
        ) as container:
            return _Decode(container, sampling, guard, damage).run(len(data))
    except (av.error.FFmpegError, UnicodeDecodeError) as error:
        guard.tick()  # the clock ends a file for FFmpeg
        check_host()  # for want of memory it may say the same as of a damaged file
        problem = CUT_SHORT.format(damage.found[0]) if damage.found else _UNREADABLE
        raise MediaError(item, _TOO_MANY_STREAMS if isinstance(error, MemoryError) else problem) from error


class _Source:
    """A file that comes to its end when the decode must: FFmpeg may read for long before it hands out anything."""

    def __init__(self, file: io.RawIOBase | io.BytesIO, guard: Guard) -> None:
        self._file, self._guard = file, guard
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int) -> bytes | None:
        return b"" if self._guard.time_is_up or self._guard.is_cancelled else self._file.read(size)


class _Decode:
    """One file at work."""

    def __init__(
        self, container: av.container.InputContainer, sampling: VideoSampling, guard: Guard, damage: Damage
    ) -> None:
        self.container, self.sampling, self.guard, self.damage = container, sampling, guard, damage
        guard.tick()  # what the opening found may be all there was time for
        self.stream = stream = _video_stream(container, guard)
        # FFmpeg's own threads multiply with the server's decoder threads, and AUTO has been seen to hang at exit.
        stream.thread_type = "NONE"
        self.codec = stream.codec_context
        self.codec.thread_count = 1
        self.codec.options = {"max_pixels": str(guard.limits.max_frame_pixels)}  # frames may grow on the way
        guard.check_size(self.codec.width, self.codec.height)
        self.rate = float(stream.average_rate or stream.guessed_rate or 0) or 24.0

    def run(self, file_bytes: int) -> DecodedVideo:
        self.packets = read_packets(self.container, self.stream, file_bytes, self.guard, self.damage)
        self.order = in_order_of_showing(self.packets, self.codec.codec.canonical_name)
        if not self.order:
            raise MediaError(self.guard.item, CUT_SHORT.format("no frame can be decoded"))
        stamps = [self.packets[place].pts for place in self.order]
        times = _fill_times([seconds(self.stream, stamp) for stamp in stamps], self.rate)
        self.guard.check_seconds(times[-1] - times[0])
        predicted = self._sample(times)
        self.guard.check_kept(len(predicted), self.codec.width, self.codec.height)
        indices, frames = predicted, self._seek(predicted)
        if frames is None:
            frames, times = self._walk(predicted)
            indices = self._sample(times)
            if not frames.holds(indices.tolist()):
                del frames  # the new ones take its room
                frames, _ = self._walk(indices)
                if not frames.holds(indices.tolist()):  # a decoder that has seen damage may remember it
                    raise MediaError(self.guard.item, CUT_SHORT.format("it decodes to other frames each time"))
        return DecodedVideo(
            frames.take(indices.tolist()),
            indices,
            np.asarray(times)[indices] - times[0],
            fps=_source_fps(times, self.rate),
            total_frames=len(times),
            window_frames=len(self.sampling.window(times)),
            missing=self.damage.account(len(times), len(self.order)),
        )

    def _sample(self, times: Sequence[float]) -> NDArray[np.int64]:
        try:
            return self.sampling.indices(times)
        except ValueError as error:
            raise MediaError(self.guard.item, str(error)) from error

    def _seek(self, indices: NDArray[np.int64]) -> FrameRows | None:
        """The frames at `indices`, decoded from key frames. None: that is not possible, saves little, or went wrong.

        It went wrong when not exactly the frames come out that the packets promise: then some of these are no key
        frames, or no frames of their own, and there is no telling which frame of the whole is which.
        """
        if self.damage.found or not can_seek(self.container, self.packets, self.order):
            return None
        runs = runs_for(self.packets, (self.order[index] for index in indices.tolist()), self.guard.tick)
        if runs is None or sum(map(len, runs)) > _WORTH_SEEKING * len(self.packets):
            return None
        index_of = {self.packets[place].pts: index for index, place in enumerate(self.order)}
        shown = set(self.order)
        frames = FrameRows(indices.tolist(), self.guard)
        for run in runs:
            key = self.packets[run.start].pts
            assert key is not None  # `can_seek`
            stamps = {self.packets[place].pts for place in run if place in shown}
            promised = stamps_from(self.packets, shown.intersection(run), key)
            try:
                for frame in self._frames_of(self.packets[run.start : run.stop]):
                    is_sound = frame.pts in stamps and not frame.is_corrupt and not frame.interlaced_frame
                    if not is_sound or (frame.pts == key and not frame.key_frame):
                        return None
                    promised.discard(frame.pts)
                    frames.offer(index_of[frame.pts], frame)
            except av.error.FFmpegError:
                return None
            if promised:
                return None
        return frames

    def _walk(self, indices: NDArray[np.int64]) -> tuple[FrameRows, list[float]]:
        """Decodes all packets. Returns the frames at `indices`, and the times of all frames in order."""
        frames = FrameRows(indices.tolist(), self.guard)
        times: list[float | None] = []
        stamps, interlaced = set(), False
        for frame in self._frames_of(self.packets, tolerant=True):
            if frame.is_corrupt:
                self.damage.add(f"frame {len(times)} cannot be decoded whole")
                continue
            self.guard.check_frames(len(times) + 1)
            frames.offer(len(times), frame)
            times.append(seconds(self.stream, frame.pts))
            stamps.add(frame.pts)
            interlaced |= frame.interlaced_frame
        # The halves of an interlaced frame may come in packets of their own.
        if not interlaced and (lost := len(self._promised() - stamps)):
            self.damage.add(f"{lost} of {len(self.order)} frames cannot be decoded")
        if not times:
            raise MediaError(self.guard.item, CUT_SHORT.format("no frame can be decoded"))
        return frames, _fill_times(times, self.rate)

    def _promised(self) -> set[int]:
        """The times of the frames that must come out of the decoder, where packets have times to tell them by.

        A file may begin with frames that refer to what was cut away before its first key frame: none of these.
        """
        first = next((packet.pts for packet in self.packets if packet.is_keyframe), None)
        if first is None or not can_seek(self.container, self.packets, self.order):
            return set()
        return stamps_from(self.packets, self.order, first)

    def _frames_of(self, packets: Sequence[av.Packet], tolerant: bool = False) -> Iterator[av.VideoFrame]:
        """Decodes `packets`, of which the first is a key frame. Being tolerant is going on, if `damage` allows it."""
        count = 0
        for run in unbroken(packets):
            self.codec.flush_buffers()
            for packet in (*run, None):
                self.guard.tick()
                try:
                    frames = self.stream.decode(packet)
                except av.error.FFmpegError:
                    if not tolerant:
                        raise
                    check_host()
                    self.damage.add(f"frame {count} cannot be decoded")
                    continue
                for frame in frames:
                    self.guard.tick()
                    count += 1
                    yield frame


def _video_stream(container: av.container.InputContainer, guard: Guard) -> av.video.VideoStream:
    """The one that FFmpeg takes for the main one: marked as default, with most pictures, with most bits."""
    videos = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if not videos:  # the cover of a song is a stream too
        raise MediaError(guard.item, "the file holds no video stream")
    best = container.streams.best("video")
    stream = next((video for video in videos if video is best), videos[0])
    if stream.codec_context is None:  # a codec that this FFmpeg does not have
        raise MediaError(guard.item, _UNREADABLE)
    if stream.codec_context.name not in _DECODERS:
        codec = stream.codec_context.codec.canonical_name  # from FFmpeg's own list
        raise MediaError(guard.item, f"its video is coded as {codec}, which is not taken; {_READABLE}")
    return stream


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
