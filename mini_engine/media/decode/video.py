"""Bytes of a video file -> the sampled frames as sRGB, upright, with PyAV, in memory.

First the packets are read. That costs next to nothing and shows how many frames there should be and when, which
predicts the frames that the sampling takes. Where key frames show which packets these need, only those are decoded, in
H.264 without the frames among them that no other refers to. Elsewhere, and after any unexpected frame, every packet is
decoded, and sampling over the decoded frames decides: if it asks for frames that were not kept (headers and packets can
lie), a second walk fetches them. Only sampled frames are converted to sRGB. Memory holds the file's packets and the
kept frames.

Runs in a decoder process, which bounds its memory and time. Knows nothing of models or requests.
"""

import mmap
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import av
import av.subtitles.stream  # PyAV imports it at the first video otherwise, when descriptors may be exhausted
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from numpy.typing import NDArray

from mini_engine.failpoints import reach_failpoint
from mini_engine.media.decode.frame_array import Allocate, FrameArray
from mini_engine.media.decode.item_limits import TRUNCATED, UNREADABLE, WRONG_COLOURS, Guard
from mini_engine.media.decode.packets import ENCRYPTED, PacketTable
from mini_engine.media.frame_sampling import VideoFacts, VideoSampling
from mini_engine.protocol.api_errors import MediaError

# FFmpeg's demuxers that open what a file names: playlists, sessions, scripts, parts of a recording. NOFILE are those
# that open devices or many files.
_DENIED = {"avisynth", "concat", "dash", "hls", "imf", "mlv", "sdp", "vapoursynth", "vobsub", "webm_dash_manifest"}
_FORMATS = [av.ContainerFormat(name) for name in av.formats_available - _DENIED]
_DEMUXERS = ",".join(form.name for form in _FORMATS if form.is_input and not form.no_file)
_JPEG = b"\xff\xd8"
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
NO_MEDIA = "the file is no image or video, but has a JPEG in it, as a PDF may; send the JPEG, or each page as PNG"
NO_FRAME = TRUNCATED.format("no frame can be decoded")


def decode_video(
    data: mmap.mmap, sampling: VideoSampling, guard: Guard, allocate: Allocate
) -> tuple[NDArray[np.uint8], VideoFacts]:
    """Returns the sampled frames of a video file, [T, H, W, 3], and what there is to know of the whole. A file of which
    not all can be read is refused, unless `guard.allow_partial`: then the readable frames count as all frames, and
    `missing` of the result names the rest. Damage in frames that need not be decoded goes unseen. Raises MediaError
    for a file that cannot be read or exceeds a limit, or within a frame's time after `guard.should_stop()` is true;
    MemoryError."""
    if (size := declared_size(data)) > len(data):
        guard.add_damage(f"{len(data)} of at least {size} bytes are there")
    try:
        with av.open(
            data,
            mode="r",
            metadata_errors="replace",
            container_options={"format_whitelist": _DEMUXERS, "protocol_whitelist": ""},
            options={"max_pixels": str(guard.limits.max_frame_pixels)},  # FFmpeg decodes a little while it opens a file
        ) as container:
            if container.format.name == "mjpeg" and data[:2] != _JPEG:  # FFmpeg looks for one anywhere in the file
                raise MediaError(guard.item, NO_MEDIA)
            video = _VideoFile(container, data, sampling, guard, allocate)
            stamps = video.packets.stamps
            if not stamps:
                raise MediaError(guard.item, NO_FRAME)
            timeline = video.timeline(stamps)
            indices = timeline.indices()
            frames, walks = video.seek(indices), 0
            while frames is None or not frames.holds(indices):
                if walks == 2:  # a decoder that has seen damage may remember it
                    raise MediaError(guard.item, TRUNCATED.format("two decodes return different frames"))
                del frames  # the next ones may take its memory
                frames, timeline = video.walk(indices)
                indices, walks = timeline.indices(), walks + 1
            return frames.select(indices), timeline.facts(indices, len(stamps))
    except (MediaError, MemoryError):
        raise
    except (av.error.FFmpegError, ValueError) as error:  # a ValueError of PyAV itself
        raise MediaError(guard.item, TRUNCATED.format(guard.damage) if guard.damage else UNREADABLE) from error


