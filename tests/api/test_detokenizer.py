"""Text and listed tokens of an answer, and stop strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mini_engine.api.detokenizer import Detokenizer, Vocabulary
from mini_engine.api.generation import Sample
from mini_engine.api.protocol import CompletionRequest
from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import RequestOutput, SamplingParams, TokenLogprob
from tests import tiny_processor

# Pieces that make characters of several tokens, special tokens, and starts of stop strings.
PIECES = ["a red", " circle", " moving", "STOP", "ST", "S", "世", "界", "🎈", "ä", "\n", " ", "<|im_end|>", "xyz"]
STOPS = ["STOP", "TO", "界🎈", "circle moving", " ", "\n\n", "p", "ä"]
pieces_of_text = st.lists(st.sampled_from(PIECES), max_size=12)


@pytest.fixture(scope="module")
def tokenizer(processor: MediaProcessor) -> Any:
    return processor.hf_processor.tokenizer


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def read_all(detokenizer: Detokenizer, ids: list[int]) -> tuple[str, int]:
    """The whole text, and the number of tokens up to the one that completed a stop string."""
    texts: list[str] = []
    for token in ids:
        if detokenizer.stopped_by is None:
            texts.append(detokenizer.push(token))
    return "".join(texts) + detokenizer.finish(), len(texts)


# --- text ------------------------------------------------------------------------------------------------------------


@given(data=st.data(), skip=st.booleans())
def test_any_token_ids_give_what_decoding_them_at_once_gives(
    tokenizer: Any, vocabulary: Vocabulary, data: Any, skip: bool
) -> None:
    """Random tokens: bytes that form no character, cut-off characters, ids that the tokenizer does not have."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=20))
    text, _ = read_all(Detokenizer(vocabulary, skip_special_tokens=skip), ids)
    assert text == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("skip", [True, False])
def test_added_tokens_give_what_decoding_them_at_once_gives(tmp_path: Path, skip: bool) -> None:
    """Also those whose characters stand for bytes, or are no bytes' at all."""
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_processor.build(tmp_path)))
    tokenizer.add_tokens(["<plain>", "two words ", "世", "café", "Ġx"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mine>"]})
    ids = encode(tokenizer, "a<plain>世two words <mine> b世caféĠx<|im_end|>\n")
    assert len({"<plain>", "two words ", "<mine>"} & {tokenizer.convert_ids_to_tokens(one) for one in ids}) == 3
    text, _ = read_all(Detokenizer(Vocabulary(tokenizer), skip_special_tokens=skip), ids)
    assert text == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip)
    assert ("<mine>" in text) != skip


# --- stop strings ----------------------------------------------------------------------------------------------------


@given(
    pieces=pieces_of_text,
    stop=st.lists(st.sampled_from(STOPS), max_size=3),
    include=st.booleans(),
    least=st.integers(0, 8),
)
def test_stop_strings(
    tokenizer: Any, vocabulary: Vocabulary, pieces: list[str], stop: list[str], include: bool, least: int
) -> None:
    """Compared with a reading character by character, from where the text of the first `least` tokens ends."""
    ids = encode(tokenizer, "".join(pieces))
    whole = "".join(pieces).replace("<|im_end|>", "")
    exempt = Detokenizer(vocabulary)
    for token in ids[:least]:
        exempt.push(token)
    lengths = range(exempt.decoded_length + 1 if least else 0, len(whole) + 1)
    ends = [end for end in lengths if any(whole[:end].endswith(word) for word in stop)]
    detokenizer = Detokenizer(vocabulary, stop, include, min_tokens=least)
    text, used = read_all(detokenizer, ids)
    if not ends:
        assert (text, used, detokenizer.stopped_by) == (whole, len(ids), None)
        return
    found = max((word for word in stop if whole[: ends[0]].endswith(word)), key=len)
    assert detokenizer.stopped_by == found
    assert text == whole[: ends[0] if include else ends[0] - len(found)]
    # One token fewer would not have been enough.
    assert found in tokenizer.decode(ids[:used], skip_special_tokens=True)
    assert used - 1 <= least or not any(
        word in tokenizer.decode(ids[least : used - 1], skip_special_tokens=True) for word in stop
    )


def test_text_is_held_back_only_while_it_may_be_a_stop_string_or_become_a_character(
    tokenizer: Any, vocabulary: Vocabulary
) -> None:
    detokenizer = Detokenizer(vocabulary, ["STOP"])
    assert [detokenizer.push(token) for token in encode(tokenizer, "xSTSTx")] == ["x", "", "", "ST", "", "STx"]
    first, *_ = encode(tokenizer, "Ж")
    detokenizer = Detokenizer(vocabulary)
    assert [detokenizer.push(first) for _ in range(3)] == ["", "�", "�"]
    assert (detokenizer.finish(), detokenizer.finish()) == ("�", "")


# --- logprobs --------------------------------------------------------------------------------------------------------


@given(
    pieces=pieces_of_text,
    size=st.integers(1, 5),
    stop=st.lists(st.sampled_from(["STOP", "circle", "界", "\n"]), max_size=2),
    include=st.booleans(),
    skip=st.booleans(),
)
def test_listed_tokens_are_those_of_the_text(
    tokenizer: Any, vocabulary: Vocabulary, pieces: list[str], size: int, stop: list[str], include: bool, skip: bool
) -> None:
    """Each with a part of its text; only a last token that a stop string cuts through has more bytes than the text."""
    ids = encode(tokenizer, "".join(pieces) + "🎈")[:-1]
    asked = CompletionRequest(prompt="", stop=stop, include_stop_str_in_output=include, skip_special_tokens=skip)
    sample = Sample(0, "r", asked, SamplingParams(99, 1, logprobs=0), vocabulary)
    text, listed, start = "", [], 0
    while start < len(ids):
        part = ids[start : start + size]
        start += size
        logprobs = [[TokenLogprob(one, -1.0)] for one in part]
        sample.add(RequestOutput("r", part, "length" if start >= len(ids) else None, None, logprobs))
        piece = sample.take()
        assert not piece.logprobs or piece.text
        text += piece.text
        listed += [token.likely[0][0] for token in piece.logprobs or ()]
        if piece.finish_reason is not None:
            break
    plain = Detokenizer(vocabulary, stop, include, skip)
    assert (text, sample.completion_tokens) == read_all(plain, ids)
    joined = b"".join(listed)
    if plain.stopped_by is None:
        assert joined == b"".join(vocabulary.bytes_shown(one, skip) for one in ids)
    else:
        *whole, _ = listed or [b""]
        assert joined.startswith(text.encode())
        assert len(b"".join(whole)) < len(text.encode()) or not text
