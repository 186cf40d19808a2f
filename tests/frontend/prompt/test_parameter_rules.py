"""What the grammar allows a model to write as parameters, byte by byte."""

import copy
import json
import operator
from random import Random
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.api.call_parser import ArgumentsText, CallBegun, CallParser
from keepsight.frontend.prompt.call_grammar import CallGrammar
from keepsight.frontend.prompt.call_text import INLINE_PARAMETERS, PARAMETERS, CallForm, write_call
from keepsight.frontend.prompt.json_types import Allowance
from keepsight.frontend.prompt.parameter_rules import ParameterRules
from keepsight.structured_outputs import StructuredOutputsParams, write_schema
from tests.frontend.prompt.test_arguments_as_parameters import arguments
from tests.frontend.prompt.test_call_grammar import TOKENIZER, follow

BEGUN, ENDED = "<tool_call>\n<function=look>\n", "</function>\n</tool_call>"
COLORS = {"colors": {"enum": ["red", "blue"]}, "size": {"type": "object", "properties": {"x": {"type": "integer"}}}}


def parameter(name: str, text: str) -> str:
    return f"<parameter={name}>\n{text}\n</parameter>\n"


def is_allowed(written: str, **schema: Any) -> bool:
    """Return whether a forced call may have these arguments, after the model was at liberty to write others."""
    own = write_schema(copy.deepcopy({"type": "object", **schema}), PARAMETERS.spacing)
    text = f"{BEGUN}{written}{ENDED}"
    return follow(text, {"look": own}, must_call=True, call_form=PARAMETERS) == (text, True)


def takes(schema: object, text: str) -> bool:
    return is_allowed(parameter("a", text), properties={"a": schema}, required=["a"], **{"$defs": COLORS})


def test_only_declared_parameters_are_written_and_the_required_ones_are() -> None:
    own: dict[str, Any] = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["b"]}
    a, b = parameter("a", "x"), parameter("b", "1")
    assert is_allowed(a + b, **own)
    assert is_allowed(b, **own)
    for wrong in ("", a, b + a, b + b, a + b + parameter("c", "1")):
        assert not is_allowed(wrong, **own)


def test_parameters_that_are_not_declared_are_written_where_the_schema_speaks_of_them() -> None:
    own: dict[str, Any] = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}}
    assert is_allowed(parameter("a", "1") + parameter("ab", "true") + parameter("c", "false"), **own)
    assert is_allowed(parameter("c", "false"), **own)
    assert not is_allowed(parameter("a", "true"), **own)
    assert not is_allowed(parameter("c", "1"), **own)
    assert is_allowed(parameter("c", "1"), anyOf=[{"required": ["c"]}, {"required": ["d"]}])
    assert is_allowed(parameter("c", "1"), required=["c"])
    assert not is_allowed(parameter("c", "1"), properties={"c": False})
    assert not is_allowed(parameter("c", "1"), additionalProperties=False)


def test_a_schema_may_be_a_reference() -> None:
    own = {"$ref": "#/$defs/own", "$defs": {"own": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}}}
    own["$defs"] = {**own["$defs"], "a": {"type": "boolean"}}  # type: ignore[dict-item]
    assert is_allowed(parameter("a", "true"), **own)
    assert not is_allowed(parameter("a", "1"), **own)


@pytest.mark.parametrize(
    "place", [{"anyOf": [{"properties": {"a": {}}}, {"required": ["b"]}]}, {}, {"$ref": "#/$defs/own"}]
)
def test_where_a_schema_refers_to_alternatives_or_to_nothing_any_parameters_are_written(place: dict[str, Any]) -> None:
    own = {"$ref": "#/$defs/own", "$defs": {"own": place}}
    assert is_allowed(parameter("a", "1"), **own)
    assert is_allowed(parameter("b", "1"), **own)
    assert is_allowed(parameter("b", "1"), **{"$ref": "#/$defs/other"})


