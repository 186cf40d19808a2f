"""The form that an answer must have: vLLM's `StructuredOutputsParams`, with its names.

Plain values only, so it is sent between processes as it is; `to_grammar` is the one string that both sides compile.
Schemas and grammars are not validated here: `frontend/prompt/check_grammar.py` compiles them.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from keepsight.errors import InvalidArgumentError
from keepsight.gbnf import GbnfError, is_gbnf, to_lark

# Agents send sixty tools and more, with 100 to 200 KB of schemas, which compile in 0.2 seconds and 15 MiB. Length is
# not what makes compiling expensive: its time and memory have limits of their own.
MAX_GRAMMAR_CHARACTERS = 256 * 2**10
# Limits on a compiled grammar, for llguidance. A string needs as many states as it may have characters; a malicious
# pattern could need any number.
MAX_LEXER_STATES = 50_000
# An object with optional properties has about four for each, as any of them may come next.
MAX_ITEMS_IN_ROW = 10_000
# White space between JSON tokens. Without a bound, a model that is unsure writes spaces until its last token.
WHITE_SPACE = {"whitespace_pattern": r"[ \n\t]{0,24}"}
NO_WHITE_SPACE = {"whitespace_flexible": False}
# llguidance's options that may bring white space even so.
_SEPARATORS = {"item_separator", "key_separator"}
# The values of `format` that llguidance enforces; any other is an annotation, as in JSON Schema.
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
# Keywords whose values map the caller's own names to schemas, and keywords whose values are not schemas.
_MAPS_OF_SCHEMAS = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_VALUES = {"const", "enum"}
# JSON Schema's types of values that need no comparison part by part.
_TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "number", float: "number", NoneType: "null"}
_ANY = object()
# Keywords that only document a schema.
_WORDS = {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"}
# Syntax that llguidance's patterns do not have: lookaround, backreferences, word boundaries.
_BEYOND_PATTERNS = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9bBk])")
# The ranges of lower and upper bounds that llguidance takes: it makes patterns of them, via floats and 64-bit integers.
_LOWER, _UPPER = (-(2**63) + 2**10, 10**18 - 2**10), (2**10 - 10**18, 2**63 - 1)
_BOUNDS = {"minimum": _LOWER, "exclusiveMinimum": _LOWER, "maximum": _UPPER, "exclusiveMaximum": _UPPER}
# References to schemas outside the request: nothing is fetched. The standard's own come with llguidance.
_ELSEWHERE = re.compile(r"(?!https?://json-schema\.org/)[a-zA-Z][a-zA-Z0-9+.-]*:")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form of an answer. Exactly one of the first five fields must be set."""

    json: str | dict[str, Any] | None = None  # a JSON schema; a string, once constructed
    regex: str | None = None
    choice: Sequence[str] | None = None  # a tuple, once constructed
    grammar: str | None = None  # Lark's or llama.cpp's (GBNF); Lark's as llguidance reads it, once constructed
    json_object: bool | None = None  # any object
    disable_any_whitespace: bool = False  # between the tokens of JSON

    def __post_init__(self) -> None:
        given = self._given
        if len(given) != 1:
            what = f"{given[0]} and {given[1]} are given together" if given else "nothing is given"
            raise InvalidArgumentError(_FIELD, f"{what}: give one of {', '.join(_CHECKS)}")
        [name] = given
        object.__setattr__(self, name, _CHECKS[name](f"{_FIELD}.{name}", getattr(self, name)))
        self._check_white_space()
        _check_length(f"{_FIELD}.{name}", len(self.to_grammar()), " as llguidance reads it")

    def _check_white_space(self) -> None:
        field, disables_whitespace = f"{_FIELD}.disable_any_whitespace", self.disable_any_whitespace
        if not isinstance(disables_whitespace, bool):
            raise InvalidArgumentError(field, "must be true or false")
        if disables_whitespace and self.field not in ("json", "json_object"):
            raise InvalidArgumentError(field, f"applies only to JSON, not to a {self.field}")
        own = json.loads(str(self.json or "{}")).get("x-guidance", {}) if disables_whitespace else {}
        if not isinstance(own, dict) or any(_is_of_white_space(name) or name in _SEPARATORS for name in own):
            of_what = "white space or separators"
            what = f"cannot be combined with {of_what} in a schema's own x-guidance: set whitespace_flexible there"
            raise InvalidArgumentError(field, what)

    @property
    def field(self) -> str:
        """The name of the field that is set."""
        return self._given[0]

    @property
    def path(self) -> str:
        """The path of the field that is set, as callers of `LLM` write it."""
        return f"{_FIELD}.{self.field}"

    @property
    def _given(self) -> list[str]:
        return [name for name in _CHECKS if getattr(self, name) not in (None, False)]

    def to_grammar(self) -> str:
        """Return the grammar in llguidance's format."""
        if self.regex is not None:
            return _from_lark(f"start: {to_pattern(self.regex)}")
        if self.choice is not None:
            # One terminal for all: with one each, the parser would track every one, and fail beyond two thousand.
            return _from_lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each) for each in self.choice))
        if self.grammar is not None:
            return _from_lark(self.grammar)
        return json.dumps({"grammars": [{"json_schema": self.to_schema()}]})

    def to_schema(self) -> dict[str, Any]:
        """Return the JSON schema as llguidance reads it."""
        schema = {"type": "object"} if self.json is None else json.loads(str(self.json))
        return write_schema(schema, NO_WHITE_SPACE if self.disable_any_whitespace else WHITE_SPACE)


