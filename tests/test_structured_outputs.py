import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from keepsight import SamplingParams, StructuredOutputsParams
from keepsight.errors import InvalidArgumentError
from keepsight.structured_outputs import _FORMATS, MAX_GRAMMAR_CHARACTERS, write_schema


def catch_refusal(**fields: Any) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        StructuredOutputsParams(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ({"json": ""}, "structured_outputs.json"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[]"}, "structured_outputs.json"),
        ({"json": 3}, "structured_outputs.json"),
        ({"json": {"enum": [object()]}}, "structured_outputs.json"),
        ({"json": "[" * 100_000}, "structured_outputs.json"),
        ({"json": {"const": "x" * MAX_GRAMMAR_CHARACTERS}}, "structured_outputs.json"),
        ({"regex": b"a"}, "structured_outputs.regex"),
        ({"regex": "\ud800"}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "yes"}, "structured_outputs.choice"),
        ({"choice": [""]}, "structured_outputs.choice"),
        ({"choice": ["yes", 1]}, "structured_outputs.choice[1]"),
        ({"grammar": ["start: a"]}, "structured_outputs.grammar"),
        ({"json_object": 1}, "structured_outputs.json_object"),
        ({"disable_any_whitespace": True}, "structured_outputs"),
        ({"json_object": True, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
        ({"json": {"x-guidance": []}, "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
        (
            {"json": {"x-guidance": {"whitespace_flexible": True}}, "disable_any_whitespace": True},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"json": {"x-guidance": {"item_separator": ", "}}, "disable_any_whitespace": True},
            "structured_outputs.disable_any_whitespace",
        ),
    ],
)
def test_invalid_or_conflicting_fields_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    assert catch_refusal(**fields).field == field


def test_a_class_in_place_of_a_schema_is_refused_with_the_way_to_its_schema() -> None:
    refusal = catch_refusal(json=SamplingParams)
    assert "as a mapping or a string (of a pydantic model: its model_json_schema())" in refusal.message


def test_a_schema_may_be_given_as_an_object_or_as_its_text() -> None:
    schema = {"type": "integer", "description": "größer"}
    assert StructuredOutputsParams(json=schema) == StructuredOutputsParams(json=json.dumps(schema))


def test_params_survive_serialization() -> None:
    for structured in (
        StructuredOutputsParams(json={"type": "object"}),
        StructuredOutputsParams(regex="a/b"),
        StructuredOutputsParams(choice=["a", "é"]),
        StructuredOutputsParams(grammar='start: "a"'),
        StructuredOutputsParams(grammar='root ::= "a"'),
        StructuredOutputsParams(json_object=True),
        StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
    ):
        params = SamplingParams(structured_outputs=structured)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
        assert len({params, SamplingParams(structured_outputs=structured)}) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json", {"const": "x" * 2**21}),
        ("json", '"' + "x" * 2**21 + '"'),
        ("regex", "x" * 2**21),
        ("choice", ["x" * 2**15] * 64),
        ("grammar", "x" * 2**21),
    ],
)
def test_an_overlong_value_is_refused_before_a_grammar_is_built(name: str, value: object) -> None:
    tracemalloc.start()
    try:
        error = catch_refusal(**{name: value})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = f"is longer than {MAX_GRAMMAR_CHARACTERS} characters"
    assert (error.field, error.message) == (f"structured_outputs.{name}", message)
    # At most the schema's own text is made, to measure its length.
    assert peak_bytes < 3 * 2**21


