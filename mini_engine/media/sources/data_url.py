"""Parses and decodes `data:` URLs, whose data may stay where they arrived. Knows nothing of what the bytes are."""

import msgspec

from mini_engine.media.media_errors import MediaError
from mini_engine.media.sources.policy import BLOCK_BYTES, MediaPolicy
from mini_engine.protocol.body_split import DataUrl

_decode = msgspec.json.Decoder(bytes).decode  # of base64, as strict as binascii and in a third of its time


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
        for place in range(data.begin, data.end, BLOCK_BYTES):
            text = rest + data.whole[place : min(place + BLOCK_BYTES, data.end)]
            cut = text.rfind(b"\\", -5) if place + BLOCK_BYTES < data.end else -1
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
