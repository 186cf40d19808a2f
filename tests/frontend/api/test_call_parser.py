import json
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keepsight.frontend.api.call_parser import AnswerText, ArgumentsText, CallBegun, CallParser, Event
from keepsight.frontend.prompt.call_text import PARAMETERS, TAGGED, write_call
from keepsight.frontend.prompt.json_types import ArgumentTypes, JsonType

NAMES = ("look", "look_up", "a.b-c")
CALL = '{"name": "look", "parameters": {"at": "the \\"sea\\" {"}}'

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
spaces = st.text(" \n\t", max_size=3)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, str]:
    """Draw a call as a model may write it; return the text, the name and the arguments."""
    name = draw(st.sampled_from(NAMES))
    value = draw(st.dictionaries(st.text(), json_values, max_size=3))
    indent, is_ascii = draw(st.sampled_from([None, 0, 2])), draw(st.booleans())
    arguments = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    parts = ("{", '"name"', ":", f'"{name}"', ",", '"parameters"', ":", arguments, "}")
    return "".join(draw(spaces) + part for part in parts), name, arguments


answers = st.lists(calls(), min_size=1, max_size=3)
fragments = st.sampled_from(
    ["{", "}", '"', '"name"', ":", "look", "Anna", ",", '"parameters"', "```", "json", " ", "\n"]
)
texts = st.lists(fragments | st.text(max_size=4) | calls().map(lambda each: each[0])).map("".join)


def parse(pieces: Sequence[str]) -> tuple[list[Event], CallParser]:
    parser = CallParser(NAMES)
    events = [event for piece in pieces for event in parser.push(piece)]
    return list(join(events + parser.finish())), parser


def join(events: Sequence[Event]) -> Iterator[Event]:
    """Merge consecutive text events of the same kind into one."""
    last: Event | None = None
    for event in events:
        if isinstance(last, AnswerText | ArgumentsText) and type(event) is type(last):
            assert not isinstance(event, CallBegun)
            last = type(last)(last.text + event.text)
        else:
            if last is not None:
                yield last
            last = event
    if last is not None:
        yield last


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@given(texts, st.lists(st.integers(0, 1000)))
@example("``", [])
@example('\n{"name": "look"', [5])
def test_calls_are_read_the_same_however_the_text_is_cut(text: str, places: list[int]) -> None:
    whole, _ = parse([text])
    assert parse(cut(text, places))[0] == parse(list(text))[0] == whole
    if not any(isinstance(event, CallBegun) for event in whole):
        assert whole == ([AnswerText(text)] if text else [])


@given(answers, st.sampled_from(["", "\n", "```json\n", "```\n```tool_code\n"]), st.lists(st.integers(0, 1000)))
def test_calls_are_read_as_they_were_written(written: Any, before: str, places: list[int]) -> None:
    text = before + "\n".join(each for each, _, _ in written) + "\n```"
    events, parser = parse(cut(text, places))
    expected = [event for _, name, arguments in written for event in (CallBegun(name), ArgumentsText(arguments))]
    assert events == expected
    assert not parser.is_amid_arguments


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        '{"name": "Anna", "parameters": {}}',
        '{"name": "loo", "parameters": {}}',
        '{"name": "look"}',
        '{"name": "look", "parameters": 1}',
        '{"name": "look", "parameters": ',
        f"I call it: {CALL}",
        f"[{CALL}]",
        "```json\n" * 3 + CALL,
        " " * 25 + CALL,
    ],
)
def test_an_answer_that_does_not_begin_as_a_call_is_all_text(text: str) -> None:
    assert parse(list(text))[0] == [AnswerText(text)]


def test_text_is_sent_at_once_and_a_possible_call_is_held_back() -> None:
    parser = CallParser(NAMES)
    assert parser.push(" ") == []
    assert parser.push('{"name') == []
    assert parser.push('": "A') == [AnswerText(' {"name": "A')]
    assert parser.push("{") == [AnswerText("{")]
    parser = CallParser(NAMES)
    assert parser.push('{"name": "look", "parameters": ') == []
    assert parser.push('{"at') == [CallBegun("look"), ArgumentsText('{"at')]
    assert parser.push('": 1}') == [ArgumentsText('": 1}')]
    assert not parser.is_amid_arguments
    assert parser.push("}\n") == []


