"""A token by itself: its bytes, of which answers are made, and whether it shows. Knows nothing of answers."""

from __future__ import annotations

from typing import Any

from tokenizers import decoders


class Vocabulary:
    """The tokens of a byte-level tokenizer, as all of the Qwen-VL models have it."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a Hugging Face fast tokenizer. Raises ValueError for one that is not byte-level."""
        self._tokenizer = tokenizer.backend_tokenizer
        if not isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            raise ValueError("the model's tokenizer is not byte-level: the bytes of its tokens are not known")
        self._byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, which may be a part of a character; none for an id that the tokenizer does not have.

        Those of several tokens in a row are what the tokenizer's own decoder makes its text of.
        """
        written = self._tokenizer.id_to_token(token_id)
        if written is None:
            return b""
        try:
            return bytes(map(self._byte_of.__getitem__, written))
        except KeyError:  # an added token, such as one with a space, which is not written in the characters for bytes
            return written.encode()

    def bytes_shown(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """What the token adds to an answer: its bytes, or none where it is a special token and these are skipped."""
        return b"" if skip_special_tokens and token_id in self._special else self.bytes_of(token_id)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself if it can be printed, else the next
    one from U+0100 on (`bytes_to_unicode` of GPT-2's encoder.py)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
