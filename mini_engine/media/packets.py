"""The packets of a video: what they tell before anything is decoded, and the least of them that must be decoded.

Reading packets costs next to nothing beside decoding them. Knows nothing of pixels or sampling.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import av
import av.container
import av.video

from mini_engine.media.errors import MediaError
from mini_engine.media.limits import Damage, Guard

_KEY_FRAMES_KNOWN = ("mov", "matroska")  # AVI's times are counted, not written, and in GIF each frame needs the last


def read_packets(
    container: av.container.InputContainer, stream: av.video.VideoStream, file_bytes: int, guard: Guard, damage: Damage
) -> list[av.Packet]:
    """All packets of the stream that hold anything, in decoding order."""
    packets: list[av.Packet] = []
    read = shown = nbytes = 0
    try:
        for packet in container.demux(stream):
            guard.tick()
            if packet.is_corrupt:
                damage.add(f"frame {read} is incomplete")
                continue
            is_frame = packet.size > 0 or packet.dts is not None  # the last is empty: it would end the decoder
            read += is_frame
            shown += is_frame and not packet.is_discard
            # Of the frames around an mp4's edits, which come for the decoder alone, there may be as many again.
            guard.check_frames(max(shown, (read + 1) // 2))
            nbytes += packet.size
            # An index may name the same bytes again and again, and Matroska may compress them.
            if nbytes > 2 * file_bytes + (1 << 20):
                raise MediaError(guard.item, "its frames together are larger than the file; encode it anew")
            if packet.size:
                packets.append(packet)
    except av.error.FFmpegError:
        guard.tick()  # first: a file also ends when its time is up
        damage.add(f"frame {read} cannot be read")
    guard.tick()
    # An mp4 lists its frames, without those that its edit list cuts away; most others say nothing, or what is not so.
    if "mov" in container.format.name and read < (listed := len(stream.index_entries)):
        damage.add(f"{read} of {listed} frames are there")
    return packets


def stamps_from(packets: Sequence[av.Packet], places: Iterable[int], first: int) -> set[int]:
    """The times, in the stream's own unit, of the packets at `places` that are not shown before `first`."""
    stamps = (packets[place].pts for place in places)
    return {stamp for stamp in stamps if stamp is not None and stamp >= first}


def in_order_of_showing(packets: Sequence[av.Packet], codec: str) -> list[int]:
    """The places of those packets that become frames, by their times; as they come where any has none."""
    places = [place for place, packet in enumerate(packets) if not packet.is_discard and _is_shown(packet, codec)]
    if any(packets[place].pts is None for place in places):
        return places
    return sorted(places, key=lambda place: packets[place].pts or 0)


def seconds(stream: av.video.VideoStream, pts: int | None) -> float | None:
    """The time of a packet or frame; None: the file does not say."""
    base = stream.time_base
    return None if pts is None or base is None else float(pts) * base.numerator / base.denominator


def can_seek(container: av.container.InputContainer, packets: Sequence[av.Packet], order: Sequence[int]) -> bool:
    """Whether a frame can be told by its time, and the packets that it needs by the key frames."""
    stamps = {packets[place].pts for place in order}
    known = any(name in container.format.name for name in _KEY_FRAMES_KNOWN)
    return known and len(stamps) == len(order) and None not in stamps


def runs_for(packets: Sequence[av.Packet], places: Iterable[int], tick: Callable[[], None]) -> list[range] | None:
    """The least runs of packets, each from a key frame on, that hold all that the packets at `places` need.

    A frame that is shown before the key frame it follows (the leading frames of an open group) needs the group before.
    None: for one of them there is no key frame. Calls `tick`, which may raise, for each key frame that is looked at:
    where times run backwards, these are all for each of `places`.
    """
    keys = [place for place, packet in enumerate(packets) if packet.is_keyframe and packet.pts is not None]
    spans: list[tuple[int, int]] = []
    for place in places:
        pts = packets[place].pts
        before = bisect_right(keys, place) - 1
        while before >= 0 and pts is not None and (packets[keys[before]].pts or 0) > pts:
            tick()
            before -= 1
        if before < 0:
            return None
        spans.append((keys[before], place + 1))
    runs: list[range] = []
    for start, stop in sorted(spans):
        if runs and start <= runs[-1].stop:
            runs[-1] = range(runs[-1].start, max(stop, runs[-1].stop))
        else:
            runs.append(range(start, stop))
    return runs


def unbroken(packets: Sequence[av.Packet]) -> Iterator[Sequence[av.Packet]]:
    """The packets in runs, each of which must be decoded by itself.

    An mp4's edit begins with the frames from its last key frame on, again if they were in the edit before. There the
    times of decoding go back, and a decoder that is not told may take frames for those that it has shown.
    """
    start = 0
    for place, (before, packet) in enumerate(pairwise(packets), 1):
        if before.dts is None or packet.dts is None:
            continue
        if packet.is_keyframe and packet.dts <= before.dts:
            yield packets[start:place]
            start = place
    yield packets[start:]


def _is_shown(packet: av.Packet, codec: str) -> bool:
    """VP8 alone keeps frames that are only referred to in packets of their own (RFC 6386, section 9.1)."""
    return codec != "vp8" or bool(memoryview(packet)[0] & 0x10)
