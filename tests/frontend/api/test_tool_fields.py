"""The tool fields of a chat request: how they are checked and made a grammar for the answer."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.api.chat_request import ChatRequest, parse_chat_request
from keepsight.frontend.api.tool_fields import MAX_FREED_SINGLY, CallTerms, Function, NamedTool
from keepsight.frontend.prompt.call_text import BARE, PARAMETERS, CallForm
from keepsight.frontend.prompt.check_grammar import GrammarChecker
from keepsight.frontend.prompt.json_types import JsonType
from keepsight.structured_outputs import MAX_GRAMMAR_CHARACTERS


def parse(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "Hello"}]
    return parse_chat_request(json.dumps({"messages": messages, **fields}).encode())


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


@pytest.mark.parametrize(
    ("choice", "terms"),
    [
        (None, CallTerms(("look", "a.b-c"))),
        ("auto", CallTerms(("look", "a.b-c"))),
        ("none", CallTerms()),
        ("required", CallTerms(("look", "a.b-c"), must_call=True)),
        (named("look"), CallTerms(("look",), must_call=True, is_single=True, is_named=True)),
        (allowed("auto", "a.b-c"), CallTerms(("a.b-c",))),
        (allowed("required", "look"), CallTerms(("look",), must_call=True)),
    ],
)
def test_a_choice_says_which_tools_may_or_must_be_called(choice: Any, terms: CallTerms) -> None:
    tools = [tool("look"), tool("a.b-c")]
    assert parse(tools=tools, tool_choice=choice).read_call_terms() == terms
    single = parse(tools=tools, tool_choice=choice, parallel_tool_calls=False).read_call_terms()
    assert single == replace(terms, is_single=bool(terms.names))


def test_a_choice_may_repeat_whole_tools_and_uses_their_names() -> None:
    tools = [tool("look", description="Looks.", parameters={"type": "object"}, strict=True), tool("touch")]
    for whole, short in (
        (tools[0], named("look")),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools[:1]}}, allowed("auto", "look")),
    ):
        asked, same = (parse(tools=tools, tool_choice=choice) for choice in (whole, short))
        assert asked.read_call_terms() == same.read_call_terms()
        assert asked.shown_tools == tools
        # While it is answered, which may take minutes, a request keeps only the names of its tools.
        assert asked.without_bulky_fields() == same.without_bulky_fields()


def test_choosing_an_unknown_tool_is_refused_with_the_known_ones() -> None:
    for choice in (named("touch"), allowed("auto", "touch")):
        with pytest.raises(InvalidArgumentError, match=r"'touch', which is not a tool's name: there are look, a\.b-c$"):
            parse(tools=[tool("look"), tool("a.b-c")], tool_choice=choice)
    with pytest.raises(InvalidArgumentError, match=r"which is not a tool's name: there are no tools$"):
        parse(tool_choice=named("touch"))
    many = [tool(f"n{index}") for index in range(128)]
    with pytest.raises(InvalidArgumentError, match=r"n14, n15 and 112 more$"):
        parse(tools=many, tool_choice=named("touch"))


def grammar_of(form: CallForm = BARE, **fields: Any) -> str:
    asked = parse(**fields)
    guide = asked.to_sampling_params(calls=asked.read_call_terms(form)).structured_outputs
    assert guide is not None
    return str(guide.grammar)


def test_arguments_follow_their_schema_and_are_empty_without_one() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "description": "One."}}}
    tools = [tool("look", parameters=schema, description="Looks."), tool("bare"), tool("any", parameters={})]
    grammar = grammar_of(tools=tools, tool_choice="required")
    first, second, third = (json.loads(line.partition("%json ")[2]) for line in grammar.split("\n")[-3:])
    assert (first["properties"], first["x-guidance"]["lenient"]) == ({"a": {"type": "integer"}}, True)
    assert (second["properties"], second["additionalProperties"]) == ({}, False)
    assert third.keys() == {"type", "x-guidance"}
    assert parse(tools=tools).shown_tools == tools


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"type": "string"}, "tools[1].function.parameters.type"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
            "tools[1].function.parameters",
        ),
        ({"const": "x" * MAX_GRAMMAR_CHARACTERS}, "tools"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_by_its_tool(parameters: Any, field: str) -> None:
    tools = [tool("look"), tool("touch", parameters=parameters, strict=True)]
    with pytest.raises(InvalidArgumentError) as caught:
        parse(tools=tools).to_sampling_params()
    assert caught.value.field == field


def test_an_agent_may_bring_its_hundred_tools() -> None:
    """As with MCP servers: 200 KB of tools in a request."""
    item = {"type": "object", "properties": {"id": {"type": "string"}, "value": {"type": "number"}}, "required": ["id"]}
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": "array", "items": item},
        {"enum": ["a", "b"]},
    ]
    tools = []
    for index in range(100):
        fields = {f"field_{number}": kinds[number % 4] | {"description": "What it is."} for number in range(20)}
        tools.append(tool(f"server_{index}", parameters={"type": "object", "properties": fields}))
    assert len(json.dumps(tools)) > 200_000
    assert "args_99: %json" in grammar_of(tools=tools)
    assert len(grammar_of(PARAMETERS, tools=tools)) < MAX_GRAMMAR_CHARACTERS / 4  # they have much in common


def test_ignore_eos_cannot_go_with_tools() -> None:
    asked = {"tools": [tool("look")], "ignore_eos": True}
    with pytest.raises(InvalidArgumentError, match=r"^ignore_eos: must not be given together with tools"):
        parse(**asked).to_sampling_params()
    assert parse(**asked, tool_choice="none").to_sampling_params().ignore_eos


def test_arguments_that_have_to_be_written_have_little_white_space() -> None:
    bound = '"whitespace_pattern": " ?"'
    assert bound in grammar_of(tools=[tool("look")], tool_choice="required")
    assert bound in grammar_of(tools=[tool("look")], tool_choice=named("look"))
    assert bound not in grammar_of(tools=[tool("look")])


# The second is pydantic's schema of a decimal number.
@pytest.mark.parametrize(
    "one",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        {"type": "string", "pattern": r"\bsea\b"},
        {"type": "string", "pattern": r"([ab])\\\1"},
    ],
)
def test_what_the_grammar_cannot_express_is_refused_only_for_a_strict_tool(one: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": one, "b": {"type": "integer"}}}
    grammar = grammar_of(tools=[tool("look", parameters=parameters)])
    assert '"b": {"type": "integer"}' in grammar
    with pytest.raises(InvalidArgumentError, match=r"tools\[0\]\.function\.parameters: cannot be compiled"):
        grammar_of(tools=[tool("look", parameters=parameters, strict=True)])


@pytest.mark.parametrize(
    "one",
    [
        {"type": "object", "patternProperties": {"^(?!x-)": {"type": "string"}}},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "minimum": 10**30},
        {"type": "number", "minimum": -1.7e308, "exclusiveMaximum": 1.7e308},
        {"$ref": "http://127.0.0.1:9/schema"},
        {"$ref": "file:///etc/passwd#/$defs/a"},
    ],
)
def test_a_value_that_no_grammar_can_express_leaves_the_others_constrained(one: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": one, "b": {"type": "integer", "minimum": 1}}}
    assert '"b": {"type": "integer", "minimum": 1}' in grammar_of(tools=[tool("look", parameters=parameters)])
    with pytest.raises(InvalidArgumentError, match=r"tools\[0\]\.function\.parameters: cannot be compiled"):
        grammar_of(tools=[tool("look", parameters=parameters, strict=True)])


def test_a_tool_whose_schema_no_grammar_can_express_keeps_its_argument_names() -> None:
    bad = {"type": "string", "pattern": "[^]"}  # valid in JavaScript
    parameters = {"type": "object", "properties": {"a": bad, "b": {"type": "integer"}}, "required": ["b"]}
    good = {"type": "object", "properties": {"c": {"type": "integer"}}}
    lines = grammar_of(tools=[tool("look", parameters=parameters), tool("touch", parameters=good)]).split("\n")
    freed, kept = (json.loads(line.partition("%json ")[2]) for line in lines[-2:])
    assert (freed["properties"], freed["required"]) == ({"a": {}, "b": {}}, ["b"])
    assert kept["properties"] == good["properties"]
    with pytest.raises(InvalidArgumentError, match=r"tools\[1\]\.function\.parameters: cannot be compiled"):
        grammar_of(tools=[tool("touch", parameters=good), tool("look", parameters=parameters, strict=True)])


@pytest.mark.parametrize("form", [BARE, PARAMETERS])
@pytest.mark.parametrize("odd", [{"properties": []}, {"properties": {"a": None}, "required": 7}, {"required": None}])
def test_a_tool_with_an_odd_schema_can_be_called(odd: dict[str, Any], form: CallForm) -> None:
    assert "args_0:" in grammar_of(form, tools=[tool("look", parameters=odd)])


def test_many_inexpressible_schemas_are_compiled_only_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    find_fault = GrammarChecker.find_fault

    def note(checker: GrammarChecker, grammar: str) -> str:
        tried.append(grammar)
        return find_fault(checker, grammar)

    monkeypatch.setattr(GrammarChecker, "find_fault", note)
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "[^]"}}}
    tools = [tool(f"n{index}", parameters=bad) for index in range(64)]
    assert "[^]" not in grammar_of(tools=tools)
    assert len(tried) == MAX_FREED_SINGLY + 2


def test_parameters_are_read_by_their_schemas_as_far_as_a_form_needs_it() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", None]}}}
    asked = parse(tools=[tool("look", parameters=schema), tool("bare"), tool("go", parameters=schema)])
    assert asked.read_call_terms(BARE).types == {}
    types = {"a": JsonType.INTEGER, "b": JsonType.STRING | JsonType.NULL}
    assert asked.read_call_terms(PARAMETERS).types == {"look": types, "go": types}
    named_one = msgspec.structs.replace(asked, tool_choice=NamedTool(Function("go")))
    assert named_one.read_call_terms(PARAMETERS).types == {"go": types}


def test_schemas_that_lead_to_the_same_large_place_too_often_are_refused_by_their_tool() -> None:
    many = {f"p{index}": {"$ref": "#/$defs/a", "minLength": index} for index in range(100)}
    parameters = {"type": "object", "properties": many, "$defs": {"a": {"anyOf": [{}] * 1000}}}
    asked = parse(tools=[tool("go"), tool("look", parameters=parameters)])
    for read in (asked.read_call_terms, lambda form: grammar_of(form, tools=asked.shown_tools)):
        with pytest.raises(InvalidArgumentError, match=r"^tools\[1\]\.function\.parameters: more than 65536 keywords"):
            read(PARAMETERS)
    many = {f"p{index}": {} for index in range(70_000)}
    for name, value in (("properties", many), ("required", list(many))):
        with pytest.raises(InvalidArgumentError, match=r"^tools\[0\]\.function\.parameters: more than 65536 keywords"):
            parse(tools=[tool("look", parameters={name: value})]).read_call_terms(PARAMETERS)


@pytest.mark.parametrize(
    "one",
    [
        {"type": "string", "format": "date"},
        {"type": "string", "pattern": "(^a|b$)c"},
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
    ],
)
def test_what_parameters_cannot_express_is_refused_only_for_a_strict_tool(one: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": one, "b": {"type": "integer"}}}
    grammar = grammar_of(PARAMETERS, tools=[tool("look", parameters=parameters)])
    assert '"<parameter=a>"' in grammar
    assert '"type": "integer"}' in grammar
    why = r"^tools\[1\]\.function\.parameters: cannot be compiled: in this model's form of calls no grammar enforces "
    with pytest.raises(InvalidArgumentError, match=rf"{why}(format|pattern|items)$"):
        grammar_of(PARAMETERS, tools=[tool("go"), tool("look", parameters=parameters, strict=True)])


def test_a_tool_whose_parameters_no_grammar_can_express_keeps_their_names() -> None:
    bad = {"type": "string", "pattern": "[^]"}  # valid in JavaScript
    good = {"type": "object", "properties": {"c": {"type": "integer"}}}
    parameters = {"type": "object", "properties": {"a": bad, "b": {"type": "integer"}}, "required": ["b"]}
    grammar = grammar_of(PARAMETERS, tools=[tool("look", parameters=parameters), tool("touch", parameters=good)])
    assert grammar.count("ANY_TEXT\n") == 2
    assert grammar.count('"type": "integer"}') == 1
    with pytest.raises(InvalidArgumentError, match=r"tools\[1\]\.function\.parameters: cannot be compiled"):
        grammar_of(PARAMETERS, tools=[tool("touch", parameters=good), tool("look", parameters=parameters, strict=True)])


def test_arguments_of_a_schema_that_is_a_reference_keep_their_names_too() -> None:
    bad = {"type": "string", "pattern": "[^]"}
    own = {"type": "object", "properties": {"a": bad, "b": {}}, "required": ["b"]}
    parameters = {"$ref": "#/$defs/own", "$defs": {"own": own}}
    grammar = grammar_of(PARAMETERS, tools=[tool("look", parameters=parameters)])
    assert {f'"<parameter={name}>"' for name in "ab"} <= set(grammar.split())
    freed = json.loads(grammar_of(tools=[tool("look", parameters=parameters)]).rpartition("%json ")[2])
    assert (freed["properties"], freed["required"]) == ({"a": {}, "b": {}}, ["b"])


def test_arguments_of_a_schema_that_has_alternatives_keep_any_names() -> None:
    some = [{"properties": {name: {"type": "string", "pattern": "[^]"}}} for name in "ab"]
    parameters = {"anyOf": some, "properties": {"c": {"type": "string", "pattern": "[^]"}}}
    assert " & ~/(c)/" in grammar_of(PARAMETERS, tools=[tool("look", parameters=parameters)])


@pytest.mark.parametrize("pattern", [r"^a+$", r"\\bsea", r"\(?=", r"^(?:a|b)\d$"])
def test_a_pattern_that_the_grammar_can_express_is_enforced(pattern: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    assert json.dumps(pattern) in grammar_of(tools=[tool("look", parameters=parameters)])


def test_only_a_json_format_can_go_with_tools() -> None:
    assert "form: %json" in grammar_of(tools=[tool("look")], response_format={"type": "json_object"})
    for name, value in {"guided_regex": "a", "guided_choice": ["a"], "structured_outputs": {"regex": "a"}}.items():
        with pytest.raises(InvalidArgumentError, match=f"{name}.*together with tools"):
            parse(tools=[tool("look")], **{name: value}).to_sampling_params()
        assert parse(tools=[tool("look")], tool_choice="none", **{name: value}).to_sampling_params()


def test_without_llguidance_tools_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedFieldError, match="tools: needs llguidance"):
        parse(tools=[tool("look")]).to_sampling_params()


def test_an_engine_s_refusal_names_the_tools_even_without_bulky_fields() -> None:
    asked = parse(tools=[tool("look", description="Looks.")], tool_choice=named("look")).without_bulky_fields()
    assert asked.client_field_name("structured_outputs.grammar") == "tools"
    assert asked.read_call_terms().names == ("look",)
    assert (asked.messages, asked.shown_tools) == (None, [tool("look")])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": {}}, "tools"),
        ({"tools": [tool("look")] * 2}, "tools[1].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("look"), tool("a b")]}, "tools[1].function.name"),
        ({"tools": [tool("x" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool(f"n{index}") for index in range(129)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [tool("look")]}, "tool_choice"),
        ({"tool_choice": named("look")}, "tool_choice.function.name"),
        ({"tool_choice": named("touch"), "tools": [tool("look")]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "custom"}, "tools": [tool("look")]}, "tool_choice.type"),
        (
            {"tool_choice": allowed("required", "look", "touch"), "tools": [tool("look")]},
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_an_invalid_tool_and_an_invalid_choice_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse(**fields)
    assert caught.value.field == field
