"""The kinds of values that a schema allows, and texts that are, or may become, such values."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.frontend.prompt.json_kinds import ANY_KIND, NO_KIND, Kind, find_kinds, is_of_kind, may_become

ROOT: dict[str, Any] = {
    "$defs": {
        "color": {"enum": ["red", "blue"]},
        "node": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "integer"}]},
        "a/b": {"type": "array"},
    }
}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, Kind.STRING),
        ({"type": "integer", "minimum": 1}, Kind.INTEGER),
        ({"type": "number"}, Kind.INTEGER | Kind.FRACTION),
        ({"type": ["string", "null"]}, Kind.STRING | Kind.NULL),
        (
            {"anyOf": [{"type": "object"}, {"oneOf": [{"type": "null"}, {"const": 1}]}]},
            Kind.OBJECT | Kind.NULL | Kind.INTEGER,
        ),
        ({"enum": ["a", 1, None, True]}, Kind.STRING | Kind.INTEGER | Kind.NULL | Kind.BOOLEAN),
        ({"type": "string", "enum": ["a", 1]}, Kind.STRING),
        ({"$ref": "#/$defs/color"}, Kind.STRING),
        ({"allOf": [{"$ref": "#/$defs/color"}], "description": "One."}, Kind.STRING),
        ({"$ref": "#/$defs/node"}, Kind.INTEGER),
        ({"$ref": "#/$defs/a~1b"}, Kind.ARRAY),
        ({"type": "boolean", "anyOf": [{"const": True}, {}]}, Kind.BOOLEAN),
        ({"$ref": "#/$defs/nothing"}, ANY_KIND),
        ({"$ref": "http://127.0.0.1:9/schema"}, ANY_KIND),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, ANY_KIND),
        ({"type": "text"}, ANY_KIND),
        ({"type": ["string", 7]}, Kind.STRING),
        ({"anyOf": []}, ANY_KIND),
        ({"enum": "ab"}, ANY_KIND),
        ({}, ANY_KIND),
        (True, ANY_KIND),
        (None, ANY_KIND),
    ],
)
def test_a_schema_allows_kinds_of_values(schema: Any, kinds: Kind) -> None:
    assert find_kinds(schema, ROOT) == kinds


def test_a_deep_schema_and_one_with_many_alternatives_are_read() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    assert find_kinds(schema, {}) == Kind.INTEGER
    wide = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{other}"} for other in range(100)]} for at in range(100)}
    assert find_kinds({"$ref": "#/$defs/d0"}, {"$defs": wide}) == ANY_KIND


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(json_values)
def test_a_value_is_of_one_kind_and_every_beginning_of_its_text_may_become_one(value: Any) -> None:
    text = json.dumps(value)
    [kind] = [each for each in Kind if is_of_kind(text, each)]
    assert is_of_kind(text, ANY_KIND)
    assert not is_of_kind(text, NO_KIND)
    assert kind == Kind.STRING or all(may_become(text[:end], kind) for end in range(1, len(text)))


@pytest.mark.parametrize("text", ["", "tru", "01", "NaN", "nul", "{", "[" * 100_000, "'a'", "True", "1" * 5000])
def test_a_text_that_is_no_json_is_of_no_kind(text: str) -> None:
    assert not is_of_kind(text, ANY_KIND)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Paris", ANY_KIND),
        (" 3", ANY_KIND),
        ("nulls", ANY_KIND),
        ("3", Kind.NULL),
        ("[", Kind.OBJECT),
        ("3 ", ANY_KIND),
    ],
)
def test_a_text_is_known_early_not_to_become_a_value(text: str, kinds: Kind) -> None:
    assert not may_become(text, kinds)
