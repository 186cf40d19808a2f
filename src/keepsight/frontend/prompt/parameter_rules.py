"""The grammar's rules of arguments that are written as parameters, as the function's schema demands.

Parameters have the schema's order, as properties have in llguidance's JSON. A string is free text within its own
schema, any other value is JSON by its schema. What else a schema says of all arguments together cannot be enforced.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.prompt.json_types import (
    NO_TYPE,
    Allowance,
    JsonType,
    Schema,
    SchemaReader,
    find_place,
    is_json_of,
    join,
    may_become,
    name_types,
    split_reference,
    type_of,
)
from keepsight.frontend.prompt.parameter_tags import ON_LINES, ParameterTags
from keepsight.structured_outputs import MAX_GRAMMAR_CHARACTERS, to_pattern

_FREE = "FREE"
_REFERENCE = re.compile(r'"\$ref": ("(?:[^"\\]|\\.)*")')
_DEFINITIONS = ("$defs", "definitions")
_IN_DEFINITIONS = tuple(f"#/{name}/" for name in _DEFINITIONS)
# What is enforced of all arguments together, and of a string; and what says nothing.
_ENFORCED = {"type", "properties", "required", "additionalProperties", "x-guidance", "$schema", "$id", *_DEFINITIONS}
_BESIDE_REFERENCE = {"$ref", *_ENFORCED} - {"properties", "required", "additionalProperties"}
_LISTING = {"enum", "const"}
_ENFORCED_OF_TEXT = {"type", "minLength", "maxLength", "pattern"}
# The end of a text in a pattern, and an end or a beginning anywhere in it.
_END, _ANCHOR = re.compile(r"(?<!\\)(?:\\\\)*\$\Z"), re.compile(r"(?<![\\\[])\^|(?<!\\)\$")
# Values in a token of texts. Numbers are so short that they are finite. Objects and arrays are only known to begin.
_INTEGER = "-?(0|[1-9][0-9]{0,99})"
_AMID_TEXTS = {
    JsonType.NULL: '"null"',
    JsonType.BOOLEAN: '"true" | "false"',
    JsonType.INTEGER: f"/{_INTEGER}/",
    JsonType.FRACTION: rf"/{_INTEGER}(\.[0-9]{{1,99}})?([eE][+-]?[0-9]{{1,2}})?/",
    JsonType.OBJECT: rf"/\{{(?s:.*)/ & {_FREE}",
    JsonType.ARRAY: rf"/\[(?s:.*)/ & {_FREE}",
}
# With these, arguments may have names that are not listed.
_OPENING = {"anyOf", "oneOf", "allOf", "$ref", "patternProperties", "propertyNames"}


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a schema says of parameters. `others`: the schema of those that it does not name; None: there are none."""

    named: Mapping[str, Any]
    required: Set[str]
    others: Any
    unenforced: Set[str]


def read_parameters(reader: SchemaReader) -> Parameters:
    """Read a function's schema, whatever it looks like."""
    schema = reader.follow_references(reader.root)
    named, required = schema.get("properties"), schema.get("required")
    named = dict(named) if isinstance(named, Mapping) else {}
    reader.spend(len(named) + (len(required) if isinstance(required, list) else 0))
    required = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
    named |= {name: {} for name in sorted(required - named.keys())}
    others = schema.get("additionalProperties", True if _OPENING & schema.keys() else None)
    beside = set() if schema is reader.root else reader.root.keys() - _BESIDE_REFERENCE
    return Parameters(named, required, None if others is False else others, schema.keys() - _ENFORCED | beside)