def test_only_the_definitions_that_a_value_needs_are_written_with_it() -> None:
    defs = {"a/b": {"items": {"$ref": "#/$defs/c"}}, "c": {"anyOf": [{"$ref": "#/$defs/c"}, {"type": "null"}]}, "d": {}}
    rules = ParameterRules()
    value = {"type": "array", "items": {"$ref": "#/$defs/a~1b"}}
    own = {"x-guidance": {"lenient": True}}
    rules.add_function(0, {"properties": {"x": value, "y": {"type": "null"}}, "$defs": defs, **own})
    written = [json.loads(line.partition("%json ")[2].rpartition(" ")[0]) for line in rules.lines if "%json" in line]
    assert written == [{**own, "$defs": {"a/b": defs["a/b"], "c": defs["c"]}, **value}, {**own, "type": "null"}]


def test_references_lead_to_the_same_place_anywhere_in_the_function_s_schema() -> None:
    own: dict[str, Any] = {
        "properties": {
            "a b": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
            "kids": {"type": "array", "items": {"$ref": "#"}},
            "same": {"type": "array", "items": {"$ref": "#/properties/a%20b"}},
            "first": {"anyOf": [{"$ref": "#/properties/same"}, {"$ref": "#/properties/first/anyOf/2"}, {"const": 5}]},
            "own": {"items": {"$ref": "#/$defs/c"}, "type": "array", "$defs": {"c": {"type": "string"}}},
        },
        "$defs": {"c": {"type": "boolean"}},
        "additionalProperties": False,
    }
    for name, right, wrong in (
        ("a b", '{"n": 1}', "{}"),
        ("kids", '[{"a b": {"n": 1}, "kids": [{}]}]', '[{"kids": [[]]}]'),
        ("kids", '[{"own": [true]}]', '[{"n": 1}]'),
        ("same", '[{"n": 1}]', "[{}]"),
        ("first", '[{"n": 1}]', '[{"n": "x"}]'),
        ("first", "5", "6"),
        ("own", "[true]", '["x"]'),
    ):
        assert is_allowed(parameter(name, right), **own)
        assert not is_allowed(parameter(name, wrong), **own)


