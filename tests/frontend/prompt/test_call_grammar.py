"""What the grammar allows a model to write, byte by byte."""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.prompt.call_grammar import CallGrammar
from keepsight.frontend.prompt.call_text import BARE, INLINE_PARAMETERS, PARAMETERS, TAGGED, CallForm, write_call
from keepsight.frontend.prompt.check_grammar import check_structured_outputs
from keepsight.frontend.prompt.json_types import Schema
from keepsight.structured_outputs import StructuredOutputsParams, write_schema

LOOK = {"type": "object", "properties": {"at": {"enum": ["sea", "sky"]}}, "additionalProperties": False}
SCHEMAS = {"look": write_schema(dict(LOOK)), "go.to-it": write_schema({"type": "object"})}
FORM = write_schema({"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]})
SEA, GO = write_call("look", '{"at": "sea"}'), write_call("go.to-it", '{"x" : [1,2 ]\n}')
TAGGED_SEA = write_call("look", '{"at": "sea"}', TAGGED)
TAGGED_GO = write_call("go.to-it", '{"x" : [1,2 ]\n}', TAGGED)
PRETTY = '{\n  "name": "look",\n  "parameters": {\n    "at": "sky"\n  }\n}'


class Bytes:
    """A vocabulary of all single bytes and an end token."""

    tokens = [*(bytes([each]) for each in range(256)), b"<eos>"]  # noqa: RUF012
    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def follow(text: str, schemas: Mapping[str, Schema] = SCHEMAS, **terms: Any) -> tuple[str, bool]:
    """Return the longest allowed beginning of the text, and whether the answer may end there."""
    params = StructuredOutputsParams(grammar=str(CallGrammar(schemas, **terms)))
    matcher = LLMatcher(TOKENIZER, params.to_grammar(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    written = b""
    for byte in text.encode():
        if not is_allowed(matcher, byte):
            break
        assert matcher.consume_token(byte)
        written += bytes([byte])
    return written.decode(), is_allowed(matcher, Bytes.eos_token_id)


def is_allowed(matcher: LLMatcher, token_id: int) -> bool:
    return bool(matcher.compute_bitmask()[token_id // 8] >> (token_id % 8) & 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello, Größe 日本\n\n",
        '{"name": "Anna", "parameters": {"at": "lake"}}',
        '{"name": "looks"}',
        '[{"name": "look", "parameters": 1}]',
        f"I shall call {SEA}",
        SEA,
        f"{SEA}\n{GO}\n",
        f"```json\n{PRETTY}\n```",
        f"\n ```\n{SEA}\n```\n```tool_code\n{GO}```",
    ],
)
def test_an_answer_is_any_text_or_calls(text: str) -> None:
    assert follow(text) == (text, True)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('{"name": "look"}', '{"name": "look"'),
        ('{"name":"look","arguments"', '{"name":"look","'),
        ('{"name": "look", "parameters": {"at": "lake"', '{"name": "look", "parameters": {"at": "'),
        ('{"name": "look", "parameters": 1', '{"name": "look", "parameters": '),
        (f"{SEA}, and so", SEA),
        (f"{SEA}\n{{}}", f"{SEA}\n{{"),
    ],
)
def test_what_has_begun_like_a_call_becomes_one(text: str, written: str) -> None:
    wrongly, ends = follow(text)
    assert wrongly.startswith(written)
    assert len(wrongly) <= len(written) + 1
    assert ends == (written == SEA)


def test_what_must_be_calls_is_nothing_else_and_written_in_one_way() -> None:
    for calls in (SEA, GO, f"{SEA}\n{GO}", f"{SEA}\n"):
        assert follow(calls, must_call=True) == (calls, True)
    for text in ("", "Hello", " {", "```", '{"name":', '{ "', "[", PRETTY, '{"name": "Anna"'):
        written, ends = follow(text, must_call=True)
        assert not ends
        assert SEA.startswith(written)


@pytest.mark.parametrize("terms", [{}, {"must_call": True}, {"form": FORM}])
def test_white_space_within_arguments_has_an_end(terms: dict[str, Any]) -> None:
    before = '{"name": "look", "parameters": {'
    assert follow(f'{before}{" " * 30}"at": "sea"}}}}', **terms) == (before + " " * 24, False)


@pytest.mark.parametrize("must_call", [True, False])
def test_of_one_call_there_is_no_second(must_call: bool) -> None:
    assert follow(f"{SEA}\n{GO}", must_call=must_call, is_single=True) == (f"{SEA}\n", True)


def test_what_has_a_form_is_that_or_calls() -> None:
    for text in ('{"count": 1}', '{\n"count":2, "name": "look"}', SEA, f"{PRETTY}\n{GO}\n"):
        assert follow(text, form=FORM)[0] == text
    assert follow('{"count": 1}', form=FORM)[1]
    for text in ("Hello", " {", "```"):
        assert follow(text, form=FORM) == ("", False)
    assert follow('{"count": "a', form=FORM) == ('{"count": ', False)
    assert follow(f"{SEA}\n{SEA}", form=FORM, is_single=True) == (f"{SEA}\n", True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello, Größe 日本\n\n",
        SEA,
        "One writes <tool_call>, and then",
        '<tool_call>\n{"name": "Anna", "arguments": {}}\n</tool_call>',
        TAGGED_SEA,
        f"I look.\n{TAGGED_SEA}\n{TAGGED_GO}\n",
        f"\n\n{TAGGED_GO}{TAGGED_SEA}",
        '<tool_call>{"name":"look","arguments":{"at":"sky"} } \n</tool_call>',
        f'<tool_call>\n{{"name": "{TAGGED_SEA}',
    ],
)
def test_where_calls_have_tags_an_answer_is_any_text_and_calls_behind_it(text: str) -> None:
    assert follow(text, call_form=TAGGED) == (text, True)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('So: <tool_call>\n{"name": "look"}', 'So: <tool_call>\n{"name": "look"'),
        ('<tool_call>{"name":"look","parameters"', '<tool_call>{"name":"look","'),
        (TAGGED_SEA.replace("sea", "lake"), '<tool_call>\n{"name": "look", "arguments": {"at": "'),
        (f"{TAGGED_SEA}\nand so", f"{TAGGED_SEA}\n"),
        (f"{TAGGED_SEA}\n<tool_call>no", f"{TAGGED_SEA}\n<tool_call>"),
    ],
)
def test_what_has_begun_like_a_tagged_call_becomes_one(text: str, written: str) -> None:
    wrongly, ends = follow(text, call_form=TAGGED)
    assert wrongly.startswith(written)
    assert len(wrongly) <= len(written) + 1
    assert ends == (written == f"{TAGGED_SEA}\n")