_FIELD = "structured_outputs"


def write_schema(schema: dict[str, Any], options: Mapping[str, Any] = WHITE_SPACE) -> dict[str, Any]:
    """Return the schema as llguidance reads it; modifies `schema`.

    `options` are llguidance's; the schema's own replace them. If they are `lenient`, llguidance ignores keywords that
    it does not implement, but not unsupported values of others: these are dropped here.
    """
    _drop_unenforced(schema, is_lenient=bool(options.get("lenient")))
    own = schema.pop("x-guidance", {})
    return {"x-guidance": _join_options(options, own) if isinstance(own, dict) else own} | schema


def _join_options(options: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Join two options' names. Those of white space belong together: to llguidance, a pattern outdoes the others."""
    replaced = {name for name in options if _is_of_white_space(name)} if any(map(_is_of_white_space, own)) else set()
    return {name: value for name, value in options.items() if name not in replaced} | {**own}


def _is_of_white_space(name: str) -> bool:
    return name.startswith("whitespace")


def _from_lark(grammar: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})


def _drop_unenforced(schema: object, *, is_lenient: bool) -> None:
    """Drop documentation, unknown formats and, if lenient, values that llguidance would refuse; write a `oneOf` of
    distinct numbers as `anyOf`, which it is, unless a reference leads into one.

    Without recursion, as a schema may be deep.
    """
    rest = [(schema, True)]
    one_ofs: list[dict[str, Any]] = []
    leads_into_one_of = False
    while rest:
        part, is_schema = rest.pop()
        if isinstance(part, list):
            rest += ((each, True) for each in part)
        elif isinstance(part, dict) and not is_schema:
            rest += ((each, True) for each in part.values())
        elif isinstance(part, dict):
            if is_lenient:
                _free_names(part)
            if "anyOf" not in part and _has_distinct_numbers(part.get("oneOf")):
                one_ofs.append(part)
            leads_into_one_of |= "/oneOf/" in str(part.get("$ref"))
            for name in [name for name, inner in part.items() if _is_unenforced(name, inner, is_lenient)]:
                del part[name]
            rest += ((inner, name not in _MAPS_OF_SCHEMAS) for name, inner in part.items() if name not in _VALUES)
    # If lenient, llguidance does so itself.
    for part in [] if is_lenient or leads_into_one_of else one_ofs:
        part["anyOf"] = part.pop("oneOf")


def _has_distinct_numbers(branches: object) -> bool:
    """Return whether several branches list numbers, and no value matches two of any: llguidance cannot prove that."""
    matched = [_list_matches(branch) for branch in branches] if isinstance(branches, list) else []
    every = [*itertools.chain(*matched)]
    whole, listed = ({name for name, value in every if (value is _ANY) == is_whole} for is_whole in (True, False))
    num_listing = sum(any(name == "number" and value is not _ANY for name, value in each) for each in matched)
    return num_listing > 1 and all(matched) and len(set(every)) == len(every) and whole.isdisjoint(listed)


def _list_matches(schema: object) -> set[tuple[str, object]]:
    """Return the values that a schema lists, with their types, or else `_ANY` for its types; empty if it has neither,
    or lists values that would have to be compared part by part.
    """
    if not isinstance(schema, dict):
        return set()
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list) and listed:
        are_known = all(type(each) in _TYPES for each in listed)
        return {(_TYPES[type(each)], each) for each in listed} if are_known else set()
    types = schema.get("type")
    names = [each for each in (types if isinstance(types, list) else [types]) if isinstance(each, str)]
    return {("number" if name == "integer" else name, _ANY) for name in names}