def test_what_becomes_too_long_is_not_written_to_its_end() -> None:
    many = {f"p{index}": {"const": index, "$ref": "#/$defs/a"} for index in range(100)}
    defs = {"a": {"type": "integer", "enum": list(range(20_000))}}
    with pytest.raises(InvalidArgumentError, match=r"^tools: are longer than 262144 characters as a grammar$"):
        ParameterRules().add_function(0, {"properties": many, "$defs": defs})
    nested: dict[str, Any] = {"type": "integer"}
    for depth in reversed(range(200)):
        nested = {"a": nested, "type": "array", "items": {"$ref": f"#/properties/p{'/a' * (depth + 1)}"}}
    with pytest.raises(InvalidArgumentError, match=r"^tools: are longer than 262144 characters"):
        ParameterRules().add_function(0, {"properties": {"p": nested}})


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, ["", "\n", "a\n", "</function>\n</tool_call>", "x</parameter>", "\n</param"], []),
        ({"type": "string", "minLength": 1, "maxLength": 3}, ["a", "a\nb", "éàü"], ["", "four"]),
        ({"type": "string", "pattern": "b"}, ["b", "abc", "\nb"], ["a", ""]),
        ({"type": "string", "pattern": "^[a-z/]+$"}, ["a/b"], ["A", "ab1", "a\n"]),
        ({"type": "string", "pattern": "^a|b\\$"}, ["a", "ab", "b$"], ["xa"]),
        ({"enum": ["red", "blue", 3, None]}, ["red", "blue", "3", "null"], ["", "green", '"red"', "reddish"]),
        ({"type": "string", "enum": ["red", 3]}, ["red"], ["3"]),
        ({"const": "a\n"}, ["a\n"], ["a"]),
        ({"$ref": "#/$defs/colors"}, ["red"], ["green"]),
        ({"anyOf": [{"$ref": "#/$defs/colors"}, {"type": "null"}]}, ["red", "null"], ["nil", "green"]),
        ({"anyOf": [{"$ref": "#/$defs/colors"}, {"$ref": "#/$defs/size"}]}, ["red", '{"x": 1}'], ['{"x": "a"}', "{"]),
        ({"type": ["string", "null"], "pattern": "^[ab]*$"}, ["ab", "null", ""], ["c", "nul"]),
        ({"type": ["string", "null"], "maxLength": 3}, ["null", "nul", "de", ""], ["nulls", "four"]),
        ({"type": ["string", "null"], "pattern": "^[a-z]{2}$"}, ["null", "de"], ["nul"]),
        ({"type": ["string", "integer"], "pattern": "^[0-9a-f]{3}$"}, ["7", "-12345", "dea", "012"], ["dead", "01"]),
        ({"type": ["string", "boolean"], "minLength": 5}, ["true", "false", "truer"], ["tru"]),
        ({"type": ["string", "number"], "maxLength": 1}, ["-1.5e+10", "x", "12"], ["12x", "1e", "1.", "1e400"]),
        ({"anyOf": [{"enum": ["north"]}, {"type": "null"}]}, ["null", "north"], ["n", "nullnorth"]),
        ({"anyOf": [{"enum": ["fast"]}, {"type": "boolean"}]}, ["false", "true", "fast"], ["f"]),
        ({"anyOf": [{"const": "1d"}, {"type": "integer"}]}, ["1", "1d", "12", "3"], ["d", "2d"]),
        ({"anyOf": [{"const": "ad"}, {"type": "integer", "minimum": 3}]}, ["3", "ad"], ["1", "a"]),
        ({"anyOf": [{"const": "[1"}, {"type": "array"}]}, ["[1", "[1, 2]", "[]"], ["{", "1"]),
        ({"type": ["string", "array"], "maxLength": 1}, ["[1, 2]", "[]", "a"], ["ab", "{1"]),
        ({"type": ["string", "object"], "maxLength": 1}, ['{"a": 1}', "{}", "a"], ["ab", "[1"]),
        ({"type": "integer", "enum": [1.0, 2.0]}, ["1", "2"], ["", "3", "x"]),
        ({"enum": ["x", 1.0]}, ["1", "x"], ["", "1.0"]),
        ({"type": ["string", "null"], "anyOf": [{"type": "null"}, {"enum": [1, "a"]}]}, ["null", "a"], ["1", "b"]),
        # Values whose texts would be read as something else cannot be written.
        ({"enum": ["a", "b\n</parameter>\nc", "</parameter>"]}, ["a"], ["b\n</parameter>\nc", "</parameter>", "b"]),
        ({"enum": ["1", "x", "2", 2, None, "null"]}, ["x", "2", "null"], ["1", "3"]),
        # Of values that there are not, any may be written.
        ({"type": "string", "enum": [1, 2]}, ["1", "", "x"], []),
        ({"enum": []}, ["1", "", "x"], []),
        ({"anyOf": [False]}, ["1", "", "x"], []),
        ({"$ref": "#/properties/a"}, ["1", "", "x"], []),
        ({"type": "integer", "minimum": 3}, ["3", "10"], ["2", "x", "", "3.5", " 3", '"3"']),
        ({"type": ["integer", "null"]}, ["3", "null"], ["x"]),
        ({"type": "boolean"}, ["true"], ["True", "x"]),
        (
            {"type": "array", "items": {"$ref": "#/$defs/size"}},
            ['[{"x": 1}, {"x": 2}]', "[]"],
            ['[{"x":1}]', "x", "{}"],
        ),
        ({"type": ["string", "integer"]}, ["3", "x", "[", ""], []),
        ({}, ["3", "x", "[", ""], []),
        (True, ["3", "x", "[", ""], []),
    ],
)
def test_a_value_follows_its_schema(schema: Any, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not takes(schema, text)] == []
    assert [text for text in wrong if takes(schema, text)] == []


def test_no_line_of_a_text_begins_like_its_closing_tag() -> None:
    assert not takes({"type": "string"}, "a\n</parameter>b")
    assert not takes({"type": "string"}, "</parameter>")
    # One newline closes an empty text.
    assert is_allowed("<parameter=a>\n</parameter>\n", properties={"a": {"type": "string"}})


def test_a_value_in_line_follows_its_schema() -> None:
    lists = {"enum": ["a</parameter>\nb", "</parameter>", "\n"]}
    for schema, right, wrong in (
        ({"type": "string"}, ["", "\n", "x</parameter>", "a\n</parameter>b"], ["</parameter>\n"]),
        ({"type": "string", "maxLength": 1}, ["", "a"], ["ab"]),
        ({"type": "array"}, ['["</parameter>"]'], ["\n[]", ""]),
        (lists, ["</parameter>", "\n"], ["a", "a</parameter>\nb"]),
    ):
        own = {"look": write_schema({"type": "object", "properties": {"a": schema}}, INLINE_PARAMETERS.spacing)}
        for text in (*right, *wrong):
            call = f"{BEGUN}<parameter=a>{text}</parameter>\n{ENDED}"
            is_right = follow(call, own, must_call=True, call_form=INLINE_PARAMETERS) == (call, True)
            assert is_right == (text in right)
    assert INLINE_PARAMETERS.arguments.find_unenforced({"properties": {"a": lists, "b>": {}}}) == {"enum", "properties"}


