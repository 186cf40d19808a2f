"""Which types of JSON values a schema allows, and whether a text is, or may become, a value of these types.

It knows nothing of calls. What a schema says of the values themselves, beside `enum` and `const`, is not looked at.
"""

import functools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Flag, auto
from typing import Any

import msgspec

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
# What a schema says of types and of texts.
_OF_TEXTS = ("type", "enum", "const", "minLength", "maxLength", "pattern", "format")
# How texts of these types begin. An object or an array is known by its first character.
_BEGINNINGS = {
    JsonType.INTEGER: re.compile(r"-?[0-9]*\Z"),
    JsonType.FRACTION: re.compile(r"-?(?:[0-9][0-9.eE+-]*)?\Z"),
    JsonType.BOOLEAN: re.compile(r"(?:t|tr|tru|true|f|fa|fal|fals|false)\Z"),
    JsonType.NULL: re.compile(r"(?:n|nu|nul|null)\Z"),
    JsonType.OBJECT: re.compile(r"\{"),
    JsonType.ARRAY: re.compile(r"\["),
}


def find_types(schema: object, root: Schema) -> JsonType:
    """Return the types of the values that a schema allows. `root`: the schema that its references refer to."""
    return _join(map(types_of_one, list_alternatives(schema, root))) or ANY_TYPE


def types_of_one(schema: Schema) -> JsonType:
    """Return the types that a schema without alternatives allows."""
    values = list_values(schema)
    return _read_type(schema) if values is None else _join(_CLASSES[type(each)] for each in values)


def list_values(schema: Schema) -> list[Any] | None:
    """Return the values that a schema allows, if it lists them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    types = _read_type(schema)
    return [each for each in values if _CLASSES[type(each)] in types]


def _read_type(schema: Schema) -> JsonType:
    named = schema.get("type", list(TYPES))
    return _join(TYPES.get(str(name), NO_TYPE) for name in (named if isinstance(named, list) else [named]))


def _join(types: Iterable[JsonType]) -> JsonType:
    return functools.reduce(operator.or_, types, NO_TYPE)


def list_alternatives(schema: object, root: Schema) -> Iterator[Schema]:
    """Yield the schemas of which a value must match one, with references resolved.

    Without recursion, as a schema may be deep; each reference is followed once, as it may lead to itself.
    """
    followed: set[str] = set()
    rest = [schema]
    while rest:
        one = rest.pop()
        if not isinstance(one, Mapping):
            if one is not False:
                yield {}
            continue
        inner = _find_inner(one, root, followed)
        if inner is None:
            yield one
        else:
            rest += reversed(inner)


def _find_inner(schema: Schema, root: Schema, followed: set[str]) -> list[Any] | None:
    """Return the schemas that a schema refers to, each with what it says itself; None if it refers to none."""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in followed:
            return []
        followed.add(reference)
        return [_merge(schema, _resolve(reference, root))]
    for name in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(name)
        # Of several that must all match, none is an alternative.
        if isinstance(inner, list) and inner and (name != "allOf" or len(inner) == 1):
            return [_merge(schema, each) for each in inner]
    return None


def _merge(outer: Schema, inner: object) -> object:
    """Return an inner schema with what the outer one says of types and texts; only that, as there may be many inner."""
    if not isinstance(inner, Mapping):
        inner = {} if inner is not False else {"enum": []}
    return {name: outer[name] for name in _OF_TEXTS if name in outer} | dict(inner)


def _resolve(reference: str, root: Schema) -> object:
    """Return the schema at a place in `root`; one that allows anything if there is none."""
    found: Any = root if reference.startswith("#") else {}
    for name in split_reference(reference):
        found = found.get(name, {}) if isinstance(found, Mapping) else {}
    return found


def split_reference(reference: str) -> list[str]:
    """Return the names that lead to a place in a schema."""
    return [name.replace("~1", "/").replace("~0", "~") for name in reference.split("/")[1:]]


def is_json_of(text: str, types: JsonType) -> bool:
    """Return whether a text is JSON of one of these types."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return _CLASSES[type(value)] in types


def may_become(text: str, types: JsonType) -> bool:
    """Return whether a text that is not empty may be the beginning of JSON of one of these types."""
    return any(each in types and begins.match(text) for each, begins in _BEGINNINGS.items())
