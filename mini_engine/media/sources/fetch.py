"""Decodes `data:` URLs, whose data may stay where they arrived, and checks all media URLs before anything is fetched.

`local_files.py` reads `file://` URLs and `http_fetch.py` reads `http(s)://` URLs. Knows nothing of what the bytes are.
No error contains a path, an address or a host name.
"""

from dataclasses import dataclass

import msgspec

from mini_engine.media.decode.item_limits import DecodeLimits, Guard
from mini_engine.media.frame_sampling import VideoFacts, VideoSampling
from mini_engine.media.sources.http_fetch import parse_http
from mini_engine.media.sources.local_files import file_size
from mini_engine.media.sources.policy import BLOCK_BYTES, MediaPolicy
from mini_engine.protocol.api_errors import MediaError
from mini_engine.protocol.body_split import DataUrl

_decode = msgspec.json.Decoder(bytes).decode  # of base64, as strict as binascii and in a third of its time
# Processors know frames by their indices: those of a video with so many frames per second, to keep the times exact.
CLOCK = 1000.0
DEFAULT_FPS = 2.0  # where the sampling has no rate: qwen_vl_utils samples at this one


def parse_data_url(url: str, policy: MediaPolicy, item: str) -> DataUrl:
    """Checks all but the data. Raises MediaError."""
    if url[:5].lower() != "data:":
        problem = "the URL must start with data:, file://, http:// or https://, or be an absolute path"
        raise MediaError(item, f"{problem}; base64 needs data:<media type>;base64, before it")
    comma = url.find(",", 0, 1024)
    if not url[: max(comma, 0)].lower().endswith(";base64"):
        raise MediaError(item, "a data: URL has the form data:<media type>;base64,<data>")
    if not isinstance(url, DataUrl):
        whole = url.encode("ascii", "replace")
        url = DataUrl(url[: comma + 1], whole, comma + 1, len(whole))
    policy.check_size((url.end - url.begin) * 2 // 3 - 1024, item)  # 3/4 of the characters; line breaks, escapes
    return url


def fetch_data(url: str, policy: MediaPolicy, item: str = "media item") -> bytes:
    """Returns the bytes of a `data:` URL, at most `policy.max_media_bytes`. Blocks: call it in a thread. Raises
    MediaError, whose text starts with `item`."""
    data = parse_data_url(url, policy, item)
    blocks: list[bytes] = []
    rest = b""  # less than one group of four characters, and an escape that a block cuts
    try:
        for offset in range(data.begin, data.end, BLOCK_BYTES):
            text = rest + data.whole[offset : min(offset + BLOCK_BYTES, data.end)]
            cut = text.rfind(b"\\", -5) if offset + BLOCK_BYTES < data.end else -1
            text, rest = (text[:cut], text[cut:]) if cut >= 0 else (text, b"")
            if b"\\" in text:
                text = msgspec.json.decode(b'"%b"' % text, type=str).encode("ascii")
                text = text.replace(b"\\", b"!")  # which is no base64 either, and no escape
            text = text.translate(None, b" \t\r\n\f")
            whole = len(text) // 4 * 4
            blocks.append(_decode(b'"%b"' % text[:whole]))
            rest = text[whole:] + rest
        # The padding may be left out.
        blocks.append(_decode(b'"%b%b"' % (rest, b"=" * (-len(rest) % 4))))
    except (msgspec.DecodeError, UnicodeError) as error:
        raise MediaError(item, "the data: URL contains invalid base64") from error
    return policy.checked(b"".join(blocks), item)


@dataclass(frozen=True)
class Frames:
    """A video that is sent as its frames."""

    sizes: list[int]  # bytes of each frame
    facts: VideoFacts


def has_frames(url: str) -> bool:
    """Whether the URL has frames, and not a file."""
    return url[:16].lower() == "data:video/jpeg;"


def fetch_frames(
    url: str, policy: MediaPolicy, limits: DecodeLimits, sampling: VideoSampling, item: str, times: list[float] | None
) -> tuple[bytes, Frames]:
    """The bytes of the frames of `data:video/jpeg;base64,<frame>,<frame>,...`, vLLM's form, one after another for
    `decode_frames`. All count, at `times` (seconds) if these are given. Raises MediaError."""
    data = parse_data_url(url, policy, item)
    guard, count = Guard(item, limits), data.whole.count(b",", data.begin, data.end) + 1
    guard.check("max_video_frames_kept", count, "frames", "fewer")
    if sampling.start is not None or sampling.end is not None:
        raise MediaError(item, "start and end are for a video that is sent as a file; remove them")
    rate = sampling.fps or DEFAULT_FPS
    if times is None:
        times = [index / rate for index in range(count)]
    elif len(times) != count:
        raise MediaError(item, f"it has {count} frames and {len(times)} timestamps; send one for each frame")
    elif count > 1:
        rate = (count - 1) / (times[-1] - times[0])
    guard.check("max_video_seconds", count / rate, "seconds", "a shorter video")
    images: list[bytes] = []
    begin = data.begin
    while begin <= data.end:
        comma = data.whole.find(b",", begin, data.end)
        end = data.end if comma < 0 else comma
        try:
            images.append(fetch_data(DataUrl(data, data.whole, begin, end), policy, item))
        except MediaError as error:
            raise MediaError(item, f"frame {len(images) + 1}: {error.problem}") from error
        begin = end + 1
    total = max(round(count / rate * CLOCK), 1)
    facts = VideoFacts(times, fps=CLOCK, total_frames=total, window_frames=total)
    return policy.checked(b"".join(images), item), Frames([len(image) for image in images], facts)


def is_http_url(url: str) -> bool:
    """Whether `fetch_http` downloads this URL from another server; `fetch` reads the others."""
    return url[:4].lower() == "http"


def is_local_file(url: str) -> bool:
    """Whether `declared_size` and `fetch` access the file system for this URL."""
    return url[:5].lower() == "file:"


def declared_size(url: str, policy: MediaPolicy, item: str = "media item") -> int | None:
    """An upper bound in bytes of what the URL contains; None if only the HTTP server knows. For a `data:` URL the bound
    follows from the length of the text and costs microseconds. For a file it is the present size. A lookup in a slow
    file system blocks, so call it in a thread where `is_local_file`. Raises MediaError where the fetch would, but for
    the content and for what the HTTP server does; OSError: see `out_of`."""
    if is_http_url(url):
        parse_http(url, policy, item)
        return None
    if is_local_file(url):
        return file_size(url, policy, item)
    data = parse_data_url(url, policy, item)
    return min((data.end - data.begin + 3) // 4 * 3, policy.max_media_bytes)
