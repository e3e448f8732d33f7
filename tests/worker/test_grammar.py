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
from mini_engine.api.grammars import json_grammar, regex_grammar
from mini_engine.messages import SamplingParams
from mini_engine.worker import sampler
from mini_engine.worker.grammar import Grammars
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
    {"enum": ["red", "green", 3, None]}, {"const": {"a": 1}},
]  # fmt: skip
CLOSED = {"type": "object", "required": ["so"], "additionalProperties": False}
SCHEMAS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.builds(lambda one: {"type": "array", "items": one, "minItems": 1, "maxItems": 3}, inner),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
        st.builds(lambda one, other: {**CLOSED, "properties": {"shape": one, "so": other}}, inner, inner),
    ),
    max_leaves=4,
)


@given(st.lists(REGEXES | SCHEMAS, min_size=8, max_size=8), st.integers(0, 1000))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_outputs_match_their_regular_expressions_and_schemas(forms, number):
    """Eight in one batch, each with a grammar of its own."""
    grammars = [regex_grammar(one) if isinstance(one, str) else json_grammar(one) for one in forms]
    asked = [params(grammar, temperature=1.5, seed=number + i) for i, grammar in enumerate(grammars)]
    constraints, outputs = [GRAMMARS.constrain(one) for one in asked], [list[int]() for _ in asked]
    logits = torch.Generator().manual_seed(number)
    for place in range(300):
        live = [i for i, one in enumerate(constraints) if one.advance(np.array(outputs[i], dtype=np.int64))]
        if not live:
            break
        scores = 4 * torch.randn(len(asked), VOCABULARY, generator=logits)
        scores = GRAMMARS.mask(scores, {i: constraints[i] for i in live})
        chosen = sampler.sample(scores, [sampler.Row(sampler.Recipe.of(one), place) for one in asked]).tokens
        for i in live:
            outputs[i].append(int(chosen[i]))
    for form, constraint, (*tokens, end) in zip(forms, constraints, outputs, strict=True):
        text = TEXT.decode(tokens, skip_special_tokens=False)
        assert re.fullmatch(form, text) if isinstance(form, str) else jsonschema_rs.is_valid(form, json.loads(text))
        assert end in ENDS and not {*tokens} & {*ENDS} and not constraint.error


def test_a_complete_grammar_ends_even_below_min_tokens():
    """Where it may go on it does. Tokens that are dropped at a restart, when more were in flight, come again."""
    (asked, output) = params(regex_grammar("r{1,3}")), list[int]()
    constraint = GRAMMARS.constrain(asked)
    for kept in (0, 1, 2, 1, 2, 3):
        del output[kept:]
        assert constraint.advance(np.array(output, dtype=np.int64))
        logits = torch.zeros(1, VOCABULARY).index_fill(1, torch.tensor(ENDS), BARRED)
        output.append(int(GRAMMARS.mask(logits, {0: constraint}).argmax()))
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
