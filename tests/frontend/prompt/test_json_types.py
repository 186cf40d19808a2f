"""The types of values that a schema allows, and texts that are, or may become, such values."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.prompt.json_types import (
    ANY_TYPE,
    MAX_KEYWORDS_AND_VALUES,
    NO_TYPE,
    Allowance,
    JsonType,
    Schema,
    SchemaReader,
    is_json_of,
    may_become,
)

ROOT: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "color": {"enum": ["red", "blue"]},
        "node": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "integer"}]},
        "a/b": {"type": "array"},
        "nullable": {"type": ["integer", "null"]},
    },
}


def find_types(schema: object, root: Schema) -> JsonType:
    return SchemaReader(root, Allowance()).find_types(schema)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, JsonType.STRING),
        ({"type": "integer", "minimum": 1}, JsonType.INTEGER),
        ({"type": "number"}, JsonType.INTEGER | JsonType.FRACTION),
        ({"type": ["string", "null"]}, JsonType.STRING | JsonType.NULL),
        (
            {"anyOf": [{"type": "object"}, {"oneOf": [{"type": "null"}, {"const": 1}]}]},
            JsonType.OBJECT | JsonType.NULL | JsonType.INTEGER,
        ),
        ({"enum": ["a", 1, None, True]}, JsonType.STRING | JsonType.INTEGER | JsonType.NULL | JsonType.BOOLEAN),
        ({"type": "string", "enum": ["a", 1]}, JsonType.STRING),
        ({"type": "integer", "enum": [1.0, 2.5]}, JsonType.INTEGER),
        ({"const": -3.0}, JsonType.INTEGER),
        ({"$ref": "#/$defs/color"}, JsonType.STRING),
        ({"allOf": [{"$ref": "#/$defs/color"}], "description": "One."}, JsonType.STRING),
        ({"$ref": "#/$defs/node"}, JsonType.INTEGER),
        ({"$ref": "#/$defs/a~1b"}, JsonType.ARRAY),
        ({"$ref": "#/%24defs/a~1b"}, JsonType.ARRAY),
        ({"$ref": "#/$defs/node/anyOf/1"}, JsonType.INTEGER),
        ({"$ref": "#/$defs/node/anyOf/2"}, ANY_TYPE),
        ({"$ref": "#color"}, ANY_TYPE),
        ({"type": "boolean", "anyOf": [{"const": True}, {}]}, JsonType.BOOLEAN),
        ({"type": ["string", "null"], "$ref": "#/$defs/nullable"}, JsonType.NULL),
        ({"type": "integer", "anyOf": [{"type": "string"}, {"type": "number"}]}, JsonType.INTEGER),
        ({"type": ["string", "null"], "anyOf": [{"type": "integer"}]}, ANY_TYPE),
        ({"$ref": "#/$defs/nothing"}, ANY_TYPE),
        ({"$ref": "http://127.0.0.1:9/schema"}, ANY_TYPE),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, ANY_TYPE),
        ({"type": "text"}, ANY_TYPE),
        ({"type": ["string", 7]}, JsonType.STRING),
        ({"anyOf": []}, ANY_TYPE),
        ({"enum": "ab"}, ANY_TYPE),
        ({}, ANY_TYPE),
        (True, ANY_TYPE),
        (None, ANY_TYPE),
    ],
)
def test_a_schema_allows_types_of_values(schema: Any, types: JsonType) -> None:
    assert find_types(schema, ROOT) == types


def test_a_deep_schema_and_one_with_many_alternatives_are_read() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    assert find_types(schema, {}) == JsonType.INTEGER
    wide = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{other}"} for other in range(100)]} for at in range(100)}
    assert find_types({"$ref": "#/$defs/d0"}, {"$defs": wide}) == ANY_TYPE


def test_a_large_place_is_read_once_for_all_that_refer_to_it() -> None:
    defs = {"many": {"anyOf": [{}] * 1000}, "colors": {"enum": ["red"] * 1000}}
    reader = SchemaReader({"$defs": defs}, Allowance())
    for _ in range(1000):
        assert reader.find_types({"$ref": "#/$defs/many", "description": "One of many."}) == ANY_TYPE
        assert reader.find_types({"anyOf": [{"$ref": "#/$defs/colors"}, {"type": "null"}]}) & JsonType.STRING


@pytest.mark.parametrize(
    "large",
    [
        {"anyOf": [{}] * 1000},
        {f"x{index}": 0 for index in range(1000)},
        {"anyOf": [{f"x{index}": 0 for index in range(1000)}]},
        {"type": ["string"] * 1000},
        {"anyOf": [{"type": []}] * 1000},
    ],
)
def test_reading_the_same_large_place_again_and_again_comes_to_an_end(large: dict[str, Any]) -> None:
    reader = SchemaReader({"$defs": {"large": large}}, Allowance())
    with pytest.raises(InvalidArgumentError, match=f"more than {MAX_KEYWORDS_AND_VALUES} keywords and values"):
        [reader.find_types({"anyOf": [{"$ref": "#/$defs/large"}]}) for _ in range(100)]


def test_values_are_counted_as_often_as_they_are_listed() -> None:
    reader = SchemaReader({}, Allowance())
    with pytest.raises(InvalidArgumentError):
        [reader.list_values({"enum": ["red"] * 1000}) for _ in range(100)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(json_values)
def test_a_value_is_of_one_type_and_every_beginning_of_its_text_may_become_one(value: Any) -> None:
    text = json.dumps(value)
    [own] = [each for each in JsonType if is_json_of(text, each)]
    assert is_json_of(text, ANY_TYPE)
    assert not is_json_of(text, NO_TYPE)
    assert own == JsonType.STRING or all(may_become(text[:end], own) for end in range(1, len(text)))


@pytest.mark.parametrize("text", ["", "tru", "01", "NaN", "nul", "{", "[" * 100_000, "'a'", "True", "1" * 5000])
def test_a_text_that_is_no_json_is_of_no_type(text: str) -> None:
    assert not is_json_of(text, ANY_TYPE)


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("Paris", ANY_TYPE),
        (" 3", ANY_TYPE),
        ("nulls", ANY_TYPE),
        ("3", JsonType.NULL),
        ("[", JsonType.OBJECT),
        ("3 ", ANY_TYPE),
    ],
)
def test_a_text_is_known_early_not_to_become_a_value(text: str, types: JsonType) -> None:
    assert not may_become(text, types)
