import json
from typing import Any

import pytest

from keepsight import StructuredOutputsParams
from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.api.chat_request import ChatRequest, parse_chat_request

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def parse(**fields: Any) -> ChatRequest:
    return parse_chat_request(json.dumps({"messages": [{"role": "user", "content": "hi"}]} | fields).encode())


def form_of(**fields: Any) -> StructuredOutputsParams | None:
    return parse(**fields).to_sampling_params().structured_outputs


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA} | fields}


def test_the_text_format_means_no_grammar() -> None:
    assert form_of() is None
    assert form_of(response_format={"type": "text"}) is None
    assert form_of(structured_outputs={}) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": json_schema()},
        {"response_format": json_schema(strict=True, description="what it is")},
        {"response_format": json_schema(strict=False)},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
    ],
)
def test_a_schema_is_read_from_each_of_its_fields(fields: dict[str, Any]) -> None:
    assert form_of(**fields) == StructuredOutputsParams(json=SCHEMA)


@pytest.mark.parametrize(
    ("name", "value"), [("json", SCHEMA), ("regex", "a+"), ("choice", ["a", "b"]), ("grammar", "root ::= [ab]")]
)
def test_a_form_given_again_under_its_older_name_is_one(name: str, value: Any) -> None:
    newer = {"structured_outputs": {name: value}}
    older = {f"guided_{name}": value, "guided_decoding_backend": "guidance"}
    assert form_of(**newer, **older) == form_of(**newer)


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        ({"const": 1}, {"const": True}),
        # The order is that of the answer.
        ({"properties": {"a": {}, "b": {}}}, {"properties": {"b": {}, "a": {}}}),
    ],
)
def test_forms_that_differ_only_as_json_are_two(newer: Any, older: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^guided_json: cannot be given together with structured_outputs"):
        form_of(structured_outputs={"json": newer}, guided_json=older)


def test_the_other_formats_are_read_from_each_of_their_fields() -> None:
    for name, value in (
        ("regex", "a+"),
        ("choice", ["a", "b"]),
        ("grammar", 'start: "a"'),
        ("grammar", 'root ::= "a"'),
    ):
        expected = StructuredOutputsParams(**{name: value})  # type: ignore[arg-type]
        assert form_of(structured_outputs={name: value}) == expected
        assert form_of(**{f"guided_{name}": value}) == expected
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"response_format": json_schema(schema=None)},
        {"structured_outputs": {"json_object": True}},
    ):
        assert form_of(**fields) == StructuredOutputsParams(json_object=True)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema() | {"type": "json_object"}}, "response_format.json_schema"),
        ({"response_format": json_schema(name=1)}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": json_schema(schema=[])}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema={"type": "x"})}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema={"not": {}})}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_an_invalid_format_is_refused_under_the_caller_s_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        form_of(**fields)
    assert (caught.value.field, caught.value.status) == (field, 400)


def test_unknown_fields_of_a_format_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFieldError, match=r"response_format\.json_schema\.schemas.*'schema'"):
        form_of(response_format=json_schema(schemas={}))
    with pytest.raises(UnsupportedFieldError, match=r"structured_outputs\.structural_tag"):
        form_of(structured_outputs={"structural_tag": "{}"})


def test_a_format_may_be_written_as_in_vllm_s_dataclass() -> None:
    options = {"disable_any_whitespace": False, "disable_additional_properties": False, "whitespace_pattern": None}
    others = dict.fromkeys(("regex", "choice", "grammar", "json_object", "structural_tag"))
    assert form_of(structured_outputs={"json": SCHEMA} | others | options) == StructuredOutputsParams(json=SCHEMA)
    with pytest.raises(UnsupportedFieldError, match=r"structured_outputs\.disable_additional_properties: is not supp"):
        form_of(structured_outputs={"json": SCHEMA, "disable_additional_properties": True})


def test_json_without_white_space_works_with_every_json_field() -> None:
    compact = {"disable_any_whitespace": True}
    schema = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    assert form_of(structured_outputs={"json": SCHEMA} | compact) == schema
    assert form_of(response_format=json_schema(), structured_outputs=compact) == schema
    assert form_of(guided_json=SCHEMA, structured_outputs=compact) == schema
    expected = StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    assert form_of(structured_outputs={"json_object": True} | compact) == expected
    assert form_of(response_format={"type": "json_object"}, structured_outputs=compact) == expected
    for others in (
        {"structured_outputs": compact},
        {"structured_outputs": compact, "response_format": {"type": "text"}},
        {"structured_outputs": {"regex": "a"} | compact},
        {"structured_outputs": compact, "guided_grammar": 'root ::= "a"'},
        {"structured_outputs": {"json": SCHEMA | {"x-guidance": {"whitespace_pattern": ""}}} | compact},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": 1}},
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            form_of(**others)
        assert (caught.value.field, caught.value.status) == ("structured_outputs.disable_any_whitespace", 400)
    with pytest.raises(InvalidArgumentError) as caught:
        form_of(guided_json={"type": "x"}, structured_outputs=compact)
    assert caught.value.field == "guided_json"