@pytest.mark.parametrize("form", [PARAMETERS, INLINE_PARAMETERS])
@settings(max_examples=60)
@given(arguments())
def test_arguments_that_a_schema_allows_may_be_written(form: CallForm, drawn: Any) -> None:
    value, schema = drawn
    assume(form is PARAMETERS or ">" not in "".join(value))
    assume("\x7f" not in json.dumps(value, ensure_ascii=False))  # llguidance has it escaped in JSON
    jsonschema_rs.validate(schema, value)
    own = {"look": write_schema(copy.deepcopy(schema), form.spacing)}
    call = write_call("look", json.dumps(value, ensure_ascii=False), form)
    assert follow(call, own, call_form=form) == (call, True)


WORDS = [
    "d",
    "true",
    "null",
    "2",
    "3",
    "-1.5",
    "red",
    "green",
    '{"x": 1}',
    "[1, 2]",
    "[]",
    "{}",
    '"',
    "a",
    "\n",
    "</parameter>",
    " ",
]
SNIPPETS = [
    "\n</parameter>\n",
    "</parameter>\n",
    ENDED,
    *(f"<parameter={name}>" for name in "abc"),
    *(f"\n{word}" for word in WORDS),
    *WORDS,
]
leaves: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "maxLength": 2},
    {"type": "string", "pattern": "^[a-r3]*$"},
    {"type": "integer"},
    {"type": "integer", "minimum": 2},
    {"type": "number"},
    {"type": ["boolean", "null"]},
    {"type": ["string", "null", "number"]},
    {"type": ["string", "null", "number", "array"], "maxLength": 2},
    {"enum": ["3d"]},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    {"enum": ["red", "3", "", "a\n"]},
    {"enum": ["red", 3, None, [1, 2]]},
    {"enum": ["red", "3", "green", True]},
    {"enum": ["red", "3", 2, "a\n</parameter>"]},
    {"const": "green"},
    {"$ref": "#/$defs/color"},
    {},
]
choices = st.lists(st.sampled_from(leaves), min_size=1, max_size=3).map(lambda several: {"anyOf": several})
own_schemas = st.sampled_from(leaves) | choices | st.builds(operator.or_, st.sampled_from(leaves), choices)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.sampled_from("ab"), own_schemas, min_size=1))
    others = draw(st.sampled_from([{}, {"additionalProperties": {"type": "integer"}}]))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    defs = {"color": {"enum": ["red", "blue"]}}
    return {"type": "object", "properties": properties, "required": required, "$defs": defs, **others}


