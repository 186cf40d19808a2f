"""How a call of a tool is written in a text: in the form that the chat template teaches; of one that teaches none that
is known here, in the form that Google documents for Gemma 3, which has no tokens for it.

What a model is told, what it may answer and what is read out of its answer are all made of this.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keepsight.structured_outputs import NO_WHITE_SPACE

MAX_NAME_LENGTH = 128
# OpenAI's characters, and the dot of MCP's names.  None of them is escaped in JSON.
NAME_PATTERN = rf"[a-zA-Z0-9_.-]{{1,{MAX_NAME_LENGTH}}}"
WHITE_SPACE = r"[ \n\t]{0,24}"
NAME_END = '"'
# Left to itself a model may put JSON between two of these.
_FENCES = rf"{WHITE_SPACE}(?:```[a-z_]{{0,16}}{WHITE_SPACE}){{0,2}}"
# Patterns, each of one character or of a run.
_TO_NAME = (r"\{", WHITE_SPACE, *'"name"', WHITE_SPACE, ":", WHITE_SPACE, '"')


@dataclass(frozen=True, slots=True, eq=False)  # each is one of its own
class CallForm:
    """A call is JSON: `{"name": ..., arguments_key: ...}`, between `opening` and `closing`.

    Where a model is free, white space may be more or less than what is written here.
    """

    arguments_key: str
    # Between the tokens of arguments that have to be written: one that would rather not may go on with spaces for long.
    spacing: Mapping[str, Any]
    # Patterns of what a model may put before a call (and of what begins like that) and behind the last by itself.
    lead: str
    begun_leads: tuple[str, ...]
    tail: str
    opening: str = ""
    closing: str = ""
    # Otherwise an answer is calls from its beginning on, or none.
    can_follow_text: bool = False

    @property
    def before_name(self) -> str:
        """How a model may begin a call by itself.  What has gone as far as the name's end is nothing else."""
        return "".join((self.lead, *self._to_name))

    @property
    def behind_name(self) -> str:
        return "".join(self._to_arguments)

    @property
    def end(self) -> str:
        return "".join((WHITE_SPACE, r"\}", *_loosely(self.closing)))

    @property
    def _to_name(self) -> tuple[str, ...]:
        return (*_loosely(self.opening), *_TO_NAME)

    @property
    def _to_arguments(self) -> tuple[str, ...]:
        key = f'"{self.arguments_key}"'
        return (NAME_END, WHITE_SPACE, ",", WHITE_SPACE, *key, WHITE_SPACE, ":", WHITE_SPACE)

    def match_unfinished_opening(self, name: str) -> str:
        """Of every beginning of `before_name`, a name and `behind_name`, and of the whole."""
        rest = ""
        for pattern in reversed((*self._to_name, name, *self._to_arguments)):
            rest = f"(?:{pattern}{rest})?"
        return f"{self.lead}(?:{'|'.join((*self.begun_leads, rest))})"

    def is_taught_by(self, text: str) -> bool:
        """`text`: all that a template may write."""
        return self.opening.strip() in text and f'"{self.arguments_key}"' in text


BARE = CallForm(
    "parameters",
    {"whitespace_pattern": " ?"},
    lead=_FENCES,
    begun_leads=("`{1,2}",),
    tail=rf"{WHITE_SPACE}(?:```{WHITE_SPACE})?",
)
# Hermes's and Qwen's: each stands in a line of its own, behind what is said with it.
TAGGED = CallForm(
    "arguments",
    # As `tojson` writes them into a later turn.
    {**NO_WHITE_SPACE, "item_separator": ", ", "key_separator": ": "},
    lead=r"\n?",
    begun_leads=(),
    tail=r"\n?",
    opening="<tool_call>\n",
    closing="\n</tool_call>",
    can_follow_text=True,
)


def write_opening(name: str, form: CallForm = BARE) -> str:
    """All that is before the arguments."""
    return f'{form.opening}{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.arguments_key}": '


def write_closing(form: CallForm = BARE) -> str:
    return f"}}{form.closing}"


def write_call(name: str, arguments: str, form: CallForm = BARE) -> str:
    return f"{write_opening(name, form)}{arguments}{write_closing(form)}"


def _loosely(text: str) -> Iterable[str]:
    return (WHITE_SPACE if each == "\n" else re.escape(each) for each in text)
