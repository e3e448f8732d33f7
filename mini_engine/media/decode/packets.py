"""The packets of a video: which of them become frames and when, and the fewest that must be decoded for some frames.

Knows nothing of pixels or sampling.
"""

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby, pairwise

import av
import numpy as np
from av.container import InputContainer
from av.video import VideoStream

from mini_engine.media.decode.item_limits import Guard
from mini_engine.protocol.api_errors import MediaError

ENCRYPTED = "its video is encrypted; send it without encryption"
# Where each packet becomes a frame at a time that the file says, and key frames are marked. AVI's times are counted,
# and an MPEG-4 encoder that drops a frame writes a packet without one (ISO/IEC 14496-2, vop_coded).
_CONTAINERS = {"mov", "matroska", "mpegts", "flv"}
_CODECS = {"h264", "hevc", "vvc", "vp8", "vp9", "av1"}  # and those that have key frames only
# Bytes of a packet of MPEG-TS, and of what is before it: nothing, or its time in .m2ts; and 16 of a code after it.
_TS_PACKETS = ((188, 0), (192, 4), (204, 0))


class PacketTable:
    """The packets of a video stream in decoding order, and the order in which their frames are shown."""

    def __init__(self, container: InputContainer, stream: VideoStream, guard: Guard, data: mmap.mmap) -> None:
        codec = stream.codec_context.codec
        self._packets = packets = _read_packets(container, stream, guard, data)
        self._parts = list(accumulate(map(_is_restart, packets, packets[1:]), initial=0))
        numbers = [number for number, packet in enumerate(packets) if not packet.is_discard]
        if codec.canonical_name == "vp8":  # alone keeps frames that are only referred to in packets of their own
            numbers = [number for number in numbers if memoryview(packets[number])[0] & 0x10]  # (RFC 6386, section 9.1)
        if all(packets[number].pts is not None for number in numbers):
            numbers.sort(key=lambda number: (self._parts[number], self.stamp(number)))
        self._order, self._shown = numbers, set(numbers)
        # When each frame is shown, in the stream's own unit; None: the file does not say.
        self.stamps = [packets[number].pts for number in numbers]
        # Whether it begins within a group of frames, as a piece of a broadcast does: the first cannot be decoded.
        self.is_cut = not (packets and packets[0].is_keyframe)
        is_known = codec.intra_only or codec.canonical_name in _CODECS
        is_known &= not (self.is_cut or _CONTAINERS.isdisjoint(container.format.name.split(",")) or None in self.stamps)
        # Each is later than the one before, and the first is no sooner than the first key frame.
        stamps = (self.stamp(0) - 1, *map(self.stamp, numbers)) if is_known else ()
        self.can_seek = is_known and all(before < stamp for before, stamp in pairwise(stamps))
        """Whether each frame has a time of its own, and key frames show which packets a frame needs."""

    def __len__(self) -> int:
        return len(self._packets)

    def stamp(self, number: int) -> int:
        """When the packet with this number is shown, where it has a time."""
        return self._packets[number].pts or 0

    def runs_for(self, indices: Iterable[int]) -> list[range] | None:
        """The shortest runs of packets, each from a key frame on, that hold all that the frames at `indices` need. A
        frame that is shown before the key frame it follows (the leading frames of an open group) needs the group
        before. None: key frames are unknown."""
        if not self.can_seek:
            return None
        keys = [number for number, packet in enumerate(self._packets) if packet.is_keyframe]
        spans: list[tuple[int, int]] = []
        for index in indices:
            number, stamp = self._order[index], self.stamps[index] or 0
            before = bisect_right(keys, number) - 1
            while self.stamp(keys[before]) > stamp:
                before -= 1
            spans.append((keys[before], number + 1))
        runs: list[range] = []
        for start, stop in sorted(spans):
            if runs and start <= runs[-1].stop:
                start, stop = runs[-1].start, max(stop, runs.pop().stop)
            runs.append(range(start, stop))
        return runs

    def promised(self, run: range) -> set[int]:
        """When the expected frames of a run are shown; empty where `can_seek` is false. The run may begin with frames
        that refer to others before its first key frame: none of these count."""
        stamps = (self.stamp(number) for number in run if self.can_seek and number in self._shown)
        return {stamp for stamp in stamps if stamp >= self.stamp(run.start)}

    def unbroken(self, run: range) -> Iterator[list[av.Packet]]:
        """The packets of a run in parts, each of which must be decoded by itself. An mp4's edit begins with the frames
        from its last key frame on, a second time if they were in the edit before. A decoder that is not flushed there
        may take frames for those that it has shown."""
        for _, part in groupby(run, key=self._parts.__getitem__):
            yield [self._packets[number] for number in part]


