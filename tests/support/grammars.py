"""Random regular expressions and JSON schemas, as hypothesis draws them."""

from typing import Any

from hypothesis import strategies as st

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
