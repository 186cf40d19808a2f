"""The grammar of an answer that may, or must, be calls of tools: Lark's, as llguidance reads it.

What must be a call is written as `write_call` would, so that it is the same text when it comes back.  What may be one
is free until it has begun like one, and then is one to its end.  Arguments keep to their schema.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepsight.frontend.prompt.call_text import (
    BEFORE_NAME,
    BEHIND_NAME,
    END_PATTERN,
    NAME_END,
    TAIL_PATTERN,
    write_opening,
)

Schema = Mapping[str, Any]
_PLACE = re.compile(r"\bat (?P<line>[0-9]+)\([0-9]+\): (?P<what>[^\n]*)")


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """`schemas`: of the arguments, by the names of the functions, as llguidance reads them."""

    schemas: Mapping[str, Schema]
    must_call: bool = False
    is_single: bool = False
    form: Schema | None = None  # of what is no call; None: any text

    def __str__(self) -> str:
        rules = self._forced() if self.must_call else self._free() if self.form is None else self._formed(self.form)
        arguments = [f"args_{index}: %json {json.dumps(each)}" for index, each in enumerate(self.schemas.values())]
        return "\n".join((*rules, *arguments))

    def place_fault(self, message: str) -> tuple[str, str] | None:
        """Of a grammar that cannot be compiled: the function whose arguments are at fault, and why."""
        found = _PLACE.search(message)
        if found is None:
            return None
        line = str(self).split("\n")[int(found["line"]) - 1]
        rule = re.match("args_([0-9]+):", line)
        return (list(self.schemas)[int(rule[1])], found["what"]) if rule else None

    def _forced(self) -> list[str]:
        openings = [f"OPENING_{index}: {json.dumps(write_opening(name))}" for index, name in enumerate(self.schemas)]
        calls = "call" if self.is_single else r'call ("\n" call)*'
        return [rf'start: {calls} "\n"?', self._choose('OPENING_{} args_{} "}}"'), *openings]

    def _free(self) -> list[str]:
        """A text and an opening are one token each: whichever gets further is what was written."""
        names = "|".join(map(re.escape, self.schemas))
        openings = [f"OPENING_{index}: BEFORE {json.dumps(name)} BEHIND" for index, name in enumerate(self.schemas)]
        return [
            f"start: TEXT | {'call' if self.is_single else 'call+'} TAIL?",
            self._choose("OPENING_{} args_{} END"),
            # llguidance takes no notice of a negation that stands by itself.
            rf"TEXT: /(?s:.*)/ & ~/{BEFORE_NAME}({names}){NAME_END}(?s:.*)/",
            f"BEFORE: /{BEFORE_NAME}/",
            f"BEHIND: /{BEHIND_NAME}/",
            f"END: /{END_PATTERN}/",
            f"TAIL: /{TAIL_PATTERN}/",
            *openings,
        ]

    def _formed(self, form: Schema) -> list[str]:
        """Both are JSON, and are cut into its tokens."""
        names = [f"NAME_{index}: {json.dumps(json.dumps(name))}" for index, name in enumerate(self.schemas)]
        parts = ('"{{"', r'"\"name\""', '":"', "NAME_{}", '","', r'"\"parameters\""', '":"', "args_{}", '"}}"')
        calls = "call" if self.is_single else "call (SPACE? call)*"
        return [
            f"start: form | {calls} SPACE?",
            self._choose(" SPACE? ".join(parts)),
            r"SPACE: /[ \n\t]{1,24}/",
            *names,
            f"form: %json {json.dumps(form)}",
        ]

    def _choose(self, rule: str) -> str:
        """A call of any of the functions."""
        return "call: " + " | ".join(rule.format(index, index) for index in range(len(self.schemas)))
