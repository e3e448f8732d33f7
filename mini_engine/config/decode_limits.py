"""Limits on decoding one image or video. The flags take their defaults here; `media/decode/item_limits.py` enforces
them.
"""

from dataclasses import dataclass

MOST_FRAMES_KEPT = 10_000
"""Upper bound of --max-video-frames-kept: a decoder process lists the frames in one datagram of at most 200 kB."""


@dataclass(frozen=True)
class DecodeLimits:
    """Limits on one item, each named like its flag. Exceeding one is a MediaError that names the flag."""

    max_image_pixels: int = 64 << 20
    max_video_frames: int = 220_000  # in the file: an hour at 60 frames per second
    max_video_frames_kept: int = 768  # by the sampling: as many as the Qwen-VL processors take
    max_video_seconds: float = 3600.0  # from the first frame to the last
    max_frame_pixels: int = 8192 * 4608  # 8K
    max_video_pixels_kept: int = 512 << 20  # of all kept frames, which are scaled to fit: 1.5 GiB of RGB
    media_decode_timeout: float = 120.0  # seconds of wall time: an hour of 720p in H.265 takes 39, a minute of 4K 53
    media_decoder_memory: int = 1 << 30  # bytes of a decoder process, beside itself, the encoded item and the frames

    @property
    def most_output_bytes(self) -> int:
        """Of the frames of one item."""
        return 3 * max(self.max_image_pixels, self.max_video_pixels_kept)


def flag_of(limit: str) -> str:
    """The flag that sets a limit: its field's name as a command line writes it."""
    return "--" + limit.replace("_", "-")
