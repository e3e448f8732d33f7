"""Grammars that an answer has to match, in llguidance's variant of Lark: an engine's rank 0 makes matchers of them.

Knows nothing of requests; how a grammar acts on the choice of tokens is in `worker/grammar.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher

# What stands between the tokens of a JSON value: no more than indentation needs, or a model could write it for ever.
WHITESPACE = r"\n?[\x20\t]{0,32}"
MAX_GRAMMAR = 100_000  # characters; llguidance takes a tenth of a second for some that are as long


def json_grammar(schema: dict[str, Any]) -> str:
    """JSON that is valid under a JSON schema."""
    schema = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}
    return f"start: %json {json.dumps(schema)}"


def regex_grammar(regex: str) -> str:
    """A text that this regular expression, in the syntax of Rust's `regex`, matches as a whole."""
    return json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"]


def choice_grammar(choices: Sequence[str]) -> str:
    """One of these texts."""
    return "start: " + " | ".join(map(json.dumps, choices))


def problem_with(grammar: str) -> str | None:
    """Why llguidance cannot follow the grammar, for the client; None: it can. May take a tenth of a second."""
    if len(grammar) > MAX_GRAMMAR:
        return f"it takes {len(grammar)} characters, more than {MAX_GRAMMAR}; send a shorter one"
    is_error, texts = LLMatcher.validate_grammar_with_warnings(grammar)
    return " ".join(texts[0].split())[:300] if is_error else None
