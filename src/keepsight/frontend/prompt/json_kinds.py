"""Which kinds of JSON values a schema allows, and whether a text is, or may become, a value of these kinds.

It knows nothing of calls. What a schema says of the values themselves, beside `enum` and `const`, is not looked at.
"""

import re
from collections.abc import Iterator, Mapping
from enum import Flag, auto
from typing import Any

import msgspec

Schema = Mapping[str, Any]


class Kind(Flag):
    """A set of kinds. JSON's numbers are two: an `integer` is also a `number`."""

    STRING = auto()
    INTEGER = auto()
    FRACTION = auto()
    BOOLEAN = auto()
    NULL = auto()
    OBJECT = auto()
    ARRAY = auto()
    NUMBER = INTEGER | FRACTION


# The kinds that values may have, by their names; `None` stands for all other names.
Kinds = Mapping[str | None, Kind]
NO_KIND, ANY_KIND = Kind(0), ~Kind(0)
TYPES = {
    "string": Kind.STRING,
    "integer": Kind.INTEGER,
    "number": Kind.NUMBER,
    "boolean": Kind.BOOLEAN,
    "null": Kind.NULL,
    "object": Kind.OBJECT,
    "array": Kind.ARRAY,
}
_CLASSES = {
    str: Kind.STRING,
    int: Kind.INTEGER,
    float: Kind.FRACTION,
    bool: Kind.BOOLEAN,
    type(None): Kind.NULL,
    dict: Kind.OBJECT,
    list: Kind.ARRAY,
}
_OF_TEXTS = ("type", "enum", "const", "minLength", "maxLength", "pattern", "format")
# How texts of these kinds begin. An object or an array is known by its first character.
_BEGINNINGS = {
    Kind.INTEGER: re.compile(r"-?[0-9]*\Z"),
    Kind.FRACTION: re.compile(r"-?(?:[0-9][0-9.eE+-]*)?\Z"),
    Kind.BOOLEAN: re.compile(r"(?:t|tr|tru|true|f|fa|fal|fals|false)\Z"),
    Kind.NULL: re.compile(r"(?:n|nu|nul|null)\Z"),
    Kind.OBJECT: re.compile(r"\{"),
    Kind.ARRAY: re.compile(r"\["),
}


def find_kinds(schema: object, root: Schema) -> Kind:
    """Return the kinds of the values that a schema allows. `root`: the schema that its references refer to."""
    kinds = NO_KIND
    for leaf in list_alternatives(schema, root):
        kinds |= kinds_of_one(leaf)
    return kinds or ANY_KIND


def kinds_of_one(schema: Schema) -> Kind:
    """Return the kinds that a schema without alternatives allows."""
    named = schema.get("type")
    kinds = NO_KIND if named else ANY_KIND
    for name in named if isinstance(named, list) else [named]:
        kinds |= TYPES.get(name, NO_KIND) if isinstance(name, str) else NO_KIND
    values = list_values(schema)
    if values is None:
        return kinds
    kinds_of_values = NO_KIND
    for value in values:
        kinds_of_values |= _CLASSES.get(type(value), NO_KIND)
    return kinds & kinds_of_values


def list_values(schema: Schema) -> list[Any] | None:
    """Return the values if a schema lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


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
    """Return an inner schema with what the outer one says of kinds and texts; only that, as there may be many inner."""
    if not isinstance(inner, Mapping):
        inner = {} if inner is not False else {"enum": []}
    return {name: outer[name] for name in _OF_TEXTS if name in outer} | dict(inner)


def _resolve(reference: str, root: Schema) -> object:
    """Return the schema at a place in `root`; one that allows anything if there is none."""
    found: Any = root
    if not reference.startswith("#"):
        return {}
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            return {}
        found = found[name]
    return found


def is_of_kind(text: str, kinds: Kind) -> bool:
    """Return whether a text is JSON of one of these kinds."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return _CLASSES[type(value)] in kinds


def may_become(text: str, kinds: Kind) -> bool:
    """Return whether a text that is not empty may be the beginning of JSON of one of these kinds."""
    return any(kind in kinds and begins.match(text) for kind, begins in _BEGINNINGS.items())