def _is_unenforced(name: str, value: object, is_lenient: bool) -> bool:
    """Return whether to drop a keyword of a schema."""
    if name in _WORDS or (name == "format" and isinstance(value, str) and value not in _FORMATS):
        return True
    return is_lenient and _is_beyond(name, value)


def _is_beyond(name: str, value: object) -> bool:
    """Return whether llguidance knows the keyword, but does not support its value."""
    if isinstance(value, str):
        is_elsewhere = name in ("$ref", "$schema") and _ELSEWHERE.match(value) is not None
        return is_elsewhere or (name == "pattern" and _BEYOND_PATTERNS.search(value) is not None)
    if name in _BOUNDS and isinstance(value, int | float):
        least, greatest = _BOUNDS[name]
        return not least <= value <= greatest
    return False


def _free_names(schema: dict[str, Any]) -> None:
    """Drop unsupported patterns of property names, and then `additionalProperties`: they might match any name."""
    patterns = schema.get("patternProperties")
    beyond = [each for each in patterns if _BEYOND_PATTERNS.search(each)] if isinstance(patterns, dict) else []
    for each in beyond:
        del schema["patternProperties"][each]
    if beyond:
        schema.pop("additionalProperties", None)


def to_pattern(regex: str) -> str:
    """Return a regex as Lark writes it, between slashes. A backslash and the character after it belong together."""
    escaped, is_behind_backslash = [], False
    for character in regex:
        spelled = {"\n": "n"} if is_behind_backslash else {"/": r"\/", "\n": r"\n"}
        escaped.append(spelled.get(character, character))
        is_behind_backslash = character == "\\" and not is_behind_backslash
    return f"/{''.join(escaped)}/"


def _check_length(field: str, num_characters: int, of_what: str = "") -> None:
    """Check the length of an input before further work: it may have millions of characters, its grammar even more."""
    if num_characters > MAX_GRAMMAR_CHARACTERS:
        raise InvalidArgumentError(field, f"is longer than {MAX_GRAMMAR_CHARACTERS} characters{of_what}")


def _check_schema(field: str, schema: object) -> str:
    if isinstance(schema, Mapping):
        try:
            written = json.dumps(dict(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(field, f"cannot be written as JSON: {error}") from error
        _check_length(field, len(written))
        return written
    if not isinstance(schema, str):
        kinds = "a JSON schema, as a mapping or a string (of a pydantic model: its model_json_schema())"
        raise InvalidArgumentError(field, f"must be {kinds}, not {schema!r:.80}")
    text = _check_text(field, schema)
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(field, f"is not valid JSON: {error}") from error
    if not is_object:
        raise InvalidArgumentError(field, "must be a JSON schema (an object)")
    return text


def _check_text(field: str, text: object) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidArgumentError(field, "must be a non-empty string")
    return _check_any_text(field, text)


def _check_any_text(field: str, text: object) -> str:
    if not isinstance(text, str):
        raise InvalidArgumentError(field, "must be a string")
    _check_length(field, len(text))
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidArgumentError(field, "contains an unpaired surrogate")
    return text


def _check_grammar(field: str, grammar: object) -> str:
    text = _check_text(field, grammar)
    try:
        return to_lark(text) if is_gbnf(text) else text
    except GbnfError as error:
        raise InvalidArgumentError(field, f"cannot be read as GBNF: {error}") from error


def _check_choice(field: str, choice: object) -> tuple[str, ...]:
    if isinstance(choice, str | Mapping) or not isinstance(choice, Iterable):
        raise InvalidArgumentError(field, "must be a list of strings")
    texts = tuple(choice)
    _check_length(field, len(texts))
    _check_length(field, sum(len(each) for each in texts if isinstance(each, str)))
    texts = tuple(_check_any_text(f"{field}[{index}]", each) for index, each in enumerate(texts))
    if not any(texts):
        raise InvalidArgumentError(field, "has no text to choose")
    return texts


def _check_json_object(field: str, value: object) -> bool:
    if value is not True:
        raise InvalidArgumentError(field, "must be true or absent")
    return True


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "json": _check_schema,
    "regex": _check_any_text,
    "choice": _check_choice,
    "grammar": _check_grammar,
    "json_object": _check_json_object,
}
