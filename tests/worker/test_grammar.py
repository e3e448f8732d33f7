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
from llguidance import LLMatcher
from tokenizers import Tokenizer

from mini_engine import demo
from mini_engine.api.grammars import choice_grammar, json_grammar
from mini_engine.messages import SamplingParams
from mini_engine.worker import sampler
from mini_engine.worker.grammar import Grammars
from tests.worker import script, tiny
from tests.worker.conftest import NUM_BLOCKS

TOKENIZER = Path(demo.__file__).parent / "weights" / "tokenizer.json"
TEXT = Tokenizer.from_file(str(TOKENIZER))
ENDS = [754, 756]
VOCABULARY = 800  # of the logits: more than the tokenizer has
GRAMMARS = Grammars(TOKENIZER, VOCABULARY)


def params(grammar: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 300, "seed": 1, "stop_token_ids": ENDS, "grammar": grammar} | more)


def generate(asked: list[SamplingParams], logits: torch.Generator) -> list[list[int]]:
    """Outputs of random logits, with their end tokens if they reach them; sampled together."""
    outputs: list[list[int]] = [[] for _ in asked]
    constraints = [GRAMMARS.constrain(one) for one in asked]
    for number in range(asked[0].max_tokens):
        live = [i for i, one in enumerate(constraints) if one.advance(np.array(outputs[i], dtype=np.int64))]
        if not live:
            break
        masks = GRAMMARS.masks(list(range(len(live))), [constraints[i] for i in live])
        scores = 4 * torch.randn(len(live), VOCABULARY, generator=logits)
        rows = [sampler.Row(sampler.Recipe.of(asked[i]), number) for i in live]
        for i, token in zip(live, sampler.sample(scores, rows, masks.apply).tokens.tolist(), strict=True):
            outputs[i].append(token)
    assert not any(one.error for one in constraints)
    return outputs


def text_of(output: list[int]) -> str | None:
    """None: the output is incomplete."""
    assert not set(output[:-1]) & set(ENDS)
    return TEXT.decode(output[:-1], skip_special_tokens=False) if output[-1] in ENDS else None


ATOMS = st.sampled_from(["a", "red", "é", "[a-z]", "[0-9]", "[^x]", r"\.", " ", "(blue|green)", "."])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(["?", "{2}", "{1,3}", "{0,2}"])),
    ),
    max_leaves=6,
)
SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "integer", "minimum": -5, "maximum": 120},
            {"type": "boolean"},
            {"type": "string", "maxLength": 6},
            {"enum": ["red", "green", 3, None]},
            {"const": {"a": 1}},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda item: {"type": "array", "items": item, "minItems": 1, "maxItems": 3}, inner),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
        st.builds(
            lambda one, other: {
                "type": "object",
                "properties": {"shape": one, "so": other},
                "required": ["so"],
                "additionalProperties": False,
            },
            inner,
            inner,
        ),
    ),
    max_leaves=4,
)


@given(st.lists(REGEXES, min_size=8, max_size=8), st.integers(0, 1000))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_outputs_match_their_regular_expressions(regexes, number):
    """Eight in one batch, each with a grammar of its own."""
    asked = [
        params(LLMatcher.grammar_from_regex(regex), temperature=1.5, seed=number + i) for i, regex in enumerate(regexes)
    ]
    for regex, output in zip(regexes, generate(asked, torch.Generator().manual_seed(number)), strict=True):
        text = text_of(output)
        assert text is not None and re.fullmatch(regex, text), (regex, text)


@given(st.lists(SCHEMAS, min_size=8, max_size=8), st.integers(0, 1000))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_outputs_are_valid_under_their_schemas(schemas, number):
    asked = [params(json_grammar(schema), temperature=1.5, seed=number + i) for i, schema in enumerate(schemas)]
    for schema, output in zip(schemas, generate(asked, torch.Generator().manual_seed(number)), strict=True):
        text = text_of(output)
        assert text is not None and jsonschema_rs.is_valid(schema, json.loads(text)), (schema, text)


def test_a_complete_grammar_ends_even_below_min_tokens():
    """Where it may go on it does: the bar on stop tokens is lifted only where nothing else is allowed."""
    asked = [params(LLMatcher.grammar_from_regex("r{1,3}"), min_tokens=5)]
    constraint, output = GRAMMARS.constrain(asked[0]), list[int]()
    for _ in range(4):
        assert constraint.advance(np.array(output, dtype=np.int64))
        scores = torch.zeros(1, VOCABULARY).index_fill_(1, torch.tensor(ENDS), float("-inf"))
        scores = GRAMMARS.masks([0], [constraint]).apply(scores)
        output.append(int(scores.argmax()))
    assert TEXT.decode(output[:-1]) == "rrr" and output[-1] in ENDS
    assert not constraint.advance(np.array(output)) and not constraint.error


def test_a_refused_token_is_an_error_of_its_sequence():
    constraint = GRAMMARS.constrain(params(choice_grammar(["red", "green"])))
    (blue,) = TEXT.encode("b").ids
    assert not constraint.advance(np.array([blue])) and "doesn't satisfy the grammar" in constraint.error
    assert "unknown special token" in GRAMMARS.constrain(params("start: <|nowhere|>")).error


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