@dataclass(frozen=True)
class Timeline:
    """When the frames of one video are shown, in seconds and ascending; at least one."""

    times: Sequence[float]
    header_rate: float
    sampling: VideoSampling
    guard: Guard

    @property
    def fps(self) -> float:
        """The header's rate where the frames' times bear it out, for it is exact; otherwise the times' own."""
        span = self.times[-1] - self.times[0]
        if span <= 0:
            return self.header_rate
        measured = (len(self.times) - 1) / span
        return self.header_rate if abs(measured - self.header_rate) < 0.02 * self.header_rate else measured

    def indices(self) -> list[int]:
        """Of the frames to keep, ascending. Raises MediaError, also for too many, and for a video that is too long."""
        self.guard.check("max_video_seconds", self.times[-1] - self.times[0], "seconds", "a shorter video")
        try:
            indices = self.sampling.indices(self.times, self.fps, self.guard.limits.max_video_frames_kept).tolist()
        except ValueError as error:
            raise MediaError(self.guard.item, str(error)) from error
        self.guard.check("max_video_frames_kept", len(indices), "frames in its sampling", "fewer, or sample fewer")
        return indices

    def facts(self, indices: Sequence[int], promised: int = 0) -> VideoFacts:
        """Of the video, where the frames at `indices` are kept. `promised`: how many frames the file should have."""
        count = len(self.times)
        of = f" of {promised}" if promised > count else ""
        problems = [f"{self.guard.damage}; {count}{of} frames were read"] if self.guard.damage else []
        problems += [WRONG_COLOURS] if self.guard.wrong_colours else []
        return VideoFacts(
            [self.times[index] - self.times[0] for index in indices],
            fps=self.fps,
            total_frames=count,
            window_frames=len(self.sampling.window(self.times)),
            missing="; ".join(problems) or None,
        )


class _VideoFile:
    """One open file, and its decoder."""

    def __init__(
        self, container: InputContainer, data: mmap.mmap, sampling: VideoSampling, guard: Guard, allocate: Allocate
    ) -> None:
        self.sampling, self.guard, self.allocate = sampling, guard, allocate
        self.stream = stream = _video_stream(container, guard)
        # FFmpeg's own threads multiply with the server's decoders, and AUTO has been seen to hang at exit.
        stream.thread_type = "NONE"
        self.codec = stream.codec_context
        self.codec.thread_count = 1
        self.codec.options = {"max_pixels": str(guard.limits.max_frame_pixels)}  # frames may grow on the way
        guard.check_size("max_frame_pixels", self.codec.width, self.codec.height)
        self.rate = float(stream.average_rate or stream.guessed_rate or 0) or 24.0
        self.packets = PacketTable(container, stream, guard, data)

    def timeline(self, stamps: Sequence[int | None]) -> Timeline:
        """Of all frames. A file in which any stamp is missing (avi) is taken to run at its frame rate."""
        base, known = self.stream.time_base, [stamp for stamp in stamps if stamp is not None]
        if base is None or len(known) < len(stamps):
            rate = float(self.stream.guessed_rate or self.rate)  # the average of a raw stream is FFmpeg's default, 25
            times = np.arange(len(stamps)) / rate
        else:
            times = np.array(known, float) * base.numerator / base.denominator
            for index in np.flatnonzero(np.diff(times) < -17 / self.rate):  # recordings were joined
                times[index + 1 :] += times[index] - times[index + 1] + 1 / self.rate
        return Timeline(np.sort(times).tolist(), self.rate, self.sampling, self.guard)

    def seek(self, indices: Sequence[int]) -> FrameArray | None:
        """The frames at `indices`, or some of them, decoded from key frames. None: that is not possible or went wrong.
        It went wrong when other frames come out than the packets promise: then some of these are no key frames, or no
        frames of their own, and which frame of the whole is which is unknown."""
        runs = None if self.guard.damage else self.packets.runs_for(indices)
        if runs is None:
            return None
        index_of = {stamp: index for index, stamp in enumerate(self.packets.stamps)}
        needed = {self.packets.stamps[index] for index in indices}
        frames = FrameArray(indices, self.guard, self.allocate)
        for run in runs:
            promised, key = self.packets.promised(run), self.packets.stamp(run.start)
            for frame in self._decode_run(run, needed):
                if frame is None or frame.pts is None or frame.interlaced_frame:
                    return None
                if frame.pts < key:  # refers to what is before the run
                    continue
                if frame.pts not in promised or (frame.pts == key and not frame.key_frame):
                    return None
                promised.remove(frame.pts)
                frames.offer(index_of[frame.pts], frame)
        return frames

    def walk(self, indices: Sequence[int]) -> tuple[FrameArray, Timeline]:
        """Decodes all packets. Returns the frames at `indices`, and the times of all frames."""
        frames = FrameArray(indices, self.guard, self.allocate)
        stamps: list[int | None] = []
        run, interlaced = range(len(self.packets)), False
        for frame in self._decode_run(run):
            if frame is None:
                if stamps or not self.packets.is_cut:
                    self.guard.add_damage(f"frame {len(stamps)} cannot be decoded")
                continue
            self.guard.check("max_video_frames", len(stamps) + 1, "frames", "a shorter video")
            frames.offer(len(stamps), frame)
            stamps.append(frame.pts)
            interlaced |= frame.interlaced_frame
        # The fields of an interlaced frame may be in separate packets.
        if not interlaced and (lost := len(self.packets.promised(run).difference(stamps))):
            self.guard.add_damage(f"{lost} of {len(self.packets.stamps)} frames cannot be decoded")
        if not stamps:
            raise MediaError(self.guard.item, NO_FRAME)
        return frames, self.timeline(stamps)

    def _decode_run(self, run: range, needed: Container[int | None] | None = None) -> Iterator[av.VideoFrame | None]:
        """Decodes a run of packets, of which the first is a key frame. None: a frame that cannot be decoded whole.
        `needed`: the times of the frames that are needed; others may be left out. None: all are."""
        if self.codec.codec.canonical_name != "h264":
            needed = None  # other decoders do not know which frames no other refers to (HEVC's layers still may)
        for packets in self.packets.unbroken(run):
            self.codec.flush_buffers()
            for packet in (*packets, None):
                self.guard.tick()
                is_needed = needed is None or packet is None or packet.pts in needed
                self.codec.skip_frame = "DEFAULT" if is_needed else "NONREF"
                try:
                    frames = self.stream.decode(packet)
                except MemoryError:
                    raise
                except av.error.FFmpegError:
                    yield None
                    continue
                for frame in frames:
                    self.guard.tick()
                    reach_failpoint("decoding")
                    yield None if frame.is_corrupt else frame