def test_structured_outputs_exclude_ignore_eos() -> None:
    with pytest.raises(InvalidArgumentError, match="ignore_eos"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), ignore_eos=True)
    with pytest.raises(InvalidArgumentError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def grammar_error(params: StructuredOutputsParams) -> str:
    is_fault, messages = LLMatcher.validate_grammar_with_warnings(params.to_grammar())
    return messages[0] if is_fault else ""


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"])), min_size=1, max_size=5).filter(any))
def test_any_text_can_be_a_choice_and_so_can_none(choice: list[str]) -> None:
    assert grammar_error(StructuredOutputsParams(choice=choice)) == ""


@pytest.mark.parametrize("regex", ["a/b", r"a\/b", "a\nb", "a\\\nb", r"\\/", r"[/\]]+", "//", '"', "é|東", ""])
def test_a_regex_may_contain_slashes_or_nothing(regex: str) -> None:
    assert grammar_error(StructuredOutputsParams(regex=regex)) == ""


def test_a_caller_s_x_guidance_is_kept() -> None:
    own = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    [grammar] = json.loads(StructuredOutputsParams(json=own).to_grammar())["grammars"]
    assert grammar["json_schema"] == own


def test_a_caller_s_x_guidance_leaves_white_space_as_it_is_unless_it_names_it() -> None:
    written = write_schema({"x-guidance": {"coerce_one_of": True}}, {"whitespace_pattern": " ?", "lenient": True})
    assert written == {"x-guidance": {"whitespace_pattern": " ?", "lenient": True, "coerce_one_of": True}}
    assert grammar_error(StructuredOutputsParams(json={"x-guidance": 1})) != ""


def test_white_space_can_be_disabled_beside_other_options_of_a_schema() -> None:
    own = {"x-guidance": {"coerce_one_of": True}}
    options = StructuredOutputsParams(json=own, disable_any_whitespace=True).to_schema()["x-guidance"]
    assert options == {"whitespace_flexible": False, "coerce_one_of": True}


@pytest.mark.parametrize(
    "branches",
    [
        [{"const": 1, "title": "low"}, {"const": 2, "title": "high"}],
        [{"const": 1}, {"const": True}],
        [{"enum": [1, 2.5, None], "type": ["number", "null"]}, {"enum": ["a", 3]}, {"const": "b"}],
        [{"const": 1}, {"const": 2}, {"type": "null"}],
        [{"type": ["string", "array"], "maxLength": 3}, {"const": 1}, {"const": 2}, {"type": "object"}],
        [{"enum": [1, 1]}, {"const": 2}],
    ],
)
def test_one_of_distinct_values_is_any_of_them(branches: list[dict[str, Any]]) -> None:
    for schema in ({"oneOf": branches}, {"properties": {"oneOf": {"items": {"oneOf": branches}}}}):
        assert grammar_error(StructuredOutputsParams(json=schema)) == ""


@pytest.mark.parametrize(
    "branches",
    [
        [{"const": 1}, {"const": 1.0}],
        [{"enum": [1, 2]}, {"enum": [2, 3]}],
        [{"const": 1}, {"type": "integer"}],
        [{"const": 1}, {"const": 2}, {"enum": [3, [4]]}],
        [{"const": 1}, {"const": 2}, {"type": "integer", "minimum": 3}],
        [{"const": 1}, {"const": 2}, {"type": "object"}, {"type": ["object", "null"]}],
        [{"const": 1}, {"const": 2}, {"minLength": 3}],
        [{"const": 1}, {"const": 2}, True],
        [{"const": [1]}, {"const": [2]}],
    ],
)
def test_one_of_values_that_might_match_twice_stays_as_it_is(branches: list[dict[str, Any]]) -> None:
    assert StructuredOutputsParams(json={"oneOf": branches}).to_schema()["oneOf"] == branches


@pytest.mark.parametrize("branches", [[{"const": "a"}, {"const": "b"}], [{"const": 1}, {"const": 2}]])
def test_a_reference_may_lead_into_a_one_of(branches: list[dict[str, Any]]) -> None:
    properties = {"p": {"$ref": "#/$defs/x/oneOf/0"}}
    schema = {"type": "object", "properties": properties, "$defs": {"x": {"oneOf": branches}}}
    assert grammar_error(StructuredOutputsParams(json=schema)) == ""
    assert write_lenient_schema(schema) == schema


@pytest.mark.parametrize("form", ["path", "password", "binary", "base64", "int32", "json-pointer", "unknown", ""])
def test_an_unsupported_format_is_dropped_from_the_schema(form: str) -> None:
    text = {"type": "string", "format": form}
    schema = {
        "$defs": {"format": text, "enum": {"anyOf": [text, {"type": "null"}]}},
        "properties": {"const": text, "properties": {"properties": {"format": text}}, "a": {"items": text}},
        "additionalProperties": {"$ref": "#/$defs/enum"},
    }
    assert grammar_error(StructuredOutputsParams(json=schema)) == ""
    [grammar] = json.loads(StructuredOutputsParams(json=schema).to_grammar())["grammars"]
    assert grammar["json_schema"].items() >= json.loads(json.dumps(schema).replace(f', "format": "{form}"', "")).items()


def test_a_property_named_like_a_keyword_is_kept() -> None:
    for schema in (
        {"const": {"format": "path"}},
        {"enum": [{"format": "path"}, "format"]},
        {"properties": {"format": {"const": "path"}}, "required": ["format"]},
        {"properties": {"enum": {"const": {"format": "path"}}}},
    ):
        [grammar] = json.loads(StructuredOutputsParams(json=schema).to_grammar())["grammars"]
        assert schema.items() <= grammar["json_schema"].items()


def write_lenient_schema(schema: dict[str, Any]) -> dict[str, Any]:
    kept = write_schema(json.loads(json.dumps(schema)), {"lenient": True})
    assert not LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": kept}]}))
    del kept["x-guidance"]
    return kept


def test_a_lenient_schema_drops_only_what_no_grammar_can_express() -> None:
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        for kept in (0, 0.5, 2**10 - 10**18, 10**18 - 2**10):
            assert write_lenient_schema({"type": "integer", name: kept}) == {"type": "integer", name: kept}
        for kind in ("integer", "number"):
            for beyond in (10**30, -(2**63), -(10**30)):
                assert write_lenient_schema({"type": kind, name: beyond}) == {"type": kind}
    assert write_lenient_schema({"maximum": 2**63 - 1, "type": "integer"}) == {"maximum": 2**63 - 1, "type": "integer"}
    elsewhere = "https://example.com/schema"
    assert write_lenient_schema({"$schema": elsewhere, "items": {"$ref": elsewhere}}) == {"items": {}}
    standard = {"$schema": "http://json-schema.org/draft-07/schema#", "$defs": {"a": {}}, "$ref": "#/$defs/a"}
    assert write_lenient_schema(standard) == standard


def test_a_lenient_schema_with_an_unsupported_name_pattern_allows_all_names() -> None:
    patterns = {"^x-": {"type": "string"}, "^(?!x-)": {"type": "integer"}}
    schema = {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    assert write_lenient_schema(schema) == {"type": "object", "patternProperties": {"^x-": {"type": "string"}}}
    # A property may have the name of the keyword.
    of_that_name = {"properties": {"patternProperties": {"properties": {"(?!a)": {}}}, "minimum": {"type": "string"}}}
    assert write_lenient_schema(of_that_name) == of_that_name


@pytest.mark.parametrize("form", sorted(_FORMATS))
def test_a_format_known_to_llguidance_is_enforced(form: str) -> None:
    grammar = StructuredOutputsParams(json={"type": "string", "format": form}).to_grammar()
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error()
    assert matcher.validate_tokens(list(b'"?"')) < 3


def test_a_schema_may_be_nested_as_deeply_as_json_parses() -> None:
    schema = '{"items":' * 900 + '{"type":"string","format":"path"}' + "}" * 900
    assert "format" not in StructuredOutputsParams(json=schema).to_grammar()


def test_too_many_choices_are_refused_before_any_is_examined() -> None:
    with pytest.raises(InvalidArgumentError, match=r"structured_outputs\.choice: is longer than"):
        StructuredOutputsParams(choice=[""] * (MAX_GRAMMAR_CHARACTERS + 1))