def test_without_tools_nothing_is_held_back() -> None:
    assert CallParser(()).push("{") == [AnswerText("{")]


def test_a_call_that_is_cut_off_is_recognized() -> None:
    events, parser = parse([write_call("look", '{"at": "}')[:-2]])
    assert events == [CallBegun("look"), ArgumentsText('{"at": "')]
    assert parser.is_amid_arguments


# Tagged calls ---------------------------------------------------------------------------------------------------------


@st.composite
def tagged_calls(draw: st.DrawFn) -> tuple[str, str, str]:
    written, name, arguments = draw(calls())
    key, tag = written.replace('"parameters"', '"arguments"', 1), draw(st.sampled_from(["", "\n"]))
    return f"<tool_call>{key}{draw(spaces)}</tool_call>{tag}", name, arguments


pieces_of_tags = st.sampled_from(["<tool_call>", "<", "<tool", "\n", "</tool_call>", '{"name": "', '", "arguments": '])
tagged_texts = st.lists(pieces_of_tags | fragments | st.text(max_size=4) | tagged_calls().map(lambda each: each[0]))
TAGGED_CALL = write_call("look", '{"at": "the \\"sea\\" {"}', TAGGED)


def parse_tagged(pieces: Sequence[str]) -> list[Event]:
    parser = CallParser(NAMES, TAGGED)
    events = [event for piece in pieces for event in parser.push(piece)]
    return list(join(events + parser.finish()))


@given(tagged_texts.map("".join), st.lists(st.integers(0, 1000)))
@example('\n<tool_call>{"name": "lo", "arguments": \n<tool_call>{"name": "look", "arguments": {}', [35])
def test_tagged_calls_are_read_the_same_however_the_text_is_cut(text: str, places: list[int]) -> None:
    whole = parse_tagged([text])
    assert parse_tagged(cut(text, places)) == parse_tagged(list(text)) == whole
    if not any(isinstance(event, CallBegun) for event in whole):
        assert whole == ([AnswerText(text)] if text else [])


@given(st.lists(tagged_calls(), min_size=1, max_size=3), st.text("a<tool_call>\n"), st.lists(st.integers(0, 1000)))
def test_tagged_calls_and_the_text_before_them_are_read_as_they_were_written(
    written: Any, before: str, places: list[int]
) -> None:
    text, content = before + "".join(each for each, _, _ in written), before.removesuffix("\n")
    expected = [event for _, name, arguments in written for event in (CallBegun(name), ArgumentsText(arguments))]
    assert parse_tagged(cut(text, places)) == [*([AnswerText(content)] if content else []), *expected]


def test_only_a_possible_start_of_a_tagged_call_is_held_back() -> None:
    parser = CallParser(NAMES, TAGGED)
    assert parser.push("I look.\n") == [AnswerText("I look.")]
    assert parser.push("<") == []
    assert parser.push("b>\n<tool_call>") == [AnswerText("\n<b>")]
    assert parser.push('\n{"name": "Anna') == [AnswerText('\n<tool_call>\n{"name": "Anna')]
    assert parser.push(f"\n{TAGGED_CALL[:-14]}") == [CallBegun("look"), ArgumentsText('{"at": "the \\"sea\\" {"}')]
    assert parser.push("}\n</tool_call>\n") == []
    assert parser.finish() == []


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        '<tool_call>\n{"name": "Anna", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "look", "parameters": {}}\n</tool_call>',
        '<tool_call>\n{"name": "look", "arguments": ',
        "I would write <tool_call>\n",
    ],
)
def test_anything_but_a_tagged_call_is_text(text: str) -> None:
    assert parse_tagged(list(text)) == [AnswerText(text)]


# Calls with parameters ------------------------------------------------------------------------------------------------

TYPES: dict[str, ArgumentTypes] = {"look": {"at": JsonType.STRING, "times": JsonType.INTEGER}}
WITH_PARAMETERS = write_call("look", '{"at": "the \\"sea\\" </", "times": 3, "other": [1, 2]}', PARAMETERS)
READ = [CallBegun("look"), ArgumentsText('{"at": "the \\"sea\\" </", "times": 3, "other": [1, 2]}')]


