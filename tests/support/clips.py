"""Encodes small videos for the tests, with PyAV."""

import io
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import av
import numpy as np

# Codecs and their containers: every one that PyAV encodes of what clients send, at ten frames per second.
CONTAINERS = {
    "libx264": "mp4 mov matroska avi mpegts mpeg flv 3gp ismv asf h264 nut",
    "libx265": "mp4 mov matroska mpegts flv hevc",
    "libvpx": "webm matroska avi",
    "libvpx-vp9": "mp4 webm matroska avi ivf",
    "libsvtav1": "mp4 webm matroska avi ivf",
    "mpeg4": "mp4 mov matroska avi mpegts 3gp m4v",
    "mjpeg": "mov matroska avi",
    **dict.fromkeys(("prores_ks", "png", "qtrle", "cfhd", "svq1", "jpeg2000"), "mov"),
    **dict.fromkeys(("ffv1", "snow"), "matroska"),
    **dict.fromkeys(("ffvhuff", "utvideo", "cinepak", "msmpeg4"), "avi"),
    **dict.fromkeys(("flv", "flashsv"), "flv"),
    **dict.fromkeys(("wmv1", "wmv2"), "asf"),
    **{"gif": "gif", "apng": "apng", "rawvideo": "yuv4mpegpipe"},
}
ALL = [(codec, container) for codec, containers in CONTAINERS.items() for container in containers.split()]
SAME_BYTES = {"fflags": "+bitexact"}  # without it Matroska contains random numbers
QUIET = {"libx265": {"x265-params": "log-level=none"}}

FROM_BT709 = {
    9: ((0.6274, 0.3293, 0.0433), (0.0691, 0.9195, 0.0114), (0.0164, 0.0880, 0.8956)),  # BT.2020
    12: ((0.8225, 0.1774, 0.0), (0.0332, 0.9669, 0.0), (0.0171, 0.0724, 0.9108)),  # P3
}


def frame(index: int, width: int, height: int) -> np.ndarray:
    """A picture that differs for every index: a bright bar at another place of a grey ramp."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[...] = np.linspace(0, 120, width, dtype=np.uint8)[:, None]
    start = index * 3 % max(1, width - 8)
    pixels[:, start : start + 8] = (255, (index * 37) % 256, 40)
    return pixels


def video_stream(output: Any, codec: str, width: int, height: int, rate: int, options: dict[str, str]) -> Any:
    """A stream of `output`. `options` are the encoder's; `g` is the most frames from one key frame to the next."""
    stream = output.add_stream(codec, rate=rate, options=QUIET.get(codec, {}) | options)
    stream.width, stream.height = width, height
    known = [kind.name for kind in stream.codec.video_formats or []] or ["yuv420p"]
    usual = "yuvj420p" if codec == "mjpeg" else "yuv444p" if codec == "libx264" and width % 2 else "yuv420p"
    stream.pix_fmt = next((kind for kind in (usual, "rgb24") if kind in known), known[0])
    stream.thread_count = 1
    return stream


def write_frames(output: Any, stream: Any, indices: Sequence[int], stamps: Sequence[int] | None = None) -> None:
    """Encodes the pictures of `indices`, shown at `stamps` (else 0, 1, 2, ...), and ends the stream."""
    for place, index in enumerate(indices):
        picture = av.VideoFrame.from_ndarray(frame(index, stream.width, stream.height), format="rgb24")
        picture.pts = stamps[place] if stamps else place
        output.mux(stream.encode(picture.reformat(format=stream.pix_fmt)))
    output.mux(stream.encode(None))
    # For root, SVT-AV1 sets the calling thread to SCHED_FIFO at priority 99, and decoder processes would inherit that.
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def signal_of(transfer: int, pixels: np.ndarray, primaries: int = 9) -> np.ndarray:
    """sRGB pixels as the signal, 0 to 1, of a transfer and primaries of ITU-T H.273. White of HDR is 203 nits."""
    light = np.where(pixels <= 10, pixels / 3294.6, ((pixels / 255 + 0.055) / 1.055) ** 2.4)
    if primaries in FROM_BT709:
        light = light @ np.array(FROM_BT709[primaries]).T
    if transfer == 16:  # SMPTE ST 2084
        power = (light * 203 / 10000) ** (1305 / 8192)
        return ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** (2523 / 32)
    if transfer == 18:  # ARIB STD-B67: white has 0.265 of the most light of a scene
        scene = light * 0.265
        bright = 0.17883277 * np.log(12 * np.maximum(scene, 1 / 12) - 0.28466892) + 0.55991073
        return np.where(scene <= 1 / 12, np.sqrt(3 * scene), bright)
    return np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def encode_in(
    transfer: int,
    pixels: np.ndarray,
    codec: str = "libx265",
    container: str = "mp4",
    primaries: int = 9,
    options: dict[str, str] | None = None,
) -> bytes:
    """A video of 10 bits that shows sRGB pixels, [N, H, W, 3], at ten frames per second; else as `signal_of`."""
    buffer, matrix = io.BytesIO(), primaries if primaries in (2, 9) else 1
    with av.open(buffer, "w", format=container, options=SAME_BYTES) as output:
        height, width = pixels.shape[1:3]
        stream = video_stream(output, codec, width, height, 10, {"crf": "10", "g": "5"} | (options or {}))
        stream.pix_fmt, context = "yuv420p10le", stream.codec_context
        context.color_primaries, context.color_trc, context.colorspace = primaries, transfer, matrix
        context.color_range = 1
        for index, values in enumerate(signal_of(transfer, pixels, primaries)):
            picture = av.VideoFrame.from_ndarray((values * 65535).round().astype(np.uint16), format="rgb48le")
            picture = picture.reformat(format="yuv420p10le", dst_colorspace=matrix, dst_color_range=1)
            picture.color_primaries, picture.color_trc, picture.pts = primaries, transfer, index
            output.mux(stream.encode(picture))
        output.mux(stream.encode(None))
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # see `write_frames`
    return buffer.getvalue()