def _video_stream(container: InputContainer, guard: Guard) -> av.video.VideoStream:
    """FFmpeg's choice of the main stream: marked as default, with most pictures, with most bits."""
    videos = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if not videos:  # the cover of a song is a stream too
        raise MediaError(guard.item, "the file contains no image or video")
    stream = next((video for video in videos if video is container.streams.best("video")), videos[0])
    if stream.codec_context is None:
        av.logging.set_level(av.logging.INFO)
        log = cast(Any, container).dumps_format()  # nothing else in PyAV names a codec that has no decoder
        av.logging.set_level(None)
        (codec, *_) = re.findall(rf"Stream #0:{stream.index}\b.*?: Video: (?:none \()?(\w+)", log) or ["none"]
        problem = f"it is coded as {codec}, for which there is no decoder; send PNG, or H.264 in mp4"
        raise MediaError(guard.item, ENCRYPTED if codec in ("encv", "drmi") else problem)
    return stream


def declared_size(data: bytes | mmap.mmap) -> int:
    """The bytes that the file should have at least, by its header: FFmpeg reports nothing of most truncated files.
    Recordings that were written without seeking do not say how long they are."""
    if data[:4] == _EBML:
        return _end_of_matroska(data)
    if data[:4] == b"RIFF":
        return _end_of_riff(data)
    if data[:3] == b"GIF":  # the last picture's empty block and the trailer (GIF89a, appendix B), maybe padded
        return len(data) + (not data[-1024:].rstrip(b"\0").endswith(b"\0;"))
    return 0  # an mp4's index shows which frames its `mdat` lacks; most others are streams without a length


def _end_of_matroska(data: bytes | mmap.mmap) -> int:
    """An EBML header and one segment, each an id of four bytes, a size and its content (RFC 8794; RFC 9559)."""
    offset = 0
    for name in (_EBML, _SEGMENT):
        start = offset + 4
        length = 9 - int.from_bytes(data[start : start + 1]).bit_length()  # the leading zero bits of a size give it
        if data[offset:start] != name or length > 8:
            break
        size, marker = int.from_bytes(data[start : start + length]), 1 << 7 * length
        if size == 2 * marker - 1:  # not known
            break
        offset = start + length + size - marker
    return offset


def _end_of_riff(data: bytes | mmap.mmap) -> int:
    """One RIFF list, or several: beyond a gigabyte OpenDML continues in further ones."""
    end = padding = 0
    while data[end + padding : end + padding + 4] == b"RIFF":
        offset = end + padding
        size = int.from_bytes(data[offset + 4 : offset + 8], "little")
        if size in (0, 0xFFFFFFFF):  # from a writer that could not go back to fill it in
            return end
        end, padding = offset + 8 + size, size % 2  # the padding of the last list is often left out
    return end