def parse_parameters(pieces: Sequence[str]) -> list[Event]:
    parser = CallParser(NAMES, PARAMETERS, TYPES)
    events = [event for piece in pieces for event in parser.push(piece)]
    return list(join(events + parser.finish()))


pieces_of_calls = st.sampled_from(
    [
        WITH_PARAMETERS,
        "<tool_call>",
        "<function=",
        "look",
        ">",
        "\n",
        "<parameter=at>\n",
        "<parameter=times>\n3",
        "\n</parameter>\n",
        "</function>",
        "</tool_call>",
        "<",
    ]
)
some_texts = st.lists(pieces_of_calls | st.text(max_size=3)).map("".join)


@given(
    some_texts | some_texts.map(lambda text: f"<tool_call>\n<function=look>\n{text}"), st.lists(st.integers(0, 1000))
)
def test_calls_with_parameters_are_read_the_same_however_the_text_is_cut(text: str, places: list[int]) -> None:
    whole = parse_parameters([text])
    assert parse_parameters(cut(text, places)) == parse_parameters(list(text)) == whole
    if not any(isinstance(event, CallBegun) for event in whole):
        assert whole == ([AnswerText(text)] if text else [])


@pytest.mark.parametrize("before", ["", "\n\n", "I look.", "I look.\n", "I look.\n\n", "\n\n\nI <tool_call>.\n\n\n"])
def test_calls_with_parameters_and_the_text_before_them_are_read_as_they_were_written(before: str) -> None:
    text = f"{before}{WITH_PARAMETERS}\n{write_call('a.b-c', '{}', PARAMETERS)}\n"
    content = before.removesuffix("\n").removesuffix("\n")
    events = [*([AnswerText(content)] if content else []), *READ, CallBegun("a.b-c"), ArgumentsText("{}")]
    assert parse_parameters([text]) == parse_parameters(list(text)) == events


def test_a_name_is_told_as_soon_as_it_is_certain_and_a_string_as_it_comes() -> None:
    parser = CallParser(NAMES, PARAMETERS, TYPES)
    assert parser.push("I look.\n\n<tool_call>\n<function=look") == [AnswerText("I look.")]
    assert parser.push(">") == [CallBegun("look")]
    assert parser.push("\n<parameter=at>\nthe s") == [ArgumentsText('{"at": "the s')]
    assert parser.push("ea") == [ArgumentsText("ea")]
    assert parser.is_amid_arguments
    assert parser.push("\n</parameter>\n<parameter=times>\n3") == [ArgumentsText('", "times": ')]
    assert parser.push("\n</parameter>\n</function>") == [ArgumentsText("3}")]
    assert not parser.is_amid_arguments
    assert parser.push("\n</tool_call>\n") == parser.finish() == []


def test_parameters_that_are_cut_off_are_told_as_far_as_they_go() -> None:
    parser = CallParser(NAMES, PARAMETERS, TYPES)
    parser.push("<tool_call>\n<function=look>\n<parameter=times>\n12")
    assert parser.finish() == [ArgumentsText("12")]
    assert parser.is_amid_arguments


def test_a_long_text_that_is_held_back_is_read_as_fast() -> None:
    began = time.process_time()
    for text in ("```" + "a" * 16 + " " * 24, '{"name": "' + "look" * 32, " " * 24 + "{" + " " * 24):
        parse(list(text * 50))
    for text in ("\n<tool_call>" + " " * 24 + '{"name": "look"', '<tool_call>{"name": "' + "look" * 32, "\n<"):
        parse_tagged(list(text * 50))
        parse_tagged([text * 500])
    for text in ("\n\n<tool_call>" + " " * 24 + "<function=look", "<tool_call>\n<function=" + "look" * 32, "\n\n<"):
        parse_parameters(list(text * 50))
        parse_parameters([text * 500])
    for name in ("at", "times", "other"):
        parse_parameters(list(f"<tool_call>\n<function=look>\n<parameter={name}>\n[{'x' * 10_000}"))
    assert time.process_time() - began < 15