@cache
def cached(codec: str, container: str, frames: int = 21, width: int = 64, height: int = 48, **options: str) -> bytes:
    """`encode`, once for the same arguments."""
    return encode(frames, width, height, codec=codec, container=container, options=options)


def encode(
    frames: int = 20,
    width: int = 64,
    height: int = 48,
    rate: int = 10,
    codec: str = "libx264",
    container: str = "mp4",
    stamps: list[int] | None = None,
    options: dict[str, str] | None = None,
) -> bytes:
    """A video file. `stamps` are the frames' times in units of 1/`rate` s where they are not 0, 1, 2, ..."""
    buffer = io.BytesIO()
    if frames == 1 and codec == "libx265":  # sometimes it leaves out the time that mp4 needs of a single frame
        options = {"x265-params": "log-level=none:bframes=0"}
    with av.open(buffer, "w", format=container, options=SAME_BYTES) as output:
        stream = video_stream(output, codec, width, height, rate, options or {})
        write_frames(output, stream, range(frames), stamps)
    return buffer.getvalue()


def encode_live(frames: int, codec: str = "libx264", container: str = "mp4") -> bytes:
    """A recording written without seeking: no sizes, no duration, an mp4 in fragments. A key frame every five."""
    pipe = io.BytesIO()
    pipe.seekable = lambda: False  # so that no header can be rewritten at the end
    muxer = {"movflags": "frag_keyframe+empty_moov"} if container in ("mp4", "mov") else {}
    with av.open(pipe, "w", format=container, options=muxer | SAME_BYTES) as output:
        write_frames(output, video_stream(output, codec, 64, 48, 10, {"g": "5"}), range(frames))
    return pipe.getvalue()


def remuxed(
    data: bytes,
    container: str,
    change: Callable[[int, bytes], bytes] = lambda _, content: content,
    times: int = 1,
    degrees: int = 0,
    is_mirrored: bool = False,
) -> bytes:
    """The video of `data` in a file of its own, `times` over, to be shown turned by `degrees` counterclockwise,
    then mirrored, with packets that `change` makes of their index and their content. Nothing is encoded again."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(buffer, "w", format=container, options=SAME_BYTES) as output:
        track = source.streams.video[0]
        stream = output.add_stream_from_template(track)
        if degrees or is_mirrored:
            stream.set_display_rotation(degrees, hflip=is_mirrored)
        packets = [(bytes(packet), packet) for packet in source.demux(track) if packet.size]
        for turn in range(times):
            for index, (content, old) in enumerate(packets):
                packet, shift = av.Packet(change(index, content)), turn * (track.duration or 0)
                packet.pts = None if old.pts is None else old.pts + shift
                packet.dts = None if old.dts is None else old.dts + shift
                packet.time_base, packet.is_keyframe, packet.stream = old.time_base, old.is_keyframe, stream
                output.mux(packet)
    return buffer.getvalue()


def decode_all(data: bytes, stream: int = 0) -> np.ndarray:
    """All frames, [N, H, W, 3], of a plain PyAV decode: the reference."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=stream)])
