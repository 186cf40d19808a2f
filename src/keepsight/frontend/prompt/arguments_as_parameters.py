"""Arguments of a call as parameters, each between tags: Qwen3-Coder's form, which Qwen3.5 and others have, too.

A string is written as it is, any other value as JSON. So the function's schema says what a text is: JSON if it is that
of a type that the schema allows, otherwise a string.
"""

import itertools
import json
from collections.abc import Iterable, Sequence, Set

import msgspec

from keepsight.frontend.prompt.json_types import (
    ANY_TYPE,
    Allowance,
    ArgumentTypes,
    JsonType,
    Schema,
    SchemaReader,
    is_json,
    is_json_of,
    may_become,
)
from keepsight.frontend.prompt.parameter_rules import ParameterRules, read_parameters
from keepsight.frontend.prompt.parameter_tags import ON_LINES, ParameterTags


class ArgumentsAsParameters:
    BEGIN = ""

    def __init__(self, tags: ParameterTags = ON_LINES) -> None:
        self._tags = tags

    def write(self, arguments: str) -> str:
        """Write arguments; none of them if they were cut off."""
        texts = show_values(arguments) or {}
        return "".join(itertools.starmap(self._tags.write, texts.items()))

    def find_types(self, schema: Schema, allowance: Allowance) -> ArgumentTypes:
        reader = SchemaReader(schema, allowance)
        found = read_parameters(reader)
        others = {} if found.others is None else {None: reader.find_types(found.others)}
        return {name: reader.find_types(each) for name, each in found.named.items()} | others

    def begin_reading(self, types: ArgumentTypes) -> "ParametersReader":
        return ParametersReader(types, self._tags)

    def list_rules(self, schemas: Iterable[Schema]) -> Sequence[str]:
        rules = ParameterRules(self._tags)
        for index, schema in enumerate(schemas):
            rules.add_function(index, schema)
        return [*rules.shared_lines, *rules.lines]

    def find_unenforced(self, schema: Schema) -> Set[str]:
        rules = ParameterRules(self._tags)
        rules.add_function(0, schema)
        return rules.unenforced


def show_values(arguments: str) -> dict[str, str] | None:
    """Return arguments as texts, JSON character by character as it was; None if they were cut off or are no object."""
    try:
        raw = msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
        return {name: _show_value(bytes(value).decode()) for name, value in raw.items()}
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _show_value(text: str) -> str:
    return msgspec.json.decode(text, type=str) if text.startswith('"') else text


class ParametersReader:
    """Makes one JSON object of parameters that come in pieces. `types`: those of the values, by name.

    Undeclared parameters may be repeated. The first one counts, as it has been passed on when the next one comes.
    """

    def __init__(self, types: ArgumentTypes, tags: ParameterTags) -> None:
        self.has_ended = False
        self._types, self._tags = types, tags
        self._names: set[str] = set()
        self._is_repeated = False
        self._value: _Value | None = None

    def read(self, text: str) -> tuple[str, int]:
        written, place, is_amid = "", 0, True
        while is_amid:
            json_text, end = self._read_tag(text, place) if self._value is None else self._read_value(text, place)
            written += json_text
            is_amid, place = end > place and not self.has_ended, end
        return written, place

    def cut_off(self) -> str:
        return "" if self._value is None or self._is_repeated else self._value.cut_off()

    def _read_tag(self, text: str, place: int) -> tuple[str, int]:
        tag = self._tags.opening_or_end.search(text, place)
        if tag is None:
            return "", place
        name, separator = tag["name"], ", " if self._names else "{"
        if name is None:
            self.has_ended = True
            return "}" if self._names else "{}", tag.start()
        self._value = _Value(self._types.get(name, self._types.get(None, ANY_TYPE)), self._tags.before)
        self._is_repeated = name in self._names
        self._names.add(name)
        return "" if self._is_repeated else f"{separator}{_quote(name)}: ", tag.end()

    def _read_value(self, text: str, place: int) -> tuple[str, int]:
        assert self._value is not None
        closing, begun = self._tags.closing, self._tags.beginnings_of_closing
        end = text.find(closing, place)
        if end < 0:
            certain = len(text) - next((len(each) for each in begun if text.endswith(each)), 0)
            written, read_to = self._value.add(text[place:certain]), certain
        else:
            written, read_to = self._value.add(text[place:end]) + self._value.end(), end + len(closing)
            self._value = None
        return "" if self._is_repeated else written, read_to


class _Value:
    """One value. A string is passed on as it comes, once it is certain to be one; any other when it is complete."""

    def __init__(self, types: JsonType, before: str) -> None:
        self._types, self._before = types, before
        self._has_begun = self._is_string = False
        self._undecided = ""

    def add(self, text: str) -> str:
        if text and not self._has_begun:
            text, self._has_begun = text[len(self._before) :], True
        if not self._is_string:
            text = self._undecided = self._undecided + text
            if not text or JsonType.STRING not in self._types or may_become(text, self._types):
                return ""
            self._is_string = True
            return _quote(text)[:-1]
        return _quote(text)[1:-1]

    def end(self) -> str:
        if self._is_string:
            return '"'
        text, types = self._undecided, self._types & ~JsonType.STRING
        is_value = is_json_of(text, types) if JsonType.STRING in self._types else is_json(text)
        return text if is_value else _quote(text)

    def cut_off(self) -> str:
        return "" if self._is_string else self._undecided


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