def test_what_must_be_tagged_calls_is_written_in_one_way() -> None:
    terms: dict[str, Any] = {"must_call": True, "call_form": TAGGED}
    for calls in (TAGGED_SEA, f"{TAGGED_SEA}\n{TAGGED_GO}", f"{TAGGED_SEA}\n"):
        assert follow(calls, **terms) == (calls, True)
    for text in ("", "Hello", "\n", SEA, TAGGED_SEA.replace("\n", ""), TAGGED_SEA.replace("look", "Anna")):
        written, ends = follow(text, **terms)
        assert not ends
        assert TAGGED_SEA.startswith(written)


@pytest.mark.parametrize("terms", [{}, {"must_call": True}, {"form": FORM}])
def test_of_one_tagged_call_there_is_no_second(terms: dict[str, Any]) -> None:
    twice = f"{TAGGED_SEA}\n{TAGGED_SEA}"
    assert follow(twice, call_form=TAGGED, is_single=True, **terms) == (f"{TAGGED_SEA}\n", True)


def test_what_has_a_form_is_that_or_tagged_calls() -> None:
    for text in ('{"count": 1}', f"{TAGGED_SEA}\n{TAGGED_GO}", '<tool_call>{"name":"look","arguments":{}}</tool_call>'):
        assert follow(text, form=FORM, call_form=TAGGED) == (text, True)
    assert follow("I look.", form=FORM, call_form=TAGGED) == ("", False)


LOOK_AT_SEA = write_call("look", '{"at": "sea"}', PARAMETERS)
GO_TO_IT = write_call("go.to-it", "{}", PARAMETERS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello, Größe 日本\n\n",
        TAGGED_SEA,
        "One writes <tool_call>\n<function=, and then",
        "<tool_call>\n<function=Anna>\n</function>\n</tool_call>",
        LOOK_AT_SEA,
        f"I look.\n\n{LOOK_AT_SEA}\n{GO_TO_IT}\n",
        f"\n\n{GO_TO_IT}{LOOK_AT_SEA}",
        "<tool_call><function=look></function></tool_call>",
    ],
)
def test_where_calls_have_parameters_an_answer_is_any_text_and_calls_behind_it(text: str) -> None:
    assert follow(text, call_form=PARAMETERS) == (text, True)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("So: <tool_call>\n<function=look> and", "So: <tool_call>\n<function=look> "),
        (LOOK_AT_SEA.replace("sea", "lake"), "<tool_call>\n<function=look>\n<parameter=at>\n"),
        (LOOK_AT_SEA.replace("=at", "=by"), "<tool_call>\n<function=look>\n<parameter="),
        (f"{LOOK_AT_SEA}\nand so", f"{LOOK_AT_SEA}\n"),
    ],
)
def test_what_has_begun_like_a_call_with_parameters_becomes_one(text: str, written: str) -> None:
    assert follow(text, call_form=PARAMETERS) == (written, written.endswith("</tool_call>\n"))