class ParameterRules:
    """The rules of all functions. What several of them need is one rule, which has the first one's index in its name.

    `lines`: the rule `args_{index}` of each function, and those that it needs, beside `shared_lines`. `unenforced`:
    keywords of the schemas that no rule expresses.
    """

    def __init__(self, tags: ParameterTags = ON_LINES) -> None:
        self.lines, self.unenforced = list[str](), set[str]()
        self._tags = tags
        self._before, self._behind = json.dumps(tags.before), json.dumps(tags.closing + tags.behind)
        self._names: dict[str, str] = {}  # of rules, by what they say
        self._values: dict[str, str] = {}  # what was written of one function's values, by their schemas
        self._index = self._num_characters = 0
        self._schema: Schema = {}
        self._allowance = Allowance()
        self._reader = SchemaReader({}, self._allowance)

    @property
    def shared_lines(self) -> list[str]:
        text = f"({self._before} {_FREE})?" if self._tags.before else _FREE
        return [f"{_FREE}: /(?s:.*)/ & ~/{self._tags.pattern_of_unfit}/", f"ANY_TEXT: {text} {self._behind}"]

    def add_function(self, index: int, schema: Schema) -> None:
        self._index, self._schema, self._values = index, schema, {}
        self._reader = SchemaReader(schema, self._allowance)
        found = read_parameters(self._reader)
        self.unenforced |= found.unenforced
        parts = []
        for name, own in found.named.items():
            if own is False or self._tags.not_in_names & set(name):
                self.unenforced.add("properties")
            else:
                rule = self._name_rule(f"{json.dumps(f'<parameter={name}>')} {self._write_value(own)}")
                parts.append(rule if name in found.required else f"{rule}?")
        if found.others is not None:
            rule = f"{self._write_other_name(found.named)} {self._write_value(found.others)}"
            parts.append(f"{self._name_rule(rule)}*")
        self.lines.append(f"args_{index}: {' '.join(parts) or json.dumps('')}")

    def _name_rule(self, rule: str, prefix: str = "args") -> str:
        if rule not in self._names:
            self._num_characters += len(rule)
            _check_length(self._num_characters)
            self._names[rule] = f"{prefix}_{self._index}_{len(self._names)}"
            self.lines.append(f"{self._names[rule]}: {rule}")
        return self._names[rule]

    def _name_token(self, token: str) -> str:
        return self._name_rule(token, "ARGS")

    def _write_other_name(self, named: Iterable[str]) -> str:
        """Return a token that opens a parameter of any other name."""
        listed = to_pattern(f"({'|'.join(map(re.escape, named))})")
        return self._name_token(rf'"<parameter=" (/[^<>\n]+/ & ~{listed}) ">"')

    def _write_value(self, schema: Any) -> str:
        """Return the name of a rule, or a token, of a value and its closing tag."""
        written = json.dumps(schema)
        if written not in self._values:
            left_out = set[str]()
            alternatives = list(self._reader.list_alternatives(schema, left_out))
            types = self._reader.join_types(alternatives)
            if JsonType.STRING not in types:
                self._values[written] = self._write_json(schema)
            else:
                self.unenforced |= left_out
                self._values[written] = self._choose(alternatives, types) or self._free(schema)
        return self._values[written]

    def _free(self, schema: Schema) -> str:
        self.unenforced |= schema.keys()
        return "ANY_TEXT"

    def _choose(self, alternatives: Iterable[Schema], types: JsonType) -> str | None:
        """Return a rule or a token of a value that matches one schema; None if none allows any value."""
        texts, others = list[str](), list[tuple[Schema, JsonType]]()
        listing = list[tuple[Schema, list[Any]]]()
        for one in alternatives:
            own, values = self._reader.types_of_one(one), self._reader.list_values(one)
            if values is not None:
                self.unenforced |= one.keys() - {"type", "const" if "const" in one else "enum"}
                listing.append((one, values))
                continue
            if JsonType.STRING in own:
                texts.append(self._write_text(one))
            if other := own & ~JsonType.STRING:
                others.append((one, other))
        listed = self._write_listed(listing, join(other for _, other in others), is_beside_texts=bool(texts))
        # A token ends only where it can no longer go on. So what begins like a text is part of the texts' token.
        amid = types & ~JsonType.STRING if texts else _find_begun(listed)
        parts = [*texts, *map(json.dumps, listed), *self._write_amid(others, amid, is_free=_FREE in texts)]
        if _FREE in texts:
            return "ANY_TEXT"
        apart = [{**one, "type": name_types(own & ~amid)} for one, own in others if own & ~amid]
        if not (parts or apart):
            return None
        token = self._name_token(f"{self._before} ({' | '.join(parts)}) {self._behind}")
        return f"({token} | {self._write_json({'anyOf': apart})})" if apart else token

    def _write_listed(
        self, listing: Sequence[tuple[Schema, list[Any]]], others: JsonType, *, is_beside_texts: bool
    ) -> list[str]:
        """Return the texts of listed values. `others`: the types of which values are allowed that are not listed."""
        written = {json.dumps(each): each for _, values in listing for each in values}
        as_json = {text: type_of(each) for text, each in written.items() if not isinstance(each, str)}
        types = join(as_json.values()) & ~others
        strings = [each for each in written.values() if isinstance(each, str)]
        # A string that is JSON of a listed value's type would be read as such a value.
        right = [
            each for each in strings if self._tags.can_hold(each) and (each in as_json or not is_json_of(each, types))
        ]
        if len(right) < len(strings) or (is_beside_texts and types & ~JsonType.NULL):
            self.unenforced |= _LISTING & {name for schema, _ in listing for name in schema}
        return [*right, *as_json]

    def _write_amid(self, others: Iterable[tuple[Schema, JsonType]], amid: JsonType, *, is_free: bool) -> list[str]:
        """Return what is added to the token of texts for values of the types `amid`, whatever their schemas say."""
        needed = NO_TYPE
        for schema, own in others:
            if own & amid:
                self.unenforced |= schema.keys() - _ENFORCED_OF_TEXT
                needed |= own & amid
        if needed & (JsonType.OBJECT | JsonType.ARRAY) and not is_free:
            self.unenforced.add("type")
        return [part for each, part in _AMID_TEXTS.items() if each in needed]

    def _write_text(self, schema: Schema) -> str:
        self.unenforced |= schema.keys() - _ENFORCED_OF_TEXT
        least, most, pattern = (schema.get(name) for name in ("minLength", "maxLength", "pattern"))
        bounds = [str(each) if isinstance(each, int) else "" for each in (least, most)]
        parts = [_FREE]
        if any(bounds):
            parts.append(to_pattern(f"(?s:.{{{bounds[0] or 0},{bounds[1]}}})"))
        if isinstance(pattern, str):
            parts.append(to_pattern(self._match_whole(pattern)))
        return " & ".join(parts)

    def _write_json(self, schema: Schema) -> str:
        options = {"x-guidance": self._schema.get("x-guidance", {})}
        whole = json.dumps(options | dict(schema) | self._list_definitions(schema))
        return self._name_rule(f"{self._before} %json {_REFERENCE.sub(self._refer, whole)} {self._behind}")

    def _list_definitions(self, schema: Schema) -> dict[str, dict[str, Any]]:
        """Return the definitions that a value's schema refers to, directly or not: all of them may be a lot more."""
        listed: dict[str, dict[str, Any]] = {}
        rest: list[object] = [schema]
        num_characters = 0
        while rest:
            written = json.dumps(rest.pop())
            num_characters += len(written)
            _check_length(num_characters)
            for found in map(self._find_definition, map(json.loads, _REFERENCE.findall(written))):
                if found is not None and found[1] not in listed.setdefault(found[0], {}):
                    kind, name, place = found
                    listed[kind][name] = place
                    rest.append(place)
        return listed

    def _find_definition(self, reference: str) -> tuple[str, str, object] | None:
        """Return where a value's own schema has a definition, its name and itself.

        A place elsewhere in the function's schema becomes one that has the place's pointer as its name.
        """
        names = split_reference(reference)
        if names is None or (place := find_place(names, self._schema)) is None:
            return None
        if reference.startswith(_IN_DEFINITIONS):
            return names[0], names[1], find_place(names[:2], self._schema)
        if not names:
            place = {name: each for name, each in self._schema.items() if name not in ("x-guidance", *_DEFINITIONS)}
        return "$defs", unquote(reference[1:]), place

    def _refer(self, written: re.Match[str]) -> str:
        """Rewrite a reference so that it leads to the same place in a value's own schema."""
        reference = json.loads(written[1])
        if reference.startswith(_IN_DEFINITIONS) or self._find_definition(reference) is None:
            return written[0]
        name = reference[1:].replace("~", "~0").replace("/", "~1")
        return f'"$ref": {json.dumps(f"#/$defs/{name}")}'

    def _match_whole(self, pattern: str) -> str:
        """Return the pattern of whole texts in which JSON Schema's `pattern` is found.

        An anchor of its first or last alternative is taken for one of all: that allows fewer texts, but no others.
        """
        begins, ends = pattern.startswith("^"), _END.search(pattern) is not None
        inner = pattern[begins : len(pattern) - ends]
        if _ANCHOR.search(inner):  # llguidance knows none
            self.unenforced.add("pattern")
            return "(?s:.*)"
        return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"


def _check_length(num_characters: int) -> None:
    if num_characters > MAX_GRAMMAR_CHARACTERS:
        raise InvalidArgumentError("tools", f"are longer than {MAX_GRAMMAR_CHARACTERS} characters as a grammar")


def _find_begun(texts: Iterable[str]) -> JsonType:
    """Return the types of values that may begin like one of these texts."""
    first = {text[0] for text in texts if text}
    return join(each for each in JsonType if any(may_become(one, each) for one in first))
