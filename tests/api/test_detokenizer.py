from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mini_engine.api.detokenizer import Detokenizer, Vocabulary
from tests import tiny_processor

# Pieces that make characters of several tokens, special tokens, and starts of stop strings.
PIECES = [
    "a red",
    " circle",
    " moving",
    "stop",
    "STOP",
    "ST",
    "S",
    "世",
    "界",
    "🎈",
    "ä",
    "\n",
    " ",
    "<|im_end|>",
    "xyz",
]
STOPS = ["STOP", "TO", "界🎈", "circle moving", " ", "\n\n", "p", "ä"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(str(tiny_processor.build(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer)


def read_all(detokenizer: Detokenizer, ids: list[int]) -> tuple[str, int]:
    """The whole text, and the number of tokens up to the one that completed a stop string."""
    texts: list[str] = []
    for token in ids:
        if detokenizer.stopped_by is None:
            texts.append(detokenizer.push(token))
    return "".join(texts) + detokenizer.finish(), len(texts)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@settings(deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_text_comes_back(tokenizer: Any, vocabulary: Vocabulary, pieces: list[str]) -> None:
    ids = encode(tokenizer, "".join(pieces))
    text, used = read_all(Detokenizer(vocabulary), ids)
    assert text == "".join(pieces).replace("<|im_end|>", "")
    assert used == len(ids)


@settings(deadline=None)
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


class CountingVocabulary(Vocabulary):
    """Counts the tokens that are looked up: a detokenizer has nothing else to make text of."""

    looked_up = 0

    def bytes_of(self, token_id: int) -> bytes:
        self.looked_up += 1
        return super().bytes_of(token_id)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("what", ["a red", "<|im_end|>", "Ж"])
def test_no_token_is_decoded_twice(tokenizer: Any, what: str, skip: bool) -> None:
    """However long tokens go on that make no text: special ones that are skipped, a character's first byte for ever."""
    vocabulary = CountingVocabulary(tokenizer)
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip)
    token = encode(tokenizer, what)[0]
    for _ in range(3000):
        detokenizer.push(token)
    detokenizer.finish()
    assert vocabulary.looked_up == (0 if what == "<|im_end|>" and skip else 3000)


def test_bytes_that_form_no_character_do_not_wait(tokenizer: Any, vocabulary: Vocabulary) -> None:
    """Nothing that follows can make one of them."""
    first, *_ = encode(tokenizer, "Ж")
    assert len(vocabulary.bytes_of(first)) == 1
    detokenizer = Detokenizer(vocabulary)
    assert [detokenizer.push(first) for _ in range(3)] == ["", "�", "�"]
    assert detokenizer.finish() == "�"


@settings(deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    stop=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_stop_strings(
    tokenizer: Any, vocabulary: Vocabulary, pieces: list[str], stop: list[str], include: bool
) -> None:
    """Held to a plain reading of the whole text, character by character."""
    ids = encode(tokenizer, "".join(pieces))
    whole = "".join(pieces).replace("<|im_end|>", "")
    ends = [end for end in range(len(whole) + 1) if any(whole[:end].endswith(word) for word in stop)]
    detokenizer = Detokenizer(vocabulary, stop, include)
    text, used = read_all(detokenizer, ids)
    if not ends:
        assert (text, used, detokenizer.stopped_by) == (whole, len(ids), None)
        return
    found = max((word for word in stop if whole[: ends[0]].endswith(word)), key=len)
    assert detokenizer.stopped_by == found
    assert text == whole[: ends[0] if include else ends[0] - len(found)]
    # One token fewer would not have been enough.
    assert found in tokenizer.decode(ids[:used], skip_special_tokens=True)
    assert not any(word in tokenizer.decode(ids[: used - 1], skip_special_tokens=True) for word in stop)


def test_text_is_held_back_only_while_it_may_be_a_stop_string(tokenizer: Any, vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary, ["STOP"])
    deltas = [detokenizer.push(token) for token in encode(tokenizer, "xSTSTx")]
    assert deltas == ["x", "", "", "ST", "", "STx"]


def test_after_a_stop_nothing_more_comes(tokenizer: Any, vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary, ["STOP"])
    assert read_all(detokenizer, encode(tokenizer, "xSTOPxyz")) == ("x", 5)
    assert detokenizer.stopped_by == "STOP"
    assert detokenizer.finish() == ""


def test_an_unfinished_character_ends_as_a_replacement_character(tokenizer: Any, vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary)
    ids = encode(tokenizer, "a🎈")
    assert "".join(map(detokenizer.push, ids[:-1])) == "a"
    assert detokenizer.finish().strip("�") == ""
    assert detokenizer.finish() == ""


def test_special_tokens_on_request(tokenizer: Any, vocabulary: Vocabulary) -> None:
    ids = encode(tokenizer, "a<|im_end|>")
    assert read_all(Detokenizer(vocabulary, skip_special_tokens=False), ids) == ("a<|im_end|>", 2)


def test_an_empty_stop_string_is_refused(tokenizer: Any, vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        Detokenizer(vocabulary, ["x", ""])


@settings(deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
    stop=st.sampled_from(STOPS),
    least=st.integers(0, 8),
)
def test_a_stop_string_counts_from_the_least_tokens_on(
    tokenizer: Any, vocabulary: Vocabulary, pieces: list[str], stop: str, least: int
) -> None:
    """Held to a reading of the text character by character, from where the first `least` tokens' text ends."""
    ids = encode(tokenizer, "".join(pieces))
    whole = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    exempt = Detokenizer(vocabulary)
    for token in ids[:least]:
        exempt.push(token)
    ends = [end for end in range(exempt.decoded_length + 1, len(whole) + 1) if whole[:end].endswith(stop)]
    text, _ = read_all(Detokenizer(vocabulary, [stop], min_tokens=least), ids)
    assert text == (whole[: ends[0] - len(stop)] if ends else whole)
