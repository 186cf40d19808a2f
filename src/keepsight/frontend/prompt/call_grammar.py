"""The Lark grammar, as llguidance reads it, of an answer that may or must consist of tool calls.

A forced call is written exactly as `write_call` writes it, so that its text is the same when the client sends it back.
An optional call is free text until it begins like a call, and must then be one to its end. Arguments must match their
schema.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from keepsight.frontend.prompt.call_text import BARE, CallForm, write_closing, write_opening
from keepsight.frontend.prompt.json_types import Schema
from keepsight.structured_outputs import to_pattern

# The message of an llguidance error. It is followed by the lines around the one at fault, each after its number.
_PLACE = re.compile(r"\bat (?P<line>[0-9]+)\([0-9]+\): (?P<what>.*?)(?:\n *[0-9]+ \| |\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of tool calls. `schemas`: those of the arguments by function name, as llguidance reads them."""

    schemas: Mapping[str, Schema]
    must_call: bool = False
    is_single: bool = False
    form: Schema | None = None  # schema of an answer without calls; None: any text
    call_form: CallForm = BARE

    def __str__(self) -> str:
        rules = self._forced() if self.must_call else self._free() if self.form is None else self._formed(self.form)
        return "\n".join((*rules, *self.call_form.arguments.list_rules(self.schemas.values())))

    def find_function_at_fault(self, message: str) -> tuple[str, str] | None:
        """Return the function whose arguments keep the grammar from compiling, and why; None if it is not in them."""
        found = _PLACE.search(message)
        if found is None:
            return None
        line = str(self).split("\n")[int(found["line"]) - 1]
        rule = re.match("(?i:args)_([0-9]+)[_:]", line)
        return (list(self.schemas)[int(rule[1])], found["what"]) if rule else None

    def _forced(self) -> list[str]:
        written = [write_opening(name, self.call_form) for name in self.schemas]
        openings = [f"OPENING_{index}: {json.dumps(each)}" for index, each in enumerate(written)]
        closing = _literal(write_closing(self.call_form))
        calls = "call" if self.is_single else f"call ({json.dumps(self.call_form.between)} call)*"
        return [rf'start: {calls} "\n"?', self._choose("call", f"OPENING_{{}} args_{{}} {closing}"), *openings]

    def _free(self) -> list[str]:
        """Return the rules of an optional call. A text and an opening are one token each: the longer match wins."""
        own, names = self.call_form, "|".join(map(re.escape, self.schemas))
        openings = [f"OPENING_{index}: BEFORE {json.dumps(name)} BEHIND" for index, name in enumerate(self.schemas)]
        begun = f"{own.pattern_before_name}({names}){own.name_end}"
        anything = "(?s:.*)"
        before = anything if own.can_follow_text else ""
        return [
            f"start: TEXT | {self._name_calls()} TAIL?",
            self._choose("call", "OPENING_{} args_{} END"),
            # llguidance ignores a negation that stands alone, hence the intersection.
            f"TEXT: /{anything}/ & ~{to_pattern(f'{before}{begun}{anything}')}",
            f"BEFORE: {to_pattern(own.pattern_before_name)}",
            f"BEHIND: {to_pattern(own.pattern_behind_name)}",
            f"END: {to_pattern(own.pattern_of_end)}",
            f"TAIL: {to_pattern(own.tail)}",
            *openings,
            *(self._follow_text() if own.can_follow_text else ()),
        ]

    def _name_calls(self) -> str:
        if self.call_form.can_follow_text:
            return "first" if self.is_single else "first call*"
        return "call" if self.is_single else "call+"

    def _follow_text(self) -> list[str]:
        """Return rules that join text before the first call to its opening in one token: TEXT would not end there."""
        openings = [f"FIRST_{index}: TEXT OPENING_{index}" for index in range(len(self.schemas))]
        return [self._choose("first", "FIRST_{} args_{} END"), *openings]

    def _formed(self, form: Schema) -> list[str]:
        """Return the rules of an answer that is `form` or calls. Both are split into tokens, as both may be JSON."""
        own = self.call_form
        quotes = [each.strip() for each in own.quotes]
        names = [f"NAME_{index}: {json.dumps(name.join(quotes))}" for index, name in enumerate(self.schemas)]
        tokens = (own.before_name, own.behind_name, own.end)
        before, behind, end = ([_literal(each.strip()) for each in part] for part in tokens)
        calls = "call" if self.is_single else "call (SPACE? call)*"
        return [
            f"start: form | {calls} SPACE?",
            self._choose("call", " SPACE? ".join((*before, "NAME_{}", *behind, "args_{}", *end))),
            r"SPACE: /[ \n\t]{1,24}/",
            *names,
            f"form: %json {json.dumps(form)}",
        ]

    def _choose(self, name: str, rule: str) -> str:
        """Return a rule that has `rule` as an alternative for each function."""
        return f"{name}: " + " | ".join(rule.format(index, index) for index in range(len(self.schemas)))


def _literal(text: str) -> str:
    """Return a text as a literal in a rule that is to be formatted."""
    return json.dumps(text).replace("{", "{{").replace("}", "}}")
