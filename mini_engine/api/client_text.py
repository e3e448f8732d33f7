"""Keeps text that clients write apart from the control tokens that the chat template writes.

`<|im_end|>` in a message is text: it ends no turn. A mark is put into every such place before the template sees it, so
that the added tokens of the rendered prompt are the template's; the tokens between them are those of the text without
marks. Knows nothing of messages or templates.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer

# A noncharacter, which Unicode reserves for the inside of a program. One that a client sends is doubled.
MARK = "\ufdd0"


class ClientText:
    """Marks texts for one tokenizer, and encodes prompts that have such texts in them.

    Args:
        tokenizer: stays unchanged; threads may share it.
        tags: added tokens that `mark` leaves as they are, where it is asked to.
    """

    def __init__(self, tokenizer: Tokenizer, tags: Collection[str] = ()) -> None:
        added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        # One character, such as a line break, is a token or text alike.
        self._ids = {content: token_id for content, token_id in added.items() if len(content) > 1}
        self._tags = frozenset(tags)
        self._beginnings = {content[:size] for content in self._ids for size in range(1, len(content))}
        self._longest = max(map(len, self._ids), default=0)
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._tokenizer = tokenizer
        self._plain = Tokenizer(tokenizer.model)  # shares the vocabulary, has no added tokens
        self._plain.normalizer, self._plain.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer

    def mark(self, value: Any, *, keep_tags: bool = False) -> Any:
        """`value`, a JSON value that a client wrote, with marks in its strings and its keys: in each added token, and
        in the beginning of one at the end of a string, since templates write strings side by side."""
        if isinstance(value, str):
            return self._mark_text(value, self._tags if keep_tags else ())
        if isinstance(value, list):
            return [self.mark(item, keep_tags=keep_tags) for item in value]
        if isinstance(value, dict):
            return {self.mark(name): self.mark(item, keep_tags=keep_tags) for name, item in value.items()}
        return value

    def encode(self, prompt: str) -> list[int]:
        """The token ids of a rendered prompt. One without marks has those that the tokenizer gives to all of it."""
        if MARK not in prompt:
            return self._tokenizer.encode(prompt, add_special_tokens=False).ids
        token_ids: list[int] = []
        begin = 0
        for token in self._tokens.finditer(prompt):
            token_ids += [*self._encode_plain(prompt[begin : token.start()]), self._ids[token[0]]]
            begin = token.end()
        return token_ids + self._encode_plain(prompt[begin:])

    def _mark_text(self, text: str, kept: Collection[str]) -> str:
        # By `replace`, which takes a nanosecond for a character: a pattern blocks other threads while it searches.
        text = text.replace(MARK, 2 * MARK)
        for token in self._ids:
            while token in text and token not in kept:  # more than once if it overlaps itself
                text = text.replace(token, _broken(token, 1))
        for size in range(min(len(text), self._longest), 0, -1):
            if text[-size:] in self._beginnings:
                text = _broken(text, len(text) - size + 1)
        return text

    def _encode_plain(self, text: str) -> list[int]:
        text = MARK.join(part.replace(MARK, "") for part in text.split(2 * MARK))
        return self._plain.encode(text, add_special_tokens=False).ids if text else []


def _broken(text: str, place: int) -> str:
    return text[:place] + MARK + text[place:]
