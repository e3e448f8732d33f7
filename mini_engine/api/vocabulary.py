"""A token by itself: its bytes and its text, which a detokenised answer does not show. Knows nothing of answers."""

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
        self._byte_of = {ord(character): byte for byte, character in enumerate(_byte_characters())}
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, which may be a part of a character; none for an id that the tokenizer does not have."""
        if token_id in self._added:
            return self._added[token_id]
        written = self._tokenizer.id_to_token(token_id)
        return b"" if written is None else bytes(map(self._byte_of.__getitem__, map(ord, written)))

    def makes_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the token adds to an answer's text."""
        if token_id in self._special:
            return not skip_special_tokens
        return bool(self.bytes_of(token_id))


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself if it can be printed, else the next
    one from U+0100 on (`bytes_to_unicode` of GPT-2's encoder.py)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
