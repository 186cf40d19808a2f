"""Which types of JSON values a schema allows, and whether a text is, or may become, a value of these types.

It knows nothing of calls. What a schema says of the values themselves, beside `enum` and `const`, is not looked at.
"""

import functools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Flag, auto
from typing import Any
from urllib.parse import unquote

import msgspec

from keepsight.errors import InvalidArgumentError

Schema = Mapping[str, Any]


class JsonType(Flag):
    """A set of types. JSON's numbers are two: an `integer` is also a `number`."""

    STRING = auto()
    INTEGER = auto()
    FRACTION = auto()
    BOOLEAN = auto()
    NULL = auto()
    OBJECT = auto()
    ARRAY = auto()
    NUMBER = INTEGER | FRACTION


# The types that values may have, by their names; `None` stands for all other names.
ArgumentTypes = Mapping[str | None, JsonType]
NO_TYPE, ANY_TYPE = JsonType(0), ~JsonType(0)
TYPES = {
    "string": JsonType.STRING,
    "integer": JsonType.INTEGER,
    "number": JsonType.NUMBER,
    "boolean": JsonType.BOOLEAN,
    "null": JsonType.NULL,
    "object": JsonType.OBJECT,
    "array": JsonType.ARRAY,
}
_CLASSES = {
    str: JsonType.STRING,
    int: JsonType.INTEGER,
    float: JsonType.FRACTION,
    bool: JsonType.BOOLEAN,
    type(None): JsonType.NULL,
    dict: JsonType.OBJECT,
    list: JsonType.ARRAY,
}
# Agents' hundred tools have some ten thousand. So many are read in 0.1 to 0.2 seconds.
MAX_KEYWORDS_AND_VALUES = 2**16
# What a schema says of types and of texts.
_OF_TEXTS = ("type", "enum", "const", "minLength", "maxLength", "pattern", "format")
# What leads to other schemas, in this order; and what says nothing of values.
_OF_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_SILENT = {"$defs", "definitions", "x-guidance", "$schema", "$id"}
# How texts of these types begin. An object or an array is known by its first character.
_BEGINNINGS = {
    JsonType.INTEGER: re.compile(r"-?[0-9]*\Z"),
    JsonType.FRACTION: re.compile(r"-?(?:[0-9][0-9.eE+-]*)?\Z"),
    JsonType.BOOLEAN: re.compile(r"(?:t|tr|tru|true|f|fa|fal|fals|false)\Z"),
    JsonType.NULL: re.compile(r"(?:n|nu|nul|null)\Z"),
    JsonType.OBJECT: re.compile(r"\{"),
    JsonType.ARRAY: re.compile(r"\["),
}


class Allowance:
    """Limits how much of the schemas of one request's functions is read: many references may lead to one large place.

    Each keyword and each value counts as often as it is read.
    """

    def __init__(self) -> None:
        self._num_left = MAX_KEYWORDS_AND_VALUES

    def spend(self, number: int) -> None:
        self._num_left -= number
        if self._num_left < 0:
            what = f"more than {MAX_KEYWORDS_AND_VALUES} keywords and values would have to be read"
            raise InvalidArgumentError("tools", f"{what}, each as often as references lead to it")


