"""How a tool call is written as text: in the form that the chat template teaches or, if it teaches none known here, in
the form that Google documents for Gemma 3, which has no special tokens for calls.

The instructions to the model, the grammar of its answer and the parser of its answer are all built from this.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keepsight.structured_outputs import NO_WHITE_SPACE

MAX_NAME_LENGTH = 128
# The characters that OpenAI allows, and the dot of MCP's names. None of them is escaped in JSON.
NAME_PATTERN = rf"[a-zA-Z0-9_.-]{{1,{MAX_NAME_LENGTH}}}"
WHITE_SPACE = r"[ \n\t]{0,24}"
NAME_END = '"'
# A model that is not constrained may put its JSON between two Markdown fences.
_FENCES = rf"{WHITE_SPACE}(?:```[a-z_]{{0,16}}{WHITE_SPACE}){{0,2}}"
# Patterns, each matching one character or one run of white space.
_TO_NAME = (r"\{", WHITE_SPACE, *'"name"', WHITE_SPACE, ":", WHITE_SPACE, '"')


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity
class CallForm:
    """A form of calls: JSON, `{"name": ..., arguments_key: ...}`, between `opening` and `closing`.

    Where a model is not constrained, its white space may differ from what is written here.
    """

    arguments_key: str
    # White space in forced arguments. It is limited: a model that would rather not call may go on with spaces for long.
    spacing: Mapping[str, Any]
    # Patterns of what an unconstrained model may put before a call, of unfinished forms of that, and of what it may put
    # after the last call.
    lead: str
    begun_leads: tuple[str, ...]
    tail: str
    opening: str = ""
    closing: str = ""
    # If False, an answer consists of calls from its beginning on, or contains none.
    can_follow_text: bool = False

    @property
    def before_name(self) -> str:
        """The pattern of how an unconstrained model begins a call. Text that reaches the end of the name is a call."""
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
        """Return a pattern of `before_name`, a name and `behind_name`, and of every beginning of that sequence."""
        rest = ""
        for pattern in reversed((*self._to_name, name, *self._to_arguments)):
            rest = f"(?:{pattern}{rest})?"
        return f"{self.lead}(?:{'|'.join((*self.begun_leads, rest))})"

    def is_taught_by(self, text: str) -> bool:
        """Return whether a template teaches this form. `text`: everything that the template may write."""
        return self.opening.strip() in text and f'"{self.arguments_key}"' in text


BARE = CallForm(
    "parameters",
    {"whitespace_pattern": " ?"},
    lead=_FENCES,
    begun_leads=("`{1,2}",),
    tail=rf"{WHITE_SPACE}(?:```{WHITE_SPACE})?",
)
# The form of Hermes and Qwen: each call is on lines of its own, after the text that accompanies it.
TAGGED = CallForm(
    "arguments",
    # As `tojson` writes arguments into a later turn.
    {**NO_WHITE_SPACE, "item_separator": ", ", "key_separator": ": "},
    lead=r"\n?",
    begun_leads=(),
    tail=r"\n?",
    opening="<tool_call>\n",
    closing="\n</tool_call>",
    can_follow_text=True,
)


def write_opening(name: str, form: CallForm = BARE) -> str:
    """Return everything that comes before the arguments."""
    return f'{form.opening}{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.arguments_key}": '


def write_closing(form: CallForm = BARE) -> str:
    return f"}}{form.closing}"


def write_call(name: str, arguments: str, form: CallForm = BARE) -> str:
    return f"{write_opening(name, form)}{arguments}{write_closing(form)}"


def _loosely(text: str) -> Iterable[str]:
    return (WHITE_SPACE if each == "\n" else re.escape(each) for each in text)
