"""Arguments as parameters: what is read of them is what was written."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from keepsight.frontend.prompt.arguments_as_parameters import ArgumentsAsParameters
from keepsight.frontend.prompt.json_types import ANY_TYPE, Allowance, ArgumentTypes, JsonType, is_json_of
from keepsight.frontend.prompt.parameter_tags import IN_LINE, ON_LINES

FORM = ArgumentsAsParameters()
IN_LINE_FORM = ArgumentsAsParameters(IN_LINE)
SCHEMA: dict[str, Any] = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "size": {"type": ["string", "number"]},
        "any": {},
    },
    "additionalProperties": {"type": "boolean"},
}
TYPES = FORM.find_types(SCHEMA, Allowance())
END = "</function>"


def read(pieces: Sequence[str], types: ArgumentTypes = TYPES, form: ArgumentsAsParameters = FORM) -> tuple[str, bool]:
    """Return the JSON of arguments that come in pieces, and whether they came to their end."""
    reader, held, written = form.begin_reading(types), "", ""
    for piece in pieces:
        held += piece
        if not reader.has_ended:
            text, length = reader.read(held)
            written, held = written + text, held[length:]
    return written if reader.has_ended else written + reader.cut_off(), reader.has_ended


def parameter(name: str, text: str) -> str:
    return f"<parameter={name}>\n{text}\n</parameter>\n"


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("city", "Paris", "Paris"),
        ("city", "3", "3"),
        ("city", "null", "null"),
        ("city", "", ""),
        ("city", ' a\n\n"b"\\\t\n', ' a\n\n"b"\\\t\n'),
        ("city", "<parameter=days>\n</function>\n </parameter>", "<parameter=days>\n</function>\n </parameter>"),
        ("days", "3", 3),
        ("days", "3.5", 3.5),
        ("days", '"3"', "3"),
        ("days", "three", "three"),
        ("days", "", ""),
        ("days", "[1,\n 2]", [1, 2]),
        ("unit", "null", None),
        ("unit", "nullify", "nullify"),
        ("unit", '"c"', '"c"'),
        ("unit", "3", "3"),
        ("size", "3", 3),
        ("size", "3e", "3e"),
        ("size", " 3", " 3"),
        ("size", "-", "-"),
        ("any", "true", True),
        ("any", '{"a": [1, "x"]}', {"a": [1, "x"]}),
        ("any", "{a}", "{a}"),
        ("any", "Hello", "Hello"),
        ("more", "true", True),
        ("more", "True", "True"),
        ('a > "b', "true", True),
    ],
)
def test_the_schema_says_what_a_text_is(name: str, text: str, value: Any) -> None:
    written, has_ended = read(list(f"{parameter(name, text)}{END}"))
    assert (json.loads(written), has_ended) == ({name: value}, True)


def test_without_a_schema_a_text_is_json_if_it_can_be() -> None:
    types = FORM.find_types({"type": "object"}, Allowance())
    text = "".join(parameter(name, text) for name, text in {"a": "1", "b": "x", "c": "[null]"}.items())
    assert read([text, END], types) == ('{"a": 1, "b": "x", "c": [null]}', True)


@pytest.mark.parametrize("text", ["", "\n", "<parameter=city></parameter>"])
def test_without_parameters_the_object_is_empty(text: str) -> None:
    assert read([text + END]) == ("{}", True)


@pytest.mark.parametrize("text", ["1e400", "[-1e400, 1]", "1" * 5000])
def test_a_number_beyond_all_that_computers_calculate_with_stays_a_number(text: str) -> None:
    assert read([parameter("days", text), END]) == (f'{{"days": {text}}}', True)


@pytest.mark.parametrize(("name", "value"), [("days", "{}"), ("city", '"{}"'), ("any", '"{}"')])
def test_a_value_that_is_nested_too_deeply_to_be_read_is_a_string_only_where_there_may_be_one(
    name: str, value: str
) -> None:
    deep = "[" * 100_000 + "]" * 100_000  # Python 3.13.0 reads some thousands
    assert read([parameter(name, deep), END]) == (f'{{"{name}": {value.format(deep)}}}', True)


def test_of_parameters_with_one_name_the_first_one_counts() -> None:
    text = "".join(
        parameter(*each) for each in (("a", "true"), ("city", "x"), ("a", "false"), ("city", "y"), ("b", "1"))
    )
    assert read([text, END]) == read(list(text + END)) == ('{"a": true, "city": "x", "b": 1}', True)
    for begun in ("<parameter=city>\ny", "<parameter=a>\nfal", parameter("a", "false")):
        assert read([f"{text}{begun}"]) == ('{"a": true, "city": "x", "b": 1', False)


def test_a_closing_tag_right_after_the_opening_one_closes_an_empty_value() -> None:
    assert read(list(f"<parameter=city>\n</parameter>\n{END}")) == ('{"city": ""}', True)


def test_a_string_is_passed_on_as_it_comes_and_any_other_value_when_it_is_complete() -> None:
    reader = FORM.begin_reading(TYPES)
    assert reader.read("<parameter=city>") == ("", 0)
    assert reader.read("<parameter=city>\n") == ('{"city": ', 16)
    assert reader.read('\n"P') == ('"\\"P', 3)
    assert reader.read("ari\n</par") == ("ari", 3)
    assert reader.read("\n</part") == ("\\n</part", 7)
    assert reader.read("\n</parameter>\n<parameter=days>\n12") == ('", "days": ', 33)
    assert reader.read("3\n</parameter>\n<parameter=unit>\nnu") == ('123, "unit": ', 34)
    assert reader.read("m") == ('"num', 1)
    assert reader.read("\n</parameter>\n</function>") == ('"}', 14)
    assert reader.has_ended


@pytest.mark.parametrize(
    ("text", "so_far"),
    [
        ("", ""),
        ("<parameter=ci", ""),
        ("<parameter=city>\n", '{"city": '),
        ("<parameter=city>\nPari", '{"city": "Pari'),
        ("<parameter=city>\nParis\n</param", '{"city": "Paris'),
        ("<parameter=days>\n12", '{"days": 12'),
        ("<parameter=any>\n[1, 2", '{"any": [1, 2'),
        (parameter("days", "12"), '{"days": 12'),
    ],
)
def test_what_is_cut_off_is_returned_as_far_as_it_goes(text: str, so_far: str) -> None:
    assert read([text]) == read(list(text)) == (so_far, False)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("city", "Paris", "Paris"),
        ("city", "", ""),
        ("city", "\n a > b\n", "\n a > b\n"),
        ("city", "<parameter=days>\n</parameter></function>", "<parameter=days>\n</parameter></function>"),
        ("days", "3", 3),
        ("unit", "null", None),
        ("any", '["</parameter>"]', ["</parameter>"]),
    ],
)
def test_a_value_in_line_is_all_that_stands_between_its_tags(name: str, text: str, value: Any) -> None:
    written, has_ended = read(list(f"<parameter={name}>{text}</parameter>\n{END}"), form=IN_LINE_FORM)
    assert (json.loads(written), has_ended) == ({name: value}, True)


def test_a_string_in_line_is_passed_on_as_it_comes() -> None:
    reader = IN_LINE_FORM.begin_reading(TYPES)
    assert reader.read("<parameter=city>Par") == ('{"city": "Par', 19)
    assert reader.read("is\n</parameter>") == ("is\\n", 3)
    assert reader.read("</parameter>\n<parameter=days>12") == ('", "days": ', 31)
    assert reader.cut_off() == "12"


fragments = st.sampled_from(
    [
        "<parameter=",
        "city",
        "days",
        "unit",
        ">",
        ">\n",
        "\n",
        "</parameter>",
        "</parameter>\n",
        "\n</parameter>\n",
        "</",
        "<",
        END,
        "nu",
        "1",
    ]
)
tails = st.lists(fragments | st.text(max_size=3)).map("".join)


@pytest.mark.parametrize("form", [FORM, IN_LINE_FORM])
@given(tails | tails.map(lambda text: f"<parameter=unit>\n{text}"), st.lists(st.integers(0, 1000)))
@example("<parameter=a></function>\n", [23])
@example("<parameter=city>\n\n</parameter>", [17])
def test_arguments_are_read_the_same_however_the_text_is_cut(
    form: ArgumentsAsParameters, text: str, places: list[int]
) -> None:
    whole, has_ended = read([text], form=form)
    assert read(cut(text, places), form=form) == read(list(text), form=form) == (whole, has_ended)
    if has_ended:
        names = [name for name, _ in json.loads(whole, object_pairs_hook=list)]
        assert len(set(names)) == len(names)


texts = st.text(st.characters(exclude_categories=["Cs"])).filter(
    lambda text: ON_LINES.can_hold(text) and IN_LINE.can_hold(text)
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
names = st.text("ab_ é>=\"'", max_size=4)
NAMES_OF_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}


@st.composite
def arguments(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw values, and a schema for which their texts mean nothing else."""
    drawn = draw(st.dictionaries(names, values, max_size=4))
    properties: dict[str, Any] = {}
    for name, value in drawn.items():
        is_plain = not isinstance(value, str) or not is_json_of(value, ANY_TYPE & ~JsonType.STRING)
        others = st.sampled_from([[], ["null"], ["string", "array"]] if is_plain else [[]])
        types = list(dict.fromkeys([NAMES_OF_TYPES[type(value)], *draw(others)]))
        forms = [{"type": types}, {"anyOf": [{"type": each} for each in types]}, *([{}] if is_plain else [])]
        properties[name] = draw(st.sampled_from(forms))
    return drawn, {"type": "object", "properties": properties}


@pytest.mark.parametrize("form", [FORM, IN_LINE_FORM])
@given(arguments(), st.booleans(), st.lists(st.integers(0, 1000)))
def test_arguments_are_read_as_they_were_written(
    form: ArgumentsAsParameters, drawn: Any, is_ascii: bool, places: list[int]
) -> None:
    value, schema = drawn
    assume(form is FORM or ">" not in "".join(value))
    written = json.dumps(value, ensure_ascii=is_ascii)
    text = form.write(written) + END
    json_text, has_ended = read(cut(text, places), form.find_types(schema, Allowance()), form)
    assert (json.loads(json_text), has_ended) == (value, True)
    assert form.write(json_text) + END == text