def _read_packets(container: InputContainer, stream: VideoStream, guard: Guard, data: mmap.mmap) -> list[av.Packet]:
    """All packets of the stream that hold anything. `data` is the file of `container`."""
    packets: list[av.Packet] = []
    read = shown = 0
    is_joined: bool | None = None  # None: it does not matter yet
    try:
        for packet in container.demux(stream):
            guard.tick()
            if packet.has_sidedata("encryption_info"):
                raise MediaError(guard.item, ENCRYPTED)
            if packet.is_corrupt and is_joined is None:
                is_joined = container.format.name == "mpegts" and _is_joined(data, stream.id)
            if packet.is_corrupt and not is_joined:
                guard.add_damage(f"frame {read} is incomplete")
                continue
            is_frame = packet.size > 0 or packet.dts is not None  # the last is empty: it would end the decoder
            read += is_frame
            shown += is_frame and not packet.is_discard
            # Around an mp4's edits as many frames again may be for the decoder alone.
            guard.check("max_video_frames", max(shown, (read + 1) // 2), "frames", "a shorter video")
            if packet.size:
                packets.append(packet)
    except MemoryError:
        raise
    except av.error.FFmpegError:
        guard.add_damage(f"frame {read} cannot be read")
    # An mp4 lists its frames, without those that its edit list cuts away; most others list none, or wrong ones.
    if "mov" in container.format.name and read < (listed := len(stream.index_entries)):
        guard.add_damage(f"{read} of {listed} frames are there")
    return packets


def _is_restart(before: av.Packet, packet: av.Packet) -> bool:
    """Whether the decoding times go back to a key frame: to an mp4's next edit, or where recordings were joined."""
    if before.dts is None or packet.dts is None:
        return False
    return packet.is_keyframe and packet.dts <= before.dts


def _is_joined(data: mmap.mmap, pid: int) -> bool:
    """Whether an MPEG-TS lacks nothing but where files were joined, which FFmpeg takes for a loss: the counter of a
    stream's packets jumps, and only where a frame begins from which decoding can start (ISO/IEC 13818-1, 2.4.3)."""
    content = np.frombuffer(data, np.uint8)
    forms = (content[: len(data) // size * size].reshape(-1, size)[:, start : start + 6] for size, start in _TS_PACKETS)
    heads = next((heads for heads in forms if (heads[:, 0] == 0x47).all()), None)
    if heads is None:
        return False
    heads = heads[((heads[:, 1] & 0x1F).astype(np.uint16) << 8 | heads[:, 2]) == pid]
    heads = heads[heads[:, 3] & 0x10 > 0]  # only what has a payload is counted
    jumps = heads[1:][(heads[1:, 3] - heads[:-1, 3]) & 0x0F != 1]
    starts = (jumps[:, 1] & 0x40 > 0) & (jumps[:, 3] & 0x20 > 0) & (jumps[:, 4] > 0) & (jumps[:, 5] & 0x40 > 0)
    return bool(starts.size and starts.all() and not (heads[:, 1] & 0x80).any())