class SchemaReader:
    """Reads the schemas in `root`, a function's, to which their references refer."""

    def __init__(self, root: Schema, allowance: Allowance) -> None:
        self.root = root
        self.spend = allowance.spend
        # By reference, and by identity of lists of values, which are in `root`.
        self._places: dict[str, object] = {}
        self._types_of_places: dict[str, JsonType] = {}
        self._types_of_lists: dict[int, JsonType] = {}

    def find_types(self, schema: object) -> JsonType:
        """Return the types of the values that a schema allows; all, if it allows none."""
        alternatives = self.list_alternatives(schema)
        reference = schema.get("$ref") if isinstance(schema, Mapping) and schema.keys().isdisjoint(_OF_TEXTS) else None
        if not isinstance(reference, str):
            return self.join_types(alternatives)
        if reference not in self._types_of_places:
            self._types_of_places[reference] = self.join_types(alternatives)
        return self._types_of_places[reference]

    def join_types(self, alternatives: Iterable[Schema]) -> JsonType:
        return join(map(self.types_of_one, alternatives)) or ANY_TYPE

    def types_of_one(self, schema: Schema) -> JsonType:
        """Return the types that a schema without alternatives allows."""
        types = self._read_type(schema)
        if "const" in schema:
            return types & type_of(schema["const"])
        values = schema.get("enum")
        if not isinstance(values, list):
            return types
        if id(values) not in self._types_of_lists:
            self.spend(len(values))
            self._types_of_lists[id(values)] = join(map(type_of, values))
        return types & self._types_of_lists[id(values)]

    def list_values(self, schema: Schema) -> list[Any] | None:
        """Return the values that a schema without alternatives allows, if it lists them."""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(values, list):
            return None
        self.spend(len(values))
        types = self._read_type(schema)
        return [_shorten(each) for each in values if type_of(each) in types]

    def _read_type(self, schema: Schema) -> JsonType:
        if "type" not in schema:
            return ANY_TYPE
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        self.spend(max(0, len(named) - 1))  # the keyword itself has been counted
        return join(TYPES.get(name, NO_TYPE) for name in named if isinstance(name, str))

    def list_alternatives(self, schema: object, left_out: set[str] | None = None) -> Iterator[Schema]:
        """Yield the schemas of which a value must match one, with references resolved.

        Without recursion, as a schema may be deep; each reference is followed once, as it may lead to itself.
        `left_out` gets the keywords of outer schemas that these do not have.
        """
        followed: set[str] = set()
        left_out = set() if left_out is None else left_out
        rest = [schema]
        while rest:
            one = rest.pop()
            self.spend(len(one) or 1 if isinstance(one, Mapping) else 1)
            if not isinstance(one, Mapping):
                if one is not False:
                    yield {}
                continue
            inner = self._find_inner(one, followed, left_out)
            if inner is None:
                yield one
            else:
                rest += reversed(inner)

    def follow_references(self, schema: Schema) -> Schema:
        """Return the schema to which a schema's reference leads; itself if it has none, or one that leads nowhere."""
        found, followed = schema, set[str]()
        while isinstance(reference := found.get("$ref"), str):
            place = self._resolve(reference)
            if reference in followed or not isinstance(place, Mapping) or not place:
                return schema
            followed.add(reference)
            found = place
        return found

    def _find_inner(self, schema: Schema, followed: set[str], left_out: set[str]) -> list[object] | None:
        """Return the schemas that a schema refers to, each with what it says itself; None if it refers to none."""
        found = self._find_referred(schema, followed)
        if found is None:
            return None
        name, inner = found
        left_out |= schema.keys() - {name, *_OF_TEXTS, *_SILENT}
        return [self._merge(schema, each, left_out) for each in inner]

    def _find_referred(self, schema: Schema, followed: set[str]) -> tuple[str, list[Any]] | None:
        """Return the keyword by which a schema refers to others, and these."""
        reference = schema.get("$ref")
        if isinstance(reference, str):
            places = [] if reference in followed else [self._resolve(reference)]
            followed.add(reference)
            return "$ref", places
        for name in _OF_ALTERNATIVES:
            inner = schema.get(name)
            # Of several that must all match, none is an alternative.
            if isinstance(inner, list) and inner and (name != "allOf" or len(inner) == 1):
                return name, inner
        return None

    def _merge(self, outer: Schema, inner: object, left_out: set[str]) -> object:
        """Return an inner schema with what the outer one says of types and texts; only that, as many may be inner.

        Types are those that both allow. Of anything else that both say, the inner one counts.
        """
        own = {name: outer[name] for name in _OF_TEXTS if name in outer}
        if not own:
            return inner
        if not isinstance(inner, Mapping):
            return own if inner is not False else False
        self.spend(len(inner))
        merged = own | dict(inner)
        if "type" in own and "type" in inner:
            merged["type"] = name_types(self._read_type(own) & self._read_type(inner))
        left_out |= {
            name for name in own.keys() & inner.keys() if name != "type" and not _are_same(own[name], inner[name])
        }
        return merged

    def _resolve(self, reference: str) -> object:
        """Return the schema at a place in `root`; one that allows anything if there is none."""
        if reference not in self._places:
            names = split_reference(reference)
            place = None if names is None else find_place(names, self.root)
            self._places[reference] = {} if place is None else place
        return self._places[reference]


def _are_same(one: object, other: object) -> bool:
    """Return whether two numbers or texts are the same; lists, which may be long, count as different."""
    return isinstance(one, int | float | str) and one == other


def name_types(types: JsonType) -> list[str]:
    return [name for name, each in TYPES.items() if each in types]


def type_of(value: object) -> JsonType:
    return _CLASSES[type(_shorten(value))]


def _shorten(value: object) -> object:
    """Return a value; a number without a fraction as an integer, as which it may be written, too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def split_reference(reference: str) -> list[str] | None:
    """Return the names that lead to a place in a schema; None if a reference has another form."""
    root, *names = reference.split("/")
    return [unquote(name).replace("~1", "/").replace("~0", "~") for name in names] if root == "#" else None


def find_place(names: Iterable[str], root: Schema) -> object:
    """Return what names lead to; None if there is nothing."""
    found: object = root
    for name in names:
        if isinstance(found, list) and re.fullmatch("[0-9]{1,9}", name) and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def join(types: Iterable[JsonType]) -> JsonType:
    """Return the types of several sets together."""
    return functools.reduce(operator.or_, types, NO_TYPE)


def is_json_of(text: str, types: JsonType) -> bool:
    """Return whether a text is JSON of one of these types."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return _CLASSES[type(value)] in types


def is_json(text: str) -> bool:
    """Return whether a text is JSON of any type. Its numbers may be greater than any that computers calculate with.

    One that is nested too deeply to be read to its end is taken for JSON: its grammar allows nothing else.
    """
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except RecursionError:
        return True
    except (msgspec.MsgspecError, UnicodeError):
        return False
    return True


def may_become(text: str, types: JsonType) -> bool:
    """Return whether a text that is not empty may be the beginning of JSON of one of these types."""
    return any(each in types and begins.match(text) for each, begins in _BEGINNINGS.items())
