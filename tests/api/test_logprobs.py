"""Tokens by themselves, and which of them belong to a text."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from mini_engine.api.detokenizer import LEAST_LOGPROB, Detokenizer, LogprobList, SampleText, Vocabulary
from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import TokenLogprob
from tests.api.test_detokenizer import read_all

PIECES = ["a red", " circle", "STOP", "ST", "世", "🎈", "ä", "\n", "<|im_end|>", "<|im_start|>", "xyz"]


@pytest.fixture(scope="module")
def tokenizer(processor: MediaProcessor) -> Any:
    return processor.hf_processor.tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_the_bytes_of_tokens(tokenizer: Any) -> None:
    vocabulary = Vocabulary(tokenizer)
    text = "a red 🎈\n\x00\x7f\xa0ÿ\xad"
    assert b"".join(map(vocabulary.bytes_of, encode(tokenizer, text))) == text.encode()
    (end,) = encode(tokenizer, "<|im_end|>")
    assert vocabulary.bytes_of(end) == b"<|im_end|>"
    assert vocabulary.bytes_shown(end, skip_special_tokens=True) == b""
    assert vocabulary.bytes_shown(end, skip_special_tokens=False) == b"<|im_end|>"
    assert vocabulary.bytes_of(len(tokenizer)) == b""


def test_a_tokenizer_that_is_not_byte_level_is_refused() -> None:
    with pytest.raises(ValueError, match="not byte-level"):
        Vocabulary(SimpleNamespace(backend_tokenizer=Tokenizer(models.BPE())))


def text_and_bytes(tokenizer: Any, ids: list[int], size: int, **how: Any) -> tuple[str, list[bytes], int]:
    """The text of `ids` in pushes of `size`, the bytes of what is listed with it, and the tokens used."""
    skip = how.get("skip_special_tokens", True)
    vocabulary = Vocabulary(tokenizer)
    sample = SampleText(0, Detokenizer(vocabulary, **how), LogprobList(vocabulary, skip))
    text, listed = "", []
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        last = start + size >= len(ids)
        logprobs = [[TokenLogprob(token, -1.0)] for token in part]
        piece = sample.push(part, "length" if last else None, logprobs)
        assert not piece.logprobs or piece.text
        text += piece.text
        listed += [bytes(token.bytes) for token in piece.logprobs or ()]
        if piece.finish_reason is not None:
            break
    return text, listed, sample.completion_tokens


@settings(deadline=None, max_examples=50)
@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=8),
    size=st.integers(1, 5),
    stop=st.lists(st.sampled_from(["STOP", "circle", "界", "\n"]), max_size=2),
    include=st.booleans(),
    skip=st.booleans(),
)
def test_the_listed_tokens_are_the_texts(
    tokenizer: Any, pieces: list[str], size: int, stop: list[str], include: bool, skip: bool
) -> None:
    ids = encode(tokenizer, "".join(pieces))
    how = {"stop": stop, "include_stop": include, "skip_special_tokens": skip}
    text, listed, used = text_and_bytes(tokenizer, ids, size, **how)
    *whole, last = listed or [b""]
    assert b"".join(listed).startswith(text.encode())
    assert len(b"".join(whole)) < len(text.encode()) or not text
    plain = Detokenizer(Vocabulary(tokenizer), **how)
    assert (text, used) == read_all(plain, ids)
    if not stop:
        assert b"".join(listed) == text.encode()


def test_an_unfinished_character_is_listed_with_its_bytes(tokenizer: Any) -> None:
    ids = encode(tokenizer, "a🎈")[:-1]
    text, listed, _ = text_and_bytes(tokenizer, ids, 1)
    assert text.startswith("a\N{REPLACEMENT CHARACTER}")
    assert b"".join(listed) == "a🎈".encode()[:-1]


def test_what_is_impossible_has_openais_figure(tokenizer: Any) -> None:
    one = LogprobList(Vocabulary(tokenizer), True)
    one.add(0, [TokenLogprob(*encode(tokenizer, "x"), float("-inf")), TokenLogprob(len(tokenizer), -1.5)])
    (listed,) = one.send("x")
    assert (listed.token, listed.logprob, listed.bytes) == ("x", LEAST_LOGPROB, [120])
    assert [(other.token, other.logprob, other.bytes) for other in listed.top_logprobs] == [("", -1.5, [])]