@pytest.mark.parametrize("form", [PARAMETERS, INLINE_PARAMETERS])
@settings(max_examples=60)
@given(schemas(), st.randoms(use_true_random=False))
def test_whatever_may_be_written_is_valid_by_its_schema(form: CallForm, schema: dict[str, Any], chance: Random) -> None:
    """Unless the schema has what no rule expresses."""
    own = write_schema(copy.deepcopy(schema), form.spacing)
    grammar = str(CallGrammar({"look": own}, must_call=True, is_single=True, call_form=form))
    matcher = LLMatcher(TOKENIZER, StructuredOutputsParams(grammar=grammar).to_grammar(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    written = BEGUN
    assert matcher.consume_tokens(list(BEGUN.encode()))
    while not matcher.is_accepting():
        allowed = [each for each in SNIPPETS if matcher.validate_tokens(list(each.encode())) == len(each)]
        snippet = chance.choice(allowed if len(written) < 400 else allowed[:1])
        assert matcher.consume_tokens(list(snippet.encode()))
        written += snippet
    parser = CallParser(["look"], form, {"look": form.arguments.find_types(schema, Allowance())})
    begun, *pieces = parser.read(written, is_last=True)
    assert begun == CallBegun("look")
    value = json.loads("".join(each.text for each in pieces if isinstance(each, ArgumentsText)))
    assert form.arguments.find_unenforced(own) or jsonschema_rs.is_valid(schema, value)


@pytest.mark.parametrize(
    ("schema", "unenforced"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^a", "minLength": 2}, "b": {"type": "array"}}}, set()),
        ({"properties": {"a": {"type": ["string", "null", "integer"]}, "b": {"enum": ["a"]}}, "required": []}, set()),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, {"format"}),
        ({"properties": {"a": {"type": "string", "pattern": "^a|^b"}}}, {"pattern"}),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}}}, {"minimum"}),
        (
            {"properties": {"a": {"anyOf": [{"maxLength": 2, "type": "string"}, COLORS["size"]]}}},
            {"properties", "type"},
        ),
        ({"properties": {"a": {"type": ["string", "null", "number"], "maxLength": 2}}}, set()),
        ({"properties": {"a": {"type": ["string", "array"], "maxLength": 2}}}, {"type"}),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, {"type", "enum"}),
        ({"properties": {"a": {"anyOf": [False]}}}, {"anyOf"}),
        ({"properties": {"a": {"enum": ["a", "\n</parameter>"]}}}, {"enum"}),
        ({"properties": {"a": {"const": "</parameter>\n"}}}, {"const"}),
        ({"properties": {"a": {"enum": ["1", 2]}}}, {"enum"}),
        ({"properties": {"a": {"enum": ["1", "2", 1, 2, None]}}}, set()),
        ({"properties": {"a": {"anyOf": [{"enum": ["1"]}, {"const": 2}, {"type": "integer"}]}}}, set()),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"enum": [2]}]}}}, {"enum"}),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"const": None}]}}}, set()),
        ({"properties": {"a": {"enum": ["a", "bc"], "maxLength": 1}}}, {"maxLength"}),
        (
            {"properties": {"a": {"enum": ["a", "b"], "anyOf": [{"const": "c"}, {"maxLength": 3}]}}},
            {"enum", "maxLength"},
        ),
        (
            {"properties": {"a": {"type": "string", "maxLength": 3, "anyOf": [{"maxLength": 5}, {"maxLength": 3}]}}},
            {"maxLength"},
        ),
        ({"properties": {"a": {"minimum": 3, "anyOf": [{"type": "integer"}, {"const": "red"}]}}}, {"minimum"}),
        ({"properties": {"a": {"anyOf": [{"type": "string"}], "oneOf": [{"maxLength": 3}]}}}, {"oneOf"}),
        ({"properties": {"a": {"anyOf": [{"enum": ["[a"]}, {"type": "array"}]}}}, {"type"}),
        ({"properties": {"a": {"anyOf": [{"enum": ["a"]}, {"type": "integer", "minimum": 2}]}}}, set()),
        ({"properties": {"a": {"anyOf": [{"enum": ["1d"]}, {"type": "integer", "minimum": 2}]}}}, {"minimum"}),
        ({"properties": {"a": {"anyOf": [COLORS["colors"], COLORS["size"]]}}}, set()),
        ({"properties": {"a": {"anyOf": [{"const": "3"}, {"type": "integer", "maximum": 2}]}}}, {"maximum"}),
        ({"properties": {"a\n": {"type": "string"}}}, {"properties"}),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "minProperties": 1}, {"oneOf", "minProperties"}),
        ({"type": "object", "$ref": "#/$defs/a", "$defs": {"a": {"required": ["a"]}}}, set()),
        ({"required": ["b"], "$ref": "#/$defs/a", "$defs": {"a": {"minProperties": 1}}}, {"required", "minProperties"}),
    ],
)
def test_what_no_rule_expresses_is_told(schema: dict[str, Any], unenforced: set[str]) -> None:
    rules = ParameterRules()
    rules.add_function(0, schema)
    assert rules.unenforced == unenforced


def test_what_several_functions_need_is_one_rule() -> None:
    rules = ParameterRules()
    for index in range(2):
        rules.add_function(
            index, {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["b"]}
        )
    assert rules.lines == [
        r'args_0_0: "\n" %json {"x-guidance": {}, "type": "integer"} "\n</parameter>\n"',
        'args_0_1: "<parameter=a>" args_0_0',
        'args_0_2: "<parameter=b>" args_0_0',
        "args_0: args_0_1? args_0_2",
        "args_1: args_0_1? args_0_2",
    ]
