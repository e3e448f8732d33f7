"""What a JSON text costs to decode, by one scan of its bytes, so that it can be bounded before it is decoded."""

MAX_STRUCTURE = 1 << 17  # arrays, objects, commas and colons of a body: its decoding takes 60 ms at most
SLOW_NUMBER = 64  # so many of these take as long as a number with an exponent
LONG_NUMBER = 20  # digits; numbers of fewer take no longer than short ones
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
STRUCTURE_LIMIT = (
    f"more than {MAX_STRUCTURE} arrays, objects, fields and items, of which a number counts as {SLOW_NUMBER} with an "
    f"exponent, and for each {LONG_NUMBER} digits"
)


def count_structure(text: bytes, items: int = 1) -> int:
    """The strings of a JSON text, or the arrays, objects, fields and items outside of them if these are more. Of items
    `items` count as one."""
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = bare.count(b'"') // 2
    outside = b"".join(bare.split(b'"')[::2]) if strings <= MAX_STRUCTURE else b""
    exponents = outside.count(b"e") + outside.count(b"E") - outside.count(b"true") - outside.count(b"false")
    slow = exponents + outside.translate(_DIGITS).count(b"0" * LONG_NUMBER)
    return max(strings, sum(map(outside.count, b"[{:")) + outside.count(b",") // items + SLOW_NUMBER * slow)
