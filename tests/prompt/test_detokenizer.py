"""Text and listed tokens of an answer, and stop strings."""

import codecs
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import FinishReason, RequestOutput, SamplingParams, TokenLogprob
from mini_engine.prompt.answer import Piece, Sample
from mini_engine.prompt.detokenizer import Detokenizer, Vocabulary
from mini_engine.prompt.renderer import Prompt
from mini_engine.prompt.tool_calls import AnswerParser
from mini_engine.protocol.bodies import CompletionRequest
from mini_engine.protocol.tools import TAGS
from tests.support import tiny_processor


@pytest.fixture(scope="module")
def tokenizer(processor: MediaProcessor) -> Any:
    return processor.hf_processor.tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def read(
    tokenizer: Any,
    ids: list[int],
    size: int = 1,
    reason: FinishReason = "length",
    thoughts: AnswerParser | None = None,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> Piece:
    """The answer of these tokens, `size` of them in each piece, up to the one that completes a stop string; each token
    is listed."""
    request, params = CompletionRequest(prompt="", **fields), SamplingParams(99, 1, logprobs=0, **sampling or {})
    vocabulary, prompt = Vocabulary(tokenizer), Prompt(request, [], lambda: thoughts or AnswerParser())
    sample = Sample(0, "r", prompt, params, vocabulary, None)
    pieces: list[Piece] = []
    for start in range(0, max(len(ids), 1), size):
        part, is_last = ids[start : start + size], start + size >= len(ids)
        logprobs = [[TokenLogprob(token_id, -1.0)] for token_id in part]
        sample.add(RequestOutput("r", part, reason if is_last else None, None, logprobs))
        pieces.append(sample.take())
        if pieces[-1].finish_reason is not None:
            break
    logprobs = [token for piece in pieces for token in piece.logprobs or ()]
    fragments = [fragment for piece in pieces for fragment in piece.fragments]
    piece = Piece(0, sample.completion_tokens, fragments, pieces[-1].finish_reason, logprobs)
    assert piece.num_tokens == sum(piece.num_tokens for piece in pieces)
    assert [token.likely[0][0] for token in logprobs] == [*map(vocabulary.bytes_of, ids[: piece.num_tokens])]
    return piece


def text_of(piece: Piece, kind: str = "content") -> str:
    return "".join(text for own, text in piece.fragments if own == kind)


def stopped(text: str, stops: list[str], include: bool = False, first_end: int = 0) -> tuple[str, str]:
    """The text up to its stop string and this string, found character by character; `first_end` is where it may end."""
    for end in range(first_end, len(text) + 1):
        if matches := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, ""


# --- text ------------------------------------------------------------------------------------------------------------


@given(data=st.data(), skip=st.booleans())
def test_any_token_ids_give_the_text_of_decoding_them_at_once(tokenizer: Any, data: Any, skip: bool) -> None:
    """Random tokens: bytes that form no character, cut-off characters, ids that the tokenizer does not have."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=20))
    text = text_of(read(tokenizer, ids, skip_special_tokens=skip))
    assert text == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("skip", [True, False])
def test_added_tokens_give_the_text_of_decoding_them_at_once(tmp_path: Path, skip: bool) -> None:
    """Also those whose characters stand for bytes, or are no bytes' at all."""
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_processor.build(tmp_path)))
    tokenizer.add_tokens(["<plain>", "two words ", "世", "café", "Ġx"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mine>"]})
    ids = encode(tokenizer, "a<plain>世two words <mine> b世caféĠx<|im_end|>\n")
    assert len({"<plain>", "two words ", "<mine>"} & {*tokenizer.convert_ids_to_tokens(ids)}) == 3
    text = text_of(read(tokenizer, ids, skip_special_tokens=skip))
    assert text == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip)
    assert ("<mine>" in text) != skip


# --- stop strings ----------------------------------------------------------------------------------------------------


@given(
    # Pieces that make characters of several tokens, special tokens, and starts of stop strings.
    pieces=st.lists(
        st.sampled_from(["a red", " circle", " moving", "STOP", "ST", "S", "世", "界", "🎈", "ä", "\n", " ", "xyz"])
        | st.sampled_from(["<|im_end|>", *TAGS, "<"]),
        max_size=12,
    ),
    size=st.integers(1, 5),
    stop=st.lists(
        st.sampled_from(["STOP", "TO", "界🎈", "circle moving", " ", "\n\n", "p", "ä", "</tool_call>", "k>\n", "<"]),
        max_size=3,
    ),
    in_thought=st.booleans(),
)
def test_stop_strings_act_after_the_thought(
    tokenizer: Any, pieces: list[str], size: int, stop: list[str], in_thought: bool
) -> None:
    text = "".join(pieces).replace("<|im_end|>", "")
    said = dict(AnswerParser(thoughts=True, in_thought=in_thought).push(text, last=True))
    parser = AnswerParser(thoughts=True, in_thought=in_thought)
    piece = read(tokenizer, encode(tokenizer, "".join(pieces)), size, thoughts=parser, stop=stop)
    expected, matched = stopped(said.get("content", ""), stop)
    assert (text_of(piece, "reasoning_content"), text_of(piece)) == (said.get("reasoning_content", ""), expected)
    assert piece.finish_reason == ("stop" if matched else "length")


def test_text_is_held_back_only_while_it_may_become_a_character(tokenizer: Any) -> None:
    first, *_ = encode(tokenizer, "Ж")
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    assert [detokenizer.push(first) for _ in range(3)] == ["", "�", "�"]
    assert (detokenizer.finish(), detokenizer.finish()) == ("�", "")


# --- logprobs --------------------------------------------------------------------------------------------------------


@given(
    data=st.data(),
    fields=st.fixed_dictionaries(
        {
            "stop": st.lists(st.sampled_from(["a", "\n", "界", "�", "<", "世\n", "a世"]), max_size=3),
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
        }
    ),
    size=st.integers(1, 5),
    reason=st.sampled_from(["length", "stop"]),
    min_tokens=st.integers(0, 8),
)
def test_every_token_up_to_the_stop_string_is_listed(
    tokenizer: Any, data: Any, fields: Any, size: int, reason: FinishReason, min_tokens: int
) -> None:
    """Special tokens, parts of characters, tokens without text, and the one that ends the answer. A stop string that
    the first `min_tokens` tokens complete does not count."""
    drawn = st.lists(st.sampled_from(encode(tokenizer, "a世<|im_end|>\n🎈<")) | st.integers(0, len(tokenizer) + 3))
    ids = data.draw(drawn)
    ends = ids[-1:] if reason == "stop" else []
    vocabulary = Vocabulary(tokenizer)
    piece = read(tokenizer, ids, size, reason, None, {"stop_token_ids": ends, "min_tokens": min_tokens}, **fields)
    stop, include = fields["stop"], fields["include_stop_str_in_output"]
    hidden = vocabulary.special if fields["skip_special_tokens"] else ()
    shown = [b"" if token_id in hidden else vocabulary.bytes_of(token_id) for token_id in ids]
    if ends and not include:
        shown[-1] = b""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets = list(itertools.accumulate((len(decoder.decode(data)) for data in shown), initial=0))
    whole = b"".join(shown).decode(errors="replace")
    text, match = stopped(whole, stop, include, (offsets[min_tokens] if min_tokens < len(ids) else len(whole)) + 1)
    assert (text_of(piece), match != "" or piece.num_tokens == len(ids)) == (text, True)
    assert [token.offset for token in piece.logprobs or ()] == offsets[: piece.num_tokens]
    if match:
        stop_end = len(text) if include else len(text) + len(match)
        assert offsets[piece.num_tokens - 1] < stop_end, "one token fewer would have been enough"
