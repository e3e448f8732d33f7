"""Keeps text that clients write apart from the control tokens that the chat template writes.

`<|im_end|>` in a message is text: it ends no turn. A mark is put after every character with which an added token may
begin, such as `<`, before the template sees the text. So the added tokens of the rendered prompt are the template's;
the tokens between them are those of the text without marks. Knows nothing of messages or templates.
"""

import re
from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer

# A noncharacter, which Unicode reserves for the inside of a program. One that a client sends is doubled.
MARK = "\ufdd0"


def encode_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """The token ids of a text, as a batch of one: `Tokenizer.encode` holds the GIL, for seconds if the text is long."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


class ClientText:
    """Marks texts for one tokenizer, and encodes prompts that have such texts in them.

    Args:
        tokenizer: stays unchanged; threads may share it.
        tags: see `mark`.
    """

    def __init__(self, tokenizer: Tokenizer, tags: Collection[str]) -> None:
        self._ids = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._beginnings, self._tags = {content[0] for content in self._ids}, tags
        self._tokens = re.compile("|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))))
        self._tokenizer = tokenizer
        self._plain = Tokenizer(tokenizer.model)  # shares the vocabulary, has no added tokens
        self._plain.normalizer, self._plain.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer

    def mark(self, value: Any, keep_tags: bool = False) -> Any:
        """`value`, a JSON value that a client wrote, with marks in its strings and its keys. `keep_tags`: of a string,
        the tags stay as they are."""
        if isinstance(value, str):
            value = value.replace(MARK, MARK * 2)
            for beginning in self._beginnings:
                value = value.replace(beginning, beginning + MARK)
            for tag in self._tags if keep_tags else ():
                value = value.replace(tag[0] + MARK + tag[1:], tag)
            return value
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        if isinstance(value, dict):
            return {self.mark(name): self.mark(item) for name, item in value.items()}
        return value

    def encode(self, prompt: str) -> list[int]:
        """The token ids of a rendered prompt. One without marks has those that the tokenizer gives to all of it."""
        if MARK not in prompt:
            return encode_text(self._tokenizer, prompt)
        token_ids: list[int] = []
        begin = 0
        for token in self._tokens.finditer(prompt):
            token_ids += [*self._encode_plain(prompt[begin : token.start()]), self._ids[token[0]]]
            begin = token.end()
        return token_ids + self._encode_plain(prompt[begin:])

    def _encode_plain(self, text: str) -> list[int]:
        text = MARK.join(part.replace(MARK, "") for part in text.split(MARK * 2))
        return encode_text(self._plain, text)