def test_what_must_be_calls_with_parameters_is_written_in_one_way() -> None:
    terms: dict[str, Any] = {"must_call": True, "call_form": PARAMETERS}
    for calls in (LOOK_AT_SEA, f"{LOOK_AT_SEA}\n{GO_TO_IT}", f"{LOOK_AT_SEA}\n"):
        assert follow(calls, **terms) == (calls, True)
    for text in ("", "Hello", "\n", TAGGED_SEA, LOOK_AT_SEA.replace("\n", ""), LOOK_AT_SEA.replace("look", "Anna")):
        written, ends = follow(text, **terms)
        assert not ends
        assert LOOK_AT_SEA.startswith(written)


@pytest.mark.parametrize("terms", [{}, {"must_call": True}, {"form": FORM}])
def test_of_one_call_with_parameters_there_is_no_second(terms: dict[str, Any]) -> None:
    twice = f"{LOOK_AT_SEA}\n{LOOK_AT_SEA}"
    assert follow(twice, call_form=PARAMETERS, is_single=True, **terms) == (f"{LOOK_AT_SEA}\n", True)


def test_what_has_a_form_is_that_or_calls_with_parameters() -> None:
    for text in ('{"count": 1}', f"{LOOK_AT_SEA}\n{GO_TO_IT}"):
        assert follow(text, form=FORM, call_form=PARAMETERS) == (text, True)
    assert follow("I look.", form=FORM, call_form=PARAMETERS) == ("", False)


def test_calls_with_parameters_in_line_follow_a_text_and_each_other_at_once() -> None:
    looks, goes = (write_call(*each, INLINE_PARAMETERS) for each in (("look", '{"at": "sea"}'), ("go.to-it", "{}")))
    assert looks == "<tool_call>\n<function=look>\n<parameter=at>sea</parameter>\n</function>\n</tool_call>"
    for text in ("", "Hello <tool_call>", looks, f"I look.\n\n{looks}{goes}\n"):
        assert follow(text, call_form=INLINE_PARAMETERS) == (text, True)
    for calls in (looks, looks + goes):
        assert follow(calls, call_form=INLINE_PARAMETERS, must_call=True) == (calls, True)
        assert follow(calls, call_form=INLINE_PARAMETERS, form=FORM) == (calls, True)
    begun = "<tool_call>\n<function=look>\n<parameter=at>"
    for terms in ({}, {"must_call": True}, {"form": FORM}):
        assert follow(looks.replace("sea", "lake"), call_form=INLINE_PARAMETERS, **terms) == (begun, False)
        assert follow(looks + looks, call_form=INLINE_PARAMETERS, is_single=True, **terms) == (looks, True)


@pytest.mark.parametrize("form", [BARE, PARAMETERS])
def test_a_schema_that_cannot_be_compiled_is_known_by_its_function(form: CallForm) -> None:
    unknown: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    grammar = CallGrammar(SCHEMAS | {"touch": unknown, "last": unknown}, call_form=form)
    with pytest.raises(InvalidArgumentError) as caught:
        check_structured_outputs(StructuredOutputsParams(grammar=str(grammar)))
    name, why = grammar.find_function_at_fault(caught.value.message) or ("", "")
    assert name == "touch"
    assert why.endswith('Unimplemented keys: ["uniqueItems"]')
    assert grammar.find_function_at_fault("it takes more than 5 seconds") is None
    assert grammar.find_function_at_fault("at 1(1): something else") is None


def test_all_of_what_is_wrong_with_arguments_is_told_and_no_line_of_the_grammar() -> None:
    grammar = CallGrammar({"look": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}})
    with pytest.raises(InvalidArgumentError) as caught:
        check_structured_outputs(StructuredOutputsParams(grammar=str(grammar)))
    name, why = grammar.find_function_at_fault(caught.value.message) or ("", "")
    assert name == "look"
    assert why.endswith("error: unclosed group")


def test_many_functions_are_compiled() -> None:
    schema = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(4)}}
    names = [f"function_number_{index}" for index in range(128)]
    asked: list[dict[str, Any]] = [{}, {"must_call": True}, {"form": FORM}]
    for form, terms in itertools.product((BARE, TAGGED, PARAMETERS, INLINE_PARAMETERS), asked):
        grammar = CallGrammar({name: write_schema(dict(schema)) for name in names}, call_form=form, **terms)
        check_structured_outputs(StructuredOutputsParams(grammar=str(grammar)))
    assert json.loads(write_call(names[7], "{}")) == {"name": names[7], "parameters": {}}
