"""Outputs under a grammar: always a text of it, whatever the logits; and nothing else about them changes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mini_engine import demo
from mini_engine.api.grammars import json_grammar, json_value, regex_grammar
from mini_engine.messages import SamplingParams
from mini_engine.worker import sampler
from mini_engine.worker.grammar import Grammars, Masks
from mini_engine.worker.penalties import BARRED
from tests.worker import script, tiny
from tests.worker.conftest import NUM_BLOCKS

TOKENIZER = Path(demo.__file__).parent / "weights" / "tokenizer.json"
TEXT = Tokenizer.from_file(str(TOKENIZER))
ENDS = [754, 756]
VOCABULARY = 800  # of the logits: more than the tokenizer has
GRAMMARS = Grammars(TOKENIZER, VOCABULARY)


def params(grammar: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 300, "seed": 1, "stop_token_ids": ENDS, "grammar": grammar} | more)


REGEXES = st.recursive(
    st.sampled_from(["a", "red", "é", "[a-z]", "[0-9]", "[^x]", r"\.", " ", "(blue|green)", "."]),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(["?", "{2}", "{1,3}", "{0,2}"])),
    ),
    max_leaves=6,
)
LEAVES: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -5, "maximum": 120}, {"type": "boolean"}, {"type": "string", "maxLength": 6},
    {"enum": ["red", "green", 3, None]}, {"const": {"a": 1}}, {"type": "integer"}, {"type": ["number", "null"]},
    {"type": "number", "exclusiveMinimum": 0}, {"type": "integer", "multipleOf": 3},
]  # fmt: skip
OBJECT = {"type": "object", "required": ["so"]}
SCHEMAS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.builds(lambda one: {"type": "array", "items": one, "minItems": 1, "maxItems": 3}, inner),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
        st.builds(lambda one, other: {**OBJECT, "properties": {"shape": one, "so": other}}, inner, inner),
    ),
    max_leaves=4,
)


@given(st.lists(REGEXES | SCHEMAS, min_size=8, max_size=8), st.integers(0, 1000))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_outputs_match_their_regular_expressions_and_schemas(forms, number):
    """Eight in one batch, each with a grammar of its own. JSON takes at most twice the tokens of its compact form."""
    grammars = [regex_grammar(one) if isinstance(one, str) else json_grammar(one) for one in forms]
    asked = [params(grammar, temperature=1.5, seed=number + i) for i, grammar in enumerate(grammars)]
    constraints, outputs = [GRAMMARS.constrain(one) for one in asked], [list[int]() for _ in asked]
    logits = torch.Generator().manual_seed(number)
    for place in range(300):
        live = [i for i, one in enumerate(constraints) if one.advance(np.array(outputs[i], dtype=np.int64))]
        if not live:
            break
        scores = 4 * torch.randn(len(asked), VOCABULARY, generator=logits)
        scores = Masks(live, GRAMMARS.bars([constraints[i] for i in live])).apply(scores)
        chosen = sampler.sample(scores, [sampler.Row(sampler.Recipe.of(one), place) for one in asked]).tokens
        for i in live:
            outputs[i].append(int(chosen[i]))
    for form, constraint, (*tokens, end) in zip(forms, constraints, outputs, strict=True):
        text = TEXT.decode(tokens, skip_special_tokens=False)
        if isinstance(form, str):
            assert re.fullmatch(form, text)
        else:
            assert jsonschema_rs.is_valid(form, json.loads(text))
            compact = re.sub(r"(?<=[,:]) ", "", text)
            assert len(TEXT.encode(text).ids) <= 2 * len(TEXT.encode(compact).ids)
        assert end in ENDS and not {*tokens} & {*ENDS} and not constraint.error


def follows(grammar: str, text: str) -> bool:
    """Whether the text can be sampled, and then an end."""
    constraint, tokens = GRAMMARS.constrain(params(grammar)), [*TEXT.encode(text).ids, ENDS[0]]
    for i, token in enumerate(tokens):
        assert constraint.advance(np.array(tokens[:i], dtype=np.int64)), constraint.error
        if GRAMMARS.bars([constraint])[0, token]:
            return False
    return True


INTEGERS = [f"{2**63 - 1}", f"{1 - 2**63}", "-0", "9" * 18]
LONG = [f"{2**63}", f"{-(2**63)}", "1" * 41]
DOUBLES = [*INTEGERS, "6.02e23", "6.6e-34", "1E+5", "0." + "1" * 17]
LONG_DOUBLES = [*LONG, "1e100", "1e-001", "0." + "1" * 18, "0." + "1" * 41]
INTEGER = {"type": "integer"}
TREE = {"properties": {"type": INTEGER, "$ref": {"items": {"$ref": "#"}}}, "required": ["type"]}


@pytest.mark.parametrize(("schema", "before", "good", "bad", "after"), [
    (INTEGER, "", INTEGERS, LONG, ""),
    ({"type": "number"}, "", DOUBLES, LONG_DOUBLES, ""),
    ({"type": ["integer", "null"]}, "", [*INTEGERS, "null"], LONG, ""),
    ({"items": INTEGER}, "[1, ", INTEGERS, LONG, "]"),
    ({"prefixItems": [{"anyOf": [INTEGER, {"type": "string"}]}], "items": False}, "[", INTEGERS, LONG, "]"),
    ({"additionalProperties": {"$ref": "#/$defs/n"}, "$defs": {"n": INTEGER}}, '{"a":', INTEGERS, LONG, "}"),
    ({"patternProperties": {"^n": INTEGER}}, '{"n\\"": ', INTEGERS, LONG, "}"),
    (TREE, '{"type": 1, "$ref":[{"type": ', INTEGERS, LONG, "}]}"),
    ({"type": "object"}, '{"a": [true, {"b\\\\": ', DOUBLES, LONG_DOUBLES, "}]}"),  # as for `json_object`
    ({"type": "integer", "multipleOf": 7}, "", ["7", "1" * 19 + "4"], ["8", "9" * 21], ""),  # "1" * 19 has to go on
    ({"type": "integer", "minimum": 0, "maximum": 10**40}, "", INTEGERS[:1], LONG, ""),
    ({"type": "number", "minimum": 0, "maximum": 1}, "", ["0." + "1" * 17], ["0." + "1" * 18], ""),
    ({"type": "number", "multipleOf": 0.01}, "", ["1.25", "9" * 18 + ".25"], [*LONG, "1.255"], ""),
    ({"type": "string"}, '"', [*LONG, "e" + "1" * 41, "\\\\" + "1" * 41], ["\\" + "1" * 41], '"'),
    ({"type": "string", "pattern": r"^\d*,$"}, '"', ["1" * 41 + ","], ["1,2"], '"'),
    ({"const": {"id": "1" * 41}}, '{"id": "', ["1" * 41], ["1"], '"}'),
])  # fmt: skip
def test_numbers_of_json_fit_64_bits(schema, before, good, bad, after):
    """And texts are as long as the schema allows."""
    texts = [*good, *bad]
    assert [one for one in texts if follows(json_grammar(schema), before + one + after)] == good


DIGITS = ["80", "807", "808", "0" * 16]


@pytest.mark.parametrize(("number", "may_follow"), [
    ("12", DIGITS), ("1.5", DIGITS), ("9223372036854775", ["80", "807"]), ("-9223372036854775", ["80", "807"]),
    ("92233720368547758", []), ("0." + "1" * 15, ["80"]), ("1e", ["80"]), ("1e-", ["80"]),
])  # fmt: skip
def test_tokens_of_several_digits(number, may_follow, tmp_path):
    """In the place of the last words of the vocabulary."""
    tokenizer = json.loads(TOKENIZER.read_text())
    model = tokenizer["model"]
    words = sorted(model["vocab"], key=model["vocab"].get)
    model["vocab"] = {word: i for i, word in enumerate([*words[: -len(DIGITS)], *DIGITS])}
    model["merges"] = model["merges"][: -len(DIGITS)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    grammars = Grammars(tmp_path / "tokenizer.json", VOCABULARY)
    constraint = grammars.constrain(params(json_grammar({"type": "number"})))
    assert constraint.advance(np.array([model["vocab"][character] for character in number]))
    bars = grammars.bars([constraint])[0]
    assert [token for token in DIGITS if not bars[model["vocab"][token]]] == may_follow


def test_numbers_of_a_thought_may_have_any_length():
    """And its quotes need not be paired."""
    grammar = f"start: /(.|\\n)*/ <|im_start|> {json_value(INTEGER)}"
    answers = [f'5" and {"1" * 41}<|im_start|>{number}' for number in (INTEGERS[0], LONG[0])]
    assert [follows(grammar, answer) for answer in answers] == [True, False]


def test_a_complete_grammar_ends_even_below_min_tokens():
    """Where it may go on it does. Tokens that are dropped at a restart, when more were in flight, come again."""
    (asked, output) = params(regex_grammar("r{1,3}")), list[int]()
    constraint = GRAMMARS.constrain(asked)
    for kept in (0, 1, 2, 1, 2, 3):
        del output[kept:]
        assert constraint.advance(np.array(output, dtype=np.int64))
        logits = torch.zeros(1, VOCABULARY).index_fill(1, torch.tensor(ENDS), BARRED)
        output.append(int(Masks([0], GRAMMARS.bars([constraint])).apply(logits).argmax()))
    assert TEXT.decode(output[:-1]) == "rrr" and output[-1] in ENDS
    assert not constraint.advance(np.array(output)) and not constraint.error


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_grammar_that_allows_all_changes_no_token(temperature, make_runner):
    """With every second request under it: alone and in company, ahead of the device, after a preemption."""
    results = []
    for grammar in ("", "start: <[*]>*"):
        media = tiny.MemoryMedia()
        requests = tiny.mixed_requests(media, temperature=temperature, seed=3)
        for i in range(0, len(requests), 2):
            sampling = msgspec.structs.replace(requests[i].sampling, grammar=grammar)
            requests[i] = msgspec.structs.replace(requests[i], sampling=sampling)
        runner = make_runner(media)
        runner.grammars = Grammars(TOKENIZER, 200)
        steps = script.write_steps(requests, 20, 64, 16, NUM_BLOCKS, preempt_at=(9, 14))
        results.append(script.run(runner, steps, ahead=1))
    assert results[0] == results[1]
